"""The calls of layers and loss modules that a loss was computed by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.backpack_adapter.context import extended_by_backpack, with_extension_alone
from gradlens.backpack_adapter.layer_calls import (
    LayerCall,
    LossExtension,
    in_order,
    kept_calls,
    stored_inputs,
)
from gradlens.curvature.hessian import check_loss
from gradlens.graph.graph import Graph
from gradlens.graph.passes import gradients_at, why_not_to_pass
from gradlens.graph.torch_private import LossModule, hands_gradients_on
from gradlens.graph.undisturbed import hooks_muted
from gradlens.numerics.unavailable import UnavailableError


@dataclass(frozen=True)
class LossCall:
    """One call of an extended loss module: its inputs, still in the graph, and ∂L/∂output."""

    module: LossModule
    inputs: tuple[Any, ...]
    grad_output: Tensor


@dataclass(frozen=True)
class Calls:
    """The calls of layers by module, and those of loss modules, from the loss on."""

    of: Mapping[nn.Module, Sequence[LayerCall]] = field(default_factory=dict)
    of_losses: Sequence[LossCall] = ()


def calls_behind(
    loss: Tensor, parameters: Mapping[str, nn.Parameter], model: nn.Module | None
) -> Calls:
    """The calls that the graph of a loss keeps, with the gradients at their outputs.

    A loss module that BackPACK itself has extended keeps none there; if the model was extended so,
    too, a backward pass by autograd's engine finds its calls.
    """
    check_loss(loss)
    graph = Graph(loss)
    numbers = graph.by_sequence_number
    kept = [
        (call, [(numbers.get(made, -1), output) for made, output in places])
        for node in reversed(graph.nodes)
        for call, places in kept_calls(node)
    ]
    places = [edge for _, edges in kept for edge in edges]
    found = gradients_at(graph, [(graph.root, torch.ones_like(loss))], places)
    of: dict[nn.Module, list[LayerCall]] = {}
    of_losses: list[LossCall] = []
    for pending, edges in kept:
        call = pending.completed(tuple(found.get(edge) for edge in edges))
        of.setdefault(call.module, []).append(call)
        gradient = call.grad_outputs[0]
        if isinstance(call.module, LossModule) and gradient is not None:
            of_losses.append(LossCall(call.module, in_order(call), gradient.detach()))
    has_module_hooks = any(map(hands_gradients_on, graph.nodes))
    if not of_losses and (has_module_hooks if model is None else extended_by_backpack(model)):
        recorder = _LossCalls()
        with with_extension_alone(recorder):
            run_engine(loss, list(parameters.values()))
        of_losses = recorder.found
    return Calls(of, of_losses)


def loss_calls_at(loss: Tensor) -> list[LossCall]:
    """The calls of loss modules that have returned the loss itself; none if it was made of them."""
    check_loss(loss)
    ones = torch.ones_like(loss)
    calls = [call.completed((ones,)) for call, _ in kept_calls(loss.grad_fn)]
    return [
        LossCall(call.module, in_order(call), ones)
        for call in calls
        if isinstance(call.module, LossModule)
    ]


def run_engine(loss: Tensor, inputs: Sequence[Tensor]) -> None:
    """A backward pass by autograd's engine, in which BackPACK's own hooks run its extensions.

    ``UnavailableError`` if it would run code that may leave a trace.
    """
    reason = why_not_to_pass(loss)
    if reason:
        raise UnavailableError(reason)
    with hooks_muted(inputs):
        torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)


class _LossCalls(LossExtension):
    """Records the calls of loss modules that BackPACK has extended."""

    def __init__(self) -> None:
        super().__init__("calls")
        self.found: list[LossCall] = []

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        if isinstance(module, LossModule) and g_out[0] is not None:
            self.found.append(LossCall(module, stored_inputs(module), g_out[0].detach()))
