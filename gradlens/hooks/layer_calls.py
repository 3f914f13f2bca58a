"""Taps: what lets gradlens see the calls of a module and the gradients at their outputs."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from backpack import hook_run_extensions
from backpack.context import CTX
from backpack.extensions.backprop_extension import FAIL_SILENT
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.utils.hooks import no_op
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves, tree_map

from gradlens.hooks.model_calls import keep_calls
from gradlens.hooks.pausable import Pausable

AnyModule = TypeVar("AnyModule", bound=nn.Module)


_WATCHED = (_Loss, nn.Dropout)
"""What is watched although it has no parameters."""

OVERWRITTEN = "an in-place operation has overwritten the layer's input"
ENTANGLED = "one of its layer's outputs is computed from another"


_ATTRIBUTE = "_gradlens_tap"


@dataclass(frozen=True)
class LayerCall:
    """One call of a module, complete once the gradient at its output is known.

    ``args`` and ``kwargs`` are what the module was called with, tensors detached, except for those
    of a loss module; ``output`` is kept of dropout alone, whose mask it tells. ``grad_outputs``
    holds, for each output tensor that needs a gradient, ∂L/∂output, or ``None`` where the loss
    doesn't depend on it. ``trainable`` are the module's parameters that needed a gradient,
    ``training`` its mode and ``autocast`` the precision of autocast, at the time of the call.
    ``flaw`` says why nothing can be made of the call, if so.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad_outputs: tuple[Tensor | None, ...]
    trainable: frozenset[str]
    training: bool
    autocast: torch.dtype | None = None
    flaw: str = ""
    output: Tensor | None = None


class CallListener(Pausable, ABC):
    """Whoever wants to hear of completed calls, unless ``paused``."""

    @abstractmethod
    def receive(self, call: LayerCall) -> None:
        """Take in a completed call; runs in the backward pass."""


class Watch:
    """Somebody on whose behalf taps watch a model's forward passes, while ``awake``."""

    def __init__(self) -> None:
        self._awake = True
        self._taps: list[Tap] = []

    @property
    def awake(self) -> bool:
        """Whether forward passes are watched from now on."""
        return self._awake

    @awake.setter
    def awake(self, awake: bool) -> None:
        if awake != self._awake:
            self._awake = awake
            for tap in self._taps:
                tap.settle()

    def over(self, model: nn.Module) -> None:
        """Let the model's layers be seen whenever the watch is awake."""
        taps = _taps_set_on(model)
        self._taps += taps
        for tap in taps:
            tap.watch_for(self)


class Tap:
    """A forward hook on a module with parameters of its own.

    It is one ``always``, or as long as somebody it knows of is awake; otherwise it has ``slept``
    through the latest call, which costs nothing. It listens with a hook on the output tensor rather
    than a full backward hook, which would wrap inputs and outputs: in-place operations and first
    layers work as without it, and the inputs of each call are its own, also when a module is called
    twice. The inputs belong to the graph and go with it, or as soon as a backward pass that frees
    it has passed.
    """

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.slept = False
        self.listeners: list[CallListener] = []
        self._watches: list[weakref.ref[Watch]] = []
        self._module: weakref.ref[nn.Module] | None = None

    def belong_to(self, module: nn.Module) -> None:
        """Be set on a module, which finds it under an attribute while it is no hook."""
        self._module = weakref.ref(module)
        vars(module)[_ATTRIBUTE] = self

    def watch_always(self) -> None:
        """Be a hook from now on."""
        self.always = True
        self.settle()

    def watch_for(self, watch: Watch) -> None:
        """Be a hook whenever the watch is awake, as long as it lives."""
        known = [reference for reference in self._watches if reference() is not None]
        self._watches = [*known, weakref.ref(watch)]
        self.settle()

    def settle(self) -> None:
        """Become a hook if that is wanted, or stop being one."""
        module = None if self._module is None else self._module()
        if module is None:
            return
        hooks = module._forward_hooks
        key = next((key for key, hook in hooks.items() if hook is self), None)
        if self._is_wanted():
            if key is None:
                # First of all hooks, since others may replace the output.
                module.register_forward_hook(self, with_kwargs=True, prepend=True)
            return
        if key is not None:
            del hooks[key], module._forward_hooks_with_kwargs[key]
        self.slept = True

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # A compiled graph has no room for hooks on its tensors.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.slept = False
        trainable = trainable_parameters(module)
        if not (trainable or isinstance(module, _Loss) or _is_dropping(module)):
            return
        outputs = _differentiable(output)
        if not outputs:
            return
        memory = _Memory(module, args, kwargs, trainable, outputs)
        if len(outputs) == 1:
            outputs[0].register_hook(lambda gradient: self._fire(memory, (gradient,)))
        else:
            torch.autograd.graph.register_multi_grad_hook(outputs, partial(self._fire, memory))

    def _fire(self, memory: _Memory, grad_outputs: tuple[Tensor | None, ...]) -> None:
        by_backpack = memory.output is None and _left_to_us_by_backpack(memory.module)
        if (self.listeners or by_backpack) and not memory.released:
            call = memory.call(tuple(grad_outputs))
            for listener in [each for each in self.listeners if not each.paused]:
                listener.receive(call)
            if by_backpack:
                _run_backpack(call)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            memory.release()

    def _is_wanted(self) -> bool:
        if self.always:
            return True
        watches = [reference() for reference in self._watches]
        return any(watch is not None and watch.awake for watch in watches)

    def __reduce__(self) -> tuple[type[Tap], tuple[bool]]:
        # Copies and pickles of a module get a tap of their own, that nobody listens to yet.
        return Tap, (self.always,)


class _Memory:
    """What is remembered of a call until its gradient comes; belongs to the graph.

    Detached inputs share the version counter with the originals, but not their graph. Objects that
    aren't tensors or plain values are referred to weakly: one of them might hold the output, and
    with it the graph, which nothing would ever free.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainable: frozenset[str],
        outputs: list[Tensor],
    ) -> None:
        self.module = module
        self.released = False
        self.output: Tensor | None = None
        self._trainable = trainable
        self._training = module.training
        self._autocast = _autocast_dtype(outputs[0].device.type)
        self._flaw = "" if len(outputs) == 1 else _entanglement(outputs, args, kwargs)
        self._simple = not kwargs and all(isinstance(argument, Tensor) for argument in args)
        if isinstance(module, nn.Dropout):
            self._inputs: Any = ((), {})
            self.output = outputs[0].detach()
        elif isinstance(module, _Loss):
            # Its inputs are the network's outputs, which the loss's curvature is taken at.
            self._inputs = (args, kwargs)
        elif self._simple:
            self._inputs = (tuple([argument.detach() for argument in args]), {})
        else:
            self._inputs = tree_map(_hold, (args, kwargs))
        self._versions = self._current_versions()

    def call(self, grad_outputs: tuple[Tensor | None, ...]) -> LayerCall:
        changed = self._versions != self._current_versions()
        args, kwargs = self._inputs if self._simple else tree_map(_recall, self._inputs)
        flaw = OVERWRITTEN if changed else self._flaw
        return LayerCall(
            self.module,
            args,
            kwargs,
            grad_outputs,
            self._trainable,
            self._training,
            self._autocast,
            flaw,
            self.output,
        )

    def release(self) -> None:
        self._inputs, self.output = ((), {}), None
        self.released = True

    def _current_versions(self) -> list[int]:
        leaves = self._inputs[0] if self._simple else tree_leaves(self._inputs)
        tensors = [leaf for leaf in (*leaves, self.output) if isinstance(leaf, Tensor)]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _is_dropping(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.training


def _hold(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.detach()
    if isinstance(argument, _PLAIN):
        return argument
    try:
        return weakref.ref(argument)
    except TypeError:
        return argument


def _recall(held: Any) -> Any:
    return held() if isinstance(held, weakref.ref) else held


def _differentiable(output: Any) -> list[Tensor]:
    """Output tensors of a graph; a module may also return a parameter as it is."""
    if isinstance(output, Tensor):
        return [] if output.is_leaf else [output]
    return [o for o in tree_leaves(output) if isinstance(o, Tensor) and not o.is_leaf]


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _entanglement(outputs: list[Tensor], args: Any, kwargs: Any) -> str:
    """Whether one output is an ancestor of another, so that its gradient contains the other's."""
    edges = {(output.grad_fn, output.output_nr) for output in outputs}
    if len(edges) < len(outputs):
        return ENTANGLED
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    seen = {tensor.grad_fn for tensor in inputs}
    # What a node computes besides an output is no part of that output.
    below = [edge for node, _ in edges if node is not None for edge in node.next_functions]
    while below:
        edge = below.pop()
        if edge in edges:
            return ENTANGLED
        node, _ = edge
        if node is None or node in seen:
            continue
        seen.add(node)
        below += node.next_functions
    return ""


def extend(model: AnyModule) -> AnyModule:
    """Let gradlens see the model's layers; returns the same model, unchanged in what it computes.

    Call it once, before the forward pass. A loss module can be extended too, for quantities that
    need per-sample losses. First-order BackPACK extensions then work on the model
    too. Second-order ones need BackPACK's own ``extend`` on model and loss besides.
    """
    for tap in _taps_set_on(model):
        tap.watch_always()
    keep_calls(model)
    return model


def _taps_set_on(model: nn.Module) -> list[Tap]:
    taps = {module: tap_of(module) or Tap() for module in tappable_modules(model)}
    for module, tap in taps.items():
        tap.belong_to(module)
    return list(taps.values())


def tap_of(module: nn.Module) -> Tap | None:
    """The module's tap, or ``None`` if it has not been extended."""
    tap: Tap | None = vars(module).get(_ATTRIBUTE)
    return tap


@contextmanager
def listening(model: nn.Module, listener: CallListener) -> Iterator[None]:
    """Let a listener receive the completed calls of a model's layers."""
    taps = taps_of(model)
    for tap in taps:
        tap.listeners.append(listener)
    try:
        yield
    finally:
        for tap in taps:
            tap.listeners.remove(listener)


def taps_of(model: nn.Module) -> list[Tap]:
    """The taps of all its modules."""
    return [tap for module in model.modules() if (tap := tap_of(module)) is not None]


def tappable_modules(model: nn.Module) -> list[nn.Module]:
    """Leaf modules with parameters of their own, dropout and losses, but no parametrizations."""
    hidden = {
        id(inner)
        for module in model.modules()
        if isinstance(module, ParametrizationList)
        for inner in module.modules()
    }
    return [m for m in model.modules() if _is_tappable(m) and id(m) not in hidden]


def _is_tappable(module: nn.Module) -> bool:
    watched = isinstance(module, _WATCHED) or any(True for _ in module.parameters(recurse=False))
    return watched and not any(True for _ in module.children())


def stored_inputs(module: nn.Module) -> tuple[Any, ...]:
    """Inputs that are stored on the module for BackPACK extensions; ``RuntimeError`` without."""
    inputs = tuple(v for k, v in vars(module).items() if k.startswith("input") and k[5:].isdigit())
    if not inputs:
        raise RuntimeError(
            f"BackPACK kept no input of this {type(module).__name__}, which happens when a "
            "module is used more than once: extend the model with gradlens.extend instead"
        )
    return inputs


def trainable_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the module's own parameters that need a gradient."""
    return frozenset(n for n, p in module._parameters.items() if p is not None and p.requires_grad)


class LossExtension(FirstOrderBackpropExtension):
    """A BackPACK extension that looks at loss modules only."""

    def __init__(self, savefield: str) -> None:
        super().__init__(savefield, {}, fail_mode=FAIL_SILENT)


def _left_to_us_by_backpack(module: nn.Module) -> bool:
    """Whether BackPACK is active, but won't run on this module by itself."""
    idle = len(CTX.get_active_exts()) == 0 and CTX.get_extension_hook() is no_op
    return not idle and hook_run_extensions not in module._backward_hooks.values()


def _run_backpack(call: LayerCall) -> None:
    """What BackPACK's hook does, with the inputs of this very call."""
    module, grad_outputs = call.module, call.grad_outputs
    active = CTX.get_active_exts()
    extensions = [
        extension
        for extension in active
        if isinstance(extension, FirstOrderBackpropExtension)
        and (isinstance(module, _Loss) or not isinstance(extension, LossExtension))
    ]
    if extensions and isinstance(module, nn.RNNBase):
        raise NotImplementedError(
            f"BackPACK's rules for {type(module).__name__} need the module's output: extend the "
            "model with backpack.extend as well"
        )
    arguments = (*call.args, *call.kwargs.values())
    names = [f"input{index}" for index in range(len(arguments))]
    for name, argument in zip(names, arguments, strict=True):
        setattr(module, name, argument)
    # Apart from recurrent ones, first-order rules ask the output for its identity alone.
    module.output = grad_outputs[0]  # type: ignore[assignment]
    try:
        for extension in extensions:
            extension(module, (), grad_outputs)  # type: ignore[arg-type]
        CTX.get_extension_hook()(module)
    finally:
        for name in [*names, "output"]:
            delattr(module, name)
