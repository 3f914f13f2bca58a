"""How labels go between the outputs and the inputs of nodes, up and down a graph.

Through a node goes the axis that its kind hands on (``gradlens.graph.kinds``). Where it puts
tensors together, cuts them or selects entries by indices, the labels are put together, cut and
selected in the same way, by what the node has saved, such as the indices of a sort or a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Graph, is_python_function
from gradlens.graph.kinds import Kind, Node, from_the_right, kind_of, plain_name
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.labels import (
    MIXED,
    NO_SAMPLE,
    UNREADABLE,
    Labels,
    Shape,
    are_all,
    are_none,
    axes_of,
    joined,
    moved,
    only,
    reshaped,
)
from gradlens.samples.picks import PICKING, PUTTING, Between, Pick, whole
from gradlens.torch_private import hands_gradients_on, saved


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


@dataclass(frozen=True)
class _Rule:
    """How a kind of node hands labels on: by its ``kind``, or as it picks or puts entries."""

    kind: Kind
    picks: Callable[[Between], Pick | None] | None
    puts: Callable[[Between], Pick] | None

    @property
    def is_known(self) -> bool:
        """Whether there is anything that labels go by."""
        return bool(self.kind.axes or self.kind.in_order or self.picks or self.puts)


@cache
def _rule_of(name: str) -> _Rule:
    plain = plain_name(name)
    return _Rule(kind_of(name), PICKING.get(plain), PUTTING.get(plain))


class Passages:
    """Between the outputs and the inputs of a graph's nodes, each of which is looked at once.

    Functions in Python that are ``elementwise`` don't move rows.
    """

    def __init__(self, graph: Graph, elementwise: Set[int] = frozenset()) -> None:
        self.graph = graph
        self.elementwise = elementwise
        self._found: dict[tuple[int, int, int], Passage] = {}
        self._read: dict[tuple[int, str, int], Selection] = {}

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The indices that were read."""
        return tuple(self._read.values())

    def at(self, number: int, output: int, place: int) -> Passage:
        """The passage between an output of a node and its input number ``place``."""
        found, graph = self._found.get((number, output, place)), self.graph
        if found is None:
            edge = graph.children[number][place]
            assert edge is not None
            shapes = graph.shape((number, output)), graph.shape(edge)
            found = Passage(graph.nodes[number], place, output, *shapes, number, self)
            self._found[number, output, place] = found
        return found

    def read(self, number: int, name: str, place: int) -> NDArray[Any]:
        """An index that a node has saved, on which the labels depend from then on."""
        key = (number, name, place)
        if key not in self._read:
            found = _saved(self.graph.nodes[number], name)[place]
            assert found is not None
            self._read[key] = Selection(*key, found.detach().clone())
        return self._read[key].index.cpu().numpy()


@dataclass(frozen=True, eq=False)
class Passage(Between):
    """Between an output of the node with a ``number`` and one of its inputs."""

    number: int
    passages: Passages

    @property
    def _rule(self) -> _Rule:
        return _rule_of(self.passages.graph.kinds[self.number])

    @property
    def picks(self) -> bool:
        """Whether the output has entries of the input, picked by what the node has saved."""
        return self._rule.picks is not None

    @property
    def all_sizes(self) -> list[Shape | None]:
        graph = self.passages.graph
        edges = graph.children[self.number]
        return [None if edge is None else graph.shape(edge) for edge in edges]

    def seen(self, name: str) -> Sequence[Tensor | None]:
        return _saved(self.node, name)

    def read(self, name: str, place: int = 0) -> NDArray[Any]:
        return self.passages.read(self.number, name, place)

    @cached_property
    def pick(self) -> Pick | None:
        """Which entries of a tensor are those of the other one; ``None`` if that isn't known.

        ``UnavailableError`` if what the node has saved can't be read now.
        """
        rule = self._rule
        if rule.picks is not None:
            return rule.picks(self)
        return rule.puts(self) if rule.puts is not None and self.place else whole(self)

    @cached_property
    def _axes(self) -> tuple[int | None, ...]:
        """The axis of the input that each axis of the output goes on in, if there is one."""
        rule, dims = self._rule.kind.axes, range(self.inputs)
        if rule is None:
            return ()
        found = [rule(self, axis) for axis in range(self.outputs)]
        return tuple([axis if axis in dims else None for axis in found])

    @property
    def sizes(self) -> Shape:
        """The lengths of the input along the axes of the output, 1 where it is repeated."""
        if self._rule.kind.axes is None:
            return self.above
        return tuple([1 if along is None else self.below[along] for along in self._axes])

    @property
    def _is_empty(self) -> bool:
        return 0 in self.above or 0 in self.below

    @property
    def _is_same(self) -> bool:
        """Whether each entry is computed from the one at the same place."""
        is_elementwise = self._rule.kind.axes is from_the_right
        is_elementwise = is_elementwise or self.number in self.passages.elementwise
        return is_elementwise and self.above == self.below

    @property
    def _hands_on(self) -> bool:
        return not self._rule.is_known and hands_gradients_on(self.node)

    def up(self, names: Labels) -> Labels:
        """Names of the output, from those of the input."""
        rule, dims = self._rule, len(self.above)
        if self._is_empty or are_none(names):
            return only(NO_SAMPLE, dims)
        if self._is_same:
            return names
        if self._hands_on:
            return names if self.output == self.place else only(NO_SAMPLE, dims)
        if rule.kind.in_order:
            return reshaped(names, self.below, self.above)
        try:
            return self._picked_up(names) if rule.picks or rule.puts else self._moved_up(names)
        except UnavailableError:  # of indices that can't be read now
            return only(UNREADABLE, dims)

    def _picked_up(self, names: Labels) -> Labels:
        pick, dims = self.pick, len(self.above)
        if pick is None:
            return only(UNREADABLE, dims)
        if self.picks:
            return pick.pulled(names, dims)
        if axes_of(names) and pick.are_beside(names, self.above):
            return pick.unpicked(names, dims)
        found = pick.put(names, self.above, pick.axes)
        if found is None:  # several are added up
            return only(UNREADABLE if names.min() == UNREADABLE else NO_SAMPLE, dims)
        return found

    def _moved_up(self, names: Labels) -> Labels:
        """Names of an output by the axes that the node's kind hands on; others are reduced."""
        dims = len(self.above)
        if self._rule.kind.axes is None or (
            self._is_grouped and names.shape[(1 - self.place) % names.ndim] > 1
        ):
            return only(UNREADABLE, dims)
        places: dict[int, int] = {}
        for axis, along in enumerate(self._axes):
            if along is not None:
                places.setdefault(along, axis)
        for axis in axes_of(names):
            if axis not in places:
                joint = joined(names, axis, NO_SAMPLE)
                assert joint is not None
                names = joint
        found, times = moved(names, places, dims), [1] * dims
        for axis in axes_of(found):
            times[axis], rest = divmod(self.above[axis], found.shape[axis])
            if rest:
                return only(NO_SAMPLE, dims)
        return np.tile(found, times)

    @property
    def _is_grouped(self) -> bool:
        """Whether it is a convolution of groups of channels, each by itself."""
        return self._rule.kind.is_layer and saved(self.node, "groups", 1) > 1

    def down(self, labels: Labels, samples: int) -> Labels | None:
        """Labels of the input, from those of the output; ``None`` if the kind doesn't tell."""
        rule, dims = self._rule, len(self.below)
        if self._is_empty:
            return only(NO_SAMPLE, dims)
        if self._is_same:
            return labels
        if self._hands_on:
            return labels if self.output == self.place else only(NO_SAMPLE, dims)
        if not rule.is_known and is_python_function(self.node):
            return None  # it may do anything
        if rule.kind.in_order:
            return reshaped(labels, self.above, self.below)
        try:
            found = self._picked_down(labels, samples) if rule.picks or rule.puts else None
        except UnavailableError:  # of indices that can't be read now
            return None
        if found is not None:
            return found
        if labels.size == 1:
            return labels.reshape([1] * dims)
        if rule.kind.axes is None:
            return None
        # It adds up the gradients of all entries that one was repeated for.
        is_sum = rule.kind.repeats and rule.kind.is_linear
        return self._moved_down(labels, MIXED if is_sum else None)

    def _picked_down(self, labels: Labels, samples: int) -> Labels | None:
        """Labels of an input that entries are picked from, or put from.

        Where other axes tell all samples apart, entries beside the picked ones belong to the same
        sample. So do those along an axis of which each index picks entries of one sample.
        """
        pick, below = self.pick, self.below
        if pick is None:
            return None
        if self._rule.puts:
            found = pick.pulled(labels, len(below))
            fits = found.ndim == len(below)
            fits = fits and all(below[axis] == found.shape[axis] for axis in axes_of(found))
            return found if fits else None
        if pick.are_beside(labels, below) and are_all(labels, samples):
            return pick.unpicked(labels, len(below))
        if pick.apart and len(pick.axes) > 1:
            for axis in pick.axes:
                put = pick.put(labels, below, [axis])
                if put is not None and are_all(put, samples):
                    return put
        return pick.put(labels, below, pick.axes)

    def _moved_down(self, labels: Labels, mixed: int | None) -> Labels | None:
        """Labels of an input by the axes that the rule of the node's kind hands on.

        Along others, entries of several samples are added up, which get the label ``mixed`` if it
        is certain that they are; otherwise, there are no labels.
        """
        places: dict[int, int] = {}
        found: Labels | None = labels
        for axis in axes_of(labels):
            along = self._axes[axis]
            if along is None or along in places.values():
                found = None if found is None else joined(found, axis, mixed)
            else:
                places[axis] = along
        if found is None:
            return None
        found = moved(found, places, len(self.below))
        for axis in axes_of(found):
            length, whole = found.shape[axis], self.below[axis]
            if length != whole:
                # An input that is repeated has several entries of the output for each of its own.
                found = joined(found, axis, mixed, whole) if length % whole == 0 else None
                if found is None:
                    return None
        return found
