"""Calls of layers and loss modules, which BackPACK's extensions run on in the backward pass."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from backpack import hook_run_extensions
from backpack.context import CTX
from backpack.utils.hooks import no_op
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from gradlens.graph.hooks import on_gradient
from gradlens.messages import GradlensWarning
from gradlens.torch_private import (
    LossModule,
    backward_hooks,
    keeps_graph,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

SECOND_ORDER = (
    "{extension} is of second order and has computed nothing: gradlens's hooks on layers run "
    "extensions of first order alone. Extend the model and the loss module by backpack.extend"
)


_CALLS = "gradlens_layer_calls"
"""Where calls are kept in the metadata of the nodes that made their outputs."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class LayerCall:
    """One call of a module, which belongs to the graph until a backward pass frees that.

    Detached inputs share the memory and the version of the originals, but not their graph. Objects
    other than tensors and plain values are referenced weakly: one that holds the output would keep
    the graph alive, and the graph would keep it alive.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self._is_released = False
        self._leaves, self._structure = tree_flatten((args, kwargs))
        # A loss's inputs are the network's outputs, at which the loss's curvature is computed.
        if not isinstance(module, LossModule):
            self._leaves = [_held(leaf) for leaf in self._leaves]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments, in the order in which the module's forward names them."""
        leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        if not kwargs:
            return tuple(args)
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())

    def run_extensions(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Run BackPACK's active extensions; called with the gradients at the module's outputs.

        These are ``None`` where the loss doesn't depend on an output.
        """
        if not self._is_released and _needs_backpack(self.module):
            _run_backpack(self.module, self.arguments, tuple(grad_outputs))
        if not keeps_graph():
            self._leaves, self._is_released = [], True


def _held(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.detach()
    if isinstance(argument, _PLAIN):
        return argument
    try:
        return weakref.ref(argument)
    except TypeError:
        return argument


def keep_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    failed: Callable[[Exception], None],
) -> None:
    """Keep a call with the graph, whose extensions run when the backward pass reaches its output.

    A call that is there already isn't kept twice. ``failed`` gets what extensions raise.
    """
    outputs = [o for o in tree_leaves(output) if isinstance(o, Tensor) and not o.is_leaf]
    is_trained = any(p.requires_grad for p in module.parameters(recurse=False))
    if not outputs or not (is_trained or isinstance(module, LossModule)):
        return
    node: Any = outputs[0].grad_fn
    if any(call.module is module for call in kept_calls(node)):
        return
    call = LayerCall(module, args, kwargs)
    node.metadata.setdefault(_CALLS, []).append(call)

    def run(gradients: Sequence[Tensor | None]) -> None:
        try:
            call.run_extensions(gradients)
        except Exception as error:
            failed(error)

    # A full backward hook would wrap inputs and outputs, and so forbid in-place operations; and
    # each call has its own inputs here, also when a layer is called twice.
    if len(outputs) == 1:
        on_gradient(outputs[0], lambda gradient: run([gradient]))
    else:
        register_multi_grad_hook(outputs, run)


def kept_calls(node: Any) -> list[LayerCall]:
    """The calls whose first output a node made."""
    found: list[LayerCall] = node.metadata.get(_CALLS, [])
    return found


def _needs_backpack(module: nn.Module) -> bool:
    """Whether BackPACK is active, but has no hook of its own on this module."""
    idle = len(CTX.get_active_exts()) == 0 and CTX.get_extension_hook() is no_op
    return not idle and hook_run_extensions not in backward_hooks(module).values()


def _run_backpack(
    module: nn.Module, arguments: Sequence[Any], grad_outputs: tuple[Tensor | None, ...]
) -> None:
    """Do what BackPACK's own hook does, with the inputs of this very call."""
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


def stored_inputs(module: nn.Module) -> tuple[Any, ...]:
    """Inputs that are stored on the module for BackPACK extensions; ``RuntimeError`` without."""
    inputs = tuple(v for k, v in vars(module).items() if k.startswith("input") and k[5:].isdigit())
    if not inputs:
        raise RuntimeError(
            f"BackPACK kept no input of this {type(module).__name__}, which happens when a "
            "module is used more than once: extend the model with gradlens.extend instead"
        )
    return inputs
