"""After which sample each row of a graph is named: labels carried from the model's inputs upwards.

The rows of what the model was called with are the samples. Each node hands their names on by the
rules of its kind, as it hands gradients on in the other direction (``gradlens.samples.structure``).
A row that is computed from rows of one name, and from data without a name such as statistics of the
batch, has this name; a row that is computed from rows of several names is mixed, and one behind a
kind of node that isn't known is unknown. A name doesn't say that no other sample has a share in a
row. The labels that start at the loss decide that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from functools import reduce
from math import prod

import numpy as np

from gradlens.graph.graph import Edge, each_once
from gradlens.graph.kinds import kind_of
from gradlens.samples.labels import (
    MIXED,
    NO_SAMPLE,
    UNREADABLE,
    Labels,
    are_known,
    are_none,
    axes_of,
    combined,
    differ,
    distinct,
    has_unnamed,
    moved,
    only,
    replaced,
    without_gaps,
)
from gradlens.samples.model_inputs import Named, counting_axes
from gradlens.samples.passages import Passages


class Names:
    """The names of the elements at the edges of a graph, from those that are ``known``.

    The rows that a model has ``returned`` are named in the order of its inputs' rows, if nothing
    else is known of them: some are named ``by_order`` then. Others ``may_be_reordered`` if they
    were named by their places (``may_be_in_order``), and a node has put them in order before, which
    the labels at the inputs may tell. Data of samples comes in at nodes that are ``reading_data``.
    ``NO_SAMPLE`` is no name, and ``UNREADABLE`` an unknown one.
    """

    def __init__(
        self,
        passages: Passages,
        reading_data: Set[int],
        known: Mapping[Edge, Named],
        returned: Mapping[Edge, Labels],
    ) -> None:
        graph = self.graph = passages.graph
        self._passages = passages
        self._reading_data = reading_data
        self.known = known
        self.by_order = self.may_be_reordered = False
        self._names: dict[Edge, Labels] = {}
        for number in (n for n, is_alone in enumerate(graph.alone) if not is_alone):
            for output in graph.outputs_of(number):
                edge = (number, output)
                self._names[edge] = self._above(number, output)
                if edge in known:
                    self.by_order |= known[edge].by_order
                    self._names[edge] = replaced(known[edge].names, NO_SAMPLE, UNREADABLE)
                if edge in returned:
                    self._take_for_inputs(edge, returned[edge])
        self.may_be_reordered = False  # inside the model, of which what it returns decides

    def _take_for_inputs(self, edge: Edge, places: Labels) -> None:
        """Name what the model has returned in the order of its inputs, if nothing else is known."""
        names = self.at(edge)
        # Rows may have no names since samples meet behind them; the labels at known rows tell.
        may_meet = self.are_exact and names.max() < 0 and not self.are_shuffled and names.ndim > 1
        axes = counting_axes(self.graph.shape(edge), is_real=False)
        is_one = axes.count(places.size) < 2
        is_kept = self.may_be_in_order(edge, places, is_one)
        if is_kept or (may_meet and self._rows_are_kept(edge, places, is_one)):
            self._names[edge] = places
            self.by_order = True
        elif not self.are_exact and are_known(names) and differ(names, places):
            # Rows that were named by their order inside were in another one there.
            self._names[edge] = only(UNREADABLE, names.ndim)

    @property
    def selects(self) -> bool:
        """Whether the names depend on indices."""
        return bool(self._passages.selections)

    @property
    def are_in_order(self) -> bool:
        """Whether all known rows are in the order of what the model was called with."""
        return all(each.in_order for each in self.known.values())

    @property
    def are_guessed(self) -> bool:
        """Whether data is taken for what the model was called with since it has as many rows."""
        return any(each.by_order for each in self.known.values())

    @property
    def are_reordered(self) -> bool:
        """Whether rows of all samples come in another order somewhere.

        Where names are guessed, it may be that these rows are in order, and the data isn't.
        """
        of_rows = (names.flatten() for names in self._names.values() if len(axes_of(names)) == 1)
        order = np.arange(self._passages.samples)
        pairs = ((names, np.sort(names)) for names in of_rows if len(names) == len(order))
        return any(np.array_equal(s, order) and not np.array_equal(n, s) for n, s in pairs)

    @property
    def are_shuffled(self) -> bool:
        """Whether rows of the inputs come in another order, and it isn't known in which."""
        return any(not each.in_order and not are_known(each.names) for each in self.known.values())

    def at(self, edge: Edge) -> Labels:
        """The names of the elements at an edge."""
        if edge in self._names:
            return self._names[edge]
        return only(NO_SAMPLE, len(self.graph.shape(edge)))

    def meet_behind(self, edge: Edge) -> bool:
        """Whether rows of several names come together at an edge, or behind it."""
        return any(bool((names == MIXED).any()) for names in self.behind(edge))

    def may_be_in_order(self, edge: Edge, places: Labels, are_samples: bool = False) -> bool:
        """Whether rows without known names may have those of their places.

        The number of rows that were selected may be N by chance. Rows ``are_samples`` even if other
        axes had N entries before: those that the model has returned along the only axis that has.
        """
        names = self.at(edge)
        if self.are_shuffled or names.max() >= 0:
            return False
        if names.min() != UNREADABLE and self.are_behind(edge):
            return False
        return self._rows_are_kept(edge, places, are_samples)

    def _rows_are_kept(self, edge: Edge, places: Labels, are_samples: bool) -> bool:
        """Whether no rows are selected on the way to a tensor that has as many, or reordered.

        Where inputs are recognised, the names of reordered rows are known, and those along another
        axis of as many entries.
        """
        places_at, waiting = {edge: places}, [edge]
        for above in each_once(waiting):
            weights = kind_of(self.graph.kinds[above[0]]).weights
            of_layer = () if 0 in weights else weights  # whose rows are those of the first input
            inputs = ((n, e) for n, e in self._inputs(above) if n not in of_layer)
            below = {n: e for n, e in inputs if not self.graph.alone[e[0]]}
            kept = [self._kept_from(above, places_at[above], n, e) for n, e in below.items()]
            pairs = zip(below.values(), (own for _, own in kept), strict=True)
            found = {each: own for each, own in pairs if own is not None}
            if not all(is_kept for is_kept, _ in kept):
                return False
            if places.size > 1 and not found and self._repeats_samples(above[0], below.values()):
                return False
            names = places_at[above]
            if not self.are_exact and names.size > 1:
                if self._are_of_parameters(above, names):
                    return False
                if self._may_be_another_axis(above, found, names.size, are_samples):
                    return False
            places_at |= found
            waiting += found
        return True

    def _are_of_parameters(self, above: Edge, names: Labels) -> bool:
        """Whether parameters have entries along the axis of rows, as networks in front have."""
        weights = ((n, e) for n, e in self._inputs(above) if self.graph.alone[e[0]])
        along = (found for n, e in weights for *_, found in self._along(above, names, n, e))
        return any(found is not None and np.array_equal(found, names) for found in along)

    def _may_be_another_axis(
        self, above: Edge, inputs: Collection[Edge], samples: int, are_samples: bool
    ) -> bool:
        """Whether the axis of rows may be one of N other things, which rows were folded with.

        It ends where single numbers are joined, in any order, or beside another axis of N entries,
        although no data comes in.
        """
        shape = self.graph.shape(above)
        if inputs or (kind_of(self.graph.kinds[above[0]]).joins and prod(shape) == samples):
            return not inputs
        has_data = None in self.graph.children[above[0]]
        is_computed = not all(self.graph.alone[edge[0]] for _, edge in self._inputs(above))
        return is_computed and not (has_data or are_samples) and shape[:2].count(samples) > 1

    def _inputs(self, above: Edge) -> list[tuple[int, Edge]]:
        """The inputs of a node that need a gradient, with their places."""
        edges = enumerate(self.graph.children[above[0]])
        return [(place, edge) for place, edge in edges if edge is not None]

    def _repeats_samples(self, number: int, inputs: Iterable[Edge]) -> bool:
        """Whether a node repeats for its rows what samples were reduced to, or one of them."""
        repeats = kind_of(self.graph.kinds[number]).repeats
        return repeats and any(names.max() >= 0 for edge in inputs for names in self.behind(edge))

    def _kept_from(
        self, above: Edge, names: Labels, place: int, below: Edge
    ) -> tuple[bool, Labels | None]:
        """Whether a node keeps the rows of an input, and the places of these if it has as many."""
        if names.size == 1:
            return True, None
        (axis,) = axes_of(names)
        is_kept, own = not self._selects(above, below), None
        kind, dims = kind_of(self.graph.kinds[above[0]]), len(self.graph.shape(above))
        is_stack = kind.joins and dims > len(self.graph.shape(below))  # the axis may begin here
        for each, along, found in self._along(above, names, place, below):
            if found is not None and np.array_equal(found, names):
                return True, along
            is_known = found is not None and are_known(found)
            if found is not None and is_known:
                is_one = found.size == 1 and each == axis
                is_repeated = is_one and kind.selects
                if axes_of(found) == axes_of(names) or is_repeated:
                    self.may_be_reordered = True
                    return is_kept and self.are_exact, along
            if each == axis and not (is_known or is_stack):
                own = along
        return is_kept, own

    def _along(
        self, above: Edge, names: Labels, place: int, below: Edge
    ) -> Iterator[tuple[int, Labels, Labels | None]]:
        """The axes of an input with as many entries, names along each, and what becomes of them."""
        shape, (axis,) = self.graph.shape(below), axes_of(names)
        for each in (n for n, length in enumerate(shape) if length == names.size):
            along = moved(names, {axis: each}, len(shape))
            yield each, along, self._passages.at(*above, place).up(along)

    def _selects(self, above: Edge, below: Edge) -> bool:
        """Whether a node selects rows, rather than entries of rows."""
        shapes = self.graph.shape(above), self.graph.shape(below)
        changed = shapes[0][:1] != shapes[1][:1] or len(shapes[1]) > len(shapes[0])
        return changed and kind_of(self.graph.kinds[above[0]]).selects

    @property
    def are_exact(self) -> bool:
        """Whether some rows are known to be those of the model's inputs."""
        return any(not each.by_order for each in self.known.values())

    def are_behind(self, edge: Edge) -> bool:
        """Whether there are names at an edge, or behind it."""
        return not all(map(are_none, self.behind(edge)))

    def behind(self, edge: Edge) -> list[Labels]:
        """All names at an edge and behind it."""
        behind = self.graph.below([edge[0]])
        return [names for (number, _), names in self._names.items() if number in behind]

    def samples_behind(self, edge: Edge) -> set[int]:
        """The samples whose rows are known at an edge or behind it."""
        found = set[int]().union(*map(distinct, self.behind(edge)))
        return {sample for sample in found if sample >= 0}

    def _above(self, number: int, output: int) -> Labels:
        """The names of a node's output, from those of its inputs.

        One number has a name only if all that it is computed from has this name.
        """
        shape = self.graph.shape((number, output))
        if number in self._reading_data:
            return only(UNREADABLE, len(shape))
        edges = self.graph.children[number]
        inputs = {n: e for n, e in enumerate(edges) if e is not None and not self.graph.alone[e[0]]}
        passages = {place: self._passages.at(number, output, place) for place in inputs}
        above = {place: passages[place].up(self.at(edge)) for place, edge in inputs.items()}
        has_rest = len(above) > 1 and any(map(has_unnamed, above.values()))
        named: dict[int, Labels] = {}
        unknown: dict[int, Labels] = {}
        for place, edge in inputs.items():
            passage, names = passages[place], above[place]
            kind = passage.kind
            has_data = has_rest or None in edges or (kind.repeats and kind.brings_data)
            if has_data and passage.may_join_others(names):
                names = only(UNREADABLE, len(shape))
            is_unknown = names.min() == UNREADABLE
            whole = names if passage.picks else self.at(edge)
            if prod(shape) == 1 and not (are_known(names) and are_known(whole)):
                return only(UNREADABLE if is_unknown else NO_SAMPLE, len(shape))
            (unknown if is_unknown else named)[place] = names
        every = [*named.values()]
        for place, names in unknown.items():
            named_by = [each for each in named if not are_none(named[each])]
            if not any(self._covers(number, output, each, place) for each in named_by):
                every.append(names)
        found = reduce(combined, every) if every else only(NO_SAMPLE, len(shape))
        # What stands beside rows of samples is of these, such as an image before its caption, or a
        # first step that begins with zeros.
        joins = kind_of(self.graph.kinds[number]).joins
        return without_gaps(found, self._passages.samples) if joins else found

    def _covers(self, number: int, output: int, place: int, other: int) -> bool:
        """Whether an input has the rows of another one itself, and isn't repeated for them."""
        one, two = (self._passages.at(number, output, each).sizes for each in (place, other))
        return all(own > 1 or length == 1 for own, length in zip(one, two, strict=True))
