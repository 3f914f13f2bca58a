"""Base classes of quantities that compute in one of the usual combinations of phases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.probe import Probe
from gradlens.quantities.quantity import Needed, Phase, Quantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update


class SingleStepQuantity(Quantity):
    """A quantity of a single step's loss, gradients and reductions."""

    phases = (Phase.AFTER_BACKWARD,)

    @abstractmethod
    def compute(self, step: Step) -> Any:
        """The value at a tracked step; called after the backward pass."""

    @final
    def after_backward(self, step: Step, earlier: Any) -> Any:
        return self.compute(step)


@dataclass(eq=False)
class CurvatureQuantity(Quantity):
    """A quantity of the loss's curvature, computed before the backward pass frees the graph.

    With a probe, ``on``, it is of the curvature of the probe's loss instead, and doesn't need the
    step's loss. Where a step's batch comes in parts, it is computed once, before the last one.
    """

    phases = (Phase.BEFORE_BACKWARD,)
    needs: Sequence[Needed] = field(default=("loss",), init=False, repr=False)

    on: Probe | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on is not None:
            self.needs = tuple(each for each in self.needs if each != "loss")

    @abstractmethod
    def compute(self, curvature: Curvature) -> Any:
        """The value at a tracked step; called before the backward pass."""

    @final
    def before_backward(self, curvature: Curvature) -> Any:
        return self.compute(curvature)


class GradientCurvatureQuantity(Quantity):
    """A quantity of the loss's curvature, and of the gradients that are computed after it."""

    phases = (Phase.BEFORE_BACKWARD, Phase.AFTER_BACKWARD)
    needs: Sequence[Needed] = ("loss",)

    @abstractmethod
    def before_backward(self, curvature: Curvature) -> Any:
        """What ``compute`` needs of the curvature."""

    @abstractmethod
    def compute(self, step: Step, earlier: Any) -> Any:
        """The value at a tracked step; ``earlier`` is what ``before_backward`` has returned."""

    @final
    def after_backward(self, step: Step, earlier: Any) -> Any:
        return self.compute(step, earlier)


class UpdateQuantity(Quantity):
    """A quantity of the parameter update that follows a step.

    It is computed right after the optimizer's step if the optimizer is passed to the context, and
    otherwise when the next context is entered.
    """

    phases = (Phase.AFTER_UPDATE,)

    @abstractmethod
    def compute(self, step: Step, update: Update) -> Any:
        """The value at the step that the update follows."""

    @final
    def after_update(self, step: Step, update: Update, earlier: Any) -> Any:
        return self.compute(step, update)


class TwoPointQuantity(Quantity):
    """A quantity of a step, the update after it, and the next step.

    The per-sample gradients of both steps are projected onto the update. The value is stored under
    the first of the two.
    """

    phases = (Phase.AT_NEXT_STEP,)
    retains_gradients = True

    @abstractmethod
    def compute(self, start: Step, update: Update, end: Step) -> Any:
        """The value at ``start``; ``update`` has the projections at both points."""

    @final
    def at_next_step(self, start: Step, update: Update, end: Step, earlier: Any) -> Any:
        return self.compute(start, update, end)
