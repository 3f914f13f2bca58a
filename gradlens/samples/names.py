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
from functools import reduce
from math import prod

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import AxisRule, Step, from_the_right, kind_of, plain_name
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.model_inputs import Named
from gradlens.samples.picks import (
    OVERWRITING,
    PICKING,
    PUTTING,
    Shape,
    at_places,
    unpicked,
)
from gradlens.samples.rows import MIXED, NO_SAMPLE, UNREADABLE
from gradlens.samples.selections import Selection, Selections
from gradlens.samples.structure import compact, reshaped
from gradlens.torch_private import hands_gradients_on, saved


class Names:
    """The names of the elements at the edges of a graph, from those that are ``known``.

    The rows that a model has ``returned`` are named in the order of its inputs' rows, if nothing
    else is known of them: some are named ``by_order`` then. Names have as many axes as the tensors;
    an axis of length 1 has the same names for all entries. ``NO_SAMPLE`` is no name, and
    ``UNREADABLE`` an unknown one.
    """

    def __init__(
        self,
        graph: Graph,
        alone: Sequence[bool],
        reading_data: Set[int],
        known: Mapping[Edge, Named],
        returned: Mapping[Edge, Tensor],
        elementwise: Set[int],
        read: tuple[Selection, ...],
    ) -> None:
        """Nodes that are ``alone`` compute with parameters alone; others are ``reading_data``.

        Functions in Python that are ``elementwise`` don't move rows. What is known depends on the
        indices that were ``read``.
        """
        self._read = read
        self._graph = graph
        self._alone = alone
        self._reading_data = reading_data
        self._elementwise = elementwise
        self.known = known
        self.by_order = False
        self._selections = Selections(graph)
        self._names: dict[Edge, Tensor] = {}
        for number in range(len(graph)):
            for output in graph.outputs_of(number):
                edge = (number, output)
                given = known.get(edge)
                names = self._above(number, output)
                if given is not None:
                    self.by_order |= given.by_order
                    names = given.names.masked_fill(given.names == NO_SAMPLE, UNREADABLE)
                if names is not None and bool((names != NO_SAMPLE).any()):
                    self._names[edge] = names
                if edge in returned and (
                    self.may_be_in_order(edge, returned[edge])
                    or (self._may_meet(edge) and self._rows_are_kept(edge, returned[edge]))
                ):
                    self._names[edge] = returned[edge]
                    self.by_order = True

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The indices that the names depend on."""
        return (*self._read, *self._selections.found)

    @property
    def are_in_order(self) -> bool:
        """Whether all known rows are in the order of what the model was called with."""
        return all(each.in_order for each in self.known.values())

    @property
    def _are_shuffled(self) -> bool:
        """Whether rows of the inputs come in another order, and it isn't known in which."""
        known = (each for each in self.known.values() if not each.in_order)
        return any(bool((each.names < 0).any()) for each in known)

    def at(self, edge: Edge) -> Tensor:
        """The names of the elements at an edge."""
        unnamed = torch.full([1] * len(self._graph.shape(edge)), NO_SAMPLE)
        return self._names.get(edge, unnamed)

    def are_all_known(self, edge: Edge) -> bool:
        """Whether all elements at an edge have a name."""
        return bool((self.at(edge) >= 0).all())

    def meet_behind(self, edge: Edge) -> bool:
        """Whether rows of several names come together at an edge, or behind it."""
        return any(bool((names == MIXED).any()) for names in self._behind(edge))

    def may_be_in_order(self, edge: Edge, places: Tensor) -> bool:
        """Whether rows without known names may have those of their places.

        The number of rows that were selected may be N by chance. Where some rows have a name, it is
        that of their place, and they were put into a tensor that has a row for each place.
        """
        if self._are_shuffled:
            return False
        names = self.at(edge)
        if bool((names >= 0).any()):
            contradict = (names != NO_SAMPLE) & (names != places)
            return not bool(contradict.any()) and self._are_put(edge)
        if not bool((names == UNREADABLE).any()) and self.are_behind(edge):
            return False
        return self._rows_are_kept(edge, places)

    def _rows_are_kept(self, edge: Edge, places: Tensor) -> bool:
        """Whether no rows are selected on the way to a tensor that has as many, or reordered.

        Where inputs are recognised, the names of reordered rows are known.
        """
        visited: set[Edge] = set()
        waiting = [(edge, places)]
        while waiting:
            above, names = waiting.pop()
            if above in visited:
                continue
            visited.add(above)
            for place, below in enumerate(self._graph.children[above[0]]):
                if below is not None and not self._alone[below[0]]:
                    is_kept, own = self._kept_from(above, names, place, below)
                    if not is_kept:
                        return False
                    waiting += [] if own is None else [(below, own)]
        return True

    def _kept_from(
        self, above: Edge, names: Tensor, place: int, below: Edge
    ) -> tuple[bool, Tensor | None]:
        """Whether a node keeps the rows of an input, and the places of these if it has as many."""
        shape, axis = self._graph.shape(below), _axis_of(names)
        if axis is None:
            return True, None
        numbers = names.flatten()
        is_kept, own = not self._selects(above, below), None
        for each in (n for n, length in enumerate(shape) if length == len(numbers)):
            along = numbers.reshape([-1 if n == each else 1 for n in range(len(shape))])
            found = self._through(*above, place, below, along)
            if found is not None and found.shape == names.shape and bool((found >= 0).all()):
                if torch.equal(found, names):
                    return True, along
                return is_kept and self._are_exact, own
            if each == axis:
                own = along
        return is_kept, own

    def _are_put(self, edge: Edge) -> bool:
        """Whether a tensor has its rows from one that some rows were put into."""
        rows = self._graph.shape(edge)[:1]
        visited: set[Edge] = set()
        waiting = [edge]
        found = False
        while waiting:
            above = waiting.pop()
            if above in visited:
                continue
            visited.add(above)
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

    def _selects(self, above: Edge, below: Edge) -> bool:
        """Whether a node selects rows, rather than entries of rows."""
        shapes = self._graph.shape(above), self._graph.shape(below)
        changed = shapes[0][:1] != shapes[1][:1] or len(shapes[1]) > len(shapes[0])
        return changed and kind_of(self._graph.kinds[above[0]]).selects

    def _may_meet(self, edge: Edge) -> bool:
        """Whether rows that have no names may be of a sample each, since samples meet behind them.

        The labels at known rows tell.
        """
        unnamed = not bool((self.at(edge) >= 0).any()) and not self._are_shuffled
        return self._are_exact and unnamed and len(self._graph.shape(edge)) > 1

    @property
    def _are_exact(self) -> bool:
        """Whether some rows are known to be those of the model's inputs."""
        return any(not each.by_order for each in self.known.values())

    def are_behind(self, edge: Edge) -> bool:
        """Whether there are names at an edge, or behind it."""
        return bool(self._behind(edge))

    def _behind(self, edge: Edge) -> list[Tensor]:
        behind = self._graph.below([edge[0]])
        return [names for (number, _), names in self._names.items() if number in behind]

    def _above(self, number: int, output: int) -> Tensor | None:
        """The names of a node's output, from those of its inputs.

        One number has a name only if all that it is computed from has this name.
        """
        shape = self._graph.shape((number, output))
        if number in self._reading_data:
            return torch.full([1] * len(shape), UNREADABLE)
        named: dict[int, Tensor] = {}
        unknown: dict[int, Tensor] = {}
        changed = False
        for place, edge in enumerate(self._graph.children[number]):
            if edge is None or self._alone[edge[0]]:
                continue
            before = self._names.get(edge)
            names = None
            if before is not None:
                names = self._through(number, output, place, edge, before)
            whole = names if self._picks(number) else before
            if prod(shape) == 1 and (names is None or whole is None or bool((whole < 0).any())):
                is_unknown = names is not None and bool((names == UNREADABLE).any())
                return names if is_unknown else None
            if names is not None:
                (unknown if bool((names == UNREADABLE).any()) else named)[place] = names
            changed = changed or names is not before
        if len(named) == 1 and not unknown and not changed:
            return next(iter(named.values()))
        found = reduce(_together, named.values()) if named else None
        for place, names in unknown.items():
            if found is None or not bool((found != NO_SAMPLE).any()):
                found = names
            elif not any(self._covers(number, output, each, place) for each in named):
                found = _together(found, names)
        return None if found is None else compact(found)

    def _picks(self, number: int) -> bool:
        return self._name(number) in PICKING

    def _covers(self, number: int, output: int, place: int, other: int) -> bool:
        """Whether an input has the rows of another one itself, and isn't repeated for them."""
        one, two = (self._sizes(number, output, each) for each in (place, other))
        return all(own > 1 or length == 1 for own, length in zip(one, two, strict=True))

    def _sizes(self, number: int, output: int, place: int) -> list[int]:
        """The lengths of an input along the axes of an output, 1 where it is repeated."""
        rule, edge = kind_of(self._graph.kinds[number]).axes, self._graph.children[number][place]
        axes = len(self._graph.shape((number, output)))
        if rule is None or edge is None:
            return [*self._graph.shape((number, output))]
        shape = self._graph.shape(edge)
        step = Step(self._graph.nodes[number], place, output, axes, len(shape))
        along = [rule(step, axis) for axis in range(axes)]
        return [1 if axis is None or axis < 0 else shape[axis] for axis in along]

    def _through(
        self, node: int, output: int, place: int, edge: Edge, names: Tensor
    ) -> Tensor | None:
        above, below = self._graph.shape((node, output)), self._graph.shape(edge)
        if not prod(above) or not prod(below):
            return None
        if hands_gradients_on(self._graph.nodes[node]):
            return names if output == place else None
        name = self._name(node)
        kind = kind_of(name)
        if (kind.axes is from_the_right or node in self._elementwise) and above == below:
            return names
        if kind.in_order:
            return reshaped(names, below, above)
        between = self._selections.between(node, output, edge, place)
        unknown = torch.full([1] * len(above), UNREADABLE)
        try:
            if name in PICKING:
                pick = PICKING[name](between)
                return unknown if pick is None else pick.pulled(names, len(above))
            if name in PUTTING:
                pick = PUTTING[name](between)
                if names.numel() > 1 and pick.are_beside(names, above):
                    return unpicked(pick, names, len(above))
                found = pick.put(names, above, pick.axes)
                if found is None:  # several are added up
                    return unknown if bool((names == UNREADABLE).any()) else None
                return self._not_overwritten(node, output, found) if place == 0 else found
        except UnavailableError:  # of indices that can't be read now
            return unknown
        is_grouped = name == "Convolution" and saved(self._graph.nodes[node], "groups") > 1
        if kind.axes is None or (is_grouped and names.shape[1 - place] > 1):
            return unknown
        return _moved(kind.axes, between.step, names, above, below)

    def _not_overwritten(self, node: int, output: int, names: Tensor) -> Tensor:
        """Names without those of entries that another input takes the place of."""
        name = self._name(node)
        other = self._graph.children[node][1]
        if other is None or name not in OVERWRITING or other not in self._names:
            return names
        shape = self._graph.shape((node, output))
        pick = PUTTING[name](self._selections.between(node, output, other, 1))
        if self._names[other].numel() > 1 and pick.are_beside(self._names[other], shape):
            return names
        taken = pick.apply(torch.arange(prod(shape)).reshape(shape))
        found = names.expand(shape).flatten().clone()
        found[taken[taken >= 0]] = NO_SAMPLE
        return found.reshape(shape)


def _moved(rule: AxisRule, step: Step, names: Tensor, above: Shape, below: Shape) -> Tensor | None:
    """Names of an output by the axes that the node's kind hands on; others are reduced."""
    places: dict[int, int] = {}
    for axis in range(len(above)):
        along = rule(step, axis)
        if along is not None and 0 <= along < len(below) and along not in places:
            places[along] = axis
    for axis in range(names.dim()):
        if axis not in places and names.shape[axis] > 1:
            names = _reduced(names, axis)
    moved = at_places(names, places, len(above))
    for axis, (length, whole) in enumerate(zip(moved.shape, above, strict=True)):
        if length not in (1, whole):  # an input that is repeated
            if whole % length:
                return None
            times = [whole // length if each == axis else 1 for each in range(len(above))]
            moved = moved.repeat(times)
    return moved


def _reduced(names: Tensor, axis: int) -> Tensor:
    """Names of what is computed from all entries along an axis: none if they are of several."""
    most = names.amax(axis, keepdim=True)
    several = (names != NO_SAMPLE) & (names != most)
    unknown = (names == UNREADABLE).any(axis, keepdim=True)
    most = most.masked_fill(several.any(axis, keepdim=True), NO_SAMPLE)
    return most.masked_fill(unknown, UNREADABLE)


def _together(one: Tensor, other: Tensor) -> Tensor:
    """Names of what is computed from two tensors, entry by entry."""
    several = (one != NO_SAMPLE) & (other != NO_SAMPLE) & (one != other)
    found = torch.where(one == NO_SAMPLE, other, one).masked_fill(several, MIXED)
    return found.masked_fill((one == UNREADABLE) | (other == UNREADABLE), UNREADABLE)


def _axis_of(names: Tensor) -> int | None:
    """The axis along which there are several names."""
    return next((axis for axis, length in enumerate(names.shape) if length > 1), None)
