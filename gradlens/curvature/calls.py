"""The calls of layers and loss modules that a loss was computed by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from backpack import backpack
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.loss import _Loss

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.hessian import check_loss
from gradlens.hooks.layer_calls import (
    CallListener,
    LayerCall,
    LossExtension,
    listening,
    stored_inputs,
)


@dataclass(frozen=True)
class LossCall:
    """One call of an extended loss module: its inputs, still in the graph, and ∂L/∂output."""

    module: _Loss
    inputs: tuple[Any, ...]
    grad_output: Tensor


class Calls(CallListener):
    """The calls of extended modules that one backward pass has gone through.

    ``of`` lists the calls of each layer of the model, ``of_losses`` those of loss modules.
    """

    def __init__(self) -> None:
        self.of: dict[nn.Module, list[LayerCall]] = {}
        self.of_losses: list[LossCall] = []

    def receive(self, call: LayerCall) -> None:
        self.of.setdefault(call.module, []).append(call)


def calls_behind(
    loss: Tensor, parameters: Mapping[str, nn.Parameter], model: nn.Module | None
) -> Calls:
    """The calls that a backward pass from the loss to the parameters goes through."""
    check_loss(loss)
    with recording(model) as calls:
        derivative([loss], list(parameters.values()), [torch.ones_like(loss)])
    return calls


def loss_calls_at(loss: Tensor) -> list[LossCall]:
    """The calls of loss modules that have returned the loss itself; none if it was made of them.

    The backward pass goes to the loss's own node and no further.
    """
    check_loss(loss)
    with recording(None) as calls:
        edge = get_gradient_edge(loss)
        torch.autograd.grad([loss], [edge], [torch.ones_like(loss)], retain_graph=True)
    return calls.of_losses


@contextmanager
def recording(model: nn.Module | None) -> Iterator[Calls]:
    """Record the calls that backward passes inside the context go through.

    Of the model's layers, and of all extended loss modules, which needn't belong to the model.
    """
    calls = Calls()
    with ExitStack() as stack:
        stack.enter_context(backpack(_LossCalls(calls), retain_graph=True))
        if model is not None:
            stack.enter_context(listening(model, calls))
        yield calls


class _LossCalls(LossExtension):
    """BackPACK extension that records the calls of loss modules, and changes nothing."""

    def __init__(self, calls: Calls) -> None:
        super().__init__("loss_calls")
        self._calls = calls

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK with the gradient ``g_out`` at the module's output."""
        if isinstance(module, _Loss) and g_out[0] is not None:
            call = LossCall(module, stored_inputs(module), g_out[0].detach())
            self._calls.of_losses.append(call)
