"""The tensors with axes that a loss is computed from.

The inputs of a loss are the edges of its graph behind which everything is summed up to numbers.
Each of their rows belongs to a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gradlens.hooks.node_kinds import INDEXING, JOINING, LAYERS, LEAF, PARTING
from gradlens.hooks.torch_private import sequence_number
from gradlens.per_sample.labelling.graph import Edge, Graph


@dataclass(frozen=True)
class LossInputs:
    """The edges at which the loss is computed from tensors with axes, and their shapes.

    ``connected`` means that they come from the same tensors, and so from the same samples.
    """

    edges: tuple[Edge, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    connected: bool = True

    @property
    def rows(self) -> tuple[int, ...]:
        """The lengths of leading axes, each once."""
        return tuple(dict.fromkeys(shape[0] for shape in self.shapes))


def loss_inputs(graph: Graph, alone: Sequence[bool], single_samples: int = 0) -> LossInputs:
    """The inputs of a loss, without terms of parameters alone, or of these and constants.

    If the model was called on ``single_samples`` one by one, as many numbers that are stacked are
    their losses.
    """
    every = _behind(graph, [graph.root], alone, single_samples)
    found = [edge for edge in every if not _is_of_weights(graph, edge, alone)] or every
    # In the order in which the user's code has computed them.
    found.sort(key=lambda edge: (sequence_number(graph.nodes[edge[0]]), edge[1]))
    shapes = tuple(graph.shape(edge) for edge in found)
    return LossInputs(tuple(found), shapes, _are_connected(graph, found, alone))


def _is_of_weights(graph: Graph, edge: Edge, alone: Sequence[bool]) -> bool:
    """Whether a term compares weights with constants, as a penalty on their change does.

    No layer computes with such weights, and they are repeated for no sample.
    """
    passed: set[Edge] = set()
    weights: set[Edge] = set()
    waiting = [edge]
    while waiting:
        above = waiting.pop()
        kind = graph.kinds[above[0]]
        if alone[above[0]]:
            weights.add(above)
        elif kind == LEAF or LAYERS.match(kind) or INDEXING.search(kind):
            return False
        elif above not in passed:
            passed.add(above)
            waiting += graph.descend(above)
    most = max((prod(graph.shape(each)) for each in weights), default=0)
    return all(prod(graph.shape(each)) <= most for each in passed)


def _behind(
    graph: Graph, edges: Sequence[Edge], alone: Sequence[bool], single_samples: int
) -> list[Edge]:
    """The first edges that hold rows."""
    found: list[Edge] = []
    visited, waiting = set(), list(edges)
    while waiting:
        edge = waiting.pop()
        if edge in visited or alone[edge[0]]:
            continue
        visited.add(edge)
        if graph.kinds[edge[0]] == LEAF:
            continue
        below = list(graph.descend(edge))
        joined = _joined(graph, edge, below, alone, single_samples)
        if joined or _is_one_number(graph, edge, below, alone):
            waiting += joined or below
        else:
            found.append(edge)
    return found


def _is_one_number(graph: Graph, edge: Edge, below: Sequence[Edge], alone: Sequence[bool]) -> bool:
    """Whether rows are summed up to a number; a layer's output may be one, too."""
    shape = graph.shape(edge)
    is_layer = not below or any(alone[number] for number, _ in below)
    return not shape or (prod(shape) == 1 and not is_layer and not _is_row(graph, edge))


def _is_row(graph: Graph, edge: Edge) -> bool:
    """Whether a single element is computed from single rows of other tensors alone."""
    waiting = [edge]
    found = False
    while waiting:
        above = waiting.pop()
        for below in graph.descend(above):
            shape = graph.shape(below)
            if prod(shape) == 1 and shape:
                waiting.append(below)
            elif PARTING.match(graph.kinds[above[0]]) and shape[0] > graph.shape(above)[0]:
                found = True
            else:
                return False
    return found


def _joined(
    graph: Graph, edge: Edge, below: Sequence[Edge], alone: Sequence[bool], single_samples: int
) -> list[Edge]:
    """The first edges that hold rows behind numbers that were stacked, such as several losses."""
    if not JOINING.match(graph.kinds[edge[0]]) or len(below) == single_samples:
        return []
    if any(prod(graph.shape(child)) > 1 for child in below):
        return []
    found = _behind(graph, below, alone, single_samples)
    # Outputs of a layer, one number for each sample, aren't losses.
    return [] if any(prod(graph.shape(each)) == 1 for each in found) else found


def _are_connected(graph: Graph, edges: Sequence[Edge], alone: Sequence[bool]) -> bool:
    """Whether each of several edges has nodes behind it that are also behind another one."""
    behind = [{n for n in graph.below([edge[0]]) if not alone[n]} for edge in edges]
    together, apart = behind[:1], behind[1:]
    while apart:
        joined = [each for each in apart if any(each & other for other in together)]
        if not joined:
            return False
        together += joined
        apart = [each for each in apart if each not in joined]
    return True
