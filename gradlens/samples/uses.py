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
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from gradlens.graph.graph import Edge, Link, Use, each_once
from gradlens.graph.kinds import HIDING, IN_PLACE, is_linear, kind_of
from gradlens.graph.passes import nodes_above
from gradlens.samples.batchnorm import uses_statistics
from gradlens.samples.labels import axes_of, joined
from gradlens.samples.plan import LabelledEdge, LabelledUse, RowIndex
from gradlens.samples.structure import Structure

MAX_CHAIN = 32
"""Nodes between a parameter and the one at which samples are apart; more are not followed."""

MAX_NODES = 2**13
"""Nodes that are passed on all paths of a parameter, which takes some tenths of a second; there are
some for each step of a recurrent network, and no more are followed."""

MIXED_NODES = 2**7
"""Nodes after which no more are followed where samples have met on one of the paths: what is left
are further edges whose labels might tell the samples apart, which are near."""

SHARED_WORK = 4
"""Bound on N times the elements of a node that all samples share, over those of the node at which
they are apart.

Computed weights may be larger: their per-sample gradients take N times their memory anyway.
"""

FINE_ELEMENTS = 2**20
"""Elements of a node's output up to which each one may be labelled: 4 MiB in float32."""

TOO_MANY = f"more than {MAX_NODES} nodes lie between it and those at which samples are apart"
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
    """The paths of one parameter to the loss.

    ``uses`` are at nodes whose rows belong to one sample each, and ``mixed`` those at which samples
    have met already, for a ``reason`` if it is known. ``beside`` means that the loss depends on the
    parameter beside the samples, as by a regulariser, and ``weighs`` that what isn't added there
    multiplies sums over samples, say, so that it is a part of each sample's loss.
    """

    uses: list[LabelledUse] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)
    beside: bool = False
    weighs: bool = False
    reason: str = ""

    def leave(self, met: int | None) -> None:
        """A path leaves the rows of samples, which had ``met`` at some node, or not."""
        self.beside |= met is None
        self.mixed += [] if met is None else [met]


class _Step(NamedTuple):
    """A node on a path, how it was reached, and what was passed.

    ``largest`` is the number of elements of the largest node that may compute with data, 0 if there
    was none; ``met`` is the first node that was passed because samples have met there.
    """

    node: int
    place: int | None = None
    chain: tuple[Link, ...] = ()
    largest: int = 0
    met: int | None = None


class Finder:
    """Follows parameters through a graph to the nodes that use them, by the labels of rows."""

    def __init__(
        self,
        labels: Structure,
        sources: Iterable[Edge],
        reads_data: Sequence[bool],
        is_normalised: bool,
    ) -> None:
        """``reads_data`` is whether a node depends on the model's inputs, by number.

        If some node ``is_normalised`` over samples, rows without gradient may get one.
        """
        graph = self._graph = labels.graph
        self._labels = labels
        self._reads_data = reads_data
        self._is_normalised = is_normalised
        self._filled: dict[RowIndex, RowIndex] = {}
        rows = [edge[0] for edge in sources]
        below = graph.below(rows)
        self._above = set(range(len(graph))) - below
        self._from_rows = nodes_above(graph, rows)
        inside = {call: graph.inside(call) for call in graph.ruled_calls if call.node in below}
        self._ruled = {
            call: inner
            for call, inner in inside.items()
            # A rule can't hold the statistics of a normalisation fixed.
            if not any(uses_statistics(graph.nodes[number]) for number in inner)
        }

    def all_ways(self, parameters: Mapping[str, Tensor]) -> dict[str, Ways]:
        """All paths of parameters."""
        leaves = self._graph.leaves
        return {name: self._ways(leaves[id(each)]) for name, each in parameters.items()}

    def _ways(self, leaf: int) -> Ways:
        found = Ways()
        ruled = self._follow_in_ruled_calls(leaf, found)
        stack = [_Step(leaf)]
        passed = 0
        while stack:
            step = stack.pop()
            passed += 1
            for consumer, place, output in self._graph.consumers[step.node]:
                if step.node == leaf and consumer in ruled:
                    continue
                if consumer in self._above:
                    found.weighs |= step.met is None and self._weighs(consumer)
                    found.leave(step.met)
                    continue
                following = self._follow(step, consumer, place, output, found)
                if following is not None:
                    stack.append(following)
            if step.node == self._graph.root[0]:  # of the outputs, above which nothing is
                found.leave(step.met)
            if found.mixed and passed > MIXED_NODES:
                return found
            if passed > MAX_NODES:
                found.mixed.append(step.node)
                found.reason = TOO_MANY
                return found
        return found

    def _weighs(self, node: int) -> bool:
        """Whether what a node above the samples makes isn't added to what is computed from them.

        Both may be entries of one tensor before, as those of a stack.
        """
        graph, ends = self._graph, [node]
        for number in each_once(ends):
            is_joined = number in self._from_rows
            if is_joined and not is_linear(graph.nodes[number], up_to_constant=True):
                return True
            if not is_joined or self._elements(number) > 1:
                ends += [consumer for consumer, _, _ in graph.consumers[number]]
        return False

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
                found.mixed.append(node)
                found.reason = BESIDE_OUTPUT
            new = (consumers & inner) - reached
            reached |= new
            waiting += new - names.keys()
        for node in sorted(reached & names.keys()):
            use = Use(node, 0, self._graph.shape((leaf, 0)), (), names[node])
            labelled = self._labelled(use)
            if labelled is not None:
                found.uses.append(labelled)
            else:
                found.mixed.append(node)
                found.reason = ROWS_OF_SEVERAL
        return inner

    def _follow(
        self,
        step: _Step,
        consumer: int,
        place: int,
        output: int,
        found: Ways,
    ) -> _Step | None:
        """The next step of a path behind a consumer; ``None`` if it ends there."""
        chain = step.chain
        if step.place is not None:
            chain = (Link(step.node, output, step.place), *chain)
        if self._graph.kinds[consumer] in HIDING:
            found.mixed.append(consumer)
            return None
        if self._graph.alone[consumer] or kind_of(self._graph.kinds[consumer]).is_view:
            return _Step(consumer, place, chain, step.largest, step.met)
        use = Use(consumer, place, self._graph.shape((step.node, output)), chain)
        return self._judge(use, step, found)

    def _judge(self, use: Use, step: _Step, found: Ways) -> _Step | None:
        node, its = use.node, kind_of(self._graph.kinds[use.node])
        met = node if step.met is None else step.met
        shared = self._labels.samples * step.largest
        affordable = not shared or shared <= SHARED_WORK * self._elements(node)
        labelled = None
        if affordable or self._is_computed_weight(use):
            labelled = self._labelled(use)
        if labelled is not None and step.largest and not self._is_shared(labelled):
            found.mixed.append(met)
            if self._graph.kinds[node] == IN_PLACE:
                found.reason = CHANGED_IN_PLACE
            return None
        if labelled is not None:
            found.uses.append(labelled)
            return None
        if len(use.chain) < MAX_CHAIN:
            elements = self._elements(node)
            grows = elements > math.prod(use.shape) or its.is_layer or its.brings_data
            largest = max(step.largest, elements if grows else 0)
            return _Step(node, use.index, use.chain, largest, met)
        found.mixed.append(met)
        return None

    def _is_shared(self, labelled: LabelledUse) -> bool:
        """Whether a use's input is the same for all samples, rather than made of them.

        It is the same if it is repeated along all axes that count samples, or multiplied by the
        rows of each. Otherwise it depends on samples, which couples those that use it.
        """
        use, kind = labelled.use, self._graph.kinds[labelled.use.node]
        if use.index in kind_of(kind).weights:
            return self._is_computed_weight(use)
        if not kind_of(kind).repeats:
            return False
        missing = len(self._graph.shape((use.node, 0))) - len(use.shape)
        own = (1,) * missing + use.shape
        output, features = next(iter(labelled.features.items()))
        labels = self._labels.rows(LabelledEdge((use.node, output), features))
        # Rows without a sample have the labels of others beside them.
        counting = [axis for axis in axes_of(labels) if joined(labels, axis) is None]
        return all(own[axis] == 1 for axis in counting)

    def _is_computed_weight(self, use: Use) -> bool:
        """Whether a use's input is a weight that is computed without samples."""
        is_weight = use.index in kind_of(self._graph.kinds[use.node]).weights
        return is_weight and not any(self._reads_data[link.node] for link in use.chain)

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
