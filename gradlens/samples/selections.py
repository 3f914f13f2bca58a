"""The indices that labels depend on, such as those of a sort, a mask or a gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import Step
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.picks import Between, Saved


@dataclass(frozen=True, eq=False)
class Selection:
    """The indices ``name`` of a node that selects rows, the one at ``place`` of several."""

    node: int
    name: str
    place: int
    index: Tensor

    def is_in(self, graph: Graph) -> bool:
        """Whether another graph of the same structure has the same indices there."""
        try:
            found = _saved(graph, self.node, self.name)
        except UnavailableError:
            return False
        other = found[self.place]
        return other is not None and torch.equal(other, self.index)


class Selections:
    """Reads what the nodes of a graph pick entries by, and keeps it, each once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._found: dict[tuple[int, str, int], Selection] = {}

    @property
    def found(self) -> tuple[Selection, ...]:
        """The indices that were read."""
        return tuple(self._found.values())

    def between(self, node: int, output: int, edge: Edge, place: int) -> Between:
        """What is between an output of a node and its input number ``place``."""
        above, below = self._graph.shape((node, output)), self._graph.shape(edge)
        sizes = [e if e is None else self._graph.shape(e) for e in self._graph.children[node]]

        def seen(name: str) -> Saved:
            return _saved(self._graph, node, name)

        def read(name: str, place: int) -> Tensor:
            key = (node, name, place)
            if key not in self._found:
                found = seen(name)[place]
                assert found is not None
                self._found[key] = Selection(*key, found.detach().clone())
            return self._found[key].index.cpu()

        step = Step(self._graph.nodes[node], place, output, len(above), len(below))
        return Between(step, above, below, sizes, seen, read)


def _saved(graph: Graph, node: int, name: str) -> Saved:
    found = read_saved(graph.nodes[node], name)
    return found if isinstance(found, (tuple, list)) else [found]
