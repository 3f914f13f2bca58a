"""After which sample each row of a graph is named: labels carried from the model's inputs upwards.

The rows of what the model was called with are the samples. Each node hands their names on by the
rules of its kind, as it hands gradients on in the other direction (``gradlens.samples.structure``).
A row that is computed from rows of one name, and from data without a name such as statistics of the
batch, has this name; a row that is computed from rows of several names is mixed, and one behind a
kind of node that isn't known is unknown. A name doesn't say that no other sample has a share in a
row. The labels that start at the loss decide that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod

import numpy as np

from gradlens.graph.graph import Edge, each_once
from gradlens.graph.kinds import kind_of, plain_name
from gradlens.numerics.unavailable import UnavailableError
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
    labels_of,
    moved,
    only,
    replaced,
)
from gradlens.samples.model_inputs import Named
from gradlens.samples.passages import Passage, Passages
from gradlens.samples.picks import OVERWRITING, PICKING, PUTTING


class Names:
    """The names of the elements at the edges of a graph, from those that are ``known``.

    The rows that a model has ``returned`` are named in the order of its inputs' rows, if nothing
    else is known of them: some are named ``by_order`` then. ``NO_SAMPLE`` is no name, and
    ``UNREADABLE`` an unknown one.
    """

    def __init__(
        self,
        passages: Passages,
        alone: Sequence[bool],
        reading_data: Set[int],
        known: Mapping[Edge, Named],
        returned: Mapping[Edge, Labels],
    ) -> None:
        """Nodes that are ``alone`` compute with parameters alone; others are ``reading_data``."""
        graph = self._graph = passages.graph
        self._passages = passages
        self._alone = alone
        self._reading_data = reading_data
        self.known = known
        self.by_order = False
        self._names: dict[Edge, Labels] = {}
        for number in (n for n, is_alone in enumerate(alone) if not is_alone):
            for output in graph.outputs_of(number):
                edge = (number, output)
                given = known.get(edge)
                names = self._above(number, output)
                if given is not None:
                    self.by_order |= given.by_order
                    names = replaced(given.names, NO_SAMPLE, UNREADABLE)
                if names is not None and not are_none(names):
                    self._names[edge] = names
                if edge in returned and (
                    self.may_be_in_order(edge, returned[edge])
                    or (self._may_meet(edge) and self._rows_are_kept(edge, returned[edge]))
                ):
                    self._names[edge] = returned[edge]
                    self.by_order = True
                elif edge in returned and not self._are_exact and self._is_other(edge, returned):
                    # Rows that were named by their order inside were in another one there.
                    self._names[edge] = only(UNREADABLE, len(graph.shape(edge)))

    @property
    def selects(self) -> bool:
        """Whether the names depend on indices."""
        return bool(self._passages.selections)

    @property
    def are_in_order(self) -> bool:
        """Whether all known rows are in the order of what the model was called with."""
        return all(each.in_order for each in self.known.values())

    @property
    def _are_shuffled(self) -> bool:
        """Whether rows of the inputs come in another order, and it isn't known in which."""
        return any(not each.in_order and not are_known(each.names) for each in self.known.values())

    def at(self, edge: Edge) -> Labels:
        """The names of the elements at an edge."""
        names = self._names.get(edge)
        return only(NO_SAMPLE, len(self._graph.shape(edge))) if names is None else names

    def meet_behind(self, edge: Edge) -> bool:
        """Whether rows of several names come together at an edge, or behind it."""
        return any(bool((names == MIXED).any()) for names in self.behind(edge))

    def _is_other(self, edge: Edge, places: Mapping[Edge, Labels]) -> bool:
        """Whether all rows have names, and some not that of their place."""
        names = self.at(edge)
        return are_known(names) and differ(names, places[edge])

    def may_be_in_order(self, edge: Edge, places: Labels) -> bool:
        """Whether rows without known names may have those of their places.

        The number of rows that were selected may be N by chance. Where some rows have a name, it is
        that of their place, and they were put into a tensor that has a row for each place.
        """
        names = self.at(edge)
        if self._are_shuffled or are_known(names):
            return False
        if int(names.max()) >= 0:
            contradict = differ(names, places) or names.min() < NO_SAMPLE
            return not contradict and self._are_put(edge)
        if names.min() != UNREADABLE and self.are_behind(edge):
            return False
        return self._rows_are_kept(edge, places)

    def _rows_are_kept(self, edge: Edge, places: Labels) -> bool:
        """Whether no rows are selected on the way to a tensor that has as many, or reordered.

        Where inputs are recognised, the names of reordered rows are known.
        """
        places_at, waiting = {edge: places}, [edge]
        for above in each_once(waiting):
            for place, below in enumerate(self._graph.children[above[0]]):
                if below is not None and not self._alone[below[0]]:
                    is_kept, own = self._kept_from(above, places_at[above], place, below)
                    if not is_kept:
                        return False
                    if own is not None:
                        places_at[below] = own
                        waiting.append(below)
        return True

    def _kept_from(
        self, above: Edge, names: Labels, place: int, below: Edge
    ) -> tuple[bool, Labels | None]:
        """Whether a node keeps the rows of an input, and the places of these if it has as many."""
        if names.size == 1:
            return True, None
        shape, (axis,) = self._graph.shape(below), axes_of(names)
        samples = names.size
        is_kept, own = not self._selects(above, below), None
        for each in (n for n, length in enumerate(shape) if length == samples):
            along = moved(names, {axis: each}, len(shape))
            found = self._passages.at(*above, place).up(along)
            if found is not None and np.array_equal(found, names):
                return True, along
            if found is not None and are_known(found):
                is_one = found.size == 1 and each == axis
                is_repeated = is_one and self._may_select(above[0])
                if axes_of(found) == axes_of(names) or is_repeated:
                    return is_kept and self._are_exact, own
            if each == axis:
                own = along
        return is_kept, own

    def _are_put(self, edge: Edge) -> bool:
        """Whether a tensor has its rows from one that some rows were put into."""
        rows, waiting = self._graph.shape(edge)[:1], [edge]
        found = False
        for above in each_once(waiting):
            is_put = self._name(above[0]) in PUTTING
            found |= is_put
            for place, below in enumerate(self._graph.children[above[0]]):
                if below is None or self._alone[below[0]] or (is_put and place > 0):
                    continue
                if self._graph.shape(below)[:1] == rows:
                    waiting.append(below)
                elif self._name(above[0]) in PICKING:
                    return False
        return found

    def _name(self, number: int) -> str:
        return plain_name(self._graph.kinds[number])

    def _may_select(self, number: int) -> bool:
        return kind_of(self._graph.kinds[number]).selects

    def _selects(self, above: Edge, below: Edge) -> bool:
        """Whether a node selects rows, rather than entries of rows."""
        shapes = self._graph.shape(above), self._graph.shape(below)
        changed = shapes[0][:1] != shapes[1][:1] or len(shapes[1]) > len(shapes[0])
        return changed and self._may_select(above[0])

    def _may_meet(self, edge: Edge) -> bool:
        """Whether rows that have no names may be of a sample each, since samples meet behind them.

        The labels at known rows tell.
        """
        unnamed = int(self.at(edge).max()) < 0 and not self._are_shuffled
        return self._are_exact and unnamed and len(self._graph.shape(edge)) > 1

    @property
    def _are_exact(self) -> bool:
        """Whether some rows are known to be those of the model's inputs."""
        return any(not each.by_order for each in self.known.values())

    def are_behind(self, edge: Edge) -> bool:
        """Whether there are names at an edge, or behind it."""
        return bool(self.behind(edge))

    def behind(self, edge: Edge) -> list[Labels]:
        """All names at an edge and behind it."""
        behind = self._graph.below([edge[0]])
        return [names for (number, _), names in self._names.items() if number in behind]

    def _above(self, number: int, output: int) -> Labels | None:
        """The names of a node's output, from those of its inputs.

        One number has a name only if all that it is computed from has this name.
        """
        shape = self._graph.shape((number, output))
        unreadable = only(UNREADABLE, len(shape))
        if number in self._reading_data:
            return unreadable
        named: dict[int, Labels] = {}
        unknown: dict[int, Labels] = {}
        for place, edge in enumerate(self._graph.children[number]):
            if edge is None or self._alone[edge[0]]:
                continue
            before = self._names.get(edge)
            passage = self._passages.at(number, output, place)
            names = None if before is None else self._up(passage, place, number, before)
            is_unknown = names is not None and names.min() == UNREADABLE
            if prod(shape) == 1:
                whole = names if passage.picks else before
                if names is None or whole is None or not are_known(whole):
                    return names if is_unknown else None
            if names is not None:
                (unknown if is_unknown else named)[place] = names
        found: Labels | None = None
        for names in named.values():
            found = names if found is None else combined(found, names)
        for place, names in unknown.items():
            if found is None or are_none(found):
                found = names
            elif not any(self._covers(number, output, each, place) for each in named):
                found = combined(found, names)
        return found

    def _covers(self, number: int, output: int, place: int, other: int) -> bool:
        """Whether an input has the rows of another one itself, and isn't repeated for them."""
        one, two = (self._passages.at(number, output, each).sizes for each in (place, other))
        return all(own > 1 or length == 1 for own, length in zip(one, two, strict=True))

    def _up(self, passage: Passage, place: int, number: int, names: Labels) -> Labels | None:
        """Names of an output, without those of entries that another input takes the place of."""
        found, other = passage.up(names), self._graph.children[number][1:2]
        is_overwritten = place == 0 and names.size == 1 and self._name(number) in OVERWRITING
        if found is None or not is_overwritten or other[0] not in self._names:
            return found
        shape, put = passage.above, self._names[other[0]]
        try:
            pick = self._passages.at(number, 0, 1).pick
            if pick is None or (axes_of(put) and pick.are_beside(put, shape)):
                return found
            taken = pick.apply(np.arange(prod(shape)).reshape(shape))
        except UnavailableError:  # of indices that can't be read now
            return only(UNREADABLE, len(shape))
        written = np.broadcast_to(found, shape).flatten()
        written[taken[taken >= 0]] = NO_SAMPLE
        return labels_of(written.reshape(shape))
