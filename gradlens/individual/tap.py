"""Taps: what lets gradlens see the calls of a module and the gradients at their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from backpack import hook_run_extensions
from backpack.context import CTX
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves, tree_map_only

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class LayerCall:
    """One call of a module, complete once the gradient at its output is known.

    ``args`` and ``kwargs`` are what the module was called with, tensors detached;
    ``grad_outputs`` holds, for each output tensor that needs a gradient, ∂L/∂output, or ``None``
    where the loss doesn't depend on it. ``inputs_changed`` says that an in-place operation has
    overwritten an input since.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad_outputs: tuple[Tensor | None, ...]
    inputs_changed: bool = False


class CallListener(ABC):
    """Whoever wants to hear of completed calls."""

    @abstractmethod
    def receive(self, call: LayerCall) -> None:
        """Take in a completed call; runs in the backward pass."""


class Tap:
    """A forward hook on a module with parameters of its own.

    It listens with a hook on the output tensor rather than a full backward hook, which would
    wrap inputs and outputs: in-place operations and first layers work as without it, and the
    inputs of each call are its own, also when a module is called twice. The inputs belong to the
    graph and go with it, or as soon as a backward pass that frees the graph has passed.
    """

    def __init__(self) -> None:
        self.listeners: list[CallListener] = []

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or not _has_trainable_parameter(module):
            return
        outputs = [output] if isinstance(output, Tensor) else tree_leaves(output)
        outputs = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        if not outputs:
            return
        inputs = _Inputs(args, kwargs)
        if len(outputs) == 1:
            outputs[0].register_hook(lambda gradient: self._fire(module, inputs, (gradient,)))
        else:
            torch.autograd.graph.register_multi_grad_hook(
                outputs, partial(self._fire, module, inputs)
            )

    def _fire(
        self, module: nn.Module, inputs: _Inputs, grad_outputs: tuple[Tensor | None, ...]
    ) -> None:
        extensions = _backpack_extensions(module)
        if (self.listeners or extensions) and inputs.held is not None:
            args, kwargs = inputs.held
            call = LayerCall(module, args, kwargs, tuple(grad_outputs), inputs.changed())
            for listener in tuple(self.listeners):
                listener.receive(call)
            if extensions:
                _run_backpack(extensions, call)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            inputs.held = None

    def __reduce__(self) -> tuple[type[Tap], tuple[()]]:
        # Copies and pickles of a module get a tap of their own, that nobody listens to yet.
        return Tap, ()


class _Inputs:
    """Detached arguments of a call; detaching shares the version counter with the original."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.held: tuple[tuple[Any, ...], dict[str, Any]] | None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            self.held = ((args[0].detach(),), {})
        else:
            self.held = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        self._versions = self._current_versions()

    def changed(self) -> bool:
        return self._versions != self._current_versions()

    def _current_versions(self) -> list[int]:
        tensors = [leaf for leaf in tree_leaves(self.held) if isinstance(leaf, Tensor)]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def extend(model: AnyModule) -> AnyModule:
    """Let gradlens see the model's layers; returns the same model, unchanged in what it computes.

    Call it once, before the forward pass. First-order BackPACK extensions then work on the model
    too. Second-order ones need BackPACK's own ``extend`` on model and loss besides.
    """
    for module in tappable_modules(model):
        if tap_of(module) is None:
            module.register_forward_hook(Tap(), with_kwargs=True)
    return model


def tap_of(module: nn.Module) -> Tap | None:
    """The module's tap, or ``None`` if it has not been extended."""
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, Tap)), None)


def tappable_modules(model: nn.Module) -> list[nn.Module]:
    """Leaf modules with parameters of their own."""
    hidden = {
        id(inner)
        for module in model.modules()
        if isinstance(module, ParametrizationList)
        for inner in module.modules()
    }
    return [
        module
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False))
        and not any(True for _ in module.children())
        and id(module) not in hidden
    ]


def _has_trainable_parameter(module: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def _backpack_extensions(module: nn.Module) -> tuple[Any, ...]:
    """Active BackPACK extensions that BackPACK itself won't run on this module."""
    active = CTX.get_active_exts()
    if not active or hook_run_extensions in module._backward_hooks.values():
        return ()
    return tuple(ext for ext in active if isinstance(ext, FirstOrderBackpropExtension))


def _run_backpack(extensions: tuple[Any, ...], call: LayerCall) -> None:
    """What BackPACK's hook does, with the inputs of this very call."""
    module, grad_outputs = call.module, call.grad_outputs
    if isinstance(module, nn.RNNBase):
        raise NotImplementedError(
            f"BackPACK's rules for {type(module).__name__} need the module's output: extend the "
            "model with backpack.extend as well"
        )
    names = [f"input{i}" for i in range(len(call.args))]
    for name, argument in zip(names, call.args, strict=True):
        setattr(module, name, argument)
    # Apart from recurrent ones, first-order rules ask the output for its identity alone.
    module.output = grad_outputs[0]  # type: ignore[assignment]
    try:
        for extension in extensions:
            extension(module, (), grad_outputs)
        CTX.get_extension_hook()(module)
    finally:
        for name in [*names, "output"]:
            delattr(module, name)
