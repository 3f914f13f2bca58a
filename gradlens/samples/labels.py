"""Which sample each row belongs to: by the graph's structure, and by numbers where that ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from types import MappingProxyType

import torch
from torch import Tensor

from gradlens.graph.graph import Graph
from gradlens.graph.kinds import LEAF, kind_of
from gradlens.graph.passes import Instead
from gradlens.graph.torch_private import output_metadata, saved
from gradlens.samples.powers_of_two import read_labels
from gradlens.samples.rows import MIXED, LabelledEdge, Source
from gradlens.samples.selections import Selection
from gradlens.samples.structure import Structure


class Labels:
    """The labels of rows at edges of a graph, from those of its loss's inputs.

    Some are read off numbers, by backward passes that compute something else ``instead`` of some
    nodes. Those at ``lasting`` edges are the same in all graphs of the same structure with the same
    ``selections``. ``refused`` are the reasons why nodes weren't run, and functions in Python that
    are ``elementwise`` don't move rows.
    """

    def __init__(
        self,
        graph: Graph,
        sources: Sequence[Source],
        samples: int,
        instead: Instead = MappingProxyType({}),
        elementwise: Set[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._sources = sources
        self._samples = samples
        self._instead = instead
        self._structure = Structure(graph, sources, samples, elementwise)
        self.are_read = bool(elementwise)  # their code may have changed at later steps
        self.lasting: set[LabelledEdge] = set()
        self._known: dict[LabelledEdge, Tensor] = {}
        self.refused: dict[int, str] = {}

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The indices that the labels depend on."""
        return self._structure.selections

    def of(
        self, edges: Iterable[LabelledEdge], by_passes: bool = True
    ) -> dict[LabelledEdge, Tensor]:
        """Labels ``[*S]`` of the rows at edges: below N, or one of the negative constants.

        Without ``by_passes``, only at the edges where the structure says them.
        """
        unique = dict.fromkeys(edges)
        for edge in unique:
            found = None if edge in self._known else self._structure.rows(edge)
            if found is not None:
                found = found.to(_device(self._graph, edge))
                self._known[edge] = self._of_sequences(edge, found)
                self.lasting.add(edge)
        rest = [edge for edge in unique if edge not in self._known]
        if rest and by_passes:
            self._read(rest)
        return {edge: self._known[edge] for edge in unique if edge in self._known}

    def _read(self, edges: Sequence[LabelledEdge]) -> None:
        self.are_read = True
        found = read_labels(self._graph, self._sources, edges, self._samples, self._instead)
        self.refused |= found.refused
        behind = self._graph.below(
            e[0] for n in found.refused for e in self._graph.children[n] if e
        )
        for edge, labels in found.labels.items():
            self._known[edge] = self._of_sequences(edge, labels)
            if edge.edge[0] in behind:
                self.lasting.add(edge)

    def _of_sequences(self, labelled: LabelledEdge, labels: Tensor) -> Tensor:
        """The same, but mixed where one recurrent node computes with steps of several samples.

        The gradients at its outputs have passed none of the steps yet.
        """
        number, output = labelled.edge
        if not kind_of(self._graph.kinds[number]).is_recurrent or output or labels.dim() < 2:
            return labels
        # What oneDNN computes with has steps first, whatever the layer was called with.
        is_cudnn = self._graph.kinds[number].startswith("Cudnn")
        is_first = is_cudnn and bool(saved(self._graph.nodes[number], "batch_first", False))
        steps = labels.movedim(1, 0) if is_first else labels
        first, known = steps.amax(0, keepdim=True), steps >= 0
        mixed = (known & (steps != first)).any(0, keepdim=True).expand_as(steps)
        steps = steps.masked_fill(mixed, MIXED)
        return steps.movedim(0, 1) if is_first else steps


def _device(graph: Graph, labelled: LabelledEdge) -> torch.device:
    number, output = labelled.edge
    node = graph.nodes[number]
    device: torch.device = (
        node.variable.device
        if graph.kinds[number] == LEAF
        else output_metadata(node)[output].device
    )
    return device
