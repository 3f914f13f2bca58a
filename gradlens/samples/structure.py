"""Which sample each row of a graph belongs to: by the graph's structure.

The labels at the loss's inputs are followed down the graph: through each node goes the axis that
its kind hands on (``gradlens.graph.kinds``). Where a node puts tensors together, cuts them or
selects entries by indices, the labels are put together, cut and selected in the same way, by what
the node has saved. Labels that follow hold for all graphs of the same structure and the same
indices, whatever the other numbers are. A node of a kind that isn't known, and one that may mix
entries of different samples, is asked itself (``gradlens.samples.powers_of_two``): what it hands on
now tells, but it may hand on something else at another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import prod

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph, is_python_function
from gradlens.graph.kinds import (
    COMPILED,
    HIDING,
    LEAF,
    AxisRule,
    Step,
    from_the_right,
    kind_of,
    plain_name,
)
from gradlens.graph.passes import RefusedNodeError
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.picks import MOST_LABELS, PICKING, PUTTING, Pick, Shape, at_places, unpicked
from gradlens.samples.powers_of_two import labels_below
from gradlens.samples.rows import MIXED, NO_SAMPLE, UNREADABLE, LabelledEdge, Source
from gradlens.samples.selections import Selection, Selections
from gradlens.torch_private import hands_gradients_on, saved


class Structure:
    """The samples of the elements at all edges below some sources.

    Labels have as many axes as their edge's tensor; an axis of length 1 has the same labels for all
    entries. Nodes that are ``alone`` compute with parameters alone, and functions in Python that
    are ``elementwise`` don't move rows. ``refused`` are the reasons why nodes couldn't be asked.
    """

    def __init__(
        self,
        graph: Graph,
        sources: Sequence[Source],
        samples: int,
        alone: Sequence[bool],
        elementwise: Set[int] = frozenset(),
    ) -> None:
        self.graph = graph
        self._alone = alone
        self._elementwise = elementwise
        self.samples = samples
        self.refused: dict[int, str] = {}
        self._asked: dict[Edge, list[Tensor | None]] = {}
        self._read: set[Edge] = set()
        self._next = len(graph) - 1
        self._labels: dict[Edge, Tensor | None] = {}
        self._rows: dict[LabelledEdge, Tensor] = {}
        self._incomplete: set[Edge] = set()
        self._selections = Selections(graph)
        for source in sources:
            labels = source.labels
            if labels is not None:
                # Rows of no sample have a label of their own, which no other row has.
                labels = labels.masked_fill(labels == NO_SAMPLE, samples)
            elif not prod(graph.shape(source.edge)):
                continue  # it has no rows
            self._merge(source.edge, labels)

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The indices that were read."""
        return self._selections.found

    @property
    def is_read(self) -> bool:
        """Whether numbers or code of others decide, which may be others at later steps."""
        return bool(self._asked or self._elementwise)

    def last(self, edges: Iterable[LabelledEdge]) -> bool:
        """Whether the labels at edges are those of all graphs with this structure and selections.

        Where a node can't be asked, that doesn't change.
        """
        below = self.graph.below(number for number, _ in self._read)
        return all(each.edge[0] not in below for each in edges)

    @property
    def unreadable(self) -> set[LabelledEdge]:
        """The edges with rows whose samples aren't known, of those that were looked at."""
        return {edge for edge, rows in self._rows.items() if bool((rows == UNREADABLE).any())}

    def are_apart(self, labelled: LabelledEdge) -> bool:
        """Whether no row at an edge is of several samples, or unknown."""
        return not bool((self._of_rows(labelled) < NO_SAMPLE).any())

    def rows(self, labelled: LabelledEdge) -> Tensor:
        """Labels ``[*S]`` of the rows at an edge: below N, or one of the negative constants."""
        shape = self._shape_of_rows(labelled)
        labels = self._of_rows(labelled).expand(shape).contiguous()
        return labels.to(self.graph.like(labelled.edge).device)

    def _of_rows(self, labelled: LabelledEdge) -> Tensor:
        """The same, with an axis of length 1 where all rows have the same label."""
        if labelled not in self._rows:
            self._rows[labelled] = self._found(labelled)
        return self._rows[labelled]

    def _found(self, labelled: LabelledEdge) -> Tensor:
        shape, found = self._shape_of_rows(labelled), self.labels(labelled.edge)
        if found is None or not prod(self.graph.shape(labelled.edge)):
            return torch.full([1] * len(shape), UNREADABLE if found is None else NO_SAMPLE)
        labels = labelled.rows(found)
        most = labels.amax(-1, keepdim=True)
        mixed = ((labels != NO_SAMPLE) & (labels != most)) | (labels >= self.samples)
        rows = most[..., 0].masked_fill(mixed.any(-1), MIXED)
        is_recurrent = kind_of(self.graph.kinds[labelled.edge[0]]).is_recurrent
        return _of_sequences(self.graph, labelled, rows.expand(shape)) if is_recurrent else rows

    def _shape_of_rows(self, labelled: LabelledEdge) -> list[int]:
        shape = self.graph.shape(labelled.edge)
        return [length for axis, length in enumerate(shape) if axis not in labelled.features]

    def labels(self, edge: Edge) -> Tensor | None:
        """Labels of the elements at an edge; ``NO_SAMPLE`` of those that no source depends on."""
        self._follow_to(edge[0])
        if edge in self._labels:
            return self._labels[edge]
        return torch.full([1] * len(self.graph.shape(edge)), NO_SAMPLE)

    def _follow_to(self, number: int) -> None:
        """Follow the labels down to a node; what consumes a node has a larger number."""
        while self._next > number:
            node = self._next
            outputs = [o for o in self.graph.outputs_of(node) if (node, o) in self._labels]
            for output in outputs:
                self._complete((node, output))
            if self.graph.kinds[node] != LEAF:
                for place, edge in enumerate(self.graph.children[node]):
                    if edge is not None:
                        for output in outputs:
                            self._merge(edge, self._below(node, output, place))
            self._next -= 1
        for output in self.graph.outputs_of(number):
            self._complete((number, output))

    def _merge(self, edge: Edge, labels: Tensor | None) -> None:
        """Take in the labels by one of the ways to an edge; where ways differ, samples meet."""
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
        found = self._by_kind(node, output, place)
        edge = self.graph.children[node][place]
        if found is not None or edge is None or self._alone[edge[0]]:
            return found
        found = self._by_numbers(node, output)[place]
        if (node, output) in self._asked and node not in self.refused:
            self._read.add(edge)
        return found

    def _by_numbers(self, node: int, output: int) -> list[Tensor | None]:
        """Labels of a node's inputs, from those of one of its outputs, by what it hands on."""
        nothing: list[Tensor | None] = [None] * len(self.graph.children[node])
        labels, kind = self._labels[node, output], self.graph.kinds[node]
        if labels is None or kind in HIDING or kind == COMPILED or node in self.refused:
            return nothing
        if (node, output) not in self._asked:
            self._asked[node, output] = nothing
            try:
                found = labels_below(self.graph, node, output, labels, self.samples + 1)
                self._asked[node, output] = [self._as_own(each) for each in found]
            except RefusedNodeError as reason:
                self.refused[node] = str(reason)
        return self._asked[node, output]

    def _as_own(self, labels: Tensor | None) -> Tensor | None:
        """Labels with the own one of mixed elements; ``None`` if some can't be read."""
        if labels is None or bool((labels == UNREADABLE).any()):
            return None
        return compact(labels.masked_fill(labels == MIXED, self.samples + 1))

    def _by_kind(self, node: int, output: int, place: int) -> Tensor | None:
        """Labels of a node's input, from those of one of its outputs, by the node's kind."""
        labels = self._labels[node, output]
        edge = self.graph.children[node][place]
        assert edge is not None
        if labels is None:
            return None
        above, below = self.graph.shape((node, output)), self.graph.shape(edge)
        if self.samples == 1 or not prod(above) or not prod(below):
            only = 0 if self.samples == 1 else NO_SAMPLE
            return torch.full([1] * len(below), only)
        if hands_gradients_on(self.graph.nodes[node]):
            return labels if output == place else torch.full([1] * len(below), NO_SAMPLE)
        name = plain_name(self.graph.kinds[node])
        kind = kind_of(name)
        if kind.axes is None and is_python_function(self.graph.nodes[node]):
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
            # It adds up the gradients of all entries that one was repeated for.
            mixed = self.samples + 1 if kind.repeats and kind.is_linear else None
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
    """Labels by both of two ways; ``None`` if they are too many."""
    if one.shape == other.shape and torch.equal(one, other):
        return one
    if prod(torch.broadcast_shapes(one.shape, other.shape)) > MOST_LABELS:
        return None
    are_open = (one == NO_SAMPLE) | (other == NO_SAMPLE)
    return torch.where(are_open, one.maximum(other), one).masked_fill(
        (one != other) & ~are_open, mixed
    )


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


def _of_sequences(graph: Graph, labelled: LabelledEdge, labels: Tensor) -> Tensor:
    """The labels at a recurrent node, mixed where it computes with steps of several samples.

    The gradients at its outputs have passed none of the steps yet.
    """
    number, output = labelled.edge
    if output or labels.dim() < 2:
        return labels
    # What oneDNN computes with has steps first, whatever the layer was called with.
    is_cudnn = graph.kinds[number].startswith("Cudnn")
    is_first = is_cudnn and bool(saved(graph.nodes[number], "batch_first", False))
    steps = labels.movedim(1, 0) if is_first else labels
    first, known = steps.amax(0, keepdim=True), steps >= 0
    mixed = (known & (steps != first)).any(0, keepdim=True).expand_as(steps)
    steps = steps.masked_fill(mixed, MIXED)
    return steps.movedim(0, 1) if is_first else steps
