"""How labels go between the outputs and the inputs of nodes, up and down a graph.

Through a node goes the axis that its kind hands on (``gradlens.graph.kinds``). Where it puts
tensors together, cuts them or selects entries by indices, the labels are put together, cut and
selected in the same way, by what the node has saved, such as the indices of a sort or a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradlens.graph.graph import Graph, is_python_function
from gradlens.graph.kinds import Kind, from_the_right, kind_of, plain_name
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
from gradlens.samples.picks import PICKING, PUTTING, Between, Pick, SavedIndices, Selection, whole
from gradlens.torch_private import hands_gradients_on, saved


class Passages:
    """Between the outputs and the inputs of a graph's nodes, each of which is looked at once.

    There are N ``samples``. Functions in Python that are ``elementwise`` don't move rows.
    """

    def __init__(self, graph: Graph, samples: int, elementwise: Set[int] = frozenset()) -> None:
        self.graph = graph
        self.samples = samples
        self.elementwise = elementwise
        self._found: dict[tuple[int, int, int], Passage] = {}
        self._indices = SavedIndices(graph)

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The indices that were read."""
        return tuple(self._indices.read.values())

    def at(self, number: int, output: int, place: int) -> Passage:
        """The passage between an output of a node and its input number ``place``."""
        found, graph = self._found.get((number, output, place)), self.graph
        if found is None:
            edge = graph.children[number][place]
            assert edge is not None
            shapes = graph.shape((number, output)), graph.shape(edge)
            is_elementwise = number in self.elementwise
            found = Passage(
                graph.nodes[number],
                place,
                output,
                *shapes,
                number,
                self._indices,
                self.samples,
                is_elementwise,
            )
            self._found[number, output, place] = found
        return found


@dataclass(frozen=True, eq=False)
class Passage(Between):
    """Between an output of a node and one of its inputs; ``is_elementwise`` doesn't move rows."""

    samples: int
    is_elementwise: bool = False

    @cached_property
    def kind(self) -> Kind:
        """What is known of the node's kind."""
        return kind_of(self.indices.graph.kinds[self.number])

    @cached_property
    def picks(self) -> Callable[[Between], Pick | None] | None:
        """How the output has entries of the input, picked by what the node has saved."""
        return PICKING.get(plain_name(self.indices.graph.kinds[self.number]))

    @cached_property
    def puts(self) -> Callable[[Between], Pick] | None:
        """How the node puts entries of its inputs into the first one."""
        return PUTTING.get(plain_name(self.indices.graph.kinds[self.number]))

    @cached_property
    def pick(self) -> Pick | None:
        """Which entries of a tensor are those of the other one; ``None`` if that isn't known.

        ``UnavailableError`` if what the node has saved can't be read now.
        """
        if self.picks is not None:
            return self.picks(self)
        return self.puts(self) if self.puts is not None and self.place else whole(self)

    @cached_property
    def _axes(self) -> tuple[int | None, ...]:
        """The axis of the input that each axis of the output goes on in, if there is one."""
        rule, dims = self.kind.axes, range(self.inputs)
        if rule is None:
            return ()
        found = [rule(self, axis) for axis in range(self.outputs)]
        return tuple([axis if axis in dims else None for axis in found])

    @property
    def sizes(self) -> Shape:
        """The lengths of the input along the axes of the output, 1 where it is repeated."""
        if self.kind.axes is None:
            return self.above
        return tuple([1 if along is None else self.below[along] for along in self._axes])

    def may_join_others(self, names: Labels) -> bool:
        """Whether data beside the input may have rows of samples that the output's names lack.

        It may where one sample is repeated for several rows, or where some are for N.
        """
        if self.picks or self.puts or are_none(names) or are_all(names, self.samples):
            return False
        lengths = self.above[:-1] or self.above
        if names.size > 1:
            return self.samples in lengths
        return any(own == 1 < length for own, length in zip(self.sizes, lengths, strict=False))

    @property
    def _is_same(self) -> bool:
        """Whether each entry is computed from the one at the same place."""
        is_elementwise = self.is_elementwise or self.kind.axes is from_the_right
        return is_elementwise and self.above == self.below

    @property
    def _is_known(self) -> bool:
        """Whether there is anything that labels go by."""
        return bool(self.kind.axes or self.kind.in_order or self.picks or self.puts)

    def up(self, names: Labels) -> Labels:
        """Names of the output, from those of the input."""
        dims = len(self.above)
        straight = self._straight(names, self.below, self.above)
        if straight is not None:
            return straight
        if are_none(names):
            return only(NO_SAMPLE, dims)
        try:
            if not (self.picks or self.puts):
                return self._moved_up(names)
            found = self._picked(names, self.above, pulls=bool(self.picks))
            are_added = found is None and self.puts and self.pick and names.min() != UNREADABLE
            return only(NO_SAMPLE if are_added else UNREADABLE, dims) if found is None else found
        except UnavailableError:  # of indices that can't be read now
            return only(UNREADABLE, dims)

    def _straight(self, labels: Labels, given: Shape, other: Shape) -> Labels | None:
        """Labels of another shape, up or down; ``None`` unless entries go on as they are."""
        if 0 in given or 0 in other:
            return only(NO_SAMPLE, len(other))
        if self._is_same:
            return labels
        if self.kind.in_order:
            return reshaped(labels, given, other)
        if self._is_known or not hands_gradients_on(self.node):
            return None
        return labels if self.output == self.place else only(NO_SAMPLE, len(other))

    def _picked(self, labels: Labels, shape: Shape, *, pulls: bool) -> Labels | None:
        """Labels of the input or the output, whose shape is given, by those of the other one.

        The pick ``pulls`` them from where they are picked, or pushes them back there.
        """
        pick = self.pick
        if pick is None or not pulls:
            return None if pick is None else pick.pushed(labels, shape, self.samples)
        found = pick.pulled(labels, len(shape))
        fits = found.ndim == len(shape)
        fits = fits and all(shape[axis] == found.shape[axis] for axis in axes_of(found))
        return found if fits else None

    def _moved_up(self, names: Labels) -> Labels:
        """Names of an output by the axes that the node's kind hands on; others are reduced."""
        dims = len(self.above)
        if self.kind.axes is None or (
            self._is_grouped and names.shape[(1 - self.place) % names.ndim] > 1
        ):
            return only(UNREADABLE, dims)
        places = {along: axis for axis, along in self._places.items()}
        found = _at(names, places, self.above, NO_SAMPLE)
        return only(NO_SAMPLE, dims) if found is None else found

    @cached_property
    def _places(self) -> dict[int, int]:
        """The axes of the output that go on in the input, with their places there."""
        found: dict[int, int] = {}
        for axis, along in enumerate(self._axes):
            if along is not None and along not in found.values():
                found[axis] = along
        return found

    @property
    def _is_grouped(self) -> bool:
        """Whether it is a convolution of groups of channels, each by itself."""
        return self.kind.is_layer and saved(self.node, "groups", 1) > 1

    def down(self, labels: Labels) -> Labels | None:
        """Labels of the input, from those of the output; ``None`` if the kind doesn't tell."""
        straight = self._straight(labels, self.above, self.below)
        if straight is not None:
            return straight
        if not self._is_known and is_python_function(self.node):
            return None  # it may do anything
        try:
            is_picked = self.picks or self.puts
            found = self._picked(labels, self.below, pulls=bool(self.puts)) if is_picked else None
        except UnavailableError:  # of indices that can't be read now
            return None
        if found is not None:
            return found
        if labels.size == 1:
            return labels.reshape([1] * len(self.below))
        if self.kind.axes is None:
            return None
        # Along other axes, entries of several samples are added up, which is certain if it only
        # adds up the gradients of all entries that one was repeated for.
        is_sum = self.kind.repeats and self.kind.is_linear
        return _at(labels, self._places, self.below, MIXED if is_sum else None)


def _at(
    labels: Labels, places: Mapping[int, int], shape: Shape, differing: int | None
) -> Labels | None:
    """Labels of a tensor of this shape, with their axes at other places there.

    Where entries of several labels come together, they have the label ``differing``; without that,
    there are no labels. An axis may be a multiple of what it was, whose entries were repeated.
    """
    found: Labels | None = labels
    for axis in axes_of(labels):
        if axis not in places and found is not None:
            found = joined(found, axis, differing)
    found = None if found is None else moved(found, places, len(shape))
    for axis, length in enumerate(shape):
        if found is None or found.shape[axis] in (1, length):
            continue
        times, rest = divmod(length, found.shape[axis])
        if not rest:
            found = np.tile(found, [times if each == axis else 1 for each in range(len(shape))])
        elif found.shape[axis] % length == 0:
            found = joined(found, axis, differing, length)
        else:
            return None
    return found
