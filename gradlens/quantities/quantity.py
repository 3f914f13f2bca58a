"""What a quantity is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.individual.extension import IndividualGradients
from gradlens.individual.reductions import Reduction
from gradlens.schedules import Schedule, linear
from gradlens.step import Step
from gradlens.view import View

Needed: TypeAlias = Literal["loss", "optimizer"]


class Quantity(ABC):
    """Something to know about a training run, on a schedule of its own.

    A subclass states as data what it needs (``reductions`` of individual gradients, ``needs`` from
    the user) and how it wishes to be shown (``view``), and turns a ``Step`` into a value:
    a number, an array or tensor, or lists and dicts of these.
    """

    reductions: Sequence[Reduction] = ()
    """Reductions of the individual gradients that ``compute`` asks the step for."""
    needs: ClassVar[Sequence[Needed]] = ()
    """What the user must pass to the context on a tracked step."""
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
        self.track_schedule = schedule
        self.verbose = verbose

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.track_schedule!r}, name={self.name!r})"

    def should_compute(self, global_step: int) -> bool:
        """Whether there is a value to find at this step."""
        return bool(self.track_schedule(global_step))

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        """Reductions of individual gradients to be made at this step."""
        return tuple(self.reductions) if self.should_compute(global_step) else ()

    def extensions(self, global_step: int) -> list[BackpropExtension]:
        """BackPACK extensions to be active in this step's backward pass."""
        return [IndividualGradients()] if self.reductions_at(global_step) else []

    def extension_hooks(self, global_step: int) -> list[Callable[[nn.Module], None]]:
        """Functions to be called on each module after BackPACK's extensions have run on it."""
        return []

    @abstractmethod
    def compute(self, step: Step) -> Any:
        """The value at a step for which ``should_compute`` is true; called after backward."""

    def update(self, step: Step) -> None:  # noqa: B027
        """Adapt to what this step has shown, for the steps to come; nothing by default."""


class SingleStepQuantity(Quantity):
    """A quantity whose value needs one step alone."""
