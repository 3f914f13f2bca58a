"""Which samples the structure of a graph says that its rows belong to, without any backward pass.

The labels at the loss's inputs are followed down the graph: through each node goes the axis that
its kind hands on (``gradlens.graph.kinds``). Where a node puts tensors together, cuts them or
selects entries by indices, the labels are put together, cut and selected in the same way, by what
the node has saved. A node that may mix entries along an axis of different samples ends that, and so
does any kind that isn't known, and a function in Python. Labels that follow hold for all graphs of
the same structure and the same indices, whatever the other numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import prod
from string import digits

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph, is_python_function
from gradlens.graph.kinds import LEAF, AxisRule, Step, from_the_right, kind_of
from gradlens.graph.torch_private import hands_gradients_on
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.picks import MOST_LABELS, PICKING, PUTTING, Pick, Shape, at_places, unpicked
from gradlens.samples.rows import MIXED, NO_SAMPLE, LabelledEdge, Source
from gradlens.samples.selections import Selection, Selections


class Structure:
    """The samples of the elements at all edges below some sources, by the structure of the graph.

    Labels have as many axes as their edge's tensor; an axis of length 1 has the same labels for all
    entries. Functions in Python that are ``elementwise`` don't move rows.
    """

    def __init__(
        self,
        graph: Graph,
        sources: Sequence[Source],
        samples: int,
        elementwise: Set[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._elementwise = elementwise
        self.samples = samples
        self._next = len(graph) - 1
        self._labels: dict[Edge, Tensor | None] = {}
        self._incomplete: set[Edge] = set()
        self._selections = Selections(graph)
        for source in sources:
            labels = source.labels
            # Rows of no sample have a label of their own, which no other row has.
            labels = None if labels is None else labels.masked_fill(labels == NO_SAMPLE, samples)
            self._merge(source.edge, labels)

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The indices that were read."""
        return self._selections.found

    def rows(self, labelled: LabelledEdge) -> Tensor | None:
        """Labels ``[*S]`` of the rows at an edge; ``None`` where the structure doesn't say them."""
        shape = self._graph.shape(labelled.edge)
        rows = [length for axis, length in enumerate(shape) if axis not in labelled.features]
        found = self.labels(labelled.edge)
        if found is None:
            return None
        if not prod(shape):
            return torch.full(rows, NO_SAMPLE)
        labels = labelled.rows(found)
        most = labels.amax(-1, keepdim=True)
        mixed = ((labels != NO_SAMPLE) & (labels != most)) | (labels >= self.samples)
        return most[..., 0].masked_fill(mixed.any(-1), MIXED).expand(rows).contiguous()

    def labels(self, edge: Edge) -> Tensor | None:
        """Labels of the elements at an edge; ``NO_SAMPLE`` of those that no source depends on."""
        self._follow_to(edge[0])
        if edge in self._labels:
            return self._labels[edge]
        return torch.full([1] * len(self._graph.shape(edge)), NO_SAMPLE)

    def _follow_to(self, number: int) -> None:
        """Follow the labels down to a node; what consumes a node has a larger number."""
        while self._next > number:
            node = self._next
            outputs = [o for o in self._graph.outputs_of(node) if (node, o) in self._labels]
            for output in outputs:
                self._complete((node, output))
            if self._graph.kinds[node] != LEAF:
                for place, edge in enumerate(self._graph.children[node]):
                    if edge is not None:
                        for output in outputs:
                            self._merge(edge, self._below(node, output, place))
            self._next -= 1
        for output in self._graph.outputs_of(number):
            self._complete((number, output))

    def _merge(self, edge: Edge, labels: Tensor | None) -> None:
        """Take in the labels by one of the ways to an edge; all ways must agree."""
        if edge not in self._labels:
            self._labels[edge] = labels
        else:
            before = self._labels[edge]
            if before is labels:
                return
            self._labels[edge] = None
            if before is not None and labels is not None:
                self._labels[edge] = _merged(before, labels, self.samples + 1)
        self._incomplete.add(edge)

    def _complete(self, edge: Edge) -> None:
        """All ways to an edge are known: axes with one label are written as one entry."""
        labels = self._labels.get(edge)
        if edge in self._incomplete and labels is not None and labels.numel() > 1:
            self._labels[edge] = self._compact(labels)
        self._incomplete.discard(edge)

    def _compact(self, labels: Tensor) -> Tensor:
        labels = compact(labels)
        # Entries that no source depends on have the labels of others beside them, if there is just
        # one axis along which these are all samples.
        if bool((labels == NO_SAMPLE).any()):
            longer = [axis for axis, length in enumerate(labels.shape) if length > 1]
            alone = [_joined(labels, [each for each in longer if each != axis]) for axis in longer]
            whole = [each for each in alone if each is not None and self._is_whole(each)]
            if len(whole) == 1:
                return whole[0]
        return labels

    def _is_whole(self, labels: Tensor) -> bool:
        """Whether labels name all samples."""
        known = labels[(labels != NO_SAMPLE) & (labels < self.samples)]
        return known.numel() >= self.samples and len(known.unique()) == self.samples

    def _below(self, node: int, output: int, place: int) -> Tensor | None:
        """Labels of a node's input, from those of one of its outputs."""
        labels = self._labels[node, output]
        edge = self._graph.children[node][place]
        assert edge is not None
        if labels is None:
            return None
        above, below = self._graph.shape((node, output)), self._graph.shape(edge)
        if self.samples == 1 or not prod(above) or not prod(below):
            only = 0 if self.samples == 1 else NO_SAMPLE
            return torch.full([1] * len(below), only)
        if hands_gradients_on(self._graph.nodes[node]):
            return labels if output == place else torch.full([1] * len(below), NO_SAMPLE)
        name = self._graph.kinds[node].rstrip(digits).removesuffix("Backward")
        kind = kind_of(name)
        if kind.axes is None and is_python_function(self._graph.nodes[node]):
            # It may do anything.
            return labels if node in self._elementwise and above == below else None
        if kind.axes is from_the_right and above == below:
            return labels
        if kind.in_order:
            return reshaped(labels, above, below)
        between = self._selections.between(node, output, edge, place)
        try:
            found = None
            if name in PICKING:
                pick = PICKING[name](between)
                found = None if pick is None else self._picked(pick, labels, below)
            elif name in PUTTING:
                found = PUTTING[name](between).pulled(labels, len(below))
                found = found if _fits(found, below) else None
            if found is not None:
                return found
            if labels.numel() == 1:
                return labels.reshape([1] * len(below))
            if kind.axes is None:
                return None
            mixed = self.samples + 1 if name in _ADDING else None
            return _moved(kind.axes, between.step, labels, below, mixed)
        except UnavailableError:  # of tensors that can't be read now
            return None

    def _picked(self, pick: Pick, labels: Tensor, below: Shape) -> Tensor | None:
        """Labels of an input that entries are picked from.

        Where other axes tell all samples apart, entries beside the picked ones belong to the same
        sample. So do those along an axis of which each index picks entries of one sample.
        """
        if pick.are_beside(labels, below) and self._is_whole(labels):
            return unpicked(pick, labels, len(below))
        if pick.apart and len(pick.axes) > 1:
            for axis in pick.axes:
                found = pick.put(labels, below, [axis])
                if found is not None and self._is_whole(found):
                    return found
        return pick.put(labels, below, pick.axes)


def compact(labels: Tensor) -> Tensor:
    """Labels with one entry along each axis along which they are the same."""
    for axis, length in enumerate(labels.shape):
        first = labels.narrow(axis, 0, min(1, length))
        if length > 1 and bool((labels == first).all()):
            labels = first
    return labels


def reshaped(labels: Tensor, given: Shape, shape: Shape) -> Tensor:
    """Labels of the same elements in the same order, in another shape."""
    if labels.numel() == 1 or given == shape:
        return labels.reshape([1] * len(shape)) if labels.numel() == 1 else labels
    behind = 0
    while (
        behind < min(len(given), len(shape)) - 1
        and given[-1 - behind] == shape[-1 - behind]
        and labels.shape[-1 - behind] == 1
    ):
        behind += 1
    ends = len(given) - behind, len(shape) - behind
    kept = labels.reshape(labels.shape[: ends[0]]).expand(given[: ends[0]])
    return kept.reshape(*shape[: ends[1]], *[1] * behind)


def _fits(labels: Tensor, shape: Shape) -> bool:
    """Whether labels are those of a tensor of a shape, entry by entry."""
    pairs = zip(labels.shape, shape, strict=False)
    return labels.dim() == len(shape) and all(n in (1, length) for n, length in pairs)


def _merged(one: Tensor, other: Tensor, mixed: int) -> Tensor | None:
    """Labels by both of two ways; ``None`` if they contradict each other, or are too many."""
    if one.shape == other.shape and torch.equal(one, other):
        return one
    if prod(torch.broadcast_shapes(one.shape, other.shape)) > MOST_LABELS:
        return None
    is_open, are_mixed = one == NO_SAMPLE, (one == mixed) | (other == mixed)
    if bool((~is_open & (other != NO_SAMPLE) & (one != other) & ~are_mixed).any()):
        return None
    return torch.where(is_open, other, one).masked_fill(are_mixed, mixed)


def _joined(labels: Tensor, axes: Sequence[int], mixed: int | None = None) -> Tensor | None:
    """The one label along axes, of the entries that have one.

    Where there are several, it is ``mixed``; without that, there are no labels.
    """
    if not axes:
        return labels
    most = labels.amax(tuple(axes), keepdim=True)
    several = (labels != NO_SAMPLE) & (labels != most)
    if mixed is None:
        return None if bool(several.any()) else most
    return most.masked_fill(several.any(axes[0], keepdim=True), mixed)


def _moved(
    rule: AxisRule, step: Step, labels: Tensor, below: Sequence[int], mixed: int | None
) -> Tensor | None:
    """Labels of an input by the axes that the rule of the node's kind hands on.

    Along others, entries of several samples are added up, which get the label ``mixed`` if it is
    certain that they are; otherwise, there are no labels.
    """
    places: dict[int, int] = {}
    for axis in range(labels.dim()):
        if labels.shape[axis] == 1:
            continue
        along = rule(step, axis)
        if along is None or along < 0 or along in places.values():
            joined = _joined(labels, [axis], mixed)
            if joined is None:
                return None
            labels = joined
        else:
            places[axis] = along
    moved = at_places(labels, places, len(below))
    for axis, (length, whole) in enumerate(zip(moved.shape, below, strict=True)):
        if length in (1, whole):
            continue
        if not whole or length % whole:
            return None
        # An input that is repeated has several entries of the output for each of its own.
        repeated = moved.unflatten(axis, (-1, whole))
        joined = _joined(repeated, [axis], mixed)
        if joined is None:
            return None
        moved = joined.squeeze(axis)
    return moved


_ADDING = frozenset({"Add", "Sub", "Rsub", "Expand", "Repeat"})
"""Kinds that add up the gradients of all entries that one of an input was repeated for."""
