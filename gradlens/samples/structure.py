"""Which sample each row of a graph belongs to: by the graph's structure.

The labels at the loss's inputs are followed down the graph (``gradlens.samples.passages``). Labels
that follow hold for all graphs of the same structure and the same indices, whatever the other
numbers are. A node of a kind that isn't known, and one that may mix entries of different samples,
is asked itself (``gradlens.samples.powers_of_two``): what it hands on now tells, but it may hand on
something else at another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
from torch import Tensor

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import COMPILED, HIDING, LEAF, kind_of
from gradlens.graph.passes import RefusedNodeError
from gradlens.samples.labels import (
    MIXED,
    NO_SAMPLE,
    UNREADABLE,
    Labels,
    Shape,
    as_tensor,
    combined,
    labels_of,
    only,
    without_gaps,
)
from gradlens.samples.passages import Passages
from gradlens.samples.plan import LabelledEdge, RowIndex
from gradlens.samples.powers_of_two import labels_below, why_not_linear
from gradlens.torch_private import saved


class Structure:
    """The samples of the elements at all edges below some sources.

    These are edges of the loss's graph with the labels of their elements, all ``UNREADABLE`` where
    they aren't known. ``refused`` are the reasons why nodes couldn't be asked.
    """

    def __init__(self, passages: Passages, sources: Mapping[Edge, Labels]) -> None:
        graph = self.graph = passages.graph
        self._passages = passages
        self.samples = passages.samples
        self.refused: dict[int, str] = {}
        self._asked: dict[Edge, Sequence[Labels | None]] = {}
        self._read: set[Edge] = set()
        self._labels: dict[Edge, Labels] = {}
        self._rows: dict[LabelledEdge, Labels] = {}
        self._indices: dict[tuple[Shape, Shape, bytes], RowIndex] = {}
        for edge, labels in sources.items():
            if prod(graph.shape(edge)):
                self._merge(edge, labels)
        for node in reversed(range(len(graph))):  # consumers come first
            for output in graph.outputs_of(node):
                if (node, output) in self._labels:
                    self._follow(node, output)

    @property
    def is_read(self) -> bool:
        """Whether numbers or code of others decide, which may be others at later steps."""
        return bool(self._asked or self._passages.elementwise)

    def last(self, nodes: Iterable[int]) -> bool:
        """Whether labels above nodes are those of all graphs with this structure and selections.

        Where a node can't be asked, that doesn't change.
        """
        return self.graph.below(number for number, _ in self._read).isdisjoint(nodes)

    @property
    def unreadable(self) -> set[int]:
        """The nodes with rows whose samples aren't known, of those that were looked at."""
        rows = self._rows.items()
        return {each.edge[0] for each, labels in rows if labels.min() == UNREADABLE}

    @cached_property
    def why_refused(self) -> dict[int, str]:
        """Why samples can't be told apart behind nodes that were to be asked, by their numbers."""
        found = dict(self.refused)
        for number, output in self._asked:
            if number not in found and number in self.graph.python_functions:
                reason = why_not_linear(self.graph, number, output)
                found |= {number: reason} if reason else {}
        return found

    def are_apart(self, labelled: LabelledEdge) -> bool:
        """Whether no row at an edge is of several samples, or unknown."""
        return self.rows(labelled).min() >= NO_SAMPLE

    def index(self, labelled: LabelledEdge) -> RowIndex:
        """The sample of each row at an edge; rows that are alike share it."""
        rows, shape = self.rows(labelled), self._shape_of_rows(labelled)
        key = shape, tuple(rows.shape), rows.tobytes()
        if key not in self._indices:
            self._indices[key] = RowIndex(_written(rows, shape), self.samples)
        return self._indices[key]

    def rows(self, labelled: LabelledEdge) -> Labels:
        """Labels of the rows at an edge: below N, or one of the negative constants."""
        found = self._rows.get(labelled)
        if found is None:
            found = self._rows[labelled] = self._found(labelled)
        return found

    def _found(self, labelled: LabelledEdge) -> Labels:
        shape = self._shape_of_rows(labelled)
        if not prod(self.graph.shape(labelled.edge)):
            return only(NO_SAMPLE, len(shape))
        rows = labelled.rows_of(self.labels(labelled.edge))
        is_recurrent = kind_of(self.graph.kinds[labelled.edge[0]]).is_recurrent
        return _of_sequences(self.graph, labelled, rows, shape) if is_recurrent else rows

    def _shape_of_rows(self, labelled: LabelledEdge) -> Shape:
        shape = self.graph.shape(labelled.edge)
        return tuple([n for axis, n in enumerate(shape) if axis not in labelled.features])

    def labels(self, edge: Edge) -> Labels:
        """Labels of the elements at an edge; ``NO_SAMPLE`` of those that no source depends on.

        What is computed from parameters alone is of all samples, and isn't looked at.
        """
        if edge in self._labels:
            return self._labels[edge]
        label = UNREADABLE if self.graph.alone[edge[0]] else NO_SAMPLE
        return only(label, len(self.graph.shape(edge)))

    def _follow(self, node: int, output: int) -> None:
        """Follow labels down to a node's inputs. All ways to its output are known."""
        self._labels[node, output] = without_gaps(self._labels[node, output], self.samples)
        if self.graph.kinds[node] != LEAF:
            for place, edge in enumerate(self.graph.children[node]):
                if edge is not None and not self.graph.alone[edge[0]]:
                    self._merge(edge, self._below(node, output, place, edge))

    def _merge(self, edge: Edge, labels: Labels) -> None:
        """Take in the labels by one of the ways to an edge; where ways differ, samples meet."""
        before = self._labels.get(edge)
        self._labels[edge] = labels if before is None else combined(before, labels)

    def _below(self, node: int, output: int, place: int, edge: Edge) -> Labels:
        """Labels of a node's input, from those of one of its outputs."""
        labels, dims = self._labels[node, output], len(self.graph.shape(edge))
        if labels.min() == UNREADABLE:
            return only(UNREADABLE, dims)
        if self.samples == 1:
            return only(0, dims)
        found = self._passages.at(node, output, place).down(labels)
        if found is None:
            found = self._by_numbers(node, output)[place]
            if (node, output) in self._asked and node not in self.refused:
                self._read.add(edge)
        return only(UNREADABLE, dims) if found is None or found.min() == UNREADABLE else found

    def _by_numbers(self, node: int, output: int) -> Sequence[Labels | None]:
        """Labels of a node's inputs, from those of one of its outputs, by what it hands on."""
        nothing: list[Labels | None] = [None] * len(self.graph.children[node])
        kind = self.graph.kinds[node]
        if kind in HIDING or kind == COMPILED or node in self.refused:
            return nothing
        if (node, output) not in self._asked:
            self._asked[node, output] = nothing
            labels = _written(self._labels[node, output])
            try:
                found = labels_below(self.graph, node, output, labels, self.samples)
                self._asked[node, output] = [
                    e if e is None else labels_of(e.numpy()) for e in found
                ]
            except RefusedNodeError as reason:
                self.refused[node] = str(reason)
        return self._asked[node, output]


def _of_sequences(graph: Graph, labelled: LabelledEdge, rows: Labels, shape: Shape) -> Labels:
    """The labels at a recurrent node, mixed where it computes with steps of several samples.

    The gradients at its outputs have passed none of the steps yet.
    """
    number, output = labelled.edge
    if output or len(shape) < 2:
        return rows
    # What oneDNN computes with has steps first, whatever the layer was called with.
    is_cudnn = graph.kinds[number].startswith("Cudnn")
    is_first = is_cudnn and bool(saved(graph.nodes[number], "batch_first", False))
    along = 1 if is_first else 0
    steps = np.broadcast_to(rows, shape)
    first, known = steps.max(along, keepdims=True), steps >= 0
    mixed = (known & (steps != first)).any(along, keepdims=True)
    return labels_of(np.where(mixed, MIXED, steps))


def _written(labels: Labels, shape: Shape | None = None) -> Tensor:
    """As a tensor, which is a view of a smaller one where rows along an axis are alike."""
    found = as_tensor(labels)
    return found.expand(shape) if shape else found  # a number alone has the axis of NumPy
