"""Whether the rule of a layer agrees with autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.graph.graph import Graph, RuledCall
from gradlens.graph.layer_rules import REMEDY, layer_call
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.powers_of_two import signed
from gradlens.torch_private import output_metadata

TF32_EPS = 2.0**-10
"""Relative rounding of matrix products in float32 off a CPU, which may be computed in TF32."""


def disagreements(graph: Graph, ruled: RuledCall) -> dict[str, str]:
    """Why the rule's gradients of the layer's own parameters can't be used, by their own names.

    The rule gets a random gradient at the layer's output. The sum of its rows with random weights
    must be autograd's gradient for the same output gradient, with each row times its weight: a rule
    with an error in any row, or that mixes rows, fails that.
    """
    call = layer_call(graph.nodes[ruled.node])
    shape = graph.shape((ruled.node, call.output))
    like: Tensor = output_metadata(graph.nodes[ruled.node])[call.output]
    generator = torch.Generator().manual_seed(0)
    start = signed(shape, generator).to(like.device, like.dtype)
    weights = signed(shape[:1], generator).to(like.device, like.dtype)
    weighted = start * weights.reshape(-1, *[1] * (len(shape) - 1))
    names = dict(ruled.names)
    try:
        found = call.row_gradients(start)
        expected = call.gradients_again(weighted)
    except UnavailableError as reason:
        return dict.fromkeys(names.values(), str(reason))
    reasons, tolerance = {}, _tolerance(graph, ruled)
    for name in names.values():
        try:
            rows = call.checked(name, found, start)
        except UnavailableError as reason:
            reasons[name] = str(reason)
            continue
        total = torch.tensordot(weights.to(rows.dtype), rows, 1)
        difference = float((total - expected[name]).norm() / expected[name].norm())
        if not (difference <= tolerance or torch.equal(total, expected[name])):
            reasons[name] = (
                f"{call.title} gives gradients of {name!r} that differ from autograd's by "
                f"{difference:.2g} times their norm; {REMEDY}"
            )
    return reasons


def _tolerance(graph: Graph, ruled: RuledCall) -> float:
    """The relative difference that rounding inside the call may make."""
    nodes = (graph.nodes[number] for number in graph.inside(ruled))
    metadata = [each for node in nodes for each in output_metadata(node)]
    precisions = [torch.finfo(m.dtype).eps for m in metadata if m.dtype.is_floating_point]
    if any(m.dtype == torch.float32 and m.device.type != "cpu" for m in metadata):
        precisions.append(TF32_EPS)
    return float(max(precisions) ** 0.5)
