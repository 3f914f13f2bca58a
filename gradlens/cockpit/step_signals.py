"""Signals of layers: captured for the steps that request some, and recorded in evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace

import torch
from torch import nn

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.run import Run
from gradlens.graph.uncompiled import uncompiled_calls
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.parts.assembly import BatchAssembly
from gradlens.parts.processes import Processes
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.step import Step
from gradlens.signals.capture import FindAxes, SignalCapture
from gradlens.signals.recorded_calls import Requests
from gradlens.signals.signal import LayerSignals, Request, merged
from gradlens.torch_private import unseen


class StepSignals:
    """Captures what quantities request of a model's layers.

    They are captured in the forward passes of the steps that are expected; where these are unknown,
    in all of them.
    """

    def __init__(
        self, model: nn.Module, quantities: Sequence[Quantity], boundary: Boundary, run: Run
    ) -> None:
        self._quantities = [each for each in quantities if each.layer_requests]
        self._boundary = boundary
        self._run = run
        self._captured: int | None = None
        """The step whose forward passes are captured, once that is known."""
        self._evaluated: dict[str, tuple[int, LayerSignals]] = {}
        named = {n: m for quantity in self._quantities for n, m in quantity.modules.items()}
        places = {module: place for place, module in enumerate(model.modules())}
        modules = dict(sorted(named.items(), key=lambda item: places[item[1]]))
        wanted = _wanted(self._quantities)
        self._capture = SignalCapture(model, modules, wanted, boundary.report)
        self._capture.expect(wanted)

    def expect(self, possible: Iterable[Quantity]) -> None:
        """A step is over: capture what the quantities need that may be active at the next one."""
        self._captured = None
        self._evaluated.clear()
        self._capture.expect(_wanted(possible))

    def forward(self, global_step: int, active: Iterable[Quantity]) -> AbstractContextManager[None]:
        """A context for a forward pass of a step before its own context."""
        wanted = _wanted(active)
        if global_step != self._captured:
            self._captured = global_step
            self._capture.expect(wanted)
            self._capture.suspend()
        return self._capture.forward(wanted)

    def begin_step(self, global_step: int) -> None:
        """A step's context is entered; nothing is captured, as in passes of curvature, until it
        begins."""
        self._captured = global_step
        self._capture.suspend()

    def begin(self, active: Iterable[Quantity], scale: float, find_axes: FindAxes) -> None:
        """A step's backward pass begins, as in ``SignalCapture.begin``."""
        self._capture.begin(_wanted(active), scale, find_axes)

    def end_part(self, active: Iterable[Quantity]) -> None:
        """A context of a step is left, and another one of the same step follows."""
        self._capture.end_part(_wanted(active))

    def discard_step(self) -> None:
        """The parts of a step that is never finished are dropped."""
        self._capture.discard_step()

    def finish(
        self, global_step: int, active: Iterable[Quantity], assembly: BatchAssembly
    ) -> LayerSignals:
        """The signals captured at a step, after its backward pass.

        All processes that track the same must call it at the same steps.
        """
        wanted, own, failed = _wanted(active), LayerSignals(), None
        try:
            own = self._capture.finish(global_step, wanted)
        except Exception as error:
            failed = error
        if not assembly.exchanges_always:
            # Each takes part whatever it has found, since others would wait for it.
            with suppress(UnavailableError) if failed else nullcontext():
                failure = first_line(failed) if failed else ""
                own = _of_all(own, wanted, assembly.processes, failure)
        if failed:
            raise failed
        return own

    @contextmanager
    def evaluation(self, step: Step, name: str) -> Iterator[None]:
        """A context for forward passes without backward passes, recorded under ``step``.

        Several of the same step and ``name``, with no other step between them, count together.
        """
        able = [
            quantity
            for quantity in self._quantities
            if not any(each.signal.needs_graph for each in quantity.layer_requests.values())
        ]
        if not able:
            raise ValueError(NOTHING_TO_RECORD)
        with uncompiled_calls(), self._capture.evaluating(_wanted(able)) as captured:
            yield
        for text in captured[0].notes:
            self._run.note(step.global_step, f"{name}: {text}")
        at, before = self._evaluated.get(name, (None, LayerSignals()))
        with unseen(), torch.no_grad():
            signals = before.and_also(captured[0]) if at == step.global_step else captured[0]
            self._evaluated[name] = step.global_step, signals
            for quantity in able:
                at_evaluation = replace(step, signals=signals)
                work = f"{quantity.name} ({name})"
                found = self._boundary.value(work, quantity.after_backward, at_evaluation, None)
                with self._boundary.contain(f"recording {work}"):
                    self._run.record_evaluation(step.global_step, name, quantity, found)

    def close(self) -> None:
        """Remove all hooks."""
        self._evaluated.clear()
        self._capture.close()


def _of_all(
    own: LayerSignals, wanted: Requests, processes: Processes, failure: str
) -> LayerSignals:
    """The signals with those of all processes together, where these are merged.

    Gradients aren't: those of a process are in units of its own loss.
    """
    keys = {
        f"{layer}: {request}": (layer, request)
        for layer, requests in wanted.items()
        for request in requests
        if request.reduction.classes is not None and not request.signal.needs_backward
    }
    known = {key: own.values.get(layer, {}).get(request) for key, (layer, request) in keys.items()}
    found = processes.joined(
        {key: value for key, value in known.items() if value is not None},
        lambda key, one, other: merged(keys[key][1], [one, other]),
        [each for _, request in keys.values() for each in request.reduction.classes or ()],
        failure,
    )
    values = {layer: dict(each) for layer, each in own.values.items()}
    for key, value in found.items():
        layer, request = keys[key]
        values.setdefault(layer, {})[request] = value
    return replace(own, values=values)


def _wanted(quantities: Iterable[Quantity]) -> Requests:
    wanted: dict[str, set[Request]] = {}
    for quantity in quantities:
        for layer, request in quantity.layer_requests.items():
            wanted.setdefault(layer, set()).add(request)
    return {layer: frozenset(requests) for layer, requests in wanted.items()}


NOTHING_TO_RECORD = (
    "there is nothing to record in an evaluation: track a quantity of layers' inputs or outputs, "
    "such as OutputNorm"
)
