"""What a quantity is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.history.view import View
from gradlens.per_sample.extension import PerSampleGradients
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update
from gradlens.reductions import Reduction
from gradlens.schedules import Schedule, decided_once, linear

Needed: TypeAlias = Literal["loss", "optimizer", "individual_losses"]


class Quantity(ABC):  # noqa: B024 - its subclasses below say what a value depends on
    """Something to know about a training run, on a schedule of its own.

    States as data what it needs (``reductions`` of per-sample gradients, ``needs`` from the user)
    and how it wishes to be shown (``view``). One of its subclasses says what a value depends on;
    it is a number, an array or tensor, or lists and dicts of these.
    """

    reductions: Sequence[Reduction] = ()
    """Reductions of the per-sample gradients that ``compute`` asks the step for."""
    needs: ClassVar[Sequence[Needed]] = ()
    """What must be known on a tracked step. Loss and optimizer are passed to the context;
    per-sample losses are found where the cockpit has been given the loss module."""
    retains_gradients: ClassVar[bool] = False
    """Whether per-sample gradients must stay until the optimizer has stepped."""
    view: ClassVar[View] = View("")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        *,
        name: str | None = None,
    ) -> None:
        """Track at the steps for which ``track_schedule`` is true, by default all.

        ``verbose`` prints each value. ``name`` is the key in the history, by default the name of
        the class; two quantities in a cockpit need different ones.
        """
        schedule = linear(1) if track_schedule is None else track_schedule
        self.name = type(self).__name__ if name is None else name
        if not callable(schedule):
            raise TypeError(
                f"{self.name}: track_schedule={schedule!r} is not callable: pass a function from "
                "the global step to a bool, such as gradlens.schedules.linear(10)"
            )
        self.track_schedule = decided_once(schedule)
        self.verbose = verbose

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.track_schedule!r}, name={self.name!r})"

    @property
    def of_samples(self) -> bool:
        """Whether values are made of per-sample gradients."""
        return bool(self.reductions) or self.retains_gradients

    def should_compute(self, global_step: int) -> bool:
        """Whether there is a value to find at this step."""
        return bool(self.track_schedule(global_step))

    def is_active(self, global_step: int) -> bool:
        """Whether something is to be done at this step, be it for the values of others."""
        return self.should_compute(global_step)

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        """Reductions of per-sample gradients to be made at this step, if it is active."""
        reductions = tuple(self.reductions)
        return reductions if reductions and self.should_compute(global_step) else ()

    def extensions(self, global_step: int) -> list[BackpropExtension]:
        """BackPACK extensions to be active in this step's backward pass."""
        retains = self.retains_gradients and self.should_compute(global_step)
        return [PerSampleGradients()] if retains or self.reductions_at(global_step) else []

    def extension_hooks(self, global_step: int) -> list[Callable[[nn.Module], None]]:
        """Functions to be called on each module after BackPACK's extensions have run on it."""
        return []

    def watches_layers(self, global_step: int) -> bool:
        """Whether layers need hooks in the forward pass of this step; asked if active.

        Per-sample gradients don't need them: they are found from the loss's graph.
        """
        losses = "individual_losses" in self.needs and self.should_compute(global_step)
        found = self.extensions(global_step)
        extends = any(not isinstance(each, PerSampleGradients) for each in found)
        return losses or extends or bool(self.extension_hooks(global_step))

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:  # noqa: B027
        """Look at the parameters when a cockpit's first context is entered; by default, don't."""

    def adapt_to(self, step: Step) -> None:  # noqa: B027
        """Adapt to what this step has shown, for the steps to come; by default, don't."""


class SingleStepQuantity(Quantity):
    """A quantity whose value needs one step alone."""

    @abstractmethod
    def compute(self, step: Step) -> Any:
        """The value at a step for which ``should_compute`` is true; called after backward."""


class CurvedQuantity(Quantity):
    """A quantity that needs the loss's curvature, in one of two ways."""

    needs: ClassVar[Sequence[Needed]] = ("loss",)

    def watches_layers(self, global_step: int) -> bool:
        """Some curvature is made of what layers tell."""
        return self.should_compute(global_step)


class CurvatureQuantity(CurvedQuantity):
    """A quantity of the loss's curvature, found before the backward pass frees the graph."""

    @abstractmethod
    def compute(self, curvature: LossCurvature) -> Any:
        """The value at a step for which ``should_compute`` is true; called on entering."""


class GradientCurvatureQuantity(CurvedQuantity):
    """A quantity of the loss's curvature and of the gradients that backward finds after it."""

    @abstractmethod
    def look(self, curvature: LossCurvature) -> Any:
        """What ``compute`` must know of the curvature; called on entering."""

    @abstractmethod
    def compute(self, step: Step, seen: Any) -> Any:
        """The value, from the step after backward and what ``look`` has returned."""


class UpdateQuantity(Quantity):
    """A quantity whose value needs the parameter update that follows the step.

    The update is seen right after the optimizer's step if the optimizer is passed to the context,
    otherwise when the next context is entered.
    """

    @abstractmethod
    def compute(self, step: Step, update: Update) -> Any:
        """The value at the step that the update followed."""


class TwoPointQuantity(Quantity):
    """A quantity whose value needs a step, the update after it, and the next step.

    The per-sample gradients of both steps are projected onto the update. The value is stored under
    the first of the two.
    """

    retains_gradients = True

    @abstractmethod
    def compute(self, start: Step, update: Update, end: Step) -> Any:
        """The value at ``start``; ``update`` has the projections at both points."""
