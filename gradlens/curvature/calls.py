"""The calls of layers and loss modules that a loss was computed by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradlens.backpack_adapter.context import with_extension_alone
from gradlens.backpack_adapter.layer_calls import LayerCall, LayerCallExtension, stored_inputs
from gradlens.curvature.hessian import check_loss
from gradlens.graph.graph import Graph
from gradlens.graph.passes import reason_not_to_run
from gradlens.graph.torch_private import LossModule
from gradlens.graph.undisturbed import hooks_muted
from gradlens.numerics.unavailable import UnavailableError


@dataclass(frozen=True)
class LossCall:
    """One call of an extended loss module: its inputs, still in the graph, and ∂L/∂output."""

    module: LossModule
    inputs: tuple[Any, ...]
    grad_output: Tensor


class Calls(LayerCallExtension):
    """A BackPACK extension that records the calls which a backward pass reaches.

    ``of`` lists the calls of each extended layer, ``of_losses`` those of loss modules, which
    needn't belong to the model.
    """

    def __init__(self) -> None:
        super().__init__("calls")
        self.of: dict[nn.Module, list[LayerCall]] = {}
        self.of_losses: list[LossCall] = []

    def receive(self, call: LayerCall) -> None:
        """Called in the backward pass, when the gradient at the layer's output is known."""
        self.of.setdefault(call.module, []).append(call)

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        if isinstance(module, LossModule) and g_out[0] is not None:
            self.of_losses.append(LossCall(module, stored_inputs(module), g_out[0].detach()))


def calls_behind(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> Calls:
    """The calls that a backward pass from the loss to the parameters reaches."""
    check_loss(loss)
    with recording() as calls:
        run_engine(loss, list(parameters.values()))
    return calls


def loss_calls_at(loss: Tensor) -> list[LossCall]:
    """The calls of loss modules that have returned the loss itself; none if it was made of them.

    The backward pass goes to the loss's own node and no further.
    """
    check_loss(loss)
    with recording() as calls:
        edge = get_gradient_edge(loss)
        torch.autograd.grad([loss], [edge], [torch.ones_like(loss)], retain_graph=True)
    return calls.of_losses


def run_engine(loss: Tensor, inputs: Sequence[Tensor]) -> None:
    """A backward pass by autograd's engine, which runs BackPACK's extensions on layers.

    ``UnavailableError`` if it would run code that may leave a trace.
    """
    reasons = map(reason_not_to_run, Graph(loss).nodes)
    reason = next(filter(None, reasons), "")
    if reason:
        raise UnavailableError(reason)
    with hooks_muted(inputs):
        torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)


@contextmanager
def recording() -> Iterator[Calls]:
    """Record the calls that backward passes inside the context reach."""
    calls = Calls()
    with with_extension_alone(calls):
        yield calls
