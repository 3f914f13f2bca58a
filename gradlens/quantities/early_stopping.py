"""The evidence-based criterion for early stopping."""

from __future__ import annotations

from dataclasses import dataclass

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.formulas import ONE_SAMPLE, early_stopping
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import ElementRatios


@dataclass(eq=False)
class EarlyStopping(SingleStepQuantity):
    """1 − N·meanⱼ[ḡⱼ²/(vⱼ + ε)], vⱼ the sample variance: stop when it is positive.

    Mahsereci et al., 2017, arXiv:1703.09580, Eq. 7; ε is ``epsilon``. The criterion tests whether
    the gradient of the loss can be distinguished from zero. It holds for any optimizer that
    converges to a zero of this gradient. Weight decay moves the optimum elsewhere: if the optimizer
    is passed to the context and has weight decay, the value is a NaN with this reason.
    """

    view = View("Early stopping", group="noise", label="criterion")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (ElementRatios(self.epsilon, ddof=1),)

    def compute(self, step: Step) -> float:
        if step.samples < 2:
            return Undefined(ONE_SAMPLE)
        groups = [] if step.optimizer is None else step.optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return Undefined("with weight decay, training doesn't converge to a zero of ∇L")
        return early_stopping(step.total(self.reductions[0]), step.samples)
