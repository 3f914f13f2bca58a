"""Finds where in a loss's graph the first number came up that isn't finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradlens.gradients.gradients import layer_of
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import LEAF, kind_of, plain_name
from gradlens.torch_private import saved_by_name, sequence_number

_RESULTS = ("result", "result0", "output", "out", "logsumexp")
"""Names under which nodes save what they have computed, and not what they compute with."""


class Place(NamedTuple):
    """A layer or operation, and the rows of its output with numbers that aren't finite."""

    name: str
    bad: Tensor | None


def bad_rows(tensor: Tensor) -> Tensor:
    """Whether each row along the first axis has a NaN or an Inf, ``[N]`` of booleans."""
    if not tensor.is_floating_point():
        return torch.zeros(len(tensor), dtype=torch.bool, device=tensor.device)
    found = ~tensor.detach().isfinite()
    return found.any(tuple(range(1, found.dim()))) if found.dim() > 1 else found


def bad_parameters(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that have a NaN or an Inf."""
    return [name for name, each in parameters.items() if not bool(each.detach().isfinite().all())]


def bad_gradients(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of the parameters whose gradients have a NaN or an Inf."""
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return bad_parameters(found)


def first_place(graph: Graph, names: Mapping[int, str], samples: int) -> Place | None:
    """The first operation of the forward pass whose output isn't finite, as far as that was saved.

    ``names`` are those of parameters, by ``id``. Where nothing was saved of an operation's output,
    the next one that has saved its input shows it. ``None`` if everything that was saved is finite.
    """
    inner = [number for number, each in enumerate(graph.kinds) if each != LEAF]
    for number in sorted(inner, key=lambda each: sequence_number(graph.nodes[each])):
        for name, tensor in saved_by_name(graph.nodes[number]):
            if not tensor.is_floating_point() or bool(tensor.detach().isfinite().all()):
                continue
            # Masked scores are minus infinity on purpose, which a softmax makes zero.
            if bool((tensor.isfinite() | tensor.isneginf()).all()) and name not in _RESULTS:
                continue
            at = number if name in _RESULTS else _source(graph, number)
            while kind_of(graph.kinds[at]).stays_finite and _source(graph, at) != at:
                at = _source(graph, at)
            has_rows = tensor.dim() > 0 and len(tensor) == samples
            return Place(_place(graph, at, names), bad_rows(tensor) if has_rows else None)
    return None


def _source(graph: Graph, number: int) -> int:
    """The operation that has computed the input of a node; the node itself if that is data."""
    inputs = [edge[0] for edge in graph.children[number] if edge is not None]
    computed = [each for each in inputs if not _is_parameter(graph, each)]
    return max(computed, default=number, key=lambda each: sequence_number(graph.nodes[each]))


def _is_parameter(graph: Graph, number: int) -> bool:
    """Whether a node is a leaf, or a view or cast of one."""
    return _leaf(graph, (number, 0)) is not None


def _leaf(graph: Graph, edge: Edge | None) -> int | None:
    """The leaf that an edge leads to by nodes with one input alone."""
    while edge is not None and graph.kinds[edge[0]] != LEAF:
        below = graph.children[edge[0]]
        edge = below[0] if len(below) == 1 else None
    return None if edge is None else edge[0]


def _place(graph: Graph, number: int, names: Mapping[int, str]) -> str:
    """The layer of an operation; of one without parameters, its kind and the layer before it."""
    own = next(_own_names(graph, number, names), "")
    if own:
        return layer_of(own)
    kind = plain_name(graph.kinds[number])
    before = sorted(graph.below([number]) - {number}, reverse=True)
    layer = next((n for each in before for n in _own_names(graph, each, names)), "")
    return f"{kind} behind {layer_of(layer)}" if layer else kind


def _own_names(graph: Graph, number: int, names: Mapping[int, str]) -> Iterator[str]:
    """Names of the parameters that a node computes with."""
    leaves = [_leaf(graph, edge) for edge in graph.children[number]]
    found = (names.get(id(graph.nodes[leaf].variable)) for leaf in leaves if leaf is not None)
    return (name for name in found if name is not None)
