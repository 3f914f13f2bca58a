"""Which samples the structure of a graph says that its rows belong to, without any backward pass.

The labels at the loss's inputs are followed down the graph: through each node goes the axis that
its kind hands on (``gradlens.graph.kinds``). Where a node puts tensors together, cuts them or
selects entries by indices, the labels are put together, cut and selected in the same way, by what
the node has saved. A node that may mix entries along an axis of different samples ends that, and so
does any kind that isn't known, and a function in Python. Labels that follow hold for all graphs of
the same structure and the same indices, whatever the other numbers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import digits

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Edge, Graph, is_python_function
from gradlens.graph.kinds import (
    LEAF,
    AxisRule,
    Node,
    Step,
    from_the_right,
    kind_of,
    positive,
)
from gradlens.graph.torch_private import hands_gradients_on, saved, signed
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.rows import MIXED, NO_SAMPLE, LabelledEdge, Source

MOST_LABELS = 2**24
"""Labels of a tensor that are written out: 128 MiB. Most axes have one label for all entries."""


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
            found = _read(graph.nodes[self.node], self.name)
        except UnavailableError:
            return False
        other = found[self.place]
        return other is not None and torch.equal(other, self.index)


class Structure:
    """The samples of the elements at all edges below some sources, by the structure of the graph.

    Labels have as many axes as their edge's tensor; an axis of length 1 has the same labels for all
    entries. ``selections`` are the indices that were read.
    """

    def __init__(self, graph: Graph, sources: Sequence[Source], samples: int) -> None:
        self._graph = graph
        self._samples = samples
        self._next = len(graph) - 1
        self._labels: dict[Edge, Tensor | None] = {}
        self._incomplete: set[Edge] = set()
        self.selections: list[Selection] = []
        for source in sources:
            labels = source.labels
            # Rows of no sample have a label of their own, which no other row has.
            labels = None if labels is None else labels.masked_fill(labels == NO_SAMPLE, samples)
            self._merge(source.edge, labels)

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
        mixed = ((labels != NO_SAMPLE) & (labels != most)) | (labels >= self._samples)
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
                self._labels[edge] = _merged(before, labels, self._samples + 1)
        self._incomplete.add(edge)

    def _complete(self, edge: Edge) -> None:
        """All ways to an edge are known: axes with one label are written as one entry."""
        labels = self._labels.get(edge)
        if edge in self._incomplete and labels is not None and labels.numel() > 1:
            self._labels[edge] = self._compact(labels)
        self._incomplete.discard(edge)

    def _compact(self, labels: Tensor) -> Tensor:
        for axis, length in enumerate(labels.shape):
            first = labels.narrow(axis, 0, min(1, length))
            if length > 1 and bool((labels == first).all()):
                labels = first
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
        known = labels[(labels != NO_SAMPLE) & (labels < self._samples)]
        return known.numel() >= self._samples and len(known.unique()) == self._samples

    def _below(self, node: int, output: int, place: int) -> Tensor | None:
        """Labels of a node's input, from those of one of its outputs."""
        labels = self._labels[node, output]
        edge = self._graph.children[node][place]
        assert edge is not None
        if labels is None:
            return None
        above, below = self._graph.shape((node, output)), self._graph.shape(edge)
        if self._samples == 1 or not prod(above) or not prod(below):
            only = 0 if self._samples == 1 else NO_SAMPLE
            return torch.full([1] * len(below), only)
        if hands_gradients_on(self._graph.nodes[node]):
            return labels if output == place else torch.full([1] * len(below), NO_SAMPLE)
        name = self._graph.kinds[node].rstrip(digits).removesuffix("Backward")
        kind = kind_of(name)
        if kind.axes is None and is_python_function(self._graph.nodes[node]):
            return None  # it may do anything
        if kind.axes is from_the_right and above == below:
            return labels
        if kind.in_order:
            return self._reshaped(labels, above, below)
        step = Step(self._graph.nodes[node], place, output, len(above), len(below))
        try:
            if name in _PLACED:
                found = self._placed(node, name, step, labels, above, below)
                if found is not None:
                    return found
            if labels.numel() == 1:
                return labels.reshape([1] * len(below))
            if kind.axes is None:
                return None
            mixed = self._samples + 1 if name in _ADDING else None
            return _moved(kind.axes, step, labels, below, mixed)
        except UnavailableError:  # of tensors that can't be read now
            return None

    def _reshaped(self, labels: Tensor, above: Sequence[int], below: Sequence[int]) -> Tensor:
        """Labels of the same elements in the same order, in another shape."""
        if labels.numel() == 1 or tuple(above) == tuple(below):
            return labels.reshape([1] * len(below)) if labels.numel() == 1 else labels
        behind = 0
        while (
            behind < min(len(above), len(below)) - 1
            and above[-1 - behind] == below[-1 - behind]
            and labels.shape[-1 - behind] == 1
        ):
            behind += 1
        ends = len(above) - behind, len(below) - behind
        kept = labels.reshape(labels.shape[: ends[0]]).expand(above[: ends[0]])
        return kept.reshape(*below[: ends[1]], *[1] * behind)

    def _placed(
        self,
        node: int,
        name: str,
        step: Step,
        labels: Tensor,
        above: Sequence[int],
        below: Sequence[int],
    ) -> Tensor | None:
        """Labels of an input that is cut, selected from or put together with others.

        ``None`` where only axes beside that tell the samples apart, which the kind's rule follows.
        """
        return _PLACED[name](_Placing(self, node, step, labels, tuple(above), tuple(below)))

    def read(self, node: int, name: str, place: int = 0) -> Tensor:
        """Indices that a node has saved, which the labels depend on from now on."""
        found = _read(self._graph.nodes[node], name)[place]
        assert found is not None
        self.selections.append(Selection(node, name, place, found.detach().clone()))
        return found.cpu()

    def is_beside(self, labels: Tensor, axes: Sequence[int]) -> bool:
        """Whether labels tell all samples apart without some of their axes."""
        return all(labels.shape[axis] == 1 for axis in axes) and self._is_whole(labels)

    def sizes(self, node: int) -> list[tuple[int, ...] | None]:
        """Shapes of a node's inputs, ``None`` of those that need no gradient."""
        edges = self._graph.children[node]
        return [None if edge is None else self._graph.shape(edge) for edge in edges]

    def indices_of(self, node: int) -> Sequence[Tensor | None]:
        """The indices of ``x[rows, places]``, ``None`` for an axis without one."""
        return _read(self._graph.nodes[node], "indices")


def _read(node: Node, name: str) -> Sequence[Tensor | None]:
    found = read_saved(node, name)
    return found if isinstance(found, (tuple, list)) else [found]


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
    order = sorted(places, key=places.__getitem__)
    rest = [axis for axis in range(labels.dim()) if axis not in places]
    moved = labels.permute(*order, *rest).reshape([labels.shape[axis] for axis in order])
    shape = [1] * len(below)
    for axis in order:
        shape[places[axis]] = labels.shape[axis]
    moved = moved.reshape(shape)
    for axis, (length, whole) in enumerate(zip(shape, below, strict=True)):
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


# Kinds that cut tensors, select entries of them, or put them together ----------------------------


@dataclass(frozen=True)
class _Placing:
    """What is needed to place the labels of a node's output in one of its inputs."""

    structure: Structure
    node: int
    step: Step
    labels: Tensor
    above: tuple[int, ...]
    below: tuple[int, ...]

    @property
    def dim(self) -> int:
        """The axis, in the tensor with more axes."""
        return positive(saved(self.step.node, "dim"), max(len(self.above), len(self.below)))[0]

    def saved(self, name: str) -> int:
        """An integer that the node has saved."""
        return int(saved(self.step.node, name))

    def at(self, positions: Tensor | slice) -> Tensor | None:
        """Labels along ``dim`` at these positions of the input, and none at others."""
        dim, labels = self.dim, self.labels
        if len(self.above) < len(self.below):
            labels = labels.unsqueeze(dim)
        if self.structure.is_beside(labels, [dim]):
            return None
        length = self.below[dim]
        places = torch.arange(length)[positions] if isinstance(positions, slice) else positions
        shape = [*labels.shape]
        shape[dim] = len(places)
        values = labels.expand(shape)
        shape[dim] = length
        return _put(torch.full(shape, NO_SAMPLE), dim, places, values)

    def gathered(self, index: Tensor) -> Tensor | None:
        """Labels at the places of the input along ``dim`` that an index of each entry names."""
        dim, labels = self.dim, self.labels
        if index.dim() < len(self.below):
            index, labels = index.unsqueeze(dim), labels.unsqueeze(dim)
        if prod(self.below) > MOST_LABELS:
            return None
        values = labels.expand(index.shape)
        found = torch.full(self.below, NO_SAMPLE)
        found.scatter_reduce_(dim, index, values, "amax")
        same = (found.gather(dim, index) == values) | (values == NO_SAMPLE)
        return found if bool(same.all()) else None


def _put(found: Tensor, dim: int, places: Tensor, values: Tensor) -> Tensor | None:
    """Put labels into others along an axis; ``None`` if an entry gets several."""
    index = places.reshape(-1, *[1] * (found.dim() - dim - 1)).expand(values.shape)
    found.scatter_reduce_(dim, index, values, "amax")
    same = (found.gather(dim, index) == values) | (values == NO_SAMPLE)
    return found if bool(same.all()) else None


def _slice(of: _Placing) -> Tensor | None:
    start, end = (_end(of.saved(name), of.below[of.dim]) for name in ("start", "end"))
    return of.at(slice(start, end, of.saved("step")))


def _end(number: int, length: int) -> int:
    """An end of a slice from 0 on."""
    number = signed(number)
    return max(number + length, 0) if number < 0 else min(number, length)


def _select(of: _Placing) -> Tensor | None:
    return of.at(torch.tensor([_end(of.saved("index"), of.below[of.dim])]))


def _unbind(of: _Placing) -> Tensor | None:
    return of.at(torch.tensor([of.step.output]))


def _split(of: _Placing) -> Tensor | None:
    size = of.saved("split_size")
    return of.at(slice(of.step.output * size, (of.step.output + 1) * size))


def _split_with_sizes(of: _Placing) -> Tensor | None:
    sizes = saved(of.step.node, "split_sizes")
    start = sum(sizes[: of.step.output])
    return of.at(slice(start, start + sizes[of.step.output]))


def _flip(of: _Placing) -> Tensor | None:
    labels = of.labels
    dims = positive(saved(of.step.node, "dims"), len(of.below))
    return labels.flip([dim for dim in dims if labels.shape[dim] > 1])


def _roll(of: _Placing) -> Tensor | None:
    labels = of.labels
    dims = positive(saved(of.step.node, "dims"), len(of.below))
    shifts = [signed(shift) for shift in saved(of.step.node, "shifts")]
    if not dims:
        return None
    for dim, shift in zip(dims, shifts, strict=True):
        if labels.shape[dim] > 1:
            labels = labels.roll(-shift, dim)
    return labels


def _index_select(of: _Placing) -> Tensor | None:
    labels = of.labels
    if of.structure.is_beside(labels, [of.dim]):
        return None
    return of.at(of.structure.read(of.node, "index").reshape(-1))


def _by_indices(of: _Placing, name: str) -> Tensor | None:
    """Kinds that pick entries along an axis, each by an index of its own."""
    labels, dim = of.labels, of.dim
    if len(of.above) < len(of.below):
        labels = labels.unsqueeze(dim)
    if of.structure.is_beside(labels, [dim]):
        return None
    return of.gathered(of.structure.read(of.node, name))


def _sorted(of: _Placing) -> Tensor | None:
    return _by_indices(of, "indices")


def _gather(of: _Placing) -> Tensor | None:
    return _by_indices(of, "index") if of.step.place == 0 else None


def _cat(of: _Placing) -> Tensor | None:
    """The part of the output that is one of the inputs, if the lengths of others are known."""
    dim, labels = of.dim, of.labels
    if labels.shape[dim] == 1:
        return None
    sizes = of.structure.sizes(of.node)
    front, behind = sizes[: of.step.place], sizes[of.step.place + 1 :]
    if all(size is not None for size in front):
        start = sum(size[dim] if len(size) > dim else 0 for size in front if size is not None)
    elif all(size is not None for size in behind):
        rest = sum(size[dim] if len(size) > dim else 0 for size in behind if size is not None)
        start = of.above[dim] - rest - of.below[dim]
    else:
        return None
    return labels.narrow(dim, start, of.below[dim])


def _stack(of: _Placing) -> Tensor | None:
    dim, labels = of.dim, of.labels
    return labels.select(dim, of.step.place if labels.shape[dim] > 1 else 0)


def _index(of: _Placing) -> Tensor | None:
    """Rows that are selected by tensors of indices or masks, as ``x[rows, places]``."""
    axes = _indexed_axes(of.structure.indices_of(of.node))
    indexed = [axis for each in axes.values() for axis in each]
    free = [axis for axis in range(len(of.below)) if axis not in indexed]
    dims = len(of.above) - len(free)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if adjacent else 0
    own = range(first, first + dims)
    rest = [axis for axis in range(len(of.above)) if axis not in own]
    labels = of.labels
    shape = [1] * len(of.below)
    for axis, place in zip(rest, free, strict=True):
        shape[place] = labels.shape[axis]
    if of.structure.is_beside(labels, own):
        return labels.reshape(shape)
    counted = _counted(of, axes, own)
    if counted is not None:
        axis, values = counted
        shape[axis] = len(values)
        return values.reshape([-1 if each == axis else 1 for each in range(len(shape))])
    for axis in indexed:
        shape[axis] = of.below[axis]
    if prod(shape) > MOST_LABELS:
        return None
    numbers = torch.arange(prod(shape)).reshape(shape)
    places = numbers[_indices(of, axes, len(shape))]
    flat = torch.full([prod(shape)], NO_SAMPLE)
    found = _put(flat, 0, places.flatten(), labels.expand(places.shape).flatten())
    return None if found is None else found.reshape(shape)


def _counted(
    of: _Placing, axes: Mapping[int, Sequence[int]], own: Sequence[int]
) -> tuple[int, Tensor] | None:
    """The axis along which one of the indices counts from 0, as ``torch.arange(N)`` does.

    With the labels along it, if they vary along no other axis: an entry beside the selected one,
    such as another position, belongs to the same sample.
    """
    varying = [axis for axis, length in enumerate(of.labels.shape) if length > 1]
    if len(varying) != 1 or varying[0] not in own:
        return None
    behind = own[-1] - varying[0]
    for place, (axis, *more) in axes.items():
        index = of.structure.indices_of(of.node)[place]
        assert index is not None
        if more or index.dim() <= behind or index.numel() != index.shape[-1 - behind]:
            continue
        counts = torch.equal(index.flatten().cpu(), torch.arange(index.numel()))
        if counts and index.numel() == of.below[axis]:
            of.structure.read(of.node, "indices", place)
            return axis, of.labels.flatten()
    return None


def _indexed_axes(given: Sequence[Tensor | None]) -> dict[int, list[int]]:
    """The axes that each of several indices selects along: a mask has as many as it has axes."""
    found: dict[int, list[int]] = {}
    axis = 0
    for place, each in enumerate(given):
        is_mask = each is not None and each.dtype in (torch.bool, torch.uint8)
        dims = each.dim() if each is not None and is_mask else 1
        if each is not None:
            found[place] = [*range(axis, axis + dims)]
        axis += dims
    return found


def _indices(
    of: _Placing, axes: Mapping[int, Sequence[int]], dims: int
) -> tuple[Tensor | slice, ...]:
    """What selects the rows, for each axis; masks are those of the axes that they begin with."""
    read = {each[0]: of.structure.read(of.node, "indices", place) for place, each in axes.items()}
    inner = {axis for each in axes.values() for axis in each[1:]}
    return tuple(read.get(axis, slice(None)) for axis in range(dims) if axis not in inner)


def _masked_select(of: _Placing) -> Tensor | None:
    mask = of.structure.read(of.node, "mask")
    if tuple(mask.shape) != of.below:
        return None
    found = torch.full(of.below, NO_SAMPLE)
    found[mask] = of.labels.expand(of.above)
    return found


def _take(of: _Placing) -> Tensor | None:
    places = of.structure.read(of.node, "index").flatten() % max(prod(of.below), 1)
    values = of.labels.expand(of.above).flatten()
    found = _put(torch.full([prod(of.below)], NO_SAMPLE), 0, places, values)
    return None if found is None else found.reshape(of.below)


def _index_add(of: _Placing) -> Tensor | None:
    """Rows that are added to, or written into, those of another tensor."""
    dim, labels = of.dim, of.labels
    if of.step.place == 0 or labels.shape[dim] == 1:
        return labels
    return labels.index_select(dim, of.structure.read(of.node, "index").reshape(-1))


def _scatter_add(of: _Placing) -> Tensor | None:
    labels = of.labels
    if of.step.place == 0 or labels.shape[of.dim] == 1:
        return labels
    index = of.structure.read(of.node, "index")
    if tuple(index.shape) != of.below:
        return None
    return labels.expand(of.above).gather(of.dim, index)


def _index_put(of: _Placing) -> Tensor | None:
    if of.step.place == 0:
        return of.labels
    axes = _indexed_axes(of.structure.indices_of(of.node))
    found = of.labels.expand(of.above)[_indices(of, axes, len(of.above))]
    return found if tuple(found.shape) == of.below else None


_ADDING = frozenset({"Add", "Sub", "Rsub", "Expand", "Repeat"})
"""Kinds that add up the gradients of all entries that one of an input was repeated for."""

_PLACED = {
    "Slice": _slice,
    "Select": _select,
    "Unbind": _unbind,
    **dict.fromkeys(("Split", "UnsafeSplit"), _split),
    **dict.fromkeys(("SplitWithSizes", "UnsafeSplitWithSizes"), _split_with_sizes),
    "Flip": _flip,
    "Roll": _roll,
    "IndexSelect": _index_select,
    **dict.fromkeys(("Sort", "Topk", "Kthvalue", "Mode"), _sorted),
    "Gather": _gather,
    "Cat": _cat,
    "Stack": _stack,
    "Index": _index,
    "MaskedSelect": _masked_select,
    "Take": _take,
    **dict.fromkeys(("IndexAdd", "IndexCopy"), _index_add),
    **dict.fromkeys(("ScatterAdd", "Scatter"), _scatter_add),
    "IndexPut": _index_put,
}
"""Where kinds have the entries of their inputs, besides the axes that they hand on."""
