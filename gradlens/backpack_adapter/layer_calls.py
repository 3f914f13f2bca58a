"""Calls of layers and loss modules, which BackPACK's extensions run on in the backward pass."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from backpack import hook_run_extensions
from backpack.context import CTX
from backpack.utils.hooks import no_op
from torch import Tensor, nn

from gradlens.messages import GradlensWarning
from gradlens.torch_private import (
    LossModule,
    backward_hooks,
    keeps_graph,
    tree_flatten,
    tree_unflatten,
)

SECOND_ORDER = (
    "{extension} is of second order and has computed nothing: gradlens's hooks on layers run "
    "extensions of first order alone. Extend the model and the loss module by backpack.extend"
)


@dataclass(frozen=True)
class LayerCall:
    """One call of a module, once the gradient at its output has been computed.

    ``args`` and ``kwargs`` are what the module was called with; tensors are detached, except for
    those of a loss module. ``grad_outputs`` holds, for each output tensor that needs a gradient,
    ∂L/∂output, or ``None`` where the loss doesn't depend on it.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad_outputs: tuple[Tensor | None, ...]


class PendingCall:
    """What a call's hook keeps until the backward pass reaches it; it belongs to the graph.

    Detached inputs share the memory and the version of the originals, but not their graph. Objects
    other than tensors and plain values are referenced weakly: one that holds the output would keep
    the graph alive, and the graph would keep it alive.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._released = False
        self._leaves, self._structure = _flattened(args, kwargs)
        # A loss's inputs are the network's outputs, at which the loss's curvature is computed.
        if not isinstance(module, LossModule):
            self._leaves = [_held(leaf) for leaf in self._leaves]

    def run_extensions(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Run BackPACK's active extensions; called with the gradients at the module's outputs."""
        if not self._released and _needs_backpack(self._module):
            _run_backpack(self.completed(tuple(grad_outputs)))
        if not keeps_graph():
            self._release()

    def completed(self, grad_outputs: tuple[Tensor | None, ...]) -> LayerCall:
        """The call with the gradients at the module's outputs."""
        leaves = [_dereferenced(leaf) for leaf in self._leaves]
        plain = self._structure is None
        args, kwargs = (tuple(leaves), {}) if plain else tree_unflatten(leaves, self._structure)
        return LayerCall(self._module, args, kwargs, grad_outputs)

    def _release(self) -> None:
        self._leaves, self._released = [], True


_PENDING = "gradlens_pending_calls"
"""Where calls of loss modules are kept in the metadata of the nodes that made their outputs."""


def keep_with_graph(call: PendingCall, output: Tensor) -> None:
    """Keep a call at the node of its output."""
    node: Any = output.grad_fn
    node.metadata.setdefault(_PENDING, []).append(call)


def kept_calls(node: Any) -> list[PendingCall]:
    """The calls whose output a node made."""
    found: list[PendingCall] = node.metadata.get(_PENDING, [])
    return found


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Leaves of the arguments, and their structure; without one if they are tensors alone."""
    # They mostly are, and tree_flatten takes 20 microseconds, which is most of a hook's time.
    if not kwargs and all(isinstance(argument, Tensor) for argument in args):
        return list(args), None
    return tree_flatten((args, kwargs))


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _held(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.detach()
    if isinstance(argument, _PLAIN):
        return argument
    try:
        return weakref.ref(argument)
    except TypeError:
        return argument


def _dereferenced(held: Any) -> Any:
    return held() if isinstance(held, weakref.ref) else held


def _needs_backpack(module: nn.Module) -> bool:
    """Whether BackPACK is active, but has no hook of its own on this module."""
    idle = len(CTX.get_active_exts()) == 0 and CTX.get_extension_hook() is no_op
    return not idle and hook_run_extensions not in backward_hooks(module).values()


def _run_backpack(call: LayerCall) -> None:
    """Do what BackPACK's own hook does, with the inputs of this very call."""
    module, grad_outputs = call.module, call.grad_outputs
    extensions = []
    for extension in CTX.get_active_exts():
        if extension.expects_backpropagation_quantities():
            kind = type(extension).__name__
            warnings.warn(SECOND_ORDER.format(extension=kind), GradlensWarning, stacklevel=2)
        else:
            extensions.append(extension)
    if extensions and isinstance(module, nn.RNNBase):
        raise NotImplementedError(
            f"BackPACK's rules for {type(module).__name__} need the module's output: extend the "
            "model with backpack.extend as well"
        )
    arguments = in_order(call)
    names = [f"input{index}" for index in range(len(arguments))]
    try:
        for name, argument in zip(names, arguments, strict=True):
            setattr(module, name, argument)
        # Apart from recurrent ones, first-order rules use nothing of the output but its identity.
        module.output = grad_outputs[0]  # type: ignore[assignment]
        for extension in extensions:
            extension(module, (), grad_outputs)  # type: ignore[arg-type]
        CTX.get_extension_hook()(module)
    finally:
        for name in [*names, "output"]:
            vars(module).pop(name, None)


def in_order(call: LayerCall) -> tuple[Any, ...]:
    """All arguments of a call in the order in which the module's forward names them."""
    if not call.kwargs:
        return call.args
    bound = inspect.signature(call.module.forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return (*bound.args, *bound.kwargs.values())


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
    return frozenset(name for name, p in own_parameters(module).items() if p.requires_grad)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's parameters by name, without those of its children."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))
