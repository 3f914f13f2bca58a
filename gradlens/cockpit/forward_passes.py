"""The steps to come: which quantities are active at them, and what their forward passes run with.

A forward pass runs before the context of its step is entered, so that it is prepared for the steps
that may come next. What it doesn't need costs it nothing: hooks on layers would take a hundredth to
a tenth of a plain step of a small network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.run import Run
from gradlens.graph.model_calls import (
    forget_calls,
    forget_earlier_calls,
    keep_calls,
    keep_outputs,
    take_outputs,
)
from gradlens.graph.uncompiled import EagerCalls, uncompiled_calls
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.parts.assembly import BatchAssembly
from gradlens.parts.processes import Processes
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.step import Step
from gradlens.signals.capture import FindAxes, SignalCapture
from gradlens.signals.recorded_calls import Requests
from gradlens.signals.signal import LayerSignals, Request, merged
from gradlens.stateful import State
from gradlens.torch_private import compiled_modules, unseen


class ForwardPasses:
    """Decides which quantities are active at a step, and prepares its forward pass.

    ``model`` is the network inside the ``wrapped`` one that the user calls. The quantities
    ``of_graphs`` need forward passes that aren't compiled, and those ``of_backpack`` name
    BackPACK's extensions. Signals of layers are captured in the forward passes of the steps that
    are expected; where these are unknown, all of them.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        wrapped: nn.Module | None,
        loss_function: nn.Module | None,
        quantities: Sequence[Quantity],
        budget: Budget | None,
        boundary: Boundary,
        run: Run,
    ) -> None:
        self.eager_calls = EagerCalls([m for m in (wrapped, loss_function) if m is not None])
        self._capture: SignalCapture | None = None
        self._captured: int | None = None
        """The step whose forward passes are captured, once that is known."""
        self._evaluated: dict[str, tuple[int, LayerSignals]] = {}
        wanted = _wanted(quantities)
        if model is not None and wanted:
            named = {n: m for quantity in quantities for n, m in quantity.modules.items()}
            places = {module: place for place, module in enumerate(model.modules())}
            modules = dict(sorted(named.items(), key=lambda item: places[item[1]]))
            self._capture = SignalCapture(model, modules, wanted, boundary.report)
            self._capture.expect(wanted)
        self._model = model
        self._quantities = quantities
        self.of_graphs = {quantity for quantity in quantities if quantity.needs_graph}
        self.of_backpack = {quantity for quantity in quantities if quantity.extends_backward}
        self._of_outputs = {quantity for quantity in quantities if quantity.of_loss_curvature}
        self._budget = budget
        self._boundary = boundary
        self._run = run
        self._past: deque[int] = deque(maxlen=3)
        self._unfinished: int | None = None
        self._active: dict[int, tuple[Quantity, ...]] = {}
        # Compiled code is made anew where hooks come and go.
        self._is_compiled = wrapped is not None and bool(compiled_modules(wrapped))
        self._keeps_calls = model is not None
        if model is not None:
            keep_calls(model, user=self)

    # Which steps come, and what is active at them.

    def active_at(self, global_step: int, boundary: Boundary | None = None) -> tuple[Quantity, ...]:
        """The active quantities, which are decided on once for each step.

        Where a schedule raises an exception, its quantity isn't active, with a ``boundary``.
        """
        if global_step not in self._active:
            active = []
            for quantity in self._quantities if self.has_means(global_step) else ():
                try:
                    active += [quantity] if quantity.is_active(global_step) else []
                except Exception as error:
                    if boundary is None:
                        raise
                    boundary.report(f"{quantity.name}'s schedule", error)
            self._active[global_step] = tuple(active)
        return self._active[global_step]

    def has_means(self, global_step: int) -> bool:
        """Whether a budget, if there is one, has the means for tracking at a step."""
        return self._budget is None or self._budget.has_means(global_step)

    def is_look(self, global_step: int) -> bool:
        """Whether a budget is spent at a step: something is tracked, or nothing ever is."""
        has_means = self.has_means(global_step)
        return has_means and (not self._quantities or bool(self.active_at(global_step)))

    @property
    def next_steps(self) -> tuple[int, ...]:
        """The step that comes next, if the last ones follow each other at one distance."""
        distances = {after - before for before, after in pairwise(self._past)}
        is_known = len(distances) == 1 and 0 not in distances
        return (self._past[-1] + distances.pop(),) if is_known else ()

    def begin_step(self, global_step: int) -> bool:
        """A step's context is entered; whether the last step has its number, or a larger one.

        Micro-batches of another step are dropped.
        """
        is_behind = bool(self._past) and self._past[-1] >= global_step
        if self._unfinished is not None:
            self._drop_other(global_step)
        self._captured = global_step
        if self._capture is not None:
            self._capture.suspend()  # such as in the passes of curvature quantities
        return is_behind

    def _drop_other(self, global_step: int) -> None:
        if self._unfinished is not None and self._unfinished != global_step:
            self._past.append(self._unfinished)
            self._unfinished = None
            if self._capture is not None:
                self._capture.discard_step()

    def end_step(self, global_step: int, goes_on: bool) -> None:
        """A step's context is left, also after an exception; whether another one follows."""
        if self._of_outputs:
            self.take_outputs()
        if goes_on:
            self._unfinished = global_step
            if self._capture is not None:
                self._capture.end_part(self._wanted_at(global_step))
            return
        self._past.append(global_step)
        self._unfinished = None
        forget_earlier_calls(self._model)
        self._capture_next()

    def take_outputs(self) -> tuple[Tensor, ...]:
        """What the model has returned last, if a quantity may need it; it is kept no longer."""
        return take_outputs(self._model, self) if self._of_outputs else ()

    def state_dict(self) -> State:
        """The numbers of the last steps."""
        return {"past": list(self._past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._past = deque(state["past"], maxlen=self._past.maxlen)
        self._active = {}
        self._unfinished = None
        self._capture_next()

    # What forward passes run with.

    def expect(self, steps: Sequence[int], needs_next_step: bool) -> None:
        """One of these steps comes next; without any, it is unknown which.

        Something that waits ``needs_next_step``.
        """
        self._active = {step: self._active[step] for step in steps if step in self._active}
        active = self._possible(steps)
        self.eager_calls.run_if(needs_next_step or not self.of_graphs.isdisjoint(active))
        # Without means, hooks would take a tenth of a plain step of a small network for nothing.
        may_be_tracked = needs_next_step or not steps or any(map(self.has_means, steps))
        needed = may_be_tracked or self._is_compiled
        # From what the model is called with, the number of samples is read.
        if self._model is not None and needed != self._keeps_calls:
            self._keeps_calls = needed
            (keep_calls if needed else forget_calls)(self._model, user=self)
        if self._of_outputs:
            keep_outputs(self._model, self, not self._of_outputs.isdisjoint(active))

    def _possible(self, steps: Sequence[int]) -> Sequence[Quantity]:
        """The quantities that may be active at one of these steps: all of them without any step.

        A user's schedule may raise an exception, such as that of a table without an entry for the
        step: it is raised when the step is tracked, if it ever is.
        """
        try:
            found = [quantity for step in steps for quantity in self.active_at(step)]
        except Exception:
            return self._quantities
        return found if steps else self._quantities

    @contextmanager
    def of(self, global_step: int) -> Iterator[None]:
        """A context for a step's forward pass, which doesn't run compiled if a quantity needs it.

        There is a note if the context can't have this effect.
        """
        with ExitStack() as stack:
            if self.eager_calls.needed:
                note = partial(self._run.note, global_step)
                with self._boundary.contain("running a forward pass uncompiled", note):
                    stack.enter_context(uncompiled_calls())
            self._drop_other(global_step)
            if self._capture is not None:
                wanted = self._wanted_at(global_step)
                if global_step != self._captured:
                    self._captured = global_step
                    self._capture.expect(wanted)
                    self._capture.suspend()
                stack.enter_context(self._capture.forward(wanted))
            yield

    # Signals of layers.

    def _capture_next(self) -> None:
        """A step is over: capture what the next one may need, by the steps that are expected."""
        self._captured = None
        self._evaluated.clear()
        if self._capture is not None:
            self._capture.expect(_wanted(self._possible(self.next_steps)))

    def _wanted_at(self, global_step: int) -> Requests:
        return _wanted(self.active_at(global_step, self._boundary))

    def begin_signals(self, global_step: int, scale: float, find_axes: FindAxes) -> None:
        """A step's backward pass begins, as in ``SignalCapture.begin``."""
        if self._capture is not None:
            self._capture.begin(self._wanted_at(global_step), scale, find_axes)

    def signals(self, global_step: int, assembly: BatchAssembly) -> LayerSignals:
        """The signals captured at a step, after its backward pass.

        All processes that track the same must call it at the same steps.
        """
        if self._capture is None:
            return LayerSignals()
        wanted, own, failed = self._wanted_at(global_step), LayerSignals(), None
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
            if (requests := quantity.layer_requests.values())
            and not any(request.signal.needs_graph for request in requests)
        ]
        if self._capture is None or not able:
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
        """Remove all hooks, and forget all calls."""
        self._evaluated.clear()
        if self._capture is not None:
            self._capture.close()
        self.eager_calls.close()
        if self._model is not None:
            forget_calls(self._model, user=self)


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
