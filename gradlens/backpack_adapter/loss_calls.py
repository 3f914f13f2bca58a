"""What extended loss modules were called with, at which the loss's curvature is computed."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradlens.graph.hooks import NO_MODULE, is_traced, takes_hooks
from gradlens.graph.layer_rules import keep_until_backward
from gradlens.graph.model_calls import keep_calls
from gradlens.torch_private import (
    LossModule,
    UnscriptedHook,
    add_forward_hook,
    forward_hooks,
    unseen,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_CALL = "gradlens_loss_call"
"""Where a call is kept in the metadata of the node that made its output."""


def extend(model: AnyModule) -> AnyModule:
    """Record what a model is called with, for per-sample gradients, and return the model.

    The hooks don't change what the model computes. Call it once, before the forward pass. A model
    that is passed to a cockpit needs it not. You can also extend a loss module, for quantities of
    its curvature where the model isn't passed. ``TypeError`` if it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(NO_MODULE.format(kind=type(model).__name__))
    for module in model.modules():
        is_loss = isinstance(module, LossModule) and takes_hooks(module)
        if is_loss and _record not in forward_hooks(module):
            add_forward_hook(module, _record, with_kwargs=True, prepend=True)
    keep_calls(model, user=model)
    return model


class _Record(UnscriptedHook):
    """A forward hook without state, of which there is one, also in copies and pickles."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_traced() or not torch.is_grad_enabled():
            return
        # Without the call, the network's outputs are what the model has returned.
        with unseen(), suppress(Exception):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                bound = inspect.signature(module.forward).bind(*args, **kwargs)
                given = (*bound.args, *bound.kwargs.values())
                keep_until_backward(output.grad_fn, _CALL, (module, given))

    def __reduce__(self) -> str:
        return "_record"


_record = _Record()


def loss_call(node: Any) -> tuple[LossModule, tuple[Any, ...]] | None:
    """The loss module whose output a node made, and its inputs, if it was extended."""
    found: tuple[LossModule, tuple[Any, ...]] | None = node.metadata.get(_CALL)
    return found


def stored_inputs(module: nn.Module) -> tuple[Any, ...]:
    """What BackPACK has stored of a module's latest call; ``RuntimeError`` if it has none."""
    inputs = tuple(v for k, v in vars(module).items() if k.startswith("input") and k[5:].isdigit())
    if not inputs:
        raise RuntimeError(f"BackPACK kept no input of this {type(module).__name__}")
    return inputs
