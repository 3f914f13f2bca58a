"""Kinds of nodes that cut tensors, pick entries of them, or put them together.

What such a node does to a tensor's entries it does to their labels. So each kind is described by
one function of a tensor, which follows labels up the graph; down the graph it is applied to the
numbers of entries, which tells where the labels belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import Node, Step, positive
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.labels import (
    MOST_LABELS,
    NO_SAMPLE,
    Labels,
    Shape,
    are_all,
    axes_of,
    labels_of,
    moved,
    only,
)
from gradlens.torch_private import saved, signed


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
            other = _saved(graph.nodes[self.node], self.name)[self.place]
        except UnavailableError:
            return False
        return other is not None and torch.equal(other, self.index)


def _saved(node: Node, name: str) -> Sequence[Tensor | None]:
    found = read_saved(node, name)
    return found if isinstance(found, (tuple, list)) else [found]


class SavedIndices:
    """The indices that the nodes of a graph have saved, and those of them that were read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.read: dict[tuple[int, str, int], Selection] = {}

    def at(self, number: int, name: str, place: int) -> NDArray[Any]:
        """One of them, on which the labels depend from then on."""
        key = (number, name, place)
        if key not in self.read:
            found = _saved(self.graph.nodes[number], name)[place]
            assert found is not None
            self.read[key] = Selection(*key, found.detach().clone())
        return self.read[key].index.cpu().numpy()


@dataclass(frozen=True, eq=False)
class Between(Step):
    """A step to an input of the node with a ``number``, and which entries it picks."""

    number: int
    indices: SavedIndices

    @property
    def all_sizes(self) -> list[Shape | None]:
        """The shapes of all inputs, ``None`` of those that need no gradient."""
        graph = self.indices.graph
        edges = graph.children[self.number]
        return [None if edge is None else graph.shape(edge) for edge in edges]

    def seen(self, name: str) -> Sequence[Tensor | None]:
        """The indices that the node has saved under a name."""
        return _saved(self.node, name)

    def read(self, name: str, place: int = 0) -> NDArray[Any]:
        """One of them, on which the labels depend from then on."""
        return self.indices.at(self.number, name, place)


@dataclass(frozen=True)
class Pick:
    """Which entries of a tensor those of another one are, as a function of the first.

    ``apply`` may get a tensor with an axis of length 1 where all entries are the same, and may
    return one; -1 is an entry of neither. ``axes`` are those along which entries are picked;
    ``kept`` has the other ones, with their places in what is returned. If entries are picked
    ``one_by_one``, they depend on all axes. ``fills`` says that what is returned has entries that
    come from elsewhere, and ``apart`` that each of the axes has an index of its own.
    """

    apply: Callable[[Labels], Labels]
    axes: tuple[int, ...]
    kept: dict[int, int]
    one_by_one: bool = False
    fills: bool = False
    apart: bool = False

    def pulled(self, labels: Labels, dims: int) -> Labels:
        """Labels of what is returned, of ``dims`` axes, by those of what is given."""
        if not self.fills and all(axis in self.kept for axis in axes_of(labels)):
            return moved(labels, self.kept, dims)
        return labels_of(self.apply(labels))

    def pushed(self, labels: Labels, shape: Shape, samples: int) -> Labels | None:
        """Labels of what is given, of this shape, by those of what is returned.

        Where other axes tell all samples apart, entries beside the picked ones belong to the same
        sample, whichever are picked. So do those along an axis of which each index picks entries of
        one sample.
        """
        places = {place: axis for axis, place in self.kept.items()}
        beside = [n for n in axes_of(labels) if n in places and labels.shape[n] == shape[places[n]]]
        if len(beside) == len(axes_of(labels)) and are_all(labels, samples):
            return moved(labels, places, len(shape))
        for axis in self.axes if self.apart and len(self.axes) > 1 else ():
            put = self.put(labels, shape, [axis])
            if put is not None and are_all(put, samples):
                return put
        return self.put(labels, shape, self.axes)

    def put(self, labels: Labels, shape: Shape, axes: Sequence[int]) -> Labels | None:
        """Labels of what is given, by those of what is returned, picked along some of the axes.

        ``None`` if an entry would get several labels, or there would be too many.
        """
        places = {place: axis for axis, place in self.kept.items()}
        along = {places[place] for place in places if labels.shape[place] > 1}
        full = range(len(shape)) if self.one_by_one else {*axes, *along}
        own = [length if axis in full else 1 for axis, length in enumerate(shape)]
        if prod(own) > MOST_LABELS:
            return None
        numbers = self.apply(np.arange(prod(own)).reshape(own))
        pairs = [*zip(numbers.shape, labels.shape, strict=False)]
        if numbers.ndim != labels.ndim or any(n != m and 1 not in (n, m) for n, m in pairs):
            return None
        sizes = [max(pair) for pair in pairs]
        if prod(sizes) > MOST_LABELS:
            return None
        numbers, values = np.broadcast_to(numbers, sizes), np.broadcast_to(labels, sizes)
        known = (numbers >= 0) & (values != NO_SAMPLE)
        numbers, values = numbers[known], values[known]
        found = np.full(prod(own), NO_SAMPLE)
        found[numbers] = values
        return labels_of(found.reshape(own)) if (found[numbers] == values).all() else None


# Along one axis ---------------------------------------------------------------------------------


def _kept(of: Between, dim: int) -> dict[int, int]:
    """The other axes of the input, with their places in the output."""
    shift = len(of.above) - len(of.below)
    if shift > 0:  # the output has one more
        return {axis: axis + (axis >= dim) for axis in range(len(of.below))}
    return {axis: axis - (axis > dim) * (shift < 0) for axis in _beside(of.below, dim)}


def _along(of: Between, places: slice, start: int | None = None) -> Pick:
    """Entries at these places of the input's axis.

    If they ``start`` behind those of another input, these are -1.
    """
    dim = of.dim
    joined = len(of.above) > len(of.below)
    length = 1 if joined else of.below[dim]

    def apply(given: Labels) -> Labels:
        x = np.expand_dims(given, dim) if joined else given
        if x.shape[dim] > 1 or length == 1:
            x = x[(*[slice(None)] * dim, places)]
        if start is not None:
            whole = np.full([*x.shape[:dim], of.above[dim], *x.shape[dim + 1 :]], NO_SAMPLE)
            whole[(*[slice(None)] * dim, slice(start, start + length))] = x
            return whole
        return x.squeeze(dim) if len(of.above) < len(of.below) else x

    return Pick(apply, () if joined else (dim,), _kept(of, dim), fills=start is not None)


def _slice(of: Between) -> Pick:
    ends = (saved(of.node, name) for name in ("start", "end"))
    start, end = (each if each is None else signed(each) for each in ends)
    return _along(of, slice(start, end, of.saved("step")))


def _at_places(of: Between, start: int, length: int) -> Pick:
    return _along(of, slice(start, start + length or None))


def _split_with_sizes(of: Between) -> Pick:
    sizes = saved(of.node, "split_sizes")
    return _at_places(of, sum(sizes[: of.output]), sizes[of.output])


def _taken(of: Between, given: Shape) -> Pick:
    """Entries that are taken from a tensor of this shape along an axis, by an index."""
    dim = of.dim

    def apply(x: Labels) -> Labels:
        is_whole = x.shape[dim] == given[dim]
        return x.take(of.read("index").reshape(-1), dim) if is_whole else x

    return Pick(apply, (dim,), _kept(of, dim))


def _by_indices(of: Between, name: str, given: Shape, returned: Shape) -> Pick:
    """Each entry is picked by an index of its own, from a tensor of the ``given`` shape."""
    dim = of.dim

    def apply(x: Labels) -> Labels:
        index = of.read(name)
        if index.size != prod(returned):
            raise UnavailableError("some entries of what is scattered are left out")
        index = np.expand_dims(index, dim) if index.ndim < len(given) else index
        found = _gathered(x, index, dim, given)
        return found.squeeze(dim) if len(returned) < len(given) else found

    return Pick(apply, (dim,), _kept(of, dim), one_by_one=True)


def _gathered(x: Labels, index: NDArray[Any], dim: int, shape: Shape) -> Labels:
    """What ``torch.gather`` takes from a tensor of this shape."""
    sizes = [n if axis == dim else index.shape[axis] for axis, n in enumerate(shape)]
    x = x[tuple(map(slice, sizes))]
    return np.take_along_axis(np.broadcast_to(x, sizes), index, dim)


def _cat(of: Between) -> Pick | None:
    """The part of the output that is one of the inputs, if the lengths of others are known."""
    dim = of.dim
    front, behind = of.all_sizes[: of.place], of.all_sizes[of.place + 1 :]
    if all(size is not None for size in front):
        start = sum(size[dim] if len(size) > dim else 0 for size in front if size is not None)
    elif all(size is not None for size in behind):
        rest = sum(size[dim] if len(size) > dim else 0 for size in behind if size is not None)
        start = of.above[dim] - rest - of.below[dim]
    else:
        return None
    return _along(of, slice(None), start)


def _beside(shape: Shape, *axes: int) -> dict[int, int]:
    """The other axes of a tensor, which stay where they are."""
    return {axis: axis for axis in range(len(shape)) if axis not in axes}


def _each(apply: Callable[[Labels], Labels], shape: Shape) -> Pick:
    """Each entry of a tensor of this shape is picked by itself."""
    return Pick(apply, tuple(range(len(shape))), {}, one_by_one=True)


# Along several axes -----------------------------------------------------------------------------


def _turned(of: Between, turn: Callable[[Labels, list[int]], Labels]) -> Pick:
    dims = positive(saved(of.node, "dims"), len(of.below))
    axes = tuple(dims or range(len(of.below)))
    return Pick(lambda x: turn(x, dims), axes, _beside(of.below, *axes))


def _flip(of: Between) -> Pick:
    return _turned(of, lambda x, dims: np.flip(x, tuple(dims)))


def _roll(of: Between) -> Pick:
    shifts = [signed(shift) for shift in saved(of.node, "shifts")]

    def roll(x: Labels, dims: list[int]) -> Labels:
        return np.roll(x, shifts, dims) if dims else np.roll(np.broadcast_to(x, of.below), shifts)

    return _turned(of, roll)


class _Indices:
    """The indices of ``x[rows, places]``, which are read where they are needed.

    A mask has one for each of its axes.
    """

    def __init__(self, of: Between) -> None:
        self._of = of
        self._given = of.seen("indices")
        self._places: dict[int, tuple[int, int]] = {}
        axis = 0
        for place, each in enumerate(self._given):
            is_mask = each is not None and each.dtype in (torch.bool, torch.uint8)
            dims = each.dim() if each is not None and is_mask else 1
            if each is not None:
                self._places |= {axis + own: (place, own if is_mask else -1) for own in range(dims)}
            axis += dims

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which entries are picked: first those whose index counts from 0 on."""
        axes = tuple(self._places)
        return axes if len(axes) < 2 else tuple(sorted(axes, key=lambda n: not self._counts(n)))

    def _counts(self, axis: int) -> bool:
        index = self._given[self._places[axis][0]]
        assert index is not None
        return torch.equal(index.flatten().cpu(), torch.arange(index.numel(), device="cpu"))

    @cached_property
    def dims(self) -> int:
        """The number of axes that they have together."""
        given = [self._given[place] for place, _ in self._places.values()]
        masks = [own >= 0 for _, own in self._places.values()]
        pairs = zip(given, masks, strict=True)
        return max(1 if is_mask else each.dim() for each, is_mask in pairs if each is not None)

    def of_axis(self, axis: int) -> NDArray[Any]:
        """The index along an axis."""
        place, own = self._places[axis]
        read = self._of.read("indices", place)
        return read if own < 0 else read.nonzero()[own]

    def select(self, x: Labels, shape: Shape) -> Labels:
        """Entries of a tensor of this shape, some of whose axes may have length 1."""
        index: list[Any] = [slice(None)] * x.ndim
        for axis in self._places:
            is_whole = x.shape[axis] == shape[axis]
            index[axis] = self.of_axis(axis) if is_whole else only(0, self.dims)
        return x[tuple(index)]

    def kept(self, dims: int) -> dict[int, int]:
        """The other axes of a tensor, with their places in what is selected."""
        first, last = min(self._places), max(self._places)
        adjacent = last - first + 1 == len(self._places)
        front = first if adjacent else 0
        free = [axis for axis in range(dims) if axis not in self._places]
        return {axis: n + (self.dims if n >= front else 0) for n, axis in enumerate(free)}


def _index(of: Between, given: Shape, returned: Shape, *, apart: bool) -> Pick:
    """Rows that are selected by tensors of indices or masks, as ``x[rows, places]``."""
    indices = _Indices(of)
    kept = indices.kept(len(given))
    if len(kept) + indices.dims == len(returned):
        return Pick(lambda x: indices.select(x, given), indices.axes, kept, apart=apart)

    def without_axes(x: Labels) -> Labels:
        found = indices.select(np.broadcast_to(x, given), given)
        if found.size != prod(returned):
            raise UnavailableError("what is put is repeated")
        return found.reshape(returned)

    return _each(without_axes, given)


def _masked_select(of: Between) -> Pick:
    def apply(x: Labels) -> Labels:
        mask = of.read("mask")
        shape = np.broadcast_shapes(of.below, mask.shape)
        return np.broadcast_to(x, shape)[np.broadcast_to(mask, shape)]

    return _each(apply, of.below)


def _take(of: Between) -> Pick:
    def apply(x: Labels) -> Labels:
        return np.broadcast_to(x, of.below).flatten()[of.read("index")]

    return _each(apply, of.below)


def _packed(of: Between) -> Pick:
    """The samples' first steps, then the second ones of those that have more, and so on."""
    steps, samples = (1, 0) if saved(of.node, "batch_first") else (0, 1)

    def apply(x: Labels) -> Labels:
        sizes = of.read("result1")  # how many samples have each step
        places = np.zeros((2, sizes.sum()), dtype=np.int64)
        if x.shape[steps] > 1:
            places[steps] = np.repeat(np.arange(len(sizes)), sizes)
        if x.shape[samples] > 1:
            places[samples] = np.concatenate([np.arange(size) for size in sizes])
        return x[tuple(places)]

    kept = {axis: axis - 1 for axis in range(2, len(of.below))}
    return Pick(apply, (samples, steps), kept, apart=True)


# Kinds that put entries of an input into the output: picks of the output ------------------------


def whole(of: Between) -> Pick | None:
    """The first input, which others are put into or added to, entry by entry.

    ``None`` if it is repeated for that.
    """
    return Pick(lambda x: x, (), _beside(of.above)) if of.above == of.below else None


def _masked_scatter(of: Between) -> Pick:

    def apply(x: Labels) -> Labels:
        taken = np.broadcast_to(x, of.above)[np.broadcast_to(of.read("mask"), of.above)]
        found = np.full(prod(of.below), NO_SAMPLE)
        found[: len(taken)] = taken
        return found.reshape(of.below)

    return _each(apply, of.above)


PICKING: dict[str, Callable[[Between], Pick | None]] = {
    "Slice": _slice,
    "Select": lambda of: _at_places(of, of.saved("index"), 1),
    "Unbind": lambda of: _at_places(of, of.output, 1),
    **dict.fromkeys(
        ("Split", "UnsafeSplit"),
        lambda of: _at_places(of, of.output * of.saved("split_size"), of.saved("split_size")),
    ),
    **dict.fromkeys(("SplitWithSizes", "UnsafeSplitWithSizes"), _split_with_sizes),
    "Flip": _flip,
    "Roll": _roll,
    "IndexSelect": lambda of: _taken(of, of.below),
    **dict.fromkeys(
        ("Sort", "Topk", "Kthvalue", "Mode"),
        lambda of: _by_indices(of, "indices", of.below, of.above),
    ),
    "Gather": lambda of: _by_indices(of, "index", of.below, of.above),
    "Cat": _cat,
    "Stack": lambda of: _along(of, slice(None), of.place),
    "Index": lambda of: _index(of, of.below, of.above, apart=True),
    "MaskedSelect": _masked_select,
    "PackPaddedSequence": _packed,
    "Take": _take,
}
"""Kinds whose output has entries of their inputs, picked by what they have saved."""

PUTTING: dict[str, Callable[[Between], Pick]] = {
    **dict.fromkeys(("IndexAdd", "IndexCopy"), lambda of: _taken(of, of.above)),
    **dict.fromkeys(
        ("ScatterAdd", "Scatter"), lambda of: _by_indices(of, "index", of.above, of.below)
    ),
    "IndexPut": lambda of: _index(of, of.above, of.below, apart=False),
    "MaskedScatter": _masked_scatter,
}
"""Kinds whose inputs but the first have entries of their output, as far as gradients go."""
