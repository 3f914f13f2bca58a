"""The local effective step size α."""

from __future__ import annotations

from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.formulas import local_step_size
from gradlens.quantities.kinds import TwoPointQuantity
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
    "to the context, as info={{'individual_losses': ...}}"
)
