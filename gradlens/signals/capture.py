"""Records the reduced signals of layers in the forward and backward passes of training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.graph.hooks import HookOwner, OwnedHook, on_gradient, removal
from gradlens.graph.model_calls import is_packed, made_by
from gradlens.signals.attention import read_attention
from gradlens.signals.axes import find_axes
from gradlens.signals.recorded_calls import (
    Made,
    RecordedCall,
    Recording,
    Requests,
    counted,
    needs_sample_axis,
    signals_of,
)
from gradlens.signals.signal import LayerSignals, Request, Signal, first_tensor, tensors_in
from gradlens.torch_private import (
    add_hook,
    backward_pass_id,
    has_numbers,
    in_backward_pass,
    next_sequence_number,
    unseen,
)

FindAxes = Callable[[Iterable[Made]], Mapping[Made, int]]
"""Finds the axes that count the samples of tensors that nodes have made, as far as they are known.
"""

Report = Callable[[str, Exception, Callable[[str], None]], None]
"""Notes an exception of some work, or raises it; calls a function with the reason."""

NOT_RECORDED = (
    "the forward pass ran before the context of step {step}, when another step was expected: run "
    "it inside `with cockpit.forward({step}):`, or inside the step's own context"
)
UNREACHED = "no backward pass went through the layer inside the step's context"
WITHOUT_GRADIENTS = (
    "all calls of the layer ran without gradients (torch.no_grad): record them inside "
    "`with cockpit.evaluation(...):`"
)
NEEDS_NONE = "the {} needs no gradient"
INDEPENDENT = "the loss doesn't depend on the {}"
NO_CALL = (
    "no layer was called before the backward pass, or all were called by compiled code or inside "
    "torch.func's transforms: call the model itself, which is given to the cockpit as it was "
    "compiled, or the layers that it holds, instead of functions of their weights, or run the "
    "forward pass inside `with cockpit.forward(step):`"
)
OVER = (
    "backward went through a forward pass that ran before an earlier context was left, and that "
    "belongs only to that context: call backward once, on the sum of the losses, or run the "
    "forward pass again"
)
NOTHING_EVALUATED = "no layer was called in this context"


class SignalCapture(HookOwner):
    """Records what is requested of a model's layers, by hooks on the layers and on their tensors.

    A forward pass outside a step's context is recorded for the step that is ``expect``ed. Of the
    calls that were recorded, those count that the step's backward pass goes through, and the other
    calls of the same forward passes. The second forward pass of a checkpoint counts as a forward
    pass of its own. Nothing of a call is kept but its reduced values, and these for one step.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        wanted: Requests,
        report: Report,
    ) -> None:
        """Set hooks on ``modules`` of the model, for all that may ever be ``wanted`` of them.

        ``report`` is called with the exceptions of hooks.
        """
        self._report = report
        self._recording = Recording()
        self.modules = dict(modules)
        axes = find_axes(model)
        self._axes = {name: axes[module] for name, module in self.modules.items()}
        self._wanted: Requests = {}
        self._forward_passes = 0
        self._inside_model = False
        self._sizes: tuple[int, ...] = ()
        self._scale = 1.0
        handles = list(self._register(model, wanted))
        self._remove_hooks = removal(self, handles)

    def _register(self, model: nn.Module, wanted: Requests) -> Iterator[RemovableHandle]:
        def hook(function: Callable[..., None], **known: str) -> OwnedHook[SignalCapture]:
            return OwnedHook(self, partial(function, **known))

        kind = SignalCapture
        yield add_hook(
            model.register_forward_pre_hook,
            hook(kind._before_model),
            prepend=True,
            with_kwargs=True,
        )
        for layer, module in self.modules.items():
            signals = {request.signal for request in wanted[layer]}
            if Signal.ATTENTION in signals or any(each.of_input for each in signals):
                before = hook(kind._before_layer, layer=layer)
                yield add_hook(module.register_forward_pre_hook, before, with_kwargs=True)
            yield add_hook(module.register_forward_hook, hook(kind._after_layer, layer=layer))
        yield add_hook(model.register_forward_hook, hook(kind._after_model))

    def close(self) -> None:
        """Remove all hooks from the model, as happens by itself once the capture is deleted."""
        self._remove_hooks()

    # Called by the cockpit, in the order of a step.

    def expect(self, wanted: Requests) -> None:
        """Discard what was recorded, and record from now on what the next step needs."""
        self._discard(self._recording.calls)
        self._recording, self._wanted = Recording(wanted), wanted
        self._inside_model = False

    def failed(self, error: Exception) -> None:
        """Nothing that was recorded counts for the step."""
        self._report("recording the signals of layers", error, self._fail)

    def _fail(self, reason: str) -> None:
        self._recording.failure = reason

    def suspend(self) -> None:
        """Record nothing until the step begins."""
        self._wanted = {}

    @contextmanager
    def forward(self, wanted: Requests) -> Iterator[None]:
        """A context for a forward pass of a step, before that begins.

        What a step needs is recorded as far as it was recorded in its other forward passes, too.
        """
        before, self._wanted = self._wanted, self._recorded_throughout(wanted)
        try:
            yield
        finally:
            self._wanted = before

    def discard_step(self) -> None:
        """Discard the calls that count so far, since their step is never finished."""
        self._discard(counted(self._recording.calls))
        self._recording.calls = [call for call in self._recording.calls if not call.is_over]

    def begin(self, wanted: Requests, scale: float, find_axes: FindAxes) -> None:
        """Record what a step needs, from now on: its context is entered.

        Gradients of the backward pass are ``scale`` times those to be recorded. ``find_axes`` is
        called where two axes of outputs may count the samples.
        """
        recording = self._recording
        made = {c.made for c in recording.calls if c.by_axis and c.made is not None}
        unknown = made - recording.axes.keys()
        if unknown:
            recording.axes |= find_axes(unknown)
        self._wanted = wanted
        recording.in_backward, self._scale = True, scale

    def end_part(self, wanted: Requests) -> None:
        """A context of the step is left, and another one of the same step follows."""
        self._recording.in_backward = False
        self._recording.requests = self._wanted = self._recorded_throughout(wanted)

    def finish(self, global_step: int, wanted: Requests) -> LayerSignals:
        """The values of a step, after its backward pass."""
        self._recording.in_backward = False
        calls, reasons = counted(self._recording.calls), dict[str, dict[Request, str]]()
        not_recorded = NOT_RECORDED.format(step=global_step)
        for layer, requests in wanted.items():
            late = requests - self._recording.requests.get(layer, frozenset())
            reasons[layer] = self._why_uncounted(layer, requests, calls)
            reasons[layer] |= dict.fromkeys(late, not_recorded)
        for call in calls:
            if call.made is not None and call.made in self._recording.axes:
                axis = self._recording.axes[call.made]
                self._axes[call.layer] = replace(self._axes[call.layer], batch=axis)
        return self._signals(calls, wanted, reasons, NO_CALL)

    @contextmanager
    def evaluating(self, wanted: Requests) -> Iterator[list[LayerSignals]]:
        """Count all calls in this context; the list has their values once the context is left."""
        before = self._recording, self._wanted
        self._recording, self._wanted = Recording(wanted, is_evaluation=True), wanted
        found: list[LayerSignals] = []
        try:
            yield found
            with unseen():
                calls = self._recording.calls
                found.append(self._signals(calls, wanted, {}, NOTHING_EVALUATED))
        finally:
            self._recording, self._wanted = before

    def _recorded_throughout(self, wanted: Requests) -> Requests:
        """What was recorded of all forward passes: values of a part would be none of the step."""
        known = {layer: set(requests) for layer, requests in self._recording.requests.items()}
        for call in self._recording.calls:
            known.setdefault(call.layer, set()).update(call.values)
        return {layer: requests & known.get(layer, set()) for layer, requests in wanted.items()}

    def _why_uncounted(
        self, layer: str, requests: Iterable[Request], calls: Iterable[RecordedCall]
    ) -> dict[Request, str]:
        """Why none of a layer's calls count, if it was called."""
        if any(call.layer == layer for call in calls):
            return {}
        if layer in self._recording.over:
            return dict.fromkeys(requests, OVER)
        if any(call.layer == layer for call in self._recording.calls):
            return dict.fromkeys(requests, UNREACHED)
        without = layer in self._recording.without_gradients
        return dict.fromkeys(requests, WITHOUT_GRADIENTS) if without else {}

    def _signals(
        self,
        calls: Sequence[RecordedCall],
        wanted: Requests,
        reasons: Mapping[str, Mapping[Request, str]],
        no_call: str,
    ) -> LayerSignals:
        """The values of calls, with another note where no layer at all was called."""
        recording = self._recording
        if recording.failure:
            calls, why = (), recording.failure
            reasons = {layer: dict.fromkeys(each, why) for layer, each in wanted.items()}
        signals = signals_of(calls, wanted, self.modules, reasons, recording.axes)
        nothing = signals.notes and not (recording.calls or recording.failure)
        return replace(signals, notes=(no_call,)) if nothing else signals

    def _discard(self, calls: Iterable[RecordedCall]) -> None:
        for call in calls:
            # The graph refers to its calls, and a user may keep the graph.
            call.values.clear()
            call.by_axis.clear()
            call.is_over = True

    # Hooks on modules.

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._wanted:
            self._forward_passes += 1
            given = next(tensors_in((args, kwargs)), None)
            self._sizes = () if given is None or given.is_nested else tuple(given.shape)
            self._inside_model = True

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._wanted:
            self._inside_model = False

    def _before_layer(self, module: nn.Module, args: Any, kwargs: Any, *, layer: str) -> None:
        """A layer is about to be called, and may change its inputs in place."""
        if layer in self._wanted and self._may_count():
            call = self._new_call(layer)
            call.first_node = next_sequence_number()
            self._recording.open.setdefault(layer, []).append(call)
            self._record(call, first_tensor((args, kwargs)), of_input=True)

    def _after_layer(self, module: nn.Module, args: Any, output: Any, *, layer: str) -> None:
        """A layer has been called, and what comes after it may change its output in place."""
        if layer not in self._wanted:
            return
        if not self._may_count():
            self._recording.without_gradients.add(layer)
            return
        opened = self._recording.open.get(layer)
        call = opened.pop() if opened else self._new_call(layer)
        self._recording.calls.append(call)
        tensor, axes = first_tensor(output), self._axes[layer]
        first = output[0] if type(output) is tuple and output else output
        if is_packed(first):
            call.is_packed = call.axis_known = True
            call.lengths = (int(first.batch_sizes[0]),)
        elif tensor is not None and tensor.dim() > 1 and not axes.is_single(tensor):
            call.axis = axes.axis_of(tensor)
            is_open = tensor.dim() == 3 and not axes.known
            call.lengths = tuple(tensor.shape[:2]) if is_open else (tensor.shape[call.axis],)
            call.axis_known, call.made = axes.known, made_by(tensor)
        call.standalone = self._is_alone and tensor is not None and not tensor.requires_grad
        self._record(call, tensor, of_input=False)

    @property
    def _is_alone(self) -> bool:
        """Whether a layer is called by itself."""
        return not (self._inside_model or in_backward_pass())

    def _may_count(self) -> bool:
        # What runs without gradients can't be part of a training step.
        return self._recording.is_evaluation or torch.is_grad_enabled()

    def _new_call(self, layer: str) -> RecordedCall:
        if self._is_alone:
            # A layer that is called by itself may be called for any purpose.
            self._forward_passes += 1
        sizes = () if self._is_alone else self._sizes
        return RecordedCall(layer, (self._forward_passes, backward_pass_id()), sizes=sizes)

    def _record(self, call: RecordedCall, tensor: Tensor | None, of_input: bool) -> None:
        requests = [r for r in self._wanted[call.layer] if r.signal.of_input == of_input]
        if tensor is None or not has_numbers(tensor):
            return
        for request in requests:
            if request.signal is Signal.ATTENTION:
                self._read_attention(call, request, tensor)
            elif not request.signal.needs_backward:
                self._reduce(call, request, tensor)
        if not self._recording.is_evaluation:
            self._record_on_backward(call, tensor, requests, of_input)

    def _record_on_backward(
        self, call: RecordedCall, tensor: Tensor, requests: Sequence[Request], of_input: bool
    ) -> None:
        later = [request for request in requests if request.signal.needs_backward]
        side = "input" if of_input else "output"
        reason = INDEPENDENT if tensor.requires_grad else NEEDS_NONE
        call.undefined |= {request.signal: reason.format(side) for request in later}
        if not tensor.requires_grad or (of_input and not later):
            return

        def receive(capture: SignalCapture, gradient: Tensor) -> None:
            if capture._recording.in_backward:
                capture._record_gradient(call, gradient, later, of_input)

        on_gradient(tensor, OwnedHook(self, receive))

    def _record_gradient(
        self, call: RecordedCall, gradient: Tensor, requests: Sequence[Request], of_input: bool
    ) -> None:
        if call.is_over:
            self._recording.over.add(call.layer)
            return
        if not of_input:
            call.reached = True
            # Calls from now on, such as those of the next checkpoint, belong to no earlier pass.
            self._forward_passes += 1
        if self._scale != 1:
            # The scale keeps gradients in the range of half precision, which they leave without it.
            half = gradient.dtype in (torch.float16, torch.bfloat16)
            with torch.no_grad():
                gradient = (gradient.float() if half else gradient) / self._scale
        for request in requests:
            self._reduce(call, request, gradient)

    def _read_attention(self, call: RecordedCall, request: Request, output: Tensor) -> None:
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            call.add(request, read_attention(output, call.first_node))

    def _reduce(self, call: RecordedCall, request: Request, tensor: Tensor) -> None:
        axes = self._axes[call.layer]
        tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        chosen = request.channel_last
        axes = replace(axes, channel_last=axes.are_last(tensor) if chosen is None else chosen)
        reduce, tensor = request.reduction.reduce, tensor.detach()
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            if len(call.lengths) > 1 and needs_sample_axis(request):
                first, second = (replace(axes, batch=axis).samples(tensor) for axis in (0, 1))
                call.by_axis[request] = request.reduction.reduce_either(first, second)
            else:
                batch = axes.batch if len(call.sizes) == 3 else 0
                count = call.sizes[batch] if len(call.sizes) > 1 else None
                call.add(request, reduce(axes.samples(tensor, count)))
