"""The batch size that fits the learning rate."""

from __future__ import annotations

import math

from torch.optim import SGD, Optimizer

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ONE_SAMPLE
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import why_not_held
from gradlens.reductions import Deviations


class CABS(SingleStepQuantity):
    """Coupled adaptive batch size η·tr(Σ)/L (Balles et al., 2017, arXiv:1612.05086).

    The rule is derived from the expected gain of one step −η·∇L of plain gradient descent with one
    learning rate η, for a loss whose minimum is zero. If the loss isn't positive, or the optimizer
    is another one, the value is a NaN. L and η are those of the mean loss: a step of η on a sum
    loss is equal to a step of Nη on the mean loss, and the same holds for any other factor of the
    loss on which backward is called.
    """

    reductions = (Deviations(),)
    needs = ("loss", "optimizer")
    view = View("Batch size", group="noise", yscale="log", label="batch size")

    def compute(self, step: Step) -> float:
        learning_rate = plain_sgd_learning_rate(step.optimizer) * step.gradient_factor
        problem = "" if step.optimizer is None else why_not_held(step.optimizer, step.parameters)
        if problem:
            raise UnavailableError(problem)
        found, mean_loss = step.total(Deviations()), step.mean_loss()
        if found.samples < 2:
            return Undefined(ONE_SAMPLE)
        if mean_loss <= 0:
            return Undefined(
                "the loss is not positive: the rule holds for one whose minimum is zero"
            )
        if found.vanish:
            return Undefined(EQUAL)
        # With the population variance tr(Σ) = Σₙ‖gₙ − ḡ‖²/N.
        size = learning_rate * found.spread / found.samples / mean_loss
        return size if math.isfinite(size) else Undefined(NOT_FINITE)


def plain_sgd_learning_rate(optimizer: Optimizer | None) -> float:
    """η of plain SGD; ``UnavailableError`` if the optimizer is another one."""
    groups = [] if optimizer is None else optimizer.param_groups
    extras = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    used = sorted({extra for group in groups for extra in extras if group.get(extra)})
    rates = {float(group["lr"]) for group in groups}
    problem = ""
    if type(optimizer) is not SGD:
        problem = f"the optimizer is {type(optimizer).__name__}"
    elif used:
        problem = f"the optimizer uses {', '.join(used)}"
    elif len(rates) > 1:
        problem = f"there are {len(rates)} learning rates"
    if problem:
        raise UnavailableError(
            f"CABS is derived for plain SGD with one learning rate, but {problem}: leave it "
            "out, or use GradNoiseScale, a batch size that doesn't depend on the optimizer"
        )
    return rates.pop()
