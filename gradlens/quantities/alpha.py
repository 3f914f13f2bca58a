"""Whether steps are too short or too long."""

from __future__ import annotations

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.formulas import local_step_size
from gradlens.quantities.kinds import TwoPointQuantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update


class Alpha(TwoPointQuantity):
    """Local effective step size α: where on a fitted parabola the update ends.

    −1 is where it began, 0 the parabola's minimum, 1 as high as it began, on the other side
    (Schneider et al., 2021, arXiv:2102.06604). Losses and slopes at both ends are those of the two
    steps' batches, and the update is the true one, of any optimizer.
    """

    needs = ("individual_losses",)
    view = View("Local step size α", group="step size", label="α")

    def compute(self, start: Step, update: Update, end: Step) -> float:
        length = update.norm()
        if length == 0:
            return Undefined("the update is zero")
        if start.individual_losses is None or end.individual_losses is None:
            return Undefined("the loss module gave no per-sample losses at one of the two steps")
        if update.projections is None or update.end_projections is None:
            return Undefined("no per-sample gradients at one of the two steps")
        slopes = (update.projections / length, update.end_projections / length)
        return local_step_size((start.individual_losses, end.individual_losses), slopes, length)
