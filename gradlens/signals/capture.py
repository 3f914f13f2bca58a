"""Reduces the signals of layers while they flow, on the steps at which somebody asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from gradlens.history.undefined import Undefined
from gradlens.signals.axes import Axes, find_axes
from gradlens.signals.layer_signals import LayerSignals, merged
from gradlens.signals.signal import Request, Signal, first_tensor

Wanted = Mapping[str, frozenset[Request]]
"""What is wanted of each layer."""

UNHEARD = (
    "the forward pass ran before step {step} was announced, and another one was expected: run it "
    "inside `with cockpit.forward({step}):`, or inside the step's own context"
)
UNREACHED = "no backward pass went through the layer inside the step's context"
GRADLESS = (
    "the layer ran without gradients alone (torch.no_grad): look at it inside "
    "`with cockpit.evaluation(...):`"
)
SEVERAL = (
    "several backward passes went through one call of the layer, whose gradient is their sum: "
    "call backward once, on the sum of the losses"
)
NEEDS_NONE = "the {} needs no gradient"
INDEPENDENT = "the loss doesn't depend on the {}"
NO_CALL = (
    "no layer was called before the backward pass: call the model itself; if torch.compile came "
    "before the cockpit, make the cockpit first"
)


MISPLACED = (
    "with batch_first=False, samples are in axis 1, also where layers around don't say where; they "
    "seem to be elsewhere in the output of {layers}, whose norms by sample are mixed up: use "
    "batch_first=True"
)
NOTHING_EVALUATED = "no layer was called in this context"

Passage = tuple[int, int]
"""A forward pass, and the backward pass that it runs in, if it is a checkpoint's second one."""


@dataclass
class _Call:
    """One call of a layer; ``reached`` once the backward pass of the step goes through it.

    ``told`` if that can be told of it alone: it needs no gradient, and it isn't the model that has
    called the layer. ``doubtful`` if a backward pass went through it that can be differentiated,
    perhaps only to make the loss. ``samples`` is the length of axis 1 of three, if they are there.
    """

    layer: str
    passage: Passage
    values: dict[Request, Any] = field(default_factory=dict)
    flaws: dict[Signal, str] = field(default_factory=dict)
    reached: bool = False
    told: bool = False
    doubtful: bool = False
    samples: int | None = None

    @property
    def tells_samples_apart(self) -> bool:
        """Whether somebody asks for more than all samples together."""
        return any(r.signal is Signal.OUTPUT and r.reduction.by_sample for r in self.values)


class SignalCapture:
    """Watches the layers of a model for the requests that are made for them.

    A forward pass outside a step's context is watched for the step that is ``expect``ed. Of the
    calls that it sees, those count that the step's backward pass goes through, and those of the
    same pass through the model that it doesn't. A checkpoint's second forward pass counts as a
    pass of its own. Nothing of a call is kept but its reduced values, and these for one step.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], wanted: Wanted) -> None:
        """Watch ``modules`` of the model by name; ``wanted`` is all that may be asked for."""
        self.modules = dict(modules)
        self._axes = _axes_of(model, self.modules)
        self._wanted: Wanted = {}
        self._heard: dict[str, frozenset[Request]] = {}
        self._calls: list[_Call] = []
        self._running: dict[str, list[_Call]] = {}
        self._gradless: set[str] = set()
        self._passage = 0
        self._inside_model = False
        self._in_backward = False
        self._scale = 1.0
        self._evaluating = False
        hooks = list(_hooks(model, self.modules, wanted, weakref.ref(self)))
        self._remove_hooks = weakref.finalize(self, _remove, hooks)
        self._remove_hooks.atexit = False

    def close(self) -> None:
        """Take all hooks off the model, as happens by itself when nobody has a capture any more."""
        self._remove_hooks()

    # What the cockpit says.

    def expect(self, wanted: Wanted) -> None:
        """Forget what was seen, and look from now on for what the next step wants."""
        self._forget(self._calls)
        self._calls, self._running, self._gradless = [], {}, set()
        self._in_backward = self._inside_model = False
        self._heard = dict(wanted)
        self._wanted = wanted

    def pause(self) -> None:
        """Look for nothing until the step begins."""
        self._wanted = {}

    @contextmanager
    def listening(self, wanted: Wanted) -> Iterator[None]:
        """Look for what a step wants, but for what hasn't been looked for all the time."""
        before, self._wanted = self._wanted, self._known(wanted)
        try:
            yield
        finally:
            self._wanted = before

    def drop(self) -> None:
        """Forget what counts by now, which belongs to a step that never ended."""
        counted = self._counted()
        self._forget(counted)
        dropped = {id(call) for call in counted}
        self._calls = [call for call in self._calls if id(call) not in dropped]

    def begin(self, wanted: Wanted, scale: float = 1.0) -> None:
        """A step's context is entered: from now on it is known what is wanted.

        Backward's gradients are ``scale`` times those to be seen.
        """
        self._wanted = wanted
        self._in_backward, self._scale = True, scale

    def go_on(self, wanted: Wanted) -> None:
        """A context of the step is left, and another one follows."""
        self._in_backward = False
        self._heard = self._wanted = self._known(wanted)

    def _known(self, wanted: Wanted) -> dict[str, frozenset[Request]]:
        """A value of some micro-batches alone would be no value of the step."""
        known = {layer: set(requests) for layer, requests in self._heard.items()}
        for call in self._calls:
            known.setdefault(call.layer, set()).update(call.values)
        return {layer: requests & known.get(layer, set()) for layer, requests in wanted.items()}

    def finish(self, global_step: int, wanted: Wanted) -> LayerSignals:
        """What was seen; called after the backward pass."""
        self._in_backward = False
        unheard = {n: requests - self._heard.get(n, frozenset()) for n, requests in wanted.items()}
        return self._signals(wanted, self._counted(), unheard, UNHEARD.format(step=global_step))

    @contextmanager
    def evaluating(self, wanted: Wanted) -> Iterator[list[LayerSignals]]:
        """Count all calls in this context; the list holds what was seen once it is left."""
        before = self._wanted, self._calls, self._running, self._gradless
        state = self._evaluating, self._in_backward
        self._wanted, self._calls, self._running, self._gradless = wanted, [], {}, set()
        self._evaluating, self._in_backward = True, False
        found: list[LayerSignals] = []
        try:
            yield found
            found.append(self._signals(wanted, self._calls, no_call=NOTHING_EVALUATED))
        finally:
            self._wanted, self._calls, self._running, self._gradless = before
            self._evaluating, self._in_backward = state

    def _forget(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            # The graph refers to its calls, and a user may keep the graph.
            call.values.clear()

    # What hooks say. On the steps that are watched, compiled models run in pieces between them.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enters_model(self) -> None:
        """The model is about to be called."""
        self._passage += 1
        self._inside_model = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leaves_model(self) -> None:
        """The model has been called."""
        self._inside_model = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enters(self, layer: str, inputs: Any) -> None:
        """A layer is about to be called, and may change its inputs in place."""
        if layer in self._wanted and self._counts():
            call = self._call(layer)
            self._running.setdefault(layer, []).append(call)
            self._see(call, first_tensor(inputs), of_input=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leaves(self, layer: str, output: Any) -> None:
        """A layer has been called, and what comes after it may change its output in place."""
        if layer not in self._wanted:
            return
        if not self._counts():
            self._gradless.add(layer)
            return
        running = self._running.get(layer)
        call = running.pop() if running else self._call(layer)
        self._calls.append(call)
        tensor = first_tensor(output)
        if tensor is not None and tensor.dim() == 3 and self._axes[layer].batch == 1:
            call.samples = tensor.shape[1]
        alone = not (self._inside_model or _inside_backward())
        call.told = alone and tensor is not None and not tensor.requires_grad
        self._see(call, tensor, of_input=False)

    def _counts(self) -> bool:
        # What runs without gradients can't be part of a training step.
        return self._evaluating or torch.is_grad_enabled()

    def _call(self, layer: str) -> _Call:
        task = torch._C._current_graph_task_id()
        if not (self._inside_model or _inside_backward()):
            # Whoever calls a layer itself may do so for any purpose.
            self._passage += 1
        return _Call(layer, (self._passage, task))

    def _see(self, call: _Call, tensor: Tensor | None, of_input: bool) -> None:
        requests = [r for r in self._wanted[call.layer] if r.signal.of_input == of_input]
        # Inside vmap, say, it is somebody else who calls the layer.
        if tensor is None or _is_abstract(tensor):
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
            # Calls from now on, such as those of the next checkpoint, belong to no earlier pass.
            self._passage += 1
        call.doubtful = call.doubtful or torch.is_grad_enabled()
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
        tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        if request.channel_last is not None:
            axes = replace(axes, channel_last=request.channel_last)
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            value = request.reduction.reduce(axes.samples(tensor.detach()))
            if request in call.values:
                value = _sum(call, request, value)
        call.values[request] = value

    # From calls to values.

    def _counted(self) -> list[_Call]:
        passages = {call.passage for call in self._calls if call.reached}
        return [
            call for call in self._calls if call.reached or call.told or call.passage in passages
        ]

    def _signals(
        self,
        wanted: Wanted,
        counted: Sequence[_Call],
        unheard: Wanted | None = None,
        reason: str = "",
        no_call: str = NO_CALL,
    ) -> LayerSignals:
        by_layer: dict[str, list[_Call]] = {call.layer: [] for call in self._calls}
        for call in counted:
            by_layer[call.layer].append(call)
        values: dict[str, dict[Request, Any]] = {}
        uncalled, empty = [], []
        for layer in self.modules:
            requests, calls = wanted.get(layer, frozenset()), by_layer.get(layer, [])
            late = {} if unheard is None else dict.fromkeys(unheard.get(layer, ()), reason)
            if not calls and (layer in by_layer or layer in self._gradless):
                cause = UNREACHED if layer in by_layer else GRADLESS
                late = dict.fromkeys(requests, cause) | late
            found = {request: _value(request, calls, late.get(request, "")) for request in requests}
            values[layer] = {request: v for request, v in found.items() if v is not None}
            missing = {request.signal.value for request in requests - values[layer].keys()}
            if missing and not calls:
                uncalled.append(layer)
            elif missing:
                empty += [f"the {signal} of {layer}" for signal in sorted(missing)]
        remarks = [*_remarks(uncalled, empty)] if self._calls or not uncalled else [no_call]
        misplaced = self._misplaced(counted)
        remarks += [MISPLACED.format(layers=_some(misplaced))] if misplaced else []
        return LayerSignals(self.modules, values, tuple(remarks))

    def _misplaced(self, counted: Iterable[_Call]) -> list[str]:
        """Layers whose samples seem to be elsewhere than those of layers that know their axis."""
        several = [call for call in counted if call.samples is not None]
        known = {(c.passage, c.samples) for c in several if self._axes[c.layer].known}
        passages = {passage for passage, _ in known}
        doubtful = [c for c in several if c.passage in passages and c.tells_samples_apart]
        return [*{c.layer: 0 for c in doubtful if (c.passage, c.samples) not in known}]


def _value(request: Request, calls: Sequence[_Call], unseen: str) -> Any:
    """All calls together; ``None`` if there was none, or none with a tensor."""
    found = [call.values[request] for call in calls if request in call.values]
    if found:
        small = request.reduction.small
        return merged(request, [_on_host(value) if small else value for value in found])
    if unseen:
        return Undefined(unseen)
    reasons = [call.flaws[request.signal] for call in calls if request.signal in call.flaws]
    return Undefined(reasons[0]) if reasons else None


def _sum(call: _Call, request: Request, value: Any) -> Any:
    """Of what another backward pass brings to a call, and those before it."""
    before = call.values[request]
    known = not (call.doubtful or isinstance(before, Undefined))
    both = request.reduction.add(before, value) if known else None
    return Undefined(SEVERAL) if both is None else both


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
    yield model.register_forward_pre_hook(_Start(capture), prepend=True)
    for name, module in modules.items():
        if any(request.signal.of_input for request in wanted[name]):
            yield module.register_forward_pre_hook(_Entry(capture, name), with_kwargs=True)
        yield module.register_forward_hook(_Exit(capture, name))
    yield model.register_forward_hook(_End(capture))


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _is_abstract(tensor: Tensor) -> bool:
    """Whether it has no numbers of its own."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or tensor.is_meta or isinstance(tensor, FakeTensor)


def _inside_backward() -> bool:
    """As for what checkpoints run again."""
    return bool(torch._C._current_graph_task_id() != -1)


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


class _Start(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        capture = self._listener()
        if capture is not None:
            capture.enters_model()


class _End(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        capture = self._listener()
        if capture is not None:
            capture.leaves_model()


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
