"""Reduces the signals of layers while they flow, on the steps at which somebody asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.signals.axes import Axes, find_axes
from gradlens.signals.layer_signals import LayerSignals
from gradlens.signals.signal import Request, Signal, first_tensor
from gradlens.undefined import Undefined

Wanted = Mapping[str, frozenset[Request]]
"""What is wanted of each layer."""

UNHEARD = (
    "the forward pass ran before step {step} was announced, and another one was expected: run it "
    "inside `with cockpit.forward({step}):`, or inside the step's own context"
)
UNREACHED = "no backward pass went through the layer inside the step's context"
NEEDS_NONE = "the {} needs no gradient"
INDEPENDENT = "the loss doesn't depend on the {}"
NO_CALL = (
    "no layer was called before the backward pass: call the model itself; if torch.compile came "
    "before the cockpit, make the cockpit first"
)


@dataclass
class _Call:
    """One call of a layer; ``reached`` once the backward pass of the step goes through it."""

    layer: str
    passage: int
    values: dict[Request, list[Any]] = field(default_factory=dict)
    flaws: dict[Signal, str] = field(default_factory=dict)
    reached: bool = False


class SignalCapture:
    """Watches the layers of a model for the requests that are made for them.

    A forward pass outside a step's context is watched for the step that is ``expect``ed. Of the
    calls that it sees, those count that the step's backward pass goes through, and those of the
    same pass through the model that need no gradient. Nothing of a call is kept but its reduced
    values, and these for one step.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], wanted: Wanted) -> None:
        """Watch ``modules`` of the model by name; ``wanted`` is all that may be asked for."""
        self.modules = dict(modules)
        self._axes = _axes_of(model, self.modules)
        self._wanted: Wanted = {}
        self._heard: dict[str, frozenset[Request]] = {}
        self._calls: list[_Call] = []
        self._running: dict[str, list[_Call]] = {}
        self._passage = 0
        self._in_backward = False
        self._scale = 1.0
        self._evaluating = False
        self._handles = list(_hooks(model, self.modules, wanted, weakref.ref(self)))

    def close(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __del__(self) -> None:
        self.close()

    # What the cockpit says.

    def expect(self, wanted: Wanted) -> None:
        """Forget what was seen, and look from now on for what the next step wants."""
        self._forget()
        self._in_backward = False
        self._heard = dict(wanted)
        self._wanted = wanted

    def pause(self) -> None:
        """Look for nothing until the step begins."""
        self._wanted = {}

    def begin(self, wanted: Wanted, scale: float = 1.0) -> None:
        """A step's context is entered: from now on it is known what is wanted.

        Backward's gradients are ``scale`` times those to be seen.
        """
        self._wanted = wanted
        self._in_backward, self._scale = True, scale

    def go_on(self, wanted: Wanted) -> None:
        """A context of the step is left, and another one follows."""
        self._in_backward = False
        seen = {(call.layer, request) for call in self._calls for request in call.values}
        # A value of some micro-batches alone would be no value of the step.
        self._wanted = {
            layer: frozenset(
                request
                for request in requests
                if request in self._heard.get(layer, ()) or (layer, request) in seen
            )
            for layer, requests in wanted.items()
        }

    def finish(self, global_step: int, wanted: Wanted) -> LayerSignals:
        """What was seen; called after the backward pass."""
        self._in_backward = False
        unheard = {n: requests - self._heard.get(n, frozenset()) for n, requests in wanted.items()}
        return self._signals(wanted, self._counted(), unheard, UNHEARD.format(step=global_step))

    @contextmanager
    def evaluating(self, wanted: Wanted) -> Iterator[list[LayerSignals]]:
        """Count all calls in this context; the list holds what was seen once it is left."""
        before = self._wanted, self._calls, self._running, self._evaluating, self._in_backward
        self._wanted, self._calls, self._running = wanted, [], {}
        self._evaluating, self._in_backward = True, False
        found: list[LayerSignals] = []
        try:
            yield found
            found.append(self._signals(wanted, self._calls))
        finally:
            self._wanted, self._calls, self._running, self._evaluating, self._in_backward = before

    def _forget(self) -> None:
        for call in self._calls:
            # The graph refers to its calls, and a user may keep the graph.
            call.values.clear()
        self._calls, self._running, self._wanted = [], {}, {}

    # What hooks say. On the steps that are watched, compiled models run in pieces between them.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def passes_through_model(self) -> None:
        """The model is called."""
        self._passage += 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enters(self, layer: str, inputs: Any) -> None:
        """A layer is about to be called, and may change its inputs in place."""
        if layer in self._wanted and self._counts():
            call = _Call(layer, self._passage)
            self._running.setdefault(layer, []).append(call)
            self._see(call, first_tensor(inputs), of_input=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leaves(self, layer: str, output: Any) -> None:
        """A layer has been called, and what comes after it may change its output in place."""
        if layer not in self._wanted or not self._counts():
            return
        running = self._running.get(layer)
        call = running.pop() if running else _Call(layer, self._passage)
        self._calls.append(call)
        self._see(call, first_tensor(output), of_input=False)

    def _counts(self) -> bool:
        # What runs without gradients can't be part of a training step.
        return self._evaluating or torch.is_grad_enabled()

    def _see(self, call: _Call, tensor: Tensor | None, of_input: bool) -> None:
        requests = [r for r in self._wanted[call.layer] if r.signal.of_input == of_input]
        # Inside vmap, say, it is somebody else who calls the layer.
        if tensor is None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        for request in requests:
            if not request.signal.needs_backward:
                self._reduce(call, request, tensor)
        if not self._evaluating:
            self._await_gradient(call, tensor, requests, of_input)

    def _await_gradient(
        self, call: _Call, tensor: Tensor, requests: Sequence[Request], of_input: bool
    ) -> None:
        later = [request for request in requests if request.signal.needs_backward]
        side = "input" if of_input else "output"
        reason = INDEPENDENT if tensor.requires_grad else NEEDS_NONE
        call.flaws |= {request.signal: reason.format(side) for request in later}
        if not tensor.requires_grad or (of_input and not later):
            return
        capture = weakref.ref(self)

        def take_in(gradient: Tensor) -> None:
            here = capture()
            if here is not None and here._in_backward:
                here._reached(call, gradient, later, of_input)

        tensor.register_hook(take_in)

    def _reached(
        self, call: _Call, gradient: Tensor, requests: Sequence[Request], of_input: bool
    ) -> None:
        if not of_input:
            call.reached = True
            # Calls from now on, such as those of checkpoints, belong to no earlier pass.
            self._passage += 1
        for request in requests:
            self._reduce(call, request, self._unscaled(gradient))

    @torch.no_grad()
    def _unscaled(self, gradient: Tensor) -> Tensor:
        if self._scale == 1:
            return gradient
        # Half precision has no room below: that is why there is a scale.
        half = gradient.dtype in (torch.float16, torch.bfloat16)
        return (gradient.float() if half else gradient) / self._scale

    def _reduce(self, call: _Call, request: Request, tensor: Tensor) -> None:
        axes = self._axes[call.layer]
        if request.channel_last is not None:
            axes = replace(axes, channel_last=request.channel_last)
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            value = request.reduction.reduce(axes.samples(tensor.detach()))
        call.values.setdefault(request, []).append(value)

    # From calls to values.

    def _counted(self) -> list[_Call]:
        passages = {call.passage for call in self._calls if call.reached}
        return [call for call in self._calls if call.reached or call.passage in passages]

    def _signals(
        self,
        wanted: Wanted,
        counted: Sequence[_Call],
        unheard: Wanted | None = None,
        reason: str = "",
    ) -> LayerSignals:
        by_layer: dict[str, list[_Call]] = {call.layer: [] for call in self._calls}
        for call in counted:
            by_layer[call.layer].append(call)
        values: dict[str, dict[Request, Any]] = {}
        uncalled, empty = [], []
        for layer in self.modules:
            requests, calls = wanted.get(layer, frozenset()), by_layer.get(layer, [])
            late = {} if unheard is None else dict.fromkeys(unheard.get(layer, ()), reason)
            if layer in by_layer and not calls:
                late = dict.fromkeys(requests, UNREACHED)
            found = {request: _value(request, calls, late.get(request, "")) for request in requests}
            values[layer] = {request: v for request, v in found.items() if v is not None}
            missing = {request.signal.value for request in requests - values[layer].keys()}
            if missing and not calls:
                uncalled.append(layer)
            elif missing:
                empty += [f"the {signal} of {layer}" for signal in sorted(missing)]
        remarks = (*_remarks(uncalled, empty),) if self._calls or not uncalled else (NO_CALL,)
        return LayerSignals(self.modules, values, remarks)


def _value(request: Request, calls: Sequence[_Call], unseen: str) -> Any:
    """All calls together; ``None`` if there was none, or none with a tensor."""
    found = [value for call in calls for value in call.values.get(request, ())]
    if found:
        small = request.reduction.small
        return request.reduction.merge([_on_host(value) if small else value for value in found])
    if unseen:
        return Undefined(unseen)
    reasons = [call.flaws[request.signal] for call in calls if request.signal in call.flaws]
    return Undefined(reasons[0]) if reasons else None


def _remarks(uncalled: Sequence[str], empty: Sequence[str]) -> Iterator[str]:
    if uncalled:
        yield f"layers that were not called have no values: {_some(uncalled)}"
    if empty:
        yield f"there are no floating-point tensors to look at in {_some(empty)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        moved = value.detach().cpu()
        return moved.double() if moved.is_floating_point() else moved
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: _on_host(getattr(value, part.name)) for part in fields(value)}
        return replace(value, **parts)
    return value


# Hooks ------------------------------------------------------------------------------------------


def _hooks(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    wanted: Wanted,
    capture: weakref.ref[SignalCapture],
) -> Iterable[RemovableHandle]:
    yield model.register_forward_pre_hook(_Passage(capture), prepend=True)
    for name, module in modules.items():
        if any(request.signal.of_input for request in wanted[name]):
            yield module.register_forward_pre_hook(_Entry(capture, name), with_kwargs=True)
        yield module.register_forward_hook(_Exit(capture, name))


class _Hook:
    """Tells a capture what happens at a layer; copies and pickles of it tell nobody."""

    def __init__(self, capture: weakref.ref[SignalCapture] | None = None, layer: str = "") -> None:
        self._capture = capture
        self._layer = layer

    def _listener(self) -> SignalCapture | None:
        capture = None if self._capture is None else self._capture()
        return capture if capture is not None and capture._wanted else None

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class _Passage(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        capture = self._listener()
        if capture is not None:
            capture.passes_through_model()


class _Entry(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        capture = self._listener()
        if capture is not None:
            capture.enters(self._layer, (args, kwargs))


class _Exit(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        capture = self._listener()
        if capture is not None:
            capture.leaves(self._layer, output)


def _axes_of(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Axes]:
    found = find_axes(model)
    return {name: found[module] for name, module in modules.items()}
