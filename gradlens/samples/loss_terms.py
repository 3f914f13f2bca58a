"""The nodes of a loss's graph whose values the loss is a weighted sum of: its terms.

The contribution of a row to the loss is its value times the gradient there.
"""

from __future__ import annotations

from string import digits

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_again
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import Node, kind_of, positive
from gradlens.graph.loss import KINDS
from gradlens.graph.torch_private import hands_gradients_on, saved
from gradlens.numerics.precision import accumulable
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.rows import LabelledEdge


def term_nodes(graph: Graph) -> list[int]:
    """The numbers of the nodes that the loss is a weighted sum of the values of.

    ``UnavailableError`` if it is another function, or if one of them depends on another one.
    """
    found: list[int] = []
    visited: set[Edge] = set()
    waiting = [graph.root]
    while waiting:
        edge = waiting.pop()
        if edge in visited:
            continue
        visited.add(edge)
        number = edge[0]
        if _name(graph, number) in KINDS and _has_rows(graph, number):
            found.append(number)
        elif is_linear(graph, number):
            waiting += graph.descend(edge)
        elif hands_gradients_on(graph.nodes[number]):
            waiting += [each for each in [graph.children[number][edge[1]]] if each is not None]
        else:
            raise UnavailableError(NO_SUM.format(kind=_name(graph, number)))
    behind = graph.below(e[0] for n in found for e in graph.children[n] if e is not None)
    within = [number for number in found if number in behind]
    if within:
        raise UnavailableError(NO_SUM.format(kind=_name(graph, within[0])))
    return list(dict.fromkeys(found))


def rows_of(graph: Graph, node: int) -> list[list[LabelledEdge]]:
    """The edges whose rows are those of a node's values: large rows, and smaller ones if any.

    All edges of the node's inputs have the same rows.
    """
    kind = KINDS[_name(graph, node)]
    edges = [(node, 0)]
    if kind.reduces:
        edges = [edge for edge in graph.children[node] if edge is not None]
    dims = len(graph.shape(edges[0]))
    if kind.dim:
        return [[LabelledEdge(edges[0], (*positive(saved(graph.nodes[node], kind.dim), dims),))]]
    sizes = [tuple(range(1, dims)), ()] if dims > 1 else [()]
    return [[LabelledEdge(edge, features) for edge in edges] for features in sizes]


def contributions(node: Node, name: str, gradient: Tensor) -> Tensor:
    """What each of a node's values contributes to the sum, of the shape of the values.

    ``gradient`` is that at the node's output.
    """
    with read_again(node):
        values = accumulable(KINDS[name.rstrip(digits)].values(node))
    weights = accumulable(gradient)
    if KINDS[name.rstrip(digits)].reduces and saved(node, "reduction") == _MEAN:
        weights = weights / values.numel()
    # Values without a gradient may be infinite, such as the logarithm of zero.
    return torch.where(weights == 0, 0, weights * values)


def _name(graph: Graph, number: int) -> str:
    return graph.kinds[number].rstrip(digits)


def _has_rows(graph: Graph, number: int) -> bool:
    return KINDS[_name(graph, number)].reduces or bool(graph.shape((number, 0)))


def is_linear(graph: Graph, number: int) -> bool:
    """Whether a node's output is linear in those of its inputs that depend on the parameters."""
    name, edges = _name(graph, number), graph.children[number]
    known = [edge is not None for edge in edges]
    if kind_of(name).is_product:
        return sum(known) == 1 and (name != "DivBackward" or known[0])
    return bool(edges) and all(known) and kind_of(name).is_linear


_MEAN = 1
"""The number of the reduction in what nodes save."""


NO_SUM = (
    "the contributions of single samples to the loss can't be read off its graph, in which "
    "{kind} comes where only sums, means and losses are followed"
)
