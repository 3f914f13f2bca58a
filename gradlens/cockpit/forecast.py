"""Which quantities are active at a step, and which step comes next.

A forward pass runs before the context of its step is entered. Hooks on layers cost time in each
forward pass, a hundredth to a tenth of a plain step of a small network, so they are installed only
for steps that may need them. That takes a forecast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gradlens.cockpit.boundary import Boundary
from gradlens.quantities.quantity import Quantity
from gradlens.stateful import State


def is_scheduled(quantity: Quantity, global_step: int) -> bool:
    """Whether a quantity is tracked at a step by its own schedules alone."""
    return quantity.is_active(global_step)


class Forecast:
    """Keeps the numbers of the last steps, and the active quantities of steps to come."""

    def __init__(
        self,
        quantities: Sequence[Quantity],
        is_due: Callable[[Quantity, int], bool] = is_scheduled,
    ) -> None:
        """``is_due`` says whether a quantity is tracked at a step."""
        self._quantities = quantities
        self._is_due = is_due
        self._past: deque[int] = deque(maxlen=3)
        self._active: dict[int, tuple[Quantity, ...]] = {}

    def active_at(self, global_step: int, boundary: Boundary | None = None) -> tuple[Quantity, ...]:
        """The active quantities, which are decided on once for each step.

        Where a schedule raises an exception, its quantity isn't active, with a ``boundary``.
        """
        if global_step not in self._active:
            active = []
            for quantity in self._quantities:
                try:
                    active += [quantity] if self._is_due(quantity, global_step) else []
                except Exception as error:
                    if boundary is None:
                        raise
                    boundary.report(f"{quantity.name}'s schedule", error)
            self._active[global_step] = tuple(active)
        return self._active[global_step]

    def end_step(self, global_step: int) -> None:
        """A step is over."""
        self._past.append(global_step)

    def keep(self, steps: Iterable[int]) -> None:
        """Forget which quantities are active at all but these steps."""
        self._active = {step: self._active[step] for step in steps if step in self._active}

    def state_dict(self) -> State:
        """The numbers of the last steps."""
        return {"past": list(self._past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._past = deque(state["past"], maxlen=self._past.maxlen)
        self.keep(())

    def is_behind(self, global_step: int) -> bool:
        """Whether the last step has the same number, or a larger one."""
        return bool(self._past) and self._past[-1] >= global_step

    def steps_behind(self, global_step: int) -> tuple[int, ...]:
        """The steps that may come after one that isn't over yet; empty if that is unknown."""
        return steps_after((*self._past, global_step)[-3:])

    @property
    def next_steps(self) -> tuple[int, ...]:
        """The steps that may come next; empty if that is unknown."""
        return steps_after(self._past)

    def needs_layer_hooks(self, steps: Iterable[int]) -> bool:
        """Whether an active quantity may need hooks on layers at one of these steps."""
        return any(may_hold(self._needs_layer_hooks_at, step) for step in steps)

    def needs_graph(self, steps: Sequence[int]) -> bool:
        """Whether the forward pass of one of these steps must not run compiled.

        Without any, it is unknown which step comes next, and may be one that an active quantity
        needs.
        """
        if not steps:
            return any(quantity.may_need_graph for quantity in self._quantities)
        return any(may_hold(self.needs_graph_at, step) for step in steps)

    def needs_graph_at(self, global_step: int) -> bool:
        """Whether an active quantity needs a forward pass that isn't compiled."""
        return any(q.needs_graph(global_step) for q in self.active_at(global_step))

    def needs_outputs(self, steps: Sequence[int]) -> bool:
        """Whether an active quantity may need the network's outputs at one of these steps.

        Without any, it is unknown which step comes next.
        """
        if not steps:
            return any(quantity.of_loss_curvature for quantity in self._quantities)
        return any(may_hold(self._needs_outputs_at, step) for step in steps)

    def _needs_outputs_at(self, global_step: int) -> bool:
        active = self.active_at(global_step)
        return any(q.of_loss_curvature and q.should_compute(global_step) for q in active)

    def _needs_layer_hooks_at(self, global_step: int) -> bool:
        return any(q.needs_layer_hooks(global_step) for q in self.active_at(global_step))


def steps_after(past: Iterable[int]) -> tuple[int, ...]:
    """The steps that may follow the last three; empty if that is unknown.

    Steps follow each other as the last two did; where a step's number was repeated, it may be
    repeated again.
    """
    steps = tuple(past)
    gaps = [after - before for before, after in pairwise(steps)]
    moves = [gap for gap in gaps if gap]
    if not moves:
        return ()
    following = steps[-1] + moves[-1]
    return (following,) if len(moves) == len(gaps) else (steps[-1], following)


def may_hold(condition: Callable[[int], bool], global_step: int) -> bool:
    """Whether a condition may hold at a step to come.

    A user's schedule may raise an exception, such as that of a table without an entry for the
    step. It is raised when the step is tracked, if it ever is.
    """
    try:
        return condition(global_step)
    except Exception:
        return True
