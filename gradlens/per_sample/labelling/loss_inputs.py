"""The tensors with axes that a loss is computed from.

The inputs of a loss are the edges of its graph behind which everything is summed up to numbers.
Each of their rows belongs to a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlens.hooks.torch_private import sequence_number
from gradlens.per_sample.labelling.graph import Edge, Graph
from gradlens.per_sample.labelling.node_kinds import LEAF


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


def loss_inputs(graph: Graph, alone: Sequence[bool]) -> LossInputs:
    """The inputs of a loss, without terms of parameters alone."""
    found: list[Edge] = []
    visited, waiting = set(), [graph.root]
    while waiting:
        edge = waiting.pop()
        if edge in visited or alone[edge[0]]:
            continue
        visited.add(edge)
        if graph.kinds[edge[0]] == LEAF:
            continue
        if graph.shape(edge):
            found.append(edge)
        else:
            waiting += graph.descend(edge)
    # In the order in which the user's code has computed them.
    found.sort(key=lambda edge: (sequence_number(graph.nodes[edge[0]]), edge[1]))
    shapes = tuple(graph.shape(edge) for edge in found)
    return LossInputs(tuple(found), shapes, _are_connected(graph, found, alone))


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
