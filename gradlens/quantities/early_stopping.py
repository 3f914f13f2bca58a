"""Whether gradients can still be told from noise."""

from __future__ import annotations

from dataclasses import dataclass

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.formulas import ONE_SAMPLE, early_stopping, mean_of_elements
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import Mean, SumOfSquares


@dataclass(eq=False)
class EarlyStopping(SingleStepQuantity):
    """1 − N·meanⱼ[ḡⱼ²/(vⱼ + ε)], vⱼ the sample variance: stop when it is positive.

    Mahsereci et al., 2017, arXiv:1703.09580, Eq. 7. The criterion looks at the gradient of the
    loss alone, so any optimizer will do as long as it heads for that gradient's zero. With weight
    decay it doesn't: pass the optimizer to the context, and the value is a NaN that says so.
    """

    reductions = (SumOfSquares(), Mean())
    view = View("Early stopping", group="noise", label="criterion")

    epsilon: float = 1e-5

    def compute(self, step: Step) -> float:
        if step.samples < 2:
            return Undefined(ONE_SAMPLE)
        groups = [] if step.optimizer is None else step.optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return Undefined("with weight decay, training doesn't head for a zero of ∇L")
        sums_of_squares, means = step.by_parameter(SumOfSquares()), step.by_parameter(Mean())
        ratios = [
            early_stopping(mean, sums_of_squares[name], step.samples, self.epsilon)
            for name, mean in means.items()
        ]
        return 1 - mean_of_elements(ratios)
