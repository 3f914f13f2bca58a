"""Signals of layers at the steps of a cockpit: which of them are captured when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gradlens.cockpit.boundary import Boundary
from gradlens.graph.uncompiled import uncompiled_calls
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.step import Step
from gradlens.signals.capture import FindAxes, SignalCapture
from gradlens.signals.recorded_calls import Requests
from gradlens.signals.signal import LayerSignals, Request
from gradlens.torch_private import unseen

ActiveAt = Callable[[int, Boundary | None], Sequence[Quantity]]
"""The active quantities of a step; the boundary takes the exceptions of their schedules."""

Record = Callable[[Quantity, Any], None]
"""Records a quantity and its value in an evaluation."""


class LayerTracking:
    """Captures the signals of layers that quantities need.

    A forward pass runs before the context of its step is entered. It is taken for that of the step
    that is expected; where that is unknown, all signals are captured.
    """

    def __init__(
        self,
        model: nn.Module,
        quantities: Iterable[Quantity],
        active_at: ActiveAt,
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self._active_at = active_at
        self.quantities = [q for q in quantities if q.layer_requests]
        self._step: int | None = None
        self._evaluated: dict[str, tuple[int, LayerSignals]] = {}
        self._everything = _wanted(self.quantities)
        named = {n: m for quantity in self.quantities for n, m in quantity.modules.items()}
        places = {module: place for place, module in enumerate(model.modules())}
        modules = dict(sorted(named.items(), key=lambda item: places[item[1]]))
        self._capture = SignalCapture(model, modules, self._everything, boundary.report)
        self._capture.expect(self._everything)

    def announce(self, global_step: int) -> None:
        """A step's context is about to be entered.

        What runs until ``begin`` is not captured, such as the passes of curvature quantities.
        """
        self._step = global_step
        self._capture.suspend()

    def begin(self, global_step: int, scale: float, find_axes: FindAxes) -> None:
        """A step's context is entered, as in ``SignalCapture.begin``."""
        self._capture.begin(self._wanted_at(global_step), scale, find_axes)

    def finish(self, global_step: int) -> LayerSignals:
        """The signals captured at a step, after its backward pass."""
        return self._capture.finish(global_step, self._wanted_at(global_step))

    def end_part(self, global_step: int) -> None:
        """The context of one of a step's micro-batches is left."""
        self._capture.end_part(self._wanted_at(global_step))

    def discard_step(self) -> None:
        """Drop the micro-batches of a step that never had a last one."""
        self._capture.discard_step()

    def expect(self, steps: Sequence[int]) -> None:
        """Capture from now on what one of these steps may need; without any, everything."""
        self._step = None
        self._evaluated.clear()
        self._capture.expect(self._wanted_in(steps) if steps else self._everything)

    @contextmanager
    def forward(self, global_step: int) -> Iterator[None]:
        """A context for a forward pass of a step other than the expected one."""
        wanted = self._wanted_at(global_step)
        if global_step != self._step:
            self.announce(global_step)
            self._capture.expect(wanted)
            self._capture.suspend()
        with self._capture.forward(wanted):
            yield

    @contextmanager
    def evaluation(
        self, step: Step, name: str, record: Record, note: Callable[[str], None]
    ) -> Iterator[None]:
        """A context for forward passes without backward passes, recorded under ``step``.

        Several of the same step and ``name``, with no other step between them, count together.
        """
        able = [q for q in self.quantities if not _needs_backward(q)]
        if not able:
            raise ValueError(NOTHING_TO_RECORD)
        with uncompiled_calls(), self._capture.evaluating(_wanted(able)) as captured:
            yield
        for text in captured[0].notes:
            note(f"{name}: {text}")
        at, before = self._evaluated.get(name, (None, LayerSignals()))
        with unseen(), torch.no_grad():
            signals = before.and_also(captured[0]) if at == step.global_step else captured[0]
            self._evaluated[name] = step.global_step, signals
            for quantity in able:
                at_evaluation = replace(step, signals=signals)
                work = f"{quantity.name} ({name})"
                found = self._boundary.value(work, quantity.after_backward, at_evaluation, None)
                with self._boundary.contain(f"recording {work}"):
                    record(quantity, found)

    def close(self) -> None:
        """Remove all hooks from the model."""
        self._evaluated.clear()
        self._capture.close()

    def _wanted_at(self, global_step: int) -> Requests:
        active = self._active_at(global_step, self._boundary)
        return _wanted(q for q in self.quantities if q in active and q.should_compute(global_step))

    def _wanted_in(self, steps: Sequence[int]) -> Requests:
        """What may be needed at one of these steps, which are still to come.

        A user's schedule may raise an exception, which is raised when the step is tracked.
        """
        try:
            active = {step: self._active_at(step, None) for step in steps}
            return _wanted(
                q
                for q in self.quantities
                if any(q in active[step] and q.should_compute(step) for step in steps)
            )
        except Exception:
            return self._everything


def _wanted(quantities: Iterable[Quantity]) -> Requests:
    wanted: dict[str, set[Request]] = {}
    for quantity in quantities:
        for layer, request in quantity.layer_requests.items():
            wanted.setdefault(layer, set()).add(request)
    return {layer: frozenset(requests) for layer, requests in wanted.items()}


def _needs_backward(quantity: Quantity) -> bool:
    return any(request.signal.needs_backward for request in quantity.layer_requests.values())


NOTHING_TO_RECORD = (
    "there is nothing to record in an evaluation: track a quantity of layers' inputs or outputs, "
    "such as OutputNorm"
)
