"""The local effective step size α."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import NOT_FINITE, ONE_SAMPLE
from gradlens.numerics.host import on_host
from gradlens.quantities.quantity import TwoPointQuantity
from gradlens.quantities.step import Step, losses_of_samples
from gradlens.quantities.update import Update


class Alpha(TwoPointQuantity):
    """Local effective step size α: the position on a fitted parabola at which the update ends.

    −1 is the start point, 0 the parabola's minimum, and 1 the point beyond the minimum at the same
    height as the start point (Schneider et al., 2021, arXiv:2102.06604). Losses and slopes at the
    two ends are those of the two steps' batches. The update is the one that the optimizer, of
    whatever kind, has made. If it has moved parameters without per-sample gradients, or if
    something else has changed parameters between an optimizer's step and the next context, the
    value is a NaN.
    """

    needs = ("individual_losses",)
    measures = (losses_of_samples,)
    view = View("Local step size α", group="step size", label="α")

    def compute(self, start: Step, update: Update, end: Step) -> float:
        length = update.norm()
        if length == 0:
            return Undefined("the update is zero")
        if start.individual_losses is None or end.individual_losses is None:
            return Undefined(NO_LOSSES.format(why=start.without_losses or end.without_losses))
        if update.projections is None or update.end_projections is None:
            return Undefined(update.without_projections or NO_GRADIENTS)
        unknown = {n for n in start.lacking | end.lacking if bool(update.direction[n].any())}
        unknown |= {*start.untracked, *end.untracked}
        if unknown:
            return Undefined(PARTLY.format(names=few(sorted(unknown))))
        losses = (start.individual_losses, end.measured(losses_of_samples))
        samples = (len(update.projections), len(update.end_projections))
        for one, number in zip(losses, samples, strict=True):
            if one.numel() != number:
                return Undefined(OF_ROWS.format(rows=one.numel(), samples=number))
        slopes = (update.projections / length, update.end_projections / length)
        return local_step_size(losses, slopes, length)


NO_GRADIENTS = "no per-sample gradients at one of the two steps"
NO_LOSSES = "there are no per-sample losses at one of the two steps: {why}"
PARTLY = (
    "the slopes along the update are unknown, since {names} have moved and aren't tracked, or have "
    "no per-sample gradients at one of the two steps"
)
OF_ROWS = (
    "there are {rows} losses of {samples} samples: call the loss module with one row for each "
    "sample, such as outputs of shape [N, C, T] instead of [N·T, C], or pass the samples' losses "
    "to the context, as individual_losses=..."
)


_LEAST_ERROR = 1e-7
"""The least standard error of an observation in a fit, relative to the largest observation.

It is the rounding error of single precision, in which losses and slopes are mostly computed: equal
losses of all samples don't make the mean more certain than that.
"""


@np.errstate(all="ignore")
def local_step_size(
    losses: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor], length: float
) -> float:
    """Where on a fitted parabola an update of this length ends: −1 start, 0 minimum, 1 mirrored.

    ``losses`` are ℓₙ and ``slopes`` ⟨gₙ,d⟩/‖d‖, each ``[N]``, at both ends of the update d; the
    parabola μ₀ + μ₁x + μ₂x² is fitted to their means by least squares, weighted by the inverse
    variances of these means, and α = 2t/(−μ₁/μ₂) − 1 (Schneider et al., 2021, arXiv:2102.06604).
    Standard errors count as ``_LEAST_ERROR`` of the largest observation at least.
    NaN where there is no such minimum.
    """
    if length == 0:
        return Undefined("the update is zero")
    losses, slopes = on_host((losses, slopes))
    observed = [values.double().numpy() for values in (*losses, *slopes)]
    if min(len(values) for values in observed) < 2:
        return Undefined(ONE_SAMPLE)
    means = np.array([values.mean() for values in observed])
    variances = np.array([values.var(ddof=1) / len(values) for values in observed])
    if not np.isfinite([means, variances]).all():
        return Undefined(NOT_FINITE)
    # With the update's length as the unit of x, slopes are comparable to losses, so that the fit
    # doesn't depend on the units of either.
    units = np.array([1.0, 1.0, length, length])
    means, errors = means * units, np.sqrt(variances) * units
    largest = float(np.abs([means, errors]).max())
    if largest == 0:
        return Undefined("all losses and slopes are zero")
    weights = largest / errors.clip(min=_LEAST_ERROR * largest)
    design = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    fit = np.linalg.lstsq(weights[:, None] * design, weights * means / largest, rcond=None)[0]
    slope, curvature = float(fit[1]), float(fit[2])
    if curvature <= 0:
        return Undefined("the fitted parabola has no minimum: its curvature is not positive")
    if slope == 0:
        return Undefined("the fitted parabola is at its minimum from the start")
    return -2 * curvature / slope - 1
