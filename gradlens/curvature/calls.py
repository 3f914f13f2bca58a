"""The calls of layers and loss modules that a loss was computed by."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.backpack_adapter.context import extended_by_backpack
from gradlens.backpack_adapter.layer_calls import (
    LayerCall,
    in_order,
    kept_calls,
    stored_inputs,
)
from gradlens.curvature.hessian import check_loss
from gradlens.graph.graph import Graph
from gradlens.graph.passes import gradients_at
from gradlens.torch_private import LossModule, has_parts


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


def calls_behind(loss: Tensor, model: nn.Module | None) -> Calls:
    """The calls that the graph of a loss keeps, with the gradients at their outputs.

    A loss module that BackPACK itself has extended keeps none there, but stores its own.
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
    if not of_losses and (model is None or extended_by_backpack(model)):
        of_losses = [
            LossCall(module, stored_inputs(module), gradient)
            for module, gradient in extended_modules(graph, loss)
            if isinstance(module, LossModule)
        ]
    return Calls(of, of_losses)


def extended_modules(graph: Graph, loss: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """The modules that BackPACK has extended, in the order of their calls, and their gradients.

    BackPACK stores the output of its latest call on each. Nothing leads from a graph to them but a
    backward pass in which others' hooks would run, too, so that they are looked for among all
    objects.
    """
    every = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    modules = [each for each in every if not has_parts(each)]
    outputs = [(each, vars(each).get("output")) for each in modules]
    edges = {
        (graph.number_of(output), output.output_nr): module
        for module, output in outputs
        if isinstance(output, Tensor) and graph.number_of(output) >= 0
    }
    found = gradients_at(graph, [(graph.root, torch.ones_like(loss))], edges)
    gradients = {edge: found.get(edge) for edge in sorted(edges)}
    return [(edges[edge], each.detach()) for edge, each in gradients.items() if each is not None]


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
