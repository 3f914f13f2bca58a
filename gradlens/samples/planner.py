"""Finds the plan of a loss's graph by labelled backward passes.

The passes (``gradlens.samples.labels``) give, for each parameter, the nodes at which
the gradients of samples are still apart, and the sample of each of their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradlens.graph.graph import Graph, Use
from gradlens.graph.kinds import COMPILED, HIDING, LEAF, REENTRANT_CHECKPOINT, SYNCHRONISED
from gradlens.graph.model_calls import ModelCall
from gradlens.graph.uncompiled import RAN_COMPILED
from gradlens.history.coverage import FEW, few
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.samples.batch_order import batch_order
from gradlens.samples.batchnorm import frozen, in_front_of, normalising
from gradlens.samples.candidates import (
    BY_LOSS,
    CALLED,
    OTHER_AXIS,
    PASSED,
    BatchEvidence,
    Candidate,
    LossInputs,
    candidates_of,
    loss_inputs,
    second_axis_fits_better,
    second_axis_may_count,
)
from gradlens.samples.labels import Labels
from gradlens.samples.loss_labels import LabelledInputs, labelled_inputs
from gradlens.samples.loss_terms import rows_of, term_nodes
from gradlens.samples.model_inputs import reads_data
from gradlens.samples.plan import LabelledUse, LossTerm, Plan
from gradlens.samples.rows import NO_SAMPLE, UNREADABLE, LabelledEdge, RowIndex, Source
from gradlens.samples.rule_checks import disagreements
from gradlens.samples.uses import Finder, Ways

MAX_ROUNDS = 3
"""Rounds of labelled passes for one plan: the first one is for the outputs of layers, further ones
are for computations with parameters that all samples share."""

_Labels: TypeAlias = tuple[tuple[Any, ...] | None, ...]


@dataclass(frozen=True)
class _LossGraph:
    """A loss's graph, the model's parameters, and what is known of the batch.

    ``calls`` are those of the model that have led to it, and ``needs_losses`` says whether the
    losses of single samples are needed.
    """

    graph: Graph
    parameters: Mapping[str, nn.Parameter]
    evidence: BatchEvidence = field(default_factory=BatchEvidence)
    calls: Sequence[ModelCall] = ()
    needs_losses: bool = False

    @cached_property
    def alone(self) -> list[bool]:
        """Whether a node computes with parameters alone, by number."""
        return self.graph.of_parameters_alone()

    @cached_property
    def inputs(self) -> LossInputs:
        """The edges at which the loss is computed from tensors with axes."""
        return loss_inputs(self.graph, self.alone, self.evidence.single_samples)

    @cached_property
    def reads_data(self) -> list[bool]:
        """Whether a node computes with what the model was called with, by number."""
        given = [each for call in self.calls for each in call.inputs]
        return reads_data(self.graph, given)


@dataclass(frozen=True)
class _Attempt:
    """The plan for a candidate, and whether it agrees with what the model was called with.

    That isn't known if ``agrees`` is ``None``. ``inputs`` are the loss's, with their labels.
    """

    candidate: Candidate
    plan: Plan
    agrees: bool | None
    inputs: LabelledInputs

    @property
    def is_certain(self) -> bool:
        """Whether no other candidate can be right."""
        one_axis = len(self.candidate.input_axes) == 1 and not self.candidate.needs_proof
        doubtful = self.candidate.is_rival or self.are_views
        return bool(self.agrees) and not doubtful and (one_axis or not self.plan.mixed)

    @property
    def are_views(self) -> bool:
        """Whether rows that the model was called with may be views of fewer samples."""
        return self.candidate.known_by == CALLED and self.inputs.are_views


def plan_of(
    graph: Graph,
    parameters: Mapping[str, nn.Parameter],
    evidence: BatchEvidence,
    calls: Sequence[ModelCall] = (),
    needs_losses: bool = False,
) -> Plan:
    """The plan of a loss's graph, with the terms of the loss if it ``needs_losses``.

    The ``calls`` of the model decide where two axes have N entries, and which sample is which.
    Gradients of parameters stay as they are.
    """
    plan = _plan_of(_LossGraph(graph, parameters, evidence, calls, needs_losses))
    hidden = _behind_compiled_code(graph)
    return plan.without({n: RAN_COMPILED for n in plan.unavailable if id(parameters[n]) in hidden})


def _behind_compiled_code(graph: Graph) -> set[int]:
    """The ``id`` of each leaf whose gradient is computed by compiled code, or passes through it."""
    below = graph.below(n for n, kind in enumerate(graph.kinds) if kind == COMPILED)
    return {id(graph.nodes[n].variable) for n in below if graph.kinds[n] == LEAF}


def _plan_of(loss: _LossGraph) -> Plan:
    graph, parameters = loss.graph, loss.parameters
    if graph.has_nested_tensors:
        return _nothing(parameters, NESTED)
    if loss.inputs.edges and not any(loss.inputs.rows):
        return replace(_nothing(parameters, EMPTY), samples=0, known_by=BY_LOSS)
    try:
        return _chosen(loss, candidates_of(loss.inputs, loss.evidence))
    except UnavailableError as reason:
        return _nothing(parameters, str(reason))


def _chosen(loss: _LossGraph, candidates: Sequence[Candidate]) -> Plan:
    """The plan of the only candidate that can be right; ``UnavailableError`` if there are more."""
    attempts: list[_Attempt] = []
    tried: set[_Labels] = set()
    reasons: dict[Candidate, UnavailableError] = {}
    for candidate in candidates:
        if candidate.samples == 1 and attempts:
            continue  # a single sample has all rows, whatever they are
        try:
            attempt = _attempt(candidate, loss, tried)
        except UnavailableError as reason:
            reasons[candidate] = reason
            continue
        except Exception as error:  # of a graph that allows no pass besides the user's own
            text = FREED if FREED_GRAPH in str(error) else NO_PASS
            reasons[candidate] = UnavailableError(text.format(error=first_line(error)))
            continue
        if attempt is not None and attempt.is_certain:
            return _unrivalled(attempt, candidates, loss).plan
        attempts += [] if attempt is None else [attempt]
    if candidates[0] in reasons and not any(each.plan.uses for each in attempts):
        raise reasons[candidates[0]]  # that of the likeliest one
    return _unrivalled(_likeliest(attempts, loss), candidates, loss).plan


def _unrivalled(attempt: _Attempt, candidates: Sequence[Candidate], loss: _LossGraph) -> _Attempt:
    """The attempt, if no other reading of the batch is as likely.

    ``UnavailableError`` if all rows may belong to a single sample, as in a last batch of one, or if
    the loss has the model's second axis, but not its leading one, in full. The same if N is the
    length of the leading axis of the model's inputs alone, while some layers have positions first
    and some parameters have no per-sample gradients.
    """
    candidate = attempt.candidate
    single = [each for each in candidates if each.samples == 1]
    if single and candidate.samples > 1:
        raise UnavailableError(_uncertain([single[0], candidate]))
    if candidate.samples > 1 and second_axis_fits_better(candidate, loss.inputs, loss.evidence):
        reason = OTHER_AXIS if candidate.known_by == PASSED else SECOND_AXIS
        raise UnavailableError(reason.format(samples=candidate.samples))
    by_call = candidate.known_by == CALLED and candidate.input_axes[:1] == (0,)
    if by_call and loss.evidence.positions_first and attempt.plan.unavailable:
        raise UnavailableError(MAY_BE_OTHER.format(samples=candidate.samples))
    return attempt


def _likeliest(attempts: Sequence[_Attempt], loss: _LossGraph) -> _Attempt:
    """The attempt that agrees with the model's inputs, or under which no samples meet."""
    agreeing = [each for each in attempts if each.agrees] or list(attempts)
    if agreeing[0].are_views:
        agreeing = list(attempts)
    possible = [each for each in agreeing if not each.plan.mixed] or agreeing
    best = possible[0]
    if not any(each.plan.uses for each in attempts):
        return best  # everything has a reason of its own
    if best.candidate.is_rival:
        raise UnavailableError(ONE_CALL_EACH.format(samples=best.candidate.samples))
    others = len(attempts) > 1
    needed = others or best.inputs.is_square
    unproven = needed if best.candidate.needs_proof else best.inputs.is_unsure and not others
    unproven = unproven or best.inputs.may_be_one_each
    if len(possible) > 1 or (unproven and not best.agrees):
        raise UnavailableError(_uncertain([each.candidate for each in possible], best.plan.mixed))
    if best.agrees:
        return best
    is_deep = best.inputs.is_deep and not loss.evidence.calls
    if best.plan.mixed and (best.inputs.is_square or is_deep):
        raise UnavailableError(_uncertain([best.candidate], mixed=True))
    if not loss.evidence.calls and _may_be_summed_over(best, loss):
        raise UnavailableError(OTHER_AXIS.format(samples=best.candidate.samples))
    if best.plan.mixed and best.candidate.axis == 1 and not loss.evidence.positions_first:
        raise UnavailableError(MEETING_ON_SECOND_AXIS.format(samples=best.candidate.samples))
    # Samples may seem not to meet if most of their rows have no share in the loss by chance.
    by_chance = loss.evidence.positions_first and not best.plan.is_balanced
    if (best.plan.mixed or (by_chance and best.candidate.input_axes == (0,))) and (
        second_axis_may_count(best.candidate, loss.inputs, loss.evidence)
    ):
        raise UnavailableError(MAY_BE_OTHER.format(samples=best.candidate.samples))
    return best


def _may_be_summed_over(attempt: _Attempt, loss: _LossGraph) -> bool:
    """Whether the axis of samples may be one that was summed over, with one of N entries left.

    That can't be excluded without calls, if there are N losses of N rows, or rows of N entries.
    """
    samples, inputs = attempt.candidate.samples, loss.inputs
    if samples == 1:
        return False
    as_many = len(inputs.edges) >= samples and inputs.rows == (samples,)
    return as_many or (attempt.inputs.is_square and all(len(each) == 1 for each in inputs.shapes))


def _uncertain(candidates: Sequence[Candidate], mixed: bool = False) -> str:
    """Why none of the candidates is taken; ``mixed`` if samples meet whichever it is."""
    numbers = dict.fromkeys(f"{each.samples}, by {each.known_by}" for each in candidates)
    if len({each.samples for each in candidates}) == 1:
        reason = MEETING_OR_OTHER_AXIS if mixed else OTHER_AXIS
        return reason.format(samples=candidates[0].samples)
    return AMBIGUOUS.format(numbers=" or ".join(numbers))


def _attempt(candidate: Candidate, loss: _LossGraph, tried: set[_Labels]) -> _Attempt | None:
    """The plan for one number of samples; ``None`` if another candidate has the same labels.

    ``UnavailableError`` if the candidate contradicts what the model was called with.
    """
    found = labelled_inputs(loss.graph, loss.inputs, loss.alone, candidate)
    labels = tuple(_as_key(source.labels) for source in found.sources)
    if labels in tried:
        return None
    tried.add(labels)
    order = batch_order(loss.graph, loss.alone, loss.calls, found.sources, candidate, loss.evidence)
    planner = _Planner(loss, candidate, order.sources)
    plan = planner.plan()
    if loss.needs_losses:
        plan = planner.with_terms(plan)
    if candidate.rows_together > 1 and (plan.mixed or not plan.is_balanced):
        raise UnavailableError(NOT_TOGETHER.format(samples=candidate.samples))
    # Only of as many calls can each row of the loss come from one.
    as_many = 1 < candidate.samples <= len(loss.evidence.calls)
    if as_many and candidate.in_each_call and any(map(_are_of_one_each, plan.uses.values())):
        reason = OTHER_AXIS if candidate.known_by == PASSED else ONE_CALL_EACH
        raise UnavailableError(reason.format(samples=candidate.samples))
    shared = [each.use for uses in plan.uses.values() for each in uses]
    if order.inputs is not None and order.inputs.are_shared(loss.graph, shared):
        raise UnavailableError(OTHER_AXIS.format(samples=candidate.samples))
    if not order.is_known:
        plan = plan.without(dict.fromkeys(plan.uses, UNKNOWN_ORDER))
        plan = replace(plan, terms=(), without_losses=UNKNOWN_ORDER)
    labelled = [planner.labels, *found.tracing, *order.labels]
    any_read = any(each.are_read for each in (*found.tracing, *order.labels))
    plan = replace(
        plan,
        holds=plan.holds and (not plan.uses or not (order.is_other or any_read)),
        selections=tuple(selection for each in labelled for selection in each.selections),
    )
    agrees = order.agrees
    return _Attempt(candidate, plan, agrees, found)


def _as_key(labels: Tensor | None) -> tuple[Any, ...] | None:
    """Labels without the axes along which they are the same."""
    if labels is None:
        return None
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, min(1, labels.shape[axis]))
        labels = first if bool((labels == first).all()) else labels
    return (labels.shape, *labels.flatten().tolist())


def _are_of_one_each(uses: Sequence[LabelledUse]) -> bool:
    """Whether the rows of each use belong to one sample, but not all to the same."""
    found = [{*use.rows[0].labels.unique().tolist()} - {NO_SAMPLE} for use in uses if 0 in use.rows]
    return all(len(each) <= 1 for each in found) and len(set().union(*found)) > 1


def _nothing(parameters: Iterable[str], reason: str) -> Plan:
    return Plan(None, reason, unavailable=dict.fromkeys(parameters, reason))


def plan_of_rows(
    graph: Graph,
    parameters: Mapping[str, nn.Parameter],
    samples: int,
    axis: int = 0,
    together: int = 1,
) -> Plan:
    """The plan of a graph of outputs, one of whose axes counts the samples.

    ``together`` is the number of consecutive rows that belong to one sample, such as the words of a
    text.
    """
    shape = [1] * len(graph.shape(graph.root))
    shape[axis] = samples * together
    labels = torch.arange(samples).repeat_interleave(together)
    source = Source(graph.root, labels.reshape(shape))
    candidate = Candidate(samples, axis, "the rows of the outputs")
    if graph.has_nested_tensors:
        return _nothing(parameters, NESTED)
    return _Planner(_LossGraph(graph, parameters), candidate, [source]).plan()


class _Planner:
    """Finds the plan for one candidate number of samples."""

    def __init__(self, loss: _LossGraph, candidate: Candidate, sources: Sequence[Source]) -> None:
        graph = self._graph = loss.graph
        self._parameters = loss.parameters
        self._candidate = candidate
        self._sources = sources
        self._inside = {
            n: p for n, p in loss.parameters.items() if p in graph and not p.is_complex()
        }
        edges = [source.edge for source in sources]
        self._finder = Finder(graph, loss.alone, edges, candidate.samples, loss.reads_data)
        self._hidden = graph.below(n for n, kind in enumerate(graph.kinds) if kind in HIDING)
        self._normalising = normalising(graph, candidate.samples)
        self.labels = Labels(graph, sources, candidate.samples, frozen(graph, self._normalising))

    def plan(self) -> Plan:
        """The plan, from as many labelled passes as it takes."""
        normalised = [_by_channel(self._graph, number) for number in self._normalising]
        ways = {name: self._finder.ways(p) for name, p in self._inside.items()}
        new = [*normalised, *(edge for way in ways.values() for edge in way.unlabelled)]
        labels: dict[LabelledEdge, Tensor] = {}
        for _ in range(MAX_ROUNDS):
            unique = [edge for edge in dict.fromkeys(new) if edge not in labels]
            new = [edge for edge in unique if edge.edge[0] not in self._hidden]
            if not new:
                break
            labels |= self.labels.of(new)
            ways = {name: self._finder.ways(p, labels) for name, p in self._inside.items()}
            new = [edge for way in ways.values() if way.mixed for edge in way.unlabelled]
        coupling = [
            edge.edge[0]
            for edge in normalised
            if _couples(labels.get(edge), self._candidate.samples)
        ]
        plan = self._without_unknown_rows(self._settled(ways, labels, coupling))
        return self._with_checked_rules(plan)

    def _settled(
        self,
        ways: Mapping[str, Ways],
        labels: Mapping[LabelledEdge, Tensor],
        coupling: Sequence[int],
    ) -> Plan:
        indices: dict[LabelledEdge, RowIndex] = {}
        unmixed = [(name, way) for name, way in ways.items() if not way.mixed]
        apart = {use.node: name for name, way in unmixed for use in way.uses}
        unreadable = {
            edge.edge[0] for edge, each in labels.items() if bool((each == UNREADABLE).any())
        }
        behind = self._names_behind(apart)
        unread = (HIDDEN, RAN_COMPILED, NOT_READABLE, *self.labels.refused.values())
        reasons = {n: self._reason(n, ways.get(n), behind, unreadable) for n in self._parameters}
        return Plan(
            self._candidate.samples,
            self._candidate.known_by,
            {
                name: tuple(self._labelled(use, labels, indices) for use in ways[name].uses)
                for name, reason in reasons.items()
                if not reason
            },
            {name: reason for name, reason in reasons.items() if reason},
            tuple(name for name, way in ways.items() if way.beside),
            tuple(coupling),
            mixed=any(way.mixed and reasons[n] not in unread for n, way in ways.items()),
            holds=indices.keys() <= self.labels.proven and not unreadable,
            read=self.labels.are_read,
            selections=self.labels.selections,
        )

    def _without_unknown_rows(self, plan: Plan) -> Plan:
        """Without parameters in front of a normalisation some of whose rows have no label.

        They have no gradient while the statistics are held fixed, but may have one through these.
        """
        front = in_front_of(plan.coupling, self._graph, self._parameters)
        lost = [
            name
            for name in front
            for use in plan.uses.get(name, ())
            if not all(index.is_complete for index in use.rows.values())
        ]
        return plan.without(dict.fromkeys(lost, NO_LABEL))

    def _with_checked_rules(self, plan: Plan) -> Plan:
        """Without parameters of layers whose rule disagrees with autograd."""
        used = {use.use.node for uses in plan.uses.values() for use in uses if use.use.own_name}
        reasons = {
            call.node: disagreements(self._graph, call)
            for call in self._graph.ruled_calls
            if call.node in used
        }
        return plan.without(
            {
                name: reasons[use.use.node][use.use.own_name]
                for name, uses in plan.uses.items()
                for use in uses
                if use.use.own_name in reasons.get(use.use.node, ())
            }
        )

    def with_terms(self, plan: Plan) -> Plan:
        """The plan with the terms of the loss, or the reason why they aren't known."""
        try:
            terms = [(node, rows_of(self._graph, node)) for node in term_nodes(self._graph)]
            edges = {edge for _, sizes in terms for each in sizes for edge in each}
            labels = self.labels.of(edges)
            found = tuple(self._term(node, sizes, labels) for node, sizes in terms)
        except UnavailableError as reason:
            return replace(plan, without_losses=str(reason))
        return replace(plan, terms=found, holds=plan.holds and edges <= self.labels.proven)

    def _term(
        self,
        node: int,
        sizes: Sequence[Sequence[LabelledEdge]],
        labels: Mapping[LabelledEdge, Tensor],
    ) -> LossTerm:
        """The term with the largest rows that are of one sample each."""
        for first, *others in sizes:
            known = labels[first]
            same = all(torch.equal(labels[each], known) for each in others)
            if same and not bool((known < NO_SAMPLE).any()):
                rows = RowIndex(known, self._candidate.samples)
                use = Use(first.edge[0], 0, (), ())
                output = first.edge[1]
                return LossTerm(node, LabelledUse(use, {output: rows}, {output: first.features}))
        raise UnavailableError(MEETING_IN_LOSS.format(kind=self._graph.kinds[node]))

    def _labelled(
        self, use: Use, labels: Mapping[LabelledEdge, Tensor], indices: dict[LabelledEdge, RowIndex]
    ) -> LabelledUse:
        edges = self._finder.labelled(use, labels)
        for edge in edges:
            if edge not in indices:
                found = RowIndex(labels[edge], self._candidate.samples)
                # In front of statistics that are held fixed, rows without gradient may get one.
                indices[edge] = found.filled(some=bool(self._normalising))
        fine = edges != self._finder.edges_at(use)
        return LabelledUse(
            use,
            {edge.edge[1]: indices[edge] for edge in edges},
            {edge.edge[1]: edge.features for edge in edges},
            fine and edges == self._finder.edges_at(use, True),
        )

    def _reason(
        self,
        name: str,
        way: Ways | None,
        names_behind: Sequence[tuple[str, ...]],
        unreadable: Set[int],
    ) -> str:
        """Why a parameter has no per-sample gradients; empty if it has."""
        if self._parameters[name].is_complex():
            return COMPLEX
        hidden = HIDDEN if REENTRANT_CHECKPOINT in self._graph.kinds else RAN_COMPILED
        if way is None:
            return UNUSED if set(HIDING).isdisjoint(self._graph.kinds) else hidden
        if self._hidden & {*way.mixed, *(use.node for use in way.uses)}:
            return hidden
        if not way.mixed:
            return "" if way.uses else BESIDE
        if unreadable & set(way.mixed):
            return self._why_not_read(way.mixed)
        if way.reason:
            return way.reason
        if SYNCHRONISED in self._graph.kinds:
            return ACROSS_PROCESSES
        unknown = [self._graph.shape(s.edge) for s in self._sources if s.labels is None]
        if unknown:
            return UNKNOWN_TERM.format(shape=list(unknown[0]), samples=self._candidate.samples)
        behind = names_behind[way.mixed[0]]
        samples, is_passed = self._candidate.samples, self._candidate.known_by == PASSED
        where = WHERE.format(behind=few(behind) or "the loss", samples=samples)
        return MEETING + where + ("" if is_passed else OTHER_N.format(samples=samples))

    def _why_not_read(self, nodes: Sequence[int]) -> str:
        """Why the samples of some rows at nodes can't be read off."""
        for number, reason in self.labels.refused.items():
            if not self._graph.below([number]).isdisjoint(nodes):
                return reason
        return NOT_READABLE

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


def _by_channel(graph: Graph, number: int) -> LabelledEdge:
    """The output of a normalisation of channels, with a row for each image and channel."""
    return LabelledEdge((number, 0), tuple(range(2, len(graph.shape((number, 0))))))


def _couples(labels: Tensor | None, samples: int) -> bool:
    """Whether some channel of a normalisation over ``[B, C]`` has rows of several samples."""
    if labels is None or samples == 1 or not labels.numel():
        return False
    return bool((labels < NO_SAMPLE).any() | (labels.amax(0) != labels.amin(0)).any())


AMBIGUOUS = (
    "the number of samples isn't certain, since more than one agrees with the network ({numbers}): "
    "pass batch_size=... to the context"
)
MAY_BE_OTHER = (
    "it isn't certain that there are {samples} samples, the rows along the leading axis, since the "
    "second axis may count the samples, too, and under the first one samples meet or some layers "
    "have positions first: pass the number of samples as batch_size=... to the context"
)
MEETING_OR_OTHER_AXIS = (
    "more than one axis has {samples} entries in the tensors that the loss is computed from, and "
    "samples meet whichever of them counts the samples, as they do in a loss of pairs: if yours "
    "don't meet, use a batch of another size"
)
MEETING_ON_SECOND_AXIS = (
    "only the second axis has {samples} entries, and samples meet if it counts them: if the "
    "leading one has several rows of each sample, use a batch of another size, or compute the loss "
    "from a tensor with one row for each sample"
)
SECOND_AXIS = (
    "the model was called with {samples} rows, but the loss is computed from tensors that have the "
    "model's second axis in full, and not this one, so that either may count the samples: pass the "
    "number of samples as batch_size=... to the context"
)
ONE_CALL_EACH = (
    "the model was called several times with {samples} rows, and the loss is computed from as many "
    "rows, but some of these come from one call each: pass the number of samples as "
    "batch_size=... to the context"
)
NOT_TOGETHER = (
    "the loss is computed from {samples} rows, of which the model was called with a multiple, but "
    "not all of them come from as many rows each: pass the number of samples as batch_size=... to "
    "the context"
)
UNKNOWN_ORDER = (
    "the loss has the samples in another order than the batch, and it isn't known of all of its "
    "rows which samples these are: compute the loss in the order of the batch"
)
NO_PASS = "no backward pass besides the user's own is possible ({error})"
FREED_GRAPH = "backward through the graph a second time"
"""Part of torch's message where a backward pass has freed the graph already."""
FREED = "backward has run already when the context was entered: call it inside the context"
COMPLEX = "it is complex"
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
    "weights a whole loss, or one function computes the whole loss with it"
)
EMPTY = "the batch is empty"
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
OTHER_N = "; if N = {samples} is wrong, pass batch_size=... to the context"
MEETING_IN_LOSS = (
    "samples meet in the loss, whose values are computed by {kind}, so that single samples have no "
    "losses of their own"
)
UNKNOWN_TERM = (
    "a term of the loss is computed from a tensor of shape {shape}, whose rows can't be followed "
    "among {samples} samples, and it depends on this parameter"
)
