"""The nodes of a loss's graph at which parameters are used with data of samples.

A parameter's gradient is the sum of the gradients from all nodes that use it. At a node that
computes with parameters alone, such as a transposition, the gradients of all samples are summed up
already; at a node whose rows belong to one sample each they are still apart. On each path from the
parameter to the loss, a node of the second kind is needed. The structure of the graph gives the
candidates, and their labels decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from gradlens.graph.graph import Edge, Link, Use
from gradlens.graph.kinds import HIDING, IN_PLACE, kind_of
from gradlens.samples.batchnorm import uses_statistics
from gradlens.samples.labels import axes_of, joined
from gradlens.samples.plan import LabelledUse
from gradlens.samples.rows import LabelledEdge, RowIndex
from gradlens.samples.structure import Structure

MAX_PATHS = 2**13
"""Paths from a parameter to the nodes at which samples are apart; there are some for each step of a
recurrent network."""

SHARED_WORK = 4
"""Bound on N times the elements of a node that all samples share, over those of the node at which
they are apart.

Computed weights may be larger: their per-sample gradients take N times their memory anyway.
"""

FINE_ELEMENTS = 2**20
"""Elements of a node's output up to which each one may be labelled: 4 MiB in float32."""

TOO_MANY = f"more than {MAX_PATHS} paths lead from it to nodes at which samples are apart"
BESIDE_OUTPUT = (
    "a layer with a rule computes something besides its output with it: return all that the loss "
    "depends on as one tensor, or remove the layer's rule"
)
CHANGED_IN_PLACE = (
    "a tensor is changed in place by what it computes, which hides whether that is the same for "
    "all samples: write h = h + e instead of h += e"
)
ROWS_OF_SEVERAL = (
    "the rule of its layer takes the leading axis of the layer's output for rows, and some of "
    "these rows belong to several samples: put the samples on that axis, or remove the rule"
)


@dataclass
class Ways:
    """The paths of one parameter to the loss, or those of a node.

    ``uses`` are at nodes whose rows belong to one sample each, and ``mixed`` those at which samples
    have met already, for a ``reason`` if it is known. ``beside`` means that the loss depends on the
    parameter beside the samples, as by a regulariser. ``outputs`` are those of the node at which
    the paths to the uses begin.
    """

    uses: list[LabelledUse] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)
    beside: bool = False
    reason: str = ""
    outputs: list[int] = field(default_factory=list)

    def add(self, use: LabelledUse, output: int) -> None:
        """Add a use on a path that begins at an output."""
        self.uses.append(use)
        self.outputs.append(output)

    def add_mixed(self, node: int, reason: str = "") -> None:
        """Samples have met at a node."""
        self.mixed.append(node)
        self.reason = reason or self.reason


class _Passed(NamedTuple):
    """A node on a path that is passed, and the number of its input by which it is reached.

    ``output`` is that of the node in front of it; ``have_met`` says that samples have.
    """

    node: int
    place: int
    output: int
    have_met: bool


class Finder:
    """Follows parameters through a graph to the nodes that use them, by the labels of rows."""

    def __init__(
        self,
        labels: Structure,
        alone: Sequence[bool],
        sources: Iterable[Edge],
        reads_data: Sequence[bool],
        is_normalised: bool,
    ) -> None:
        """``reads_data`` is whether a node depends on the model's inputs, by number.

        If some node ``is_normalised`` over samples, rows without gradient may get one.
        """
        graph = self._graph = labels.graph
        self._labels = labels
        self._alone = alone
        self._reads_data = reads_data
        self._is_normalised = is_normalised
        self._filled: dict[RowIndex, RowIndex] = {}
        below = graph.below(edge[0] for edge in sources)
        self._above = set(range(len(graph))) - below
        inside = {call: graph.inside(call) for call in graph.ruled_calls if call.node in below}
        self._ruled = {
            call: inner
            for call, inner in inside.items()
            # A rule can't hold the statistics of a normalisation fixed.
            if not any(uses_statistics(graph.nodes[number]) for number in inner)
        }

    def all_ways(self, parameters: Mapping[str, Tensor]) -> dict[str, Ways]:
        """All paths of parameters."""
        leaves = {name: self._graph.leaves[id(each)] for name, each in parameters.items()}
        found: dict[int, Ways] = {leaf: Ways() for leaf in leaves.values()}
        ruled = {leaf: self._follow_in_ruled_calls(leaf, ways) for leaf, ways in found.items()}
        passed: dict[int, list[_Passed]] = {}
        # The elements of the largest node up to one that may compute with data, 0 without any.
        largest = dict.fromkeys(found, 0)
        for number in range(len(self._graph)):  # inputs come first
            if number in largest:
                ways = found.setdefault(number, Ways())
                passed[number] = self._passed(number, largest, ways, ruled.get(number, set()))
        for number in sorted(passed, reverse=True):
            for step in passed[number]:
                _extend(found[number], step, found[step.node])
        return {name: found[leaf] for name, leaf in leaves.items()}

    def _passed(
        self, number: int, largest: dict[int, int], found: Ways, ruled: set[int]
    ) -> list[_Passed]:
        """The nodes behind which the paths of a node go on; others end there."""
        passed: list[_Passed] = []
        for consumer, place, output in self._graph.consumers[number]:
            if consumer in ruled:
                continue
            kind = kind_of(self._graph.kinds[consumer])
            size = largest[number]
            if consumer in self._above:
                found.beside = True
                continue
            if self._graph.kinds[consumer] in HIDING:
                found.add_mixed(consumer)
                continue
            is_judged = not self._alone[consumer] and not kind.is_view
            if is_judged:
                use = Use(consumer, place, self._graph.shape((number, output)), ())
                if self._ends(use, number, output, size, found):
                    continue
                elements = self._elements(consumer)
                grows = elements > math.prod(use.shape) or kind.is_layer or kind.brings_data
                size = max(size, elements if grows else 0)
            largest[consumer] = max(size, largest.get(consumer, 0))
            passed.append(_Passed(consumer, place, output, is_judged))
        return passed

    def _follow_in_ruled_calls(self, leaf: int, found: Ways) -> set[int]:
        """Add the uses of a parameter by layers that have a rule; returns these calls' nodes."""
        if not self._ruled:
            return set()
        calls = {call: dict(call.names) for call in self._ruled}
        names = {call.node: own[leaf] for call, own in calls.items() if leaf in own}
        inner = set[int]().union(*(self._ruled[call] for call in calls if call.node in names))
        reached: set[int] = set()
        waiting = [leaf] if inner else []
        while waiting:
            node = waiting.pop()
            consumers = {consumer for consumer, _, _ in self._graph.consumers[node]}
            if node != leaf and not consumers <= inner:
                found.add_mixed(node, BESIDE_OUTPUT)
            new = (consumers & inner) - reached
            reached |= new
            waiting += new - names.keys()
        for node in sorted(reached & names.keys()):
            use = Use(node, 0, self._graph.shape((leaf, 0)), (), names[node])
            labelled = self._labelled(use)
            if labelled is not None:
                found.add(labelled, 0)
            else:
                found.add_mixed(node, ROWS_OF_SEVERAL)
        return inner

    def _ends(self, use: Use, number: int, output: int, largest: int, found: Ways) -> bool:
        """Whether a path ends at a node at which samples are apart."""
        shared = self._labels.samples * largest
        is_affordable = not shared or shared <= SHARED_WORK * self._elements(use.node)
        is_computed = self._is_computed_weight(use, number)
        labelled = self._labelled(use) if is_affordable or is_computed else None
        if labelled is None:
            return False
        if largest and not self._is_shared(labelled, is_computed):
            is_in_place = self._graph.kinds[use.node] == IN_PLACE
            found.add_mixed(use.node, CHANGED_IN_PLACE if is_in_place else "")
        else:
            found.add(labelled, output)
        return True

    def _is_shared(self, labelled: LabelledUse, is_computed: bool) -> bool:
        """Whether a use's input is the same for all samples, rather than made of them.

        It is the same if it is repeated along all axes that count samples, or multiplied by the
        rows of each. Otherwise it depends on samples, which couples those that use it.
        """
        use, kind = labelled.use, self._graph.kinds[labelled.use.node]
        if use.index in kind_of(kind).weights:
            return is_computed
        if not kind_of(kind).repeats:
            return False
        missing = len(self._graph.shape((use.node, 0))) - len(use.shape)
        own = (1,) * missing + use.shape
        output, features = next(iter(labelled.features.items()))
        labels = self._labels.rows(LabelledEdge((use.node, output), features))
        # Rows without a sample have the labels of others beside them.
        counting = [axis for axis in axes_of(labels) if joined(labels, axis) is None]
        return all(own[axis] == 1 for axis in counting)

    def _is_computed_weight(self, use: Use, number: int) -> bool:
        """Whether a use's input, made by a node, is a weight that is computed without samples."""
        is_weight = use.index in kind_of(self._graph.kinds[use.node]).weights
        return is_weight and not self._reads_data[number]

    def _labelled(self, use: Use) -> LabelledUse | None:
        """A use with the samples of its rows; ``None`` if samples have met there."""
        outputs = self._graph.outputs_of(use.node)
        coarse = {output: self._features(use, (use.node, output)) for output in outputs}
        for is_fine in (False, True):
            if is_fine and not self._may_be_fine(use):
                return None
            features = dict.fromkeys(outputs, ()) if is_fine else coarse
            edges = {o: LabelledEdge((use.node, o), axes) for o, axes in features.items()}
            if edges and all(map(self._labels.are_apart, edges.values())):
                rows = {o: self._rows(edge) for o, edge in edges.items()}
                return LabelledUse(use, rows, features, is_fine)
        return None

    def _may_be_fine(self, use: Use) -> bool:
        """Whether each element may be a row, although the kind of node has larger ones."""
        is_small = self._elements(use.node) <= FINE_ELEMENTS
        is_layer = kind_of(self._graph.kinds[use.node]).is_layer
        return is_small and not use.own_name and not is_layer

    def _rows(self, edge: LabelledEdge) -> RowIndex:
        index = self._labels.index(edge)
        if index not in self._filled:
            # In front of statistics that are held fixed, rows without gradient may get one.
            self._filled[index] = index.filled(some=self._is_normalised)
        return self._filled[index]

    def _features(self, use: Use, edge: Edge) -> tuple[int, ...]:
        kind, dims = self._graph.kinds[use.node], len(self._graph.shape(edge))
        if use.own_name:
            return tuple(range(1, dims))
        return kind_of(kind).feature_axes(use.index, dims)

    def _elements(self, node: int) -> int:
        shapes = [self._graph.shape((node, output)) for output in self._graph.outputs_of(node)]
        return max(math.prod(shape) for shape in shapes)


def _extend(found: Ways, step: _Passed, behind: Ways) -> None:
    """Add the paths behind a node that is passed."""
    if step.have_met and (behind.mixed or behind.beside):
        found.add_mixed(step.node, behind.reason)
        return
    found.mixed += behind.mixed
    found.reason = found.reason or behind.reason
    found.beside |= behind.beside
    if found.mixed:
        return
    for labelled, output in zip(behind.uses, behind.outputs, strict=True):
        chain = (*labelled.use.chain, Link(step.node, output, step.place))
        found.add(replace(labelled, use=replace(labelled.use, chain=chain)), step.output)
    if len(found.uses) > MAX_PATHS:
        found.add_mixed(step.node, TOO_MANY)
