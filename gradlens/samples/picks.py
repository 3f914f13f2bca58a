"""Kinds of nodes that cut tensors, pick entries of them, or put them together.

What such a node does to a tensor's entries it does to their labels. So each kind is described by
the numbers of the entries that it picks. By these, labels follow up the graph and down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from gradlens.samples.labels import MOST_LABELS, NO_SAMPLE, Labels, Shape, axes_of, labels_of, moved
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
    """A step to an input of the node with a ``number``, and which entries it picks.

    Those of the input are in the output, or, if it ``puts`` some into its first one, the other way
    round.
    """

    number: int
    indices: SavedIndices
    puts: bool

    @property
    def given(self) -> Shape:
        """The shape of the tensor of which entries are picked."""
        return self.above if self.puts else self.below

    @property
    def made(self) -> Shape:
        """The shape of the one that has them."""
        return self.below if self.puts else self.above

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
    """Which entries of a ``given`` tensor those of one that is ``made`` of it are, by their shapes.

    Entries are picked along some ``axes``: ``numbers`` count them among these, and -1 is an entry
    from elsewhere. They have as many axes as what is made, of length 1 where each number is for all
    entries. They are called only where labels depend on them, since indices are read then. Other
    axes are ``kept`` whole, at some place in what is made. If an axis is among both, the index
    along another one depends on the place along it.
    """

    given: Shape
    made: Shape
    axes: tuple[int, ...]
    kept: Mapping[int, int]
    numbers: Callable[[], Labels]
    fills: bool = False

    @property
    def _free(self) -> dict[int, int]:
        return {axis: place for axis, place in self.kept.items() if axis not in self.axes}

    @property
    def _order(self) -> tuple[list[int], list[int]]:
        """The axes of what is given, and of what is made, those that are picked along first."""
        free = self._free
        picked = [place for place in range(len(self.made)) if place not in free.values()]
        return [*self.axes, *free], [*picked, *free.values()]

    def pulled(self, labels: Labels) -> Labels:
        """Labels of what is made, by those of what is given."""
        if not self.fills and all(axis in self.kept for axis in axes_of(labels)):
            return moved(labels, self.kept, len(self.made))
        before, after = self._order
        sizes = [
            n if axis in self.axes else labels.shape[axis] for axis, n in enumerate(self.given)
        ]
        free = [labels.shape[axis] for axis in self._free]
        rows = np.broadcast_to(labels, sizes).transpose(before).reshape(-1, *free)
        numbers = self.numbers().transpose(after)
        found = np.where(
            (numbers < 0).reshape(-1, *[1] * len(free)), NO_SAMPLE, rows[numbers.ravel()]
        )
        picked = numbers.shape[: numbers.ndim - len(free)]
        return labels_of(found.reshape([*picked, *free]).transpose(np.argsort(after)))

    def are_beside(self, labels: Labels) -> bool:
        """Whether labels of what is made vary only along axes that are kept whole.

        They are then those of what is given, too, whichever entries are picked.
        """
        given = {place: self.given[axis] for axis, place in self.kept.items()}
        return all(labels.shape[place] == given.get(place) for place in axes_of(labels))

    def unpicked(self, labels: Labels) -> Labels:
        """Labels of what is given, by those that are beside picked entries."""
        return moved(labels, {place: axis for axis, place in self.kept.items()}, len(self.given))

    def put(self, labels: Labels) -> Labels | None:
        """Labels of what is given, by those of what is made.

        ``None`` if an entry would get several labels, or there would be too many.
        """
        before, after = self._order
        free = [labels.shape[place] for place in self._free.values()]
        picked = [self.given[axis] for axis in self.axes]
        if prod(picked) * prod(free) > MOST_LABELS:
            return None
        numbers, labels = self.numbers().transpose(after), labels.transpose(after)
        sizes = [max(pair) for pair in zip(numbers.shape, labels.shape, strict=True)]
        if prod(sizes) > MOST_LABELS:
            return None
        values = np.broadcast_to(labels, sizes).reshape(-1, *free)
        numbers = np.broadcast_to(
            numbers, [*sizes[: len(sizes) - len(free)], *[1] * len(free)]
        ).ravel()
        found = np.full([prod(picked), *free], NO_SAMPLE)
        known = (numbers >= 0).reshape(-1, *[1] * len(free)) & (values != NO_SAMPLE)
        rows, *others = known.nonzero()
        places = (numbers[rows], *others)
        found[places] = values[known]
        if (found[places] != values[known]).any():
            return None
        return labels_of(found.reshape([*picked, *free]).transpose(np.argsort(before)))


# Along one axis ---------------------------------------------------------------------------------


def _along(of: Between, numbers: Callable[[], Labels], fills: bool = False) -> Pick:
    """The entries of one axis with these numbers; what is made may lack the axis.

    If it has one more, the numbers say where the whole tensor is along that.
    """
    dim, given, made = of.dim, of.given, of.made
    shift = len(made) - len(given)
    others = [axis for axis in range(len(given)) if shift > 0 or axis != dim]
    kept = {axis: axis + shift * (axis >= dim) for axis in others}
    sizes = [1 if axis != dim or shift < 0 else -1 for axis in range(len(made))]
    axes = () if shift > 0 else (dim,)
    return Pick(given, made, axes, kept, lambda: numbers().reshape(sizes), fills)


def _cut(of: Between, places: slice) -> Pick:
    return _along(of, lambda: np.arange(of.below[of.dim])[places])


def _filled(of: Between, start: int, length: int) -> Pick:
    """A tensor that is a part of the output along an axis."""

    def numbers() -> Labels:
        found = np.full(of.above[of.dim], NO_SAMPLE)
        found[start : start + length] = np.arange(length)
        return found

    return _along(of, numbers, fills=True)


def _end(number: int, length: int) -> int:
    """An end of a slice from 0 on."""
    return max(number + length, 0) if number < 0 else min(number, length)


def _slice(of: Between) -> Pick:
    start, end = (_end(of.saved(name), of.below[of.dim]) for name in ("start", "end"))
    return _cut(of, slice(start, end, of.saved("step")))


def _select(of: Between) -> Pick:
    place = _end(of.saved("index"), of.below[of.dim])
    return _cut(of, slice(place, place + 1))


def _unbind(of: Between) -> Pick:
    return _cut(of, slice(of.output, of.output + 1))


def _split(of: Between) -> Pick:
    size = of.saved("split_size")
    return _cut(of, slice(of.output * size, (of.output + 1) * size))


def _split_with_sizes(of: Between) -> Pick:
    sizes = saved(of.node, "split_sizes")
    start = sum(sizes[: of.output])
    return _cut(of, slice(start, start + sizes[of.output]))


def _by_index(of: Between) -> Pick:
    return _along(of, lambda: of.read("index").reshape(-1))


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
    return _filled(of, start, of.below[dim])


def _stack(of: Between) -> Pick:
    return _filled(of, of.place, 1)


# Along several axes -----------------------------------------------------------------------------


def _gathered(of: Between, name: str) -> Pick:
    """Each entry is picked by an index of its own, as by ``torch.gather``."""
    dim, given = of.dim, of.given

    def numbers() -> Labels:
        index = of.read(name)
        index = np.expand_dims(index, dim) if index.ndim < len(given) else index
        places: list[NDArray[Any]] = [*np.indices(index.shape, sparse=True)]
        places[dim] = index
        return np.ravel_multi_index(places, given).reshape(of.made)

    kept = _along(of, numbers).kept
    whole = {axis: place for axis, place in kept.items() if given[axis] == of.made[place]}
    return Pick(given, of.made, tuple(range(len(given))), whole, numbers)


def _sorted(of: Between) -> Pick:
    return _gathered(of, "indices")


def _gather(of: Between) -> Pick | None:
    return _gathered(of, "index") if of.place == 0 else None


def _scatter(of: Between) -> Pick:
    if tuple(of.seen("index")[0].shape) != of.below:  # type: ignore[union-attr]
        raise UnavailableError("some entries of what is scattered are left out")
    return _gathered(of, "index")


def _turned(of: Between, turn: Callable[[Labels, list[int]], Labels]) -> Pick:
    """Entries change places along some axes, or along all as if they were one."""
    dims = positive(saved(of.node, "dims"), len(of.below))
    axes = sorted(dims) or range(len(of.below))
    sizes = [n if axis in axes else 1 for axis, n in enumerate(of.below)]
    kept = {axis: axis for axis in range(len(of.below)) if axis not in axes}
    numbers = np.arange(prod(sizes)).reshape(sizes)
    return Pick(of.below, of.above, tuple(axes), kept, lambda: turn(numbers, dims))


def _flip(of: Between) -> Pick:
    return _turned(of, lambda numbers, dims: np.flip(numbers, tuple(dims)))


def _roll(of: Between) -> Pick:
    shifts = [signed(shift) for shift in saved(of.node, "shifts")]
    return _turned(of, lambda numbers, dims: np.roll(numbers, shifts, dims or None))


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
        """The axes along which entries are picked."""
        return tuple(self._places)

    @cached_property
    def dims(self) -> int:
        """The number of axes that they have together."""
        given = [self._given[place] for place, _ in self._places.values()]
        masks = [own >= 0 for _, own in self._places.values()]
        pairs = zip(given, masks, strict=True)
        return max(1 if is_mask else each.dim() for each, is_mask in pairs if each is not None)

    @property
    def front(self) -> int:
        """Where these are in what is selected: in place of axes that are next to each other."""
        first, last = min(self.axes), max(self.axes)
        return first if last - first + 1 == len(self.axes) else 0

    @property
    def whole(self) -> dict[int, int]:
        """Axes whose index counts all entries, with the axis of the indices along which it does."""
        found: dict[int, int] = {}
        for axis, (place, own) in self._places.items():
            index, length = self._given[place], self._of.given[axis]
            assert index is not None
            is_one_axis = own < 0 and max(index.shape, default=1) == index.numel() == length > 1
            if is_one_axis and index.flatten().tolist() == [*range(length)]:
                self._of.read("indices", place)
                found[axis] = self.dims - index.dim() + tuple(index.shape).index(length)
        return found

    def numbers(self) -> Labels:
        """The numbers of entries among those of the axes, of the shape of all indices."""
        sizes = [self._of.given[axis] for axis in self.axes]
        found: list[NDArray[Any]] = []
        for place, own in self._places.values():
            read = self._of.read("indices", place)
            found.append(read if own < 0 else read.nonzero()[own])
        pairs = zip(found, sizes, strict=True)
        inside = np.broadcast_arrays(*(index % max(length, 1) for index, length in pairs))
        return np.ravel_multi_index(inside, sizes)


def _index(of: Between) -> Pick:
    """Rows that are selected by tensors of indices or masks, as ``x[rows, places]``."""
    indices, given = _Indices(of), of.given
    front, dims = indices.front, indices.dims
    free = [axis for axis in range(len(given)) if axis not in indices.axes]
    # Axes of length 1 in front may be missing in what is put.
    missing = len(free) + dims - len(of.made)
    kept = {axis: n + (dims if n >= front else 0) - missing for n, axis in enumerate(free)}
    places = range(len(of.made))
    if any(n not in places or given[axis] != of.made[n] for axis, n in kept.items()):
        raise UnavailableError(REPEATED)
    kept |= {axis: front + place - missing for axis, place in indices.whole.items()}

    def numbers() -> Labels:
        found = indices.numbers()
        sizes = [*[1] * front, *found.shape, *[1] * (len(free) - front)]
        if prod(sizes[:missing]) > 1:
            raise UnavailableError(REPEATED)
        return found.reshape(sizes[missing:])

    return Pick(given, of.made, indices.axes, kept, numbers)


def _single(of: Between, numbers: Callable[[], Labels]) -> Pick:
    """Each entry of a tensor is picked by itself."""
    return Pick(of.given, of.made, tuple(range(len(of.given))), {}, numbers)


def _masked(of: Between) -> Labels:
    return np.flatnonzero(np.broadcast_to(of.read("mask"), of.given))


def _masked_select(of: Between) -> Pick:
    return _single(of, lambda: _masked(of))


def _take(of: Between) -> Pick:
    return _single(of, lambda: of.read("index").reshape(of.made))


def _masked_scatter(of: Between) -> Pick:

    def numbers() -> Labels:
        found, taken = np.full(prod(of.made), NO_SAMPLE), _masked(of)
        found[: len(taken)] = taken
        return found.reshape(of.made)

    return _single(of, numbers)


REPEATED = "what is put is repeated"

PICKING: dict[str, Callable[[Between], Pick | None]] = {
    "Slice": _slice,
    "Select": _select,
    "Unbind": _unbind,
    **dict.fromkeys(("Split", "UnsafeSplit"), _split),
    **dict.fromkeys(("SplitWithSizes", "UnsafeSplitWithSizes"), _split_with_sizes),
    "Flip": _flip,
    "Roll": _roll,
    "IndexSelect": _by_index,
    **dict.fromkeys(("Sort", "Topk", "Kthvalue", "Mode"), _sorted),
    "Gather": _gather,
    "Cat": _cat,
    "Stack": _stack,
    "Index": _index,
    "MaskedSelect": _masked_select,
    "Take": _take,
}
"""Kinds whose output has entries of their inputs, picked by what they have saved."""

PUTTING: dict[str, Callable[[Between], Pick | None]] = {
    **dict.fromkeys(("IndexAdd", "IndexCopy"), _by_index),
    **dict.fromkeys(("ScatterAdd", "Scatter"), _scatter),
    "IndexPut": _index,
    "MaskedScatter": _masked_scatter,
}
"""Kinds whose inputs but the first have entries of their output, as far as gradients go."""
