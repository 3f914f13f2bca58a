"""What watches the steps of a cockpit: told when a context is entered, and when it is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch.optim import Optimizer

from gradlens.graph.scaler import GradientScale
from gradlens.history.history import History
from gradlens.quantities.step import Measure, Step
from gradlens.reductions import Reduction
from gradlens.stateful import State

Values = Mapping[Reduction, Mapping[str, Any]]
"""Results of reductions by parameter name."""


class Records(Protocol):
    """What observers write to: a run."""

    history: History

    def note(self, global_step: int, text: str) -> None:
        """Note a text once, however often it is given, as a warning and in the history."""

    def say(self, text: str) -> None:
        """Tell the user something that isn't recorded, since it follows from what is."""

    def take_in(self, global_step: int, kind: str, content: Any) -> None:
        """Record what is known of a step besides values, of a kind of ``records.KINDS``."""


@dataclass(frozen=True)
class StepContext:
    """A context that is entered for a step, or for one of its micro-batches.

    ``info`` is what the user has passed, and ``scale`` the factor of a gradient scaler.
    """

    global_step: int
    info: Mapping[str, Any]
    accumulating: bool = False
    scale: GradientScale = field(default_factory=GradientScale)


@dataclass(frozen=True)
class Outcome:
    """How a context was left, with the per-sample gradients of its backward pass.

    ``values`` are reductions of these, ``samples`` is their number if it is known, and
    ``without_values`` the reason why there are none. ``error`` has left the context. ``step`` is
    the tracked step, if there is one.
    """

    error: BaseException | None = None
    values: Values = field(default_factory=dict)
    samples: int | None = None
    without_values: str = ""
    step: Step | None = None


class Observer:
    """Watches the steps of a cockpit. A subclass defines what it takes part in.

    What it raises is noted as a failure of its ``work``, and training goes on.
    """

    work: ClassVar[str] = "watching a step"
    of_ids: ClassVar[bool] = False
    """Whether it is told of steps alone whose samples have ids."""
    reductions: Sequence[Reduction] = ()
    """What it needs of the per-sample gradients of the backward pass in the present context."""
    measures: Sequence[Measure] = ()
    """What it measures of a tracked step, as quantities do."""

    def enter(self, context: StepContext) -> None:
        """A context is entered: the loss's graph is whole, and the last update is over."""

    def skip(self) -> None:
        """A context is entered for which a budget has no means: ``enter`` isn't called."""

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """A context is left, and what was tracked in it is recorded."""

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """The optimizer begins its step, where torch calls hooks."""

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, as above; only this is called if a context is inside of it."""

    def flush(self) -> None:
        """Record what is complete."""

    def close(self) -> None:
        """Record what remains, and remove all hooks."""

    def state_dict(self) -> State:
        """What later steps depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
