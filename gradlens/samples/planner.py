"""Finds the plan of a loss's graph: N, and the nodes at which the gradients of samples are apart.

The labels (``gradlens.samples.structure``) give, for each parameter, the nodes at which the
gradients of samples are still apart, and the sample of each of their rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gradlens.graph.graph import Edge, Graph, is_python_function
from gradlens.graph.kinds import (
    COMPILED,
    HIDING,
    REENTRANT_CHECKPOINT,
    SYNCHRONISED,
    kind_of,
)
from gradlens.graph.loss import terms
from gradlens.graph.passes import is_elementwise
from gradlens.graph.uncompiled import RAN_COMPILED
from gradlens.history.coverage import FEW, few
from gradlens.history.html import count
from gradlens.numerics.shards import any_distributed
from gradlens.numerics.unavailable import FREED, UnavailableError, first_line, has_freed
from gradlens.samples.batchnorm import in_front_of, normalising
from gradlens.samples.count import (
    AMBIGUOUS,
    CALLED,
    EITHER_AXIS,
    ONE_SAMPLE,
    OTHER_N,
    OTHER_ORDER,
    OUTPUTS,
    PASS_LOSSES,
    PASS_OTHER,
    SEVERAL,
    TOGETHER,
    UNSURE,
    BatchEvidence,
    EitherAxisError,
    LossRows,
    UnknownOrderError,
    UnsureError,
    loss_edges,
    loss_rows,
    may_be_parts,
    readings,
    unknown_order,
)
from gradlens.samples.labels import (
    MIXED,
    NO_SAMPLE,
    UNREADABLE,
    Labels,
    are_all,
    are_known,
    counted,
    distinct,
    replaced,
)
from gradlens.samples.model_inputs import (
    PASSED,
    Named,
    Reading,
    first_nodes,
    lengths_of,
    nodes_reading_data,
    reads_data,
    rows_of,
    shapes_of,
    takes_channels,
)
from gradlens.samples.names import Names
from gradlens.samples.passages import Passages
from gradlens.samples.plan import LabelledEdge, LossTerm, Plan, rows_of_values
from gradlens.samples.rule_checks import disagreements
from gradlens.samples.structure import Structure
from gradlens.samples.uses import Finder, Ways
from gradlens.torch_private import hands_gradients_on


@dataclass(frozen=True)
class _LossGraph:
    """A loss's graph, the model's parameters, and what is known of the batch.

    The losses of single samples may be needed (``needs_losses``), and the samples of the rows at
    other ``edges``.
    """

    graph: Graph
    parameters: Mapping[str, nn.Parameter]
    evidence: BatchEvidence = field(default_factory=BatchEvidence)
    needs_losses: bool = False
    edges: tuple[LabelledEdge, ...] = ()

    @cached_property
    def loss_edges(self) -> list[Edge]:
        """Where the loss is computed from rows, whatever these are."""
        return loss_edges(self.graph, shapes_of(self.evidence.calls))

    def has_all_rows(self, samples: int) -> bool:
        """Whether the loss is computed from N rows each time, and N is more than one."""
        shapes = [self.graph.shape(edge)[:1] for edge in self.loss_edges]
        return {*shapes} == {(samples,)} != {(1,)}

    @cached_property
    def reading_data(self) -> set[int]:
        """The first nodes that compute with data, by number."""
        return nodes_reading_data(self.graph)

    @cached_property
    def elementwise(self) -> frozenset[int]:
        """The functions in Python that don't move rows, by number."""
        pairs = zip(self.graph.nodes, self.graph.kinds, strict=True)
        return frozenset(
            number
            for number, (node, kind) in enumerate(pairs)
            if is_python_function(node) and not hands_gradients_on(node)
            if kind_of(kind).axes is None and kind not in HIDING
            if is_elementwise(self.graph, number)
        )

    def passages(self, reading: Reading) -> Passages:
        """How labels go through the graph, of which nothing has been read yet."""
        return Passages(self.graph, reading.samples, self.elementwise)

    def names(self, passages: Passages, reading: Reading, rows: LossRows | None = None) -> Names:
        """The names of rows, by a reading of the batch, and by the loss's rows as far as known."""
        losses = self.evidence.losses_at
        known = reading.named(self.graph, self.reading_data)
        if losses is not None:  # which say more than what is only likely
            certain = known.items() if reading.is_one_axis else ()
            known = {edge: named for edge, named in certain if not named.by_order}
            axes = len(self.graph.shape(losses))
            known[losses] = Named(counted(range(reading.samples), 0, axes))
        if rows is not None:
            sources = {edge: each for edge, each in rows.sources.items() if are_known(each)}
            known = self._of_data(Structure(passages, sources)) | known
        return Names(passages, self.reading_data, known, reading.returned(self.graph))

    def _of_data(self, structure: Structure) -> dict[Edge, Named]:
        """The samples at the edges where the graph begins with data."""
        leaves = [n for n in self.graph.leaves.values() if not self.graph.alone[n]]
        edges = [(number, 0) for number in (*leaves, *first_nodes(self.graph))]
        labels = {edge: structure.labels(edge) for edge in edges}
        return {
            edge: Named(replaced(found, MIXED, NO_SAMPLE))
            for edge, found in labels.items()
            if found.min() != UNREADABLE
        }


def plan_of(
    graph: Graph,
    parameters: Mapping[str, nn.Parameter],
    evidence: BatchEvidence,
    needs_losses: bool = False,
    edges: tuple[LabelledEdge, ...] = (),
) -> Plan:
    """The plan of a loss's graph, with the terms of the loss if it ``needs_losses``.

    The samples at other ``edges`` may be needed, too. Gradients of parameters stay as they are.
    """
    loss = _LossGraph(graph, parameters, evidence, needs_losses, edges)
    try:
        if any_distributed(graph.nodes[number].variable for number in graph.leaves.values()):
            raise UnavailableError(DISTRIBUTED)
        if graph.has_nested_tensors:
            raise UnavailableError(NESTED)
        plan = _chosen(loss)
    except UnavailableError as reason:
        plan = _nothing(parameters, str(reason))
    hidden = graph.below(n for n, kind in enumerate(graph.kinds) if kind == COMPILED)
    behind = [n for n in plan.unavailable if graph.leaves.get(id(parameters[n])) in hidden]
    return plan.without(dict.fromkeys(behind, RAN_COMPILED))


class _Attempt(NamedTuple):
    """The plan for a reading of the batch, and the loss's rows.

    Some of these may be known by their order alone.
    """

    reading: Reading
    rows: LossRows
    plan: Plan
    by_order: bool


def _chosen(loss: _LossGraph) -> Plan:
    """The plan of the only reading that can be right; ``UnavailableError`` if there are more."""
    graph, evidence = loss.graph, loss.evidence
    shapes = [graph.shape(edge) for edge in loss.loss_edges]
    if shapes and all(shape and not shape[0] for shape in shapes):
        return replace(_nothing(loss.parameters, EMPTY), samples=0, known_by=OF_LOSS)
    every = readings(evidence)
    if every[0].known_by == TOGETHER:
        every = _of_several_calls(loss, every)
    single = [each for each in every if each.samples == 1]
    if single and len(single) < len(every):
        # The only row of the loss may have been selected among those of several samples.
        is_second = single[0].axis and not single[0].is_given
        selects = single[0].axis and any(kind_of(kind).selects for kind in graph.kinds)
        if not selects and all(shape[:1] == (1,) for shape in shapes):
            every = single
        elif is_second and takes_channels(graph, single[0].inputs):
            every = [each for each in every if each not in single]
        else:
            raise UnavailableError(_uncertain(every))
    attempts, reasons = _attempts(loss, every)
    if not attempts:
        raise reasons[0]
    either = [each for each in reasons if isinstance(each, EitherAxisError)]
    if either and all(each.reading.in_turn or each.plan.mixed for each in attempts):
        raise either[0]
    first = attempts[0].reading
    has_rows_of_first_axis = any(shape[:1] == (every[0].samples,) for shape in shapes)
    if first.axis > every[0].axis and has_rows_of_first_axis and first.samples != every[0].samples:
        for reason in reasons:
            if isinstance(reason, UnknownOrderError):
                raise reason
    doubtful = len(every) > 1 and all(each.by_order and each.plan.mixed for each in attempts)
    if doubtful and not first.is_given:
        raise UnavailableError(_uncertain(every))
    if len(attempts) == 1 and attempts[0].plan.mixed and not first.is_given and first.axis == 0:
        # Samples may seem to meet if they are along the second axis.
        second = lengths_of(evidence.calls, 1)
        others = [Reading(evidence.calls, n, CALLED, axis=1) for n in second]
        unmixed = [each.reading for each in _attempts(loss, others)[0] if not each.plan.mixed]
        if unmixed:
            raise UnavailableError(_uncertain([first, *unmixed]))
        if all(map(may_be_parts, first.inputs)):
            raise UnavailableError(ONE_SAMPLE.format(samples=first.samples))
    # Under the right reading, samples don't meet, and the loss may have a row for each. As many may
    # have been selected by chance, so that a guess isn't likelier than what is known of all rows.
    attempts = [each for each in attempts if not each.plan.mixed] or attempts
    likelier = [each for each in attempts if each.rows.has_row_for_each]
    if not all(each.by_order for each in likelier) or all(each.by_order for each in attempts):
        attempts = likelier or attempts
    if len(attempts) > 1:
        raise UnavailableError(_uncertain([each.reading for each in attempts]))
    return attempts[0].plan


def _attempts(
    loss: _LossGraph, every: Sequence[Reading]
) -> tuple[list[_Attempt], list[UnavailableError]]:
    """The readings that the graph allows, and the reasons against others."""
    attempts: list[_Attempt] = []
    reasons: list[UnavailableError] = []
    for reading in every:
        try:
            attempt = _attempt(loss, reading)
            if not any(map(attempt.rows.are_those_of, (each.rows for each in attempts))):
                attempts.append(attempt)
        except UnavailableError as reason:
            has_other_axis = len([each for each in every if each.samples == reading.samples]) > 1
            if isinstance(reason, UnsureError) and has_other_axis:
                raise
            reasons.append(reason)
        except Exception as error:  # another reading may be had
            reasons.append(UnavailableError(why_failed(error)))
    return attempts, reasons


def why_failed(error: Exception) -> str:
    """The reason that an exception is."""
    return FREED if has_freed(error) else FAILED.format(first_line(error))


def _uncertain(every: Sequence[Reading]) -> str:
    """Why none of several readings is taken."""
    numbers = {each.samples: each.known_by for each in every}
    if len(numbers) == 1:
        return EITHER_AXIS.format(samples=next(iter(numbers)))
    listed = " or ".join(f"{n}, by {known_by}" for n, known_by in numbers.items())
    return AMBIGUOUS.format(numbers=listed)


def _of_several_calls(loss: _LossGraph, every: Sequence[Reading]) -> list[Reading]:
    """Calls on parts of the batch whose outputs are put together, or each of them on all samples.

    In the second case, the loss has rows of one call alone, or combines those of all calls.
    """
    names = loss.names(loss.passages(every[0]), every[0])
    shapes = shapes_of(loss.evidence.calls)
    edges = loss_edges(loss.graph, shapes, lambda edge: are_known(names.at(edge)))
    together = every[0].samples
    for edge in edges:
        has_all = not are_known(names.at(edge)) or len(distinct(names.at(edge))) == together
        if has_all and loss.graph.shape(edge)[:1] == (together,):
            return [every[0]]
    rows = [*map(rows_of, loss.evidence.calls)]
    ends = [*accumulate(rows)]
    calls = _calls_of((each for edge in edges for each in names.behind(edge)), ends)
    found = [each for each in every[1:] if calls <= _combined(loss, names, each, ends)]
    if len(calls) > 1 and together in [each.samples for each in found]:
        raise UnavailableError(EITHER_AXIS.format(samples=together))
    if any(each.samples == 1 for each in found):  # sums of losses are of one row, too
        raise UnavailableError(_uncertain(every))
    if len(calls) == 1:  # which says nothing if rows of others aren't known
        found = found or [*every[1:]]
        found = found if all(are_known(names.at(edge)) for edge in edges) else []
    if found:
        return found
    *lengths, last = dict.fromkeys(rows)
    each = " and ".join([*map(str, lengths), count(last, "row")])
    raise UnavailableError(SEVERAL.format(count=len(rows), rows=each))


def _combined(loss: _LossGraph, names: Names, reading: Reading, ends: Sequence[int]) -> set[int]:
    """The calls that have the same samples, since their rows are combined with each other's.

    That is where nothing but tensors with N rows is computed from them: a tensor of more rows may
    have those of parts of the batch, one after another.
    """
    graph, calls = loss.graph, dict[Edge, set[int]]()
    groups: list[set[int]] = []
    for number in range(len(graph.nodes)):  # inputs come first
        for edge in ((number, output) for output in graph.outputs_of(number)):
            if reading.samples not in graph.shape(edge)[: reading.axis + 1]:
                continue
            below = (calls.get(each, ()) for each in graph.descend(edge))
            found = _calls_of([names.at(edge)], ends).union(*below)
            if found:
                calls[edge] = found
                near = [each for each in groups if not each.isdisjoint(found)]
                apart = [each for each in groups if each.isdisjoint(found)]
                groups = [*apart, found.union(*near)]
    return max(groups, key=len, default=set())


def _calls_of(names: Iterable[Labels], ends: Sequence[int]) -> set[int]:
    """The calls that rows are of, by the numbers that end the calls' rows."""
    rows = {row for labels in names for row in distinct(labels) if row >= 0}
    return {bisect_right(ends, row) for row in rows}


def _attempt(loss: _LossGraph, reading: Reading) -> _Attempt:
    """The plan for a reading; ``UnavailableError`` if the graph contradicts it."""
    passages = loss.passages(reading)
    names = loss.names(passages, reading)
    rows = loss_rows(names, reading)
    if not all(map(are_known, rows.sources.values())):
        names = loss.names(passages, reading, rows)
        rows = loss_rows(names, reading)
    by_order = rows.by_place or names.by_order
    # Where either axis may count the samples, the second one may have as many as are selected.
    is_second = reading.axis == 1 and loss.evidence.positions_first and not reading.is_given
    if by_order and (reading.needs_names or (is_second and names.selects)):
        raise UnavailableError(UNSURE.format(samples=reading.samples))
    shapes = [loss.graph.shape(edge) for edge in rows.sources]
    has_all = loss.has_all_rows(reading.samples) and loss.evidence.losses_at is None
    if has_all and reading.in_turn:
        labels = map(names.at, loss.loss_edges)
        if all(len(distinct(each)) == 1 for each in labels):  # or all samples, folded into rows
            raise EitherAxisError(EITHER_AXIS.format(samples=reading.samples))
    if rows.by_place and any(shape[:-1].count(reading.samples) > 1 for shape in shapes):
        raise UnavailableError(EITHER_AXIS.format(samples=reading.samples))
    planner = _Planner(loss, passages, reading, rows.sources)
    order = planner.order(names)
    own = order[rows.samples]
    is_known, is_same = bool((own >= 0).all()), bool(((own < 0) | (own == rows.samples)).all())
    is_kept = rows.are_in_order and not names.may_be_reordered
    is_certain = is_known or (is_same and (is_kept or not by_order))
    may_be_moved = not names.are_exact and (
        reading.returns_an_order or reading.compares_in_another_order(loss.graph)
    )
    if may_be_moved or not is_certain or (names.are_guessed and names.are_reordered):
        raise unknown_order(reading)
    if not is_same:
        rows = rows.in_order(order)
        planner = _Planner(loss, passages, reading, rows.sources)
    plan = planner.plan()
    as_many = len(loss.loss_edges) == reading.samples and len(loss.evidence.calls) > 1
    if plan.mixed and has_all and as_many:  # each may be of one sample, such as a task
        raise EitherAxisError(EITHER_AXIS.format(samples=reading.samples))
    by_second = reading.axis == 1 and reading.samples in lengths_of(loss.evidence.calls, 1)
    is_open = not loss.evidence.positions_first and loss.evidence.losses_at is None
    if plan.mixed and by_second and is_open:
        raise UnavailableError(EITHER_AXIS.format(samples=reading.samples))
    holds = plan.holds and names.are_in_order and planner.confirms_again(names)
    plan = replace(
        plan,
        selections=passages.selections,
        holds=holds,
        inputs=reading,
        compared={edge: each for edge, each in names.known.items() if each.compared},
        guessed=not names.are_exact,
    )
    return _Attempt(reading, rows, plan, by_order)


def _nothing(parameters: Iterable[str], reason: str) -> Plan:
    return Plan(None, reason, unavailable=dict.fromkeys(parameters, reason))


def plan_of_rows(
    graph: Graph,
    parameters: Mapping[str, nn.Parameter],
    samples: int,
    together: int = 1,
) -> Plan:
    """The plan of a graph of outputs, whose first axis counts the samples.

    ``together`` is the number of consecutive rows that belong to one sample, such as the words of a
    text.
    """
    labels = np.arange(samples).repeat(together)
    others = [1] * (len(graph.shape(graph.root)) - 1)
    sources = {graph.root: labels.reshape(-1, *others)}
    if graph.has_nested_tensors:
        return _nothing(parameters, NESTED)
    loss, passages = _LossGraph(graph, parameters), Passages(graph, samples)
    plan = _Planner(loss, passages, Reading((), samples, OUTPUTS), sources).plan()
    return replace(plan, selections=passages.selections)


class _Planner:
    """Finds the plan for one reading of the batch."""

    def __init__(
        self,
        loss: _LossGraph,
        passages: Passages,
        reading: Reading,
        sources: Mapping[Edge, Labels],
    ) -> None:
        graph = self._graph = loss.graph
        self._loss = loss
        self._reading = reading
        self._sources = sources
        self._kinds = {*graph.kinds}
        self._hidden = graph.below(n for n, kind in enumerate(graph.kinds) if kind in HIDING)
        self._labels = Structure(passages, sources)

    def order(self, names: Names) -> NDArray[np.int64]:
        """The sample of each label ``[N]``, by rows that are those of the model's inputs.

        Or else by the elements of the rows of all. ``NO_SAMPLE`` where these don't tell;
        ``UnavailableError`` if they tell several.
        """
        found = np.full(self._reading.samples, NO_SAMPLE)
        known = {e: each.names for e, each in names.known.items() if e[0] not in self._hidden}
        by_row = [self._with_labels(edge, own) for edge, own in known.items()]
        # Where an edge has the rows of some, others that use them may have their own elsewhere.
        by_element = [
            np.broadcast_arrays(self._labels.labels(edge), own)
            for edge, own in known.items()
            if are_all(own, len(found))
        ]
        for pairs in (by_row, by_element):
            is_open = found < 0
            for labels, own in pairs if is_open.any() else ():
                is_known = (labels >= 0) & (own >= 0)
                labels, own = labels[is_known], own[is_known]
                labels, own = labels[is_open[labels]], own[is_open[labels]]
                found[labels] = np.where(found[labels] < 0, own, found[labels])
                if (found[labels] != own).any():
                    if self._loss.evidence.losses_at is not None:
                        raise UnknownOrderError(OTHER_ORDER)
                    raise unknown_order(self._reading)
        if names.by_order and self._labels.refused:
            raise UnavailableError(next(iter(self._labels.refused.values())))
        rows = np.flatnonzero(found >= 0)
        is_other = (found[rows] != rows).any()
        is_one_to_one = len(np.unique(found[rows])) == len(rows)
        if is_other and (names.are_guessed or not is_one_to_one):
            raise unknown_order(self._reading)
        return found

    def _with_labels(self, edge: Edge, names: Labels) -> Sequence[Labels]:
        """The labels and the names of the rows at an edge, of the same shape."""
        shared = [axis for axis, length in enumerate(names.shape) if length == 1]
        labelled = LabelledEdge(edge, tuple(shared))
        return np.broadcast_arrays(self._labels.rows(labelled), labelled.rows_of(names))

    def confirms_again(self, names: Names) -> bool:
        """Whether rows have the same order in all graphs with this structure and selections."""
        return not names.by_order or self._labels.last(edge[0] for edge in names.known)

    def plan(self) -> Plan:
        """The plan, with what else the loss's graph is asked for."""
        loss, graph, labels = self._loss, self._graph, self._labels
        normalising_ = normalising(graph, labels.samples)
        inside = {n: p for n, p in loss.parameters.items() if p in graph and not p.is_complex()}
        data = reads_data(graph, self._reading.inputs)
        finder = Finder(labels, self._sources, data, bool(normalising_))
        ways = finder.all_ways(inside)
        coupling = [number for number in normalising_ if self._couples(number)]
        unmixed = [(name, way) for name, way in ways.items() if not way.mixed]
        # Elements of a row may be apart where those that share the row have met.
        rows = ((name, each) for name, way in unmixed for each in way.uses if not each.fine)
        apart = {each.use.node: name for name, each in rows}
        unreadable = labels.unreadable
        behind = self._names_behind(apart) if len(unmixed) < len(ways) else []
        unread = (HIDDEN, RAN_COMPILED, NOT_READABLE, *labels.refused.values())
        reasons = {n: self._reason(n, ways.get(n), behind, unreadable) for n in loss.parameters}
        uses = {name: tuple(ways[name].uses) for name, reason in reasons.items() if not reason}
        used = {each.use.node for labelled in uses.values() for each in labelled}
        terms_, without_losses = self._terms() if loss.needs_losses else ((), "")
        nodes = [term.node for term in terms_]
        seen = {*nodes, *(edge[0] for n in nodes for edge in graph.descend((n, 0)))}
        seen |= {each.edge[0] for each in loss.edges}
        plan = Plan(
            self._reading.samples,
            self._reading.known_by,
            uses,
            {name: reason for name, reason in reasons.items() if reason},
            tuple(name for name, way in ways.items() if way.beside),
            tuple(coupling),
            mixed=any(way.mixed and reasons[n] not in unread for n, way in ways.items()),
            holds=labels.last(used | unreadable | seen),
            read=labels.is_read,
            terms=terms_,
            without_losses=without_losses,
            edges={each: labels.index(each) for each in loss.edges if labels.are_apart(each)},
        )
        plan = plan.without(self._without_labels(plan))
        return plan.without(self._disagreements(plan))

    def _couples(self, number: int) -> bool:
        """Whether some channel of a normalisation has rows of several samples."""
        channels = tuple(range(2, len(self._graph.shape((number, 0)))))
        rows = self._labels.rows(LabelledEdge((number, 0), channels))
        return bool(rows.min() < NO_SAMPLE) or rows.shape[0] > 1

    def _without_labels(self, plan: Plan) -> dict[str, str]:
        """Why parameters in front of a normalisation have none if some of their rows have no label.

        These have no gradient while the statistics are held fixed, but may have one through these.
        """
        front = in_front_of(plan.coupling, self._graph, self._loss.parameters)
        lost = [
            name
            for name in front
            for use in plan.uses.get(name, ())
            if not all(index.is_complete for index in use.rows.values())
        ]
        return dict.fromkeys(lost, NO_LABEL)

    def _disagreements(self, plan: Plan) -> dict[str, str]:
        """Why parameters of layers have none whose rule disagrees with autograd."""
        used = {use.use.node for uses in plan.uses.values() for use in uses if use.use.own_name}
        reasons = {
            call.node: disagreements(self._graph, call)
            for call in self._graph.ruled_calls
            if call.node in used
        }
        return {
            name: reasons[use.use.node][use.use.own_name]
            for name, uses in plan.uses.items()
            for use in uses
            if use.use.own_name in reasons.get(use.use.node, ())
        }

    def _terms(self) -> tuple[tuple[LossTerm, ...], str]:
        """The terms of the loss, or the reason why they aren't known."""
        try:
            return tuple(map(self._term, terms(self._graph))), ""
        except UnavailableError as reason:
            return (), str(reason)

    def _term(self, node: int) -> LossTerm:
        """The term with the largest rows that are of one sample each."""
        for first, *others in rows_of_values(self._graph, node):
            known = [self._labels.rows(each) for each in (first, *others)]
            same = all(np.array_equal(each, known[0]) for each in known)
            if same and known[0].min() >= NO_SAMPLE:
                return LossTerm(node, first, self._labels.index(first))
        reason = UNKNOWN_IN_LOSS if known[0].min() == UNREADABLE else MEETING_IN_LOSS
        raise UnavailableError(reason.format(kind=self._graph.kinds[node]))

    def _reason(
        self,
        name: str,
        way: Ways | None,
        names_behind: Sequence[tuple[str, ...]],
        unreadable: Set[int],
    ) -> str:
        """Why a parameter has no per-sample gradients; empty if it has."""
        if self._loss.parameters[name].is_complex():
            return COMPLEX
        hidden = HIDDEN if REENTRANT_CHECKPOINT in self._kinds else RAN_COMPILED
        if way is None:
            return UNUSED if self._kinds.isdisjoint(HIDING) else hidden
        if self._hidden & {*way.mixed, *(each.use.node for each in way.uses)}:
            return hidden
        if not way.mixed:
            return (WEIGHS if way.weighs else "") if way.uses else BESIDE
        refused = self._why_refused(way.mixed)
        if refused or way.reason:
            return refused or way.reason
        if SYNCHRONISED in self._kinds:
            return ACROSS_PROCESSES
        unknown = [self._graph.shape(e) for e, each in self._sources.items() if not are_known(each)]
        if unknown:
            remedy = PASS_LOSSES if self._reading.is_given else PASS_OTHER
            found = {"samples": self._reading.samples, "remedy": remedy}
            return UNKNOWN_TERM.format(shape=list(unknown[0]), **found)
        if unreadable & set(way.mixed):
            return NOT_READABLE
        behind = names_behind[way.mixed[0]]
        samples, is_passed = self._reading.samples, self._reading.known_by == PASSED
        where = WHERE.format(behind=few(behind) or "the loss", samples=samples)
        return MEETING + where + ("" if is_passed else OTHER_N.format(samples=samples))

    def _why_refused(self, nodes: Sequence[int]) -> str:
        """Why a node in front of others couldn't be asked what it does to rows; usually empty."""
        refused = self._labels.why_refused.items()
        reasons = (why for n, why in refused if not self._graph.below([n]).isdisjoint(nodes))
        return next(reasons, "")

    def _names_behind(self, apart: Mapping[int, str]) -> list[tuple[str, ...]]:
        """Some parameters of the first nodes towards the loss at which samples are apart, by node.

        ``FEW`` of them and one more are enough for a message.
        """
        found: list[tuple[str, ...]] = [()] * len(self._graph)
        for number in reversed(range(len(self._graph))):
            names: dict[str, None] = {}
            for consumer, _, _ in self._graph.consumers[number]:
                if len(names) > FEW:
                    break
                own = (apart[consumer],) if consumer in apart else found[consumer]
                names.update(dict.fromkeys(own))
            found[number] = tuple(names)[: FEW + 1]
        return found


FAILED = "an error occurred while the samples of the gradients were determined ({})"
OF_LOSS = "the rows of the loss"
COMPLEX = (
    "it is complex: keep it as a real parameter whose last axis has two entries, and compute with "
    "torch.view_as_complex of it"
)
NO_LABEL = (
    "it is in front of a normalisation over the batch, and some of its rows get their gradient "
    "from the statistics alone, which are of all samples"
)
UNUSED = (
    "the loss doesn't depend on it, or in a way that autograd doesn't follow, or it is frozen for "
    "the moment"
)
BESIDE = (
    "the loss depends on it only where samples are summed up already: it is in a regulariser, it "
    "weights a whole loss, or one function computes the whole loss with it; a weight has them if "
    "it multiplies the losses of samples before they are averaged"
)
WEIGHS = (
    "it is used for each sample, and the mean or sum of their losses is multiplied by it, too, or "
    "another function of both is the loss: multiply the losses of samples before they are averaged"
)
EMPTY = "the batch is empty"
DISTRIBUTED = (
    "the layers of the network compute with tensors that are divided among processes (tensor "
    "parallelism), where a backward pass of each process's own isn't possible"
)
NESTED = (
    "the loss is computed by way of a nested tensor, whose rows can't be followed: use a padded "
    "tensor and a mask"
)
HIDDEN = (
    "a reentrant checkpoint hides which sample its gradients belong to: pass use_reentrant=False "
    "to it"
)
NOT_READABLE = (
    "the gradient in front of it has NaN, infinities, or numbers too small for its precision, so "
    "that the samples that they belong to can't be read off"
)
ACROSS_PROCESSES = (
    "it is in front of a normalisation with the statistics of all processes: use BatchNorm, or "
    "eval mode"
)
MEETING = "samples meet "
WHERE = (
    "between it and {behind}, as far as can be seen: its gradient comes from rows that several of "
    "the {samples} samples depend on (they are normalised together, compared with each other, or "
    "attend to each other, say)"
)
MEETING_IN_LOSS = (
    "samples meet in the loss, whose values are computed by {kind}, so that single samples have no "
    "losses of their own"
)
UNKNOWN_IN_LOSS = (
    "it can't be followed which samples the values of {kind} in the loss belong to; those of a "
    "penalty on parameters belong to none"
)
UNKNOWN_TERM = (
    "a term of the loss is computed from a tensor of shape {shape}, whose rows can't be followed "
    "among {samples} samples, and it depends on this parameter: {remedy}"
)
