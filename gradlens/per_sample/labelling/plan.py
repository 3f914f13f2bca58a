"""A look at a loss's graph: how many samples there are, and whose gradient is where.

``look_at`` finds, for each parameter, the nodes at which samples are still apart, and the sample of
each of their rows (``Plan``). What holds for one graph holds for all of the same structure as long
as nothing in it selects rows by numbers that change (``Plan.holds_for``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gradlens.history.coverage import few
from gradlens.hooks.model_calls import Given
from gradlens.per_sample.batchnorm import in_front_of, statistics_frozen, uses_statistics
from gradlens.per_sample.labelling.batch import (
    Candidate,
    UnknownBatchError,
    Witnesses,
    candidates_of,
    loss_inputs,
    sources_of,
)
from gradlens.per_sample.labelling.evidence import inputs_by_axis, reads_data
from gradlens.per_sample.labelling.graph import Graph, Use, selections_of
from gradlens.per_sample.labelling.labels import UNREADABLE, Source, Watched, read_labels
from gradlens.per_sample.labelling.node_kinds import HIDING, REENTRANT_CHECKPOINT, SYNCHRONISED
from gradlens.per_sample.labelling.row_index import NOBODY, RowIndex
from gradlens.per_sample.labelling.saved import is_recomputed, recomputation
from gradlens.per_sample.labelling.uses import Finder, Ways

MAX_LOOKS = 3
"""Looks at one graph: the first at what layers it has, further ones at what all samples share."""


@dataclass(frozen=True)
class LabelledUse:
    """A use of a parameter with the samples of its rows, by the number of the node's output.

    ``features`` are the axes of an output that belong to one row; ``fine`` says that each element
    is a row, although the kind of node has larger ones.
    """

    use: Use
    rows: Mapping[int, RowIndex]
    features: Mapping[int, tuple[int, ...]]
    fine: bool = False


@dataclass(frozen=True)
class Plan:
    """What a look has shown, in terms of a graph's numbers.

    ``samples`` is N and ``known_by`` how it is known, or why it isn't. ``uses`` are by parameter
    name, ``unavailable`` says why others have none, and ``beside`` names parameters that the loss
    also depends on without any samples. ``coupling`` are nodes that normalise over samples, and
    ``recounts`` says that looking at what they have saved updates their running statistics again.
    ``holds`` says that the same holds for other graphs of the same structure, whose numbers that
    select rows are ``selections``.
    """

    samples: int | None
    known_by: str
    uses: Mapping[str, tuple[LabelledUse, ...]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    coupling: tuple[int, ...] = ()
    recounts: bool = False
    holds: bool = False
    selections: tuple[Tensor, ...] = ()

    def holds_for(self, graph: Graph) -> bool:
        """Whether it is that of another graph with the same structure, too."""
        if not self.holds:
            return False
        others = selections(graph, self)
        return len(others) == len(self.selections) and all(
            first.shape == second.shape and torch.equal(first, second)
            for first, second in zip(self.selections, others, strict=True)
        )

    def part(self, kept: Tensor) -> Plan:
        """The plan for some of the samples alone, in the order of ``kept``."""
        samples = len(kept)
        numbers = torch.full(((self.samples or 0) + 1,), NOBODY)
        numbers[kept.cpu()] = torch.arange(samples)
        parts: dict[int, RowIndex] = {}

        def part_of(index: RowIndex) -> RowIndex:
            if id(index) not in parts:
                # The last one stands for the rows of nobody, whose label is -1.
                labels = numbers.to(index.labels.device)[index.labels]
                parts[id(index)] = RowIndex(labels, samples)
            return parts[id(index)]

        uses = {
            name: tuple(
                replace(use, rows={o: part_of(index) for o, index in use.rows.items()})
                for use in labelled
            )
            for name, labelled in self.uses.items()
        }
        return replace(self, samples=samples, uses=uses)


def look_at(
    graph: Graph,
    parameters: Mapping[str, nn.Parameter],
    witnesses: Witnesses,
    model_inputs: Sequence[Given] = (),
) -> Plan:
    """Which samples' gradients are where in the graph of a loss.

    ``model_inputs`` are what the model was called with, which decides where two axes have N
    entries. Gradients of parameters stay as they are.
    """
    alone = graph.of_parameters_alone()
    inputs = loss_inputs(graph, alone)
    try:
        candidates = candidates_of(inputs, witnesses)
    except UnknownBatchError as reason:
        return _nothing(parameters, None, str(reason))
    reads = reads_data(graph, model_inputs)
    plans: list[Plan] = []
    seen: set[tuple[object, ...]] = set()
    why = ""
    for candidate in candidates:
        try:
            found = sources_of(graph, inputs, alone, candidate)
            sources = found.sources
            if _fingerprint(sources) in seen or (candidate.samples == 1 and plans):
                continue  # a single sample has all rows, whatever they are
            seen.add(_fingerprint(sources))
            plan = _Look(graph, alone, parameters, candidate, sources, reads).plan()
        except UnknownBatchError as error:
            why = why or str(error)
            continue
        except RuntimeError as error:  # of a graph that allows no pass besides the user's own
            text = (str(error).splitlines() or [""])[0]
            why = why or f"no backward pass besides the user's own is possible ({text})"
            continue
        if candidate.rows_together > 1 and (plan.unavailable or not _is_balanced(plan)):
            continue  # rows of the model that none of the loss's came from
        agrees = _evidence(graph, plan, candidate.input_axis, model_inputs)
        if agrees is False or (agrees is None and found.ambiguous):
            why = why or OTHER_AXIS.format(samples=candidate.samples)
            continue
        if found.in_parts:
            plan = _in_order_of_inputs(graph, plan, candidate.input_axis, model_inputs)
        if not plan.unavailable:
            return plan
        plans.append(plan)
    if len(plans) > 1:
        return _nothing(parameters, None, AMBIGUOUS.format(numbers=_either(plans)))
    return plans[0] if plans else _nothing(parameters, None, why)


def _fingerprint(sources: Sequence[Source]) -> tuple[object, ...]:
    """What is the same for candidates that say the same of the loss's inputs."""
    labels = [None if s.labels is None else s.labels.flatten() for s in sources]
    return tuple(None if each is None else tuple(each.tolist()) for each in labels)


def _either(plans: Sequence[Plan]) -> str:
    return " or ".join(dict.fromkeys(f"{plan.samples}, by {plan.known_by}" for plan in plans))


def _evidence(
    graph: Graph, plan: Plan, axis: int | None, model_inputs: Sequence[Given]
) -> bool | None:
    """Whether a plan's labels agree with what the model was called with; ``None`` if unknown."""
    inputs = inputs_by_axis(model_inputs, axis)
    if inputs is None or plan.samples is None:
        return None
    return inputs.agree(graph, _labels_of_uses(plan), plan.samples)


def _in_order_of_inputs(
    graph: Graph, plan: Plan, axis: int | None, model_inputs: Sequence[Given]
) -> Plan:
    """A plan whose labels are in the order of the losses, in that of the model's inputs."""
    inputs = inputs_by_axis(model_inputs, axis)
    if inputs is None or plan.samples is None:
        return plan
    labels = inputs.order(graph, _labels_of_uses(plan), plan.samples)
    return plan if labels is None else plan.part(labels)


def _labels_of_uses(plan: Plan) -> list[tuple[Use, Tensor]]:
    labelled = (use for uses in plan.uses.values() for use in uses)
    return [(use.use, use.rows[0].labels) for use in labelled if 0 in use.rows]


AMBIGUOUS = (
    "samples meet in the network whichever axis counts them, so that the number of samples isn't "
    "certain ({numbers}): pass batch_size=... to the context"
)
OTHER_AXIS = (
    "more than one axis, or a selection of rows, has {samples} entries in the tensors that the "
    "loss is computed from, so that it isn't certain which of them are the samples: use a batch of "
    "another size, or compute the loss from a tensor with one row for each sample"
)


def samples_of(graph: Graph, witnesses: Witnesses) -> int:
    """The number of samples of a loss; ``UnknownBatchError`` if it isn't known."""
    alone = graph.of_parameters_alone()
    inputs = loss_inputs(graph, alone)
    reason: UnknownBatchError | None = None
    for candidate in candidates_of(inputs, witnesses):
        try:
            sources_of(graph, inputs, alone, candidate)
        except UnknownBatchError as error:
            reason = reason or error
        else:
            return candidate.samples
    assert reason is not None
    raise reason


def look_at_rows(
    graph: Graph, parameters: Mapping[str, nn.Parameter], samples: int, axis: int = 0
) -> Plan:
    """The same for a graph of outputs, one of whose axes counts the samples."""
    shape = [1] * len(graph.shape(graph.root))
    shape[axis] = samples
    source = Source(graph.root, torch.arange(samples).reshape(shape))
    candidate = Candidate(samples, axis, "the rows of the outputs")
    alone, reads = graph.of_parameters_alone(), reads_data(graph, ())
    return _Look(graph, alone, parameters, candidate, [source], reads).plan()


def _nothing(parameters: Iterable[str], samples: int | None, reason: str) -> Plan:
    return Plan(samples, reason, unavailable=dict.fromkeys(parameters, reason))


def selections(graph: Graph, plan: Plan) -> tuple[Tensor, ...]:
    """The numbers by which rows are selected on the way from the loss to parameters."""
    at_parameters = {labelled.use.node for uses in plan.uses.values() for labelled in uses}
    at_parameters |= {
        link.node for uses in plan.uses.values() for u in uses for link in u.use.chain
    }
    found = []
    with recomputation():
        for number, node in enumerate(graph.nodes):
            if number not in at_parameters:
                found += selections_of(node)
    return tuple(found)


class _Look:
    """One look, for a candidate number of samples."""

    def __init__(
        self,
        graph: Graph,
        alone: Sequence[bool],
        parameters: Mapping[str, nn.Parameter],
        candidate: Candidate,
        sources: Sequence[Source],
        reads_data: Sequence[bool],
    ) -> None:
        self._graph = graph
        self._candidate = candidate
        self._sources = sources
        real = {n: p for n, p in parameters.items() if not p.is_complex()}
        self._inside = {n: p for n, p in real.items() if p in graph}
        self._parameters = parameters
        self._finder = Finder(
            graph, alone, [s.edge for s in sources], candidate.samples, reads_data
        )
        hiding = [n for n, kind in enumerate(graph.kinds) if kind in HIDING]
        self._hidden = graph.below(hiding)
        self._normalising = [
            number
            for number, node in enumerate(graph.nodes)
            if uses_statistics(node) and number not in self._hidden and self._has_images(number)
        ]

    def _has_images(self, number: int) -> bool:
        """Not of instance normalisation, which normalises channels ``[1, N·C]`` of samples."""
        return self._candidate.samples > 1 and self._graph.shape((number, 0))[0] > 1

    def plan(self) -> Plan:
        watched = [_by_channel(self._graph, number) for number in self._normalising]
        ways = {name: self._finder.ways(p) for name, p in self._inside.items()}
        new = [*watched, *(watch for way in ways.values() for watch in way.unwatched)]
        labels: dict[Watched, Tensor] = {}
        for _ in range(MAX_LOOKS):
            new = [
                w for w in dict.fromkeys(new) if w not in labels and w.edge[0] not in self._hidden
            ]
            if not new:
                break
            labels |= self._read(new)
            ways = {name: self._finder.ways(p, labels) for name, p in self._inside.items()}
            new = [watch for way in ways.values() if way.mixed for watch in way.unwatched]
        return self._settled(ways, labels, watched)

    def _read(self, watched: Sequence[Watched]) -> dict[Watched, Tensor]:
        nodes = [self._graph.nodes[number] for number in self._normalising]
        with ExitStack() as stack:
            stack.enter_context(statistics_frozen(nodes))
            return read_labels(self._graph, self._sources, watched, self._candidate.samples)

    def _settled(
        self, ways: Mapping[str, Ways], labels: Mapping[Watched, Tensor], watched: Sequence[Watched]
    ) -> Plan:
        uses: dict[str, tuple[LabelledUse, ...]] = {}
        unavailable: dict[str, str] = {}
        indices: dict[Watched, RowIndex] = {}
        settled = [(name, way) for name, way in ways.items() if not way.mixed]
        labelled = {use.node: name for name, way in settled for use in way.uses}
        unreadable = {
            watch.edge[0] for watch, each in labels.items() if bool((each == UNREADABLE).any())
        }
        for name in self._parameters:
            way = ways.get(name)
            reason = self._reason(way, labelled, unreadable)
            reason = COMPLEX if self._parameters[name].is_complex() else reason
            if reason or way is None:
                unavailable[name] = reason
                continue
            uses[name] = tuple(self._labelled(use, labels, indices) for use in way.uses)
        plan = Plan(
            self._candidate.samples,
            self._candidate.known_by,
            uses,
            unavailable,
            tuple(name for name, way in ways.items() if way.beside),
            tuple(w.edge[0] for w in watched if _couples(labels.get(w), self._candidate.samples)),
            any(is_recomputed(node) for node in self._graph.nodes if uses_statistics(node)),
        )
        plan = self._without_unknown_rows(plan)
        if not self._is_believable(plan):
            return plan
        return replace(
            plan, holds=True, selections=tuple(s.clone() for s in selections(self._graph, plan))
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
        if not lost:
            return plan
        uses = {name: each for name, each in plan.uses.items() if name not in lost}
        return replace(
            plan, uses=uses, unavailable={**plan.unavailable, **dict.fromkeys(lost, NO_LABEL)}
        )

    def _labelled(
        self, use: Use, labels: Mapping[Watched, Tensor], indices: dict[Watched, RowIndex]
    ) -> LabelledUse:
        watched = self._finder.labelled(use, labels)
        for watch in watched:
            if watch not in indices:
                found = RowIndex(labels[watch], self._candidate.samples)
                # In front of statistics that are held fixed, rows without gradient may get one.
                indices[watch] = found.filled(some=bool(self._normalising))
        fine = watched != self._finder.watched_at(use)
        return LabelledUse(
            use,
            {watch.edge[1]: indices[watch] for watch in watched},
            {watch.edge[1]: watch.features for watch in watched},
            fine and watched == self._finder.watched_at(use, True),
        )

    def _is_believable(self, plan: Plan) -> bool:
        """Whether rows can't belong to other samples in a graph of the same structure.

        Each sample has as many rows everywhere. Otherwise a row that all samples share may seem to
        be of one, if those of the others have no gradient by chance.
        """
        opaque = any(kind == "CopySlices" for kind in self._graph.kinds)
        return not opaque and _is_balanced(plan)

    def _reason(self, way: Ways | None, labelled: Mapping[int, str], unreadable: Set[int]) -> str:
        """Why a parameter has no per-sample gradients; nothing if it has."""
        hidden = HIDDEN if REENTRANT_CHECKPOINT in self._graph.kinds else COMPILED
        if way is None:
            return UNUSED if set(HIDING).isdisjoint(self._graph.kinds) else hidden
        if self._hidden & {*way.mixed, *(use.node for use in way.uses)}:
            return hidden
        if not way.mixed:
            return "" if way.uses else BESIDE
        if unreadable & set(way.mixed):
            return NOT_READABLE
        if SYNCHRONISED in self._graph.kinds:
            return ACROSS_PROCESSES
        unknown = [self._graph.shape(s.edge) for s in self._sources if s.labels is None]
        if unknown:
            return UNKNOWN_TERM.format(shape=list(unknown[0]), samples=self._candidate.samples)
        behind = self._first_behind(way.mixed[0], labelled)
        return MEETING.format(behind=few(behind) or "the loss", samples=self._candidate.samples)

    def _first_behind(self, node: int, labelled: Mapping[int, str]) -> list[str]:
        """The parameters of the first nodes towards the loss at which samples are apart."""
        found: dict[str, None] = {}
        seen, waiting = {node}, [node]
        while waiting:
            for consumer, _, _ in self._graph.consumers[waiting.pop()]:
                if consumer in labelled:
                    found[labelled[consumer]] = None
                elif consumer not in seen:
                    seen.add(consumer)
                    waiting.append(consumer)
        return list(found)


def _by_channel(graph: Graph, number: int) -> Watched:
    """The output of a normalisation of channels, row by row for each image and channel."""
    return Watched((number, 0), tuple(range(2, len(graph.shape((number, 0))))))


def _is_balanced(plan: Plan) -> bool:
    """Whether each sample has as many rows in all uses."""
    uses = [use for labelled in plan.uses.values() for use in labelled]
    return all(index.is_balanced for use in uses for index in use.rows.values())


def _couples(labels: Tensor | None, samples: int) -> bool:
    """Whether some channel of a normalisation over ``[B, C]`` has rows of several samples."""
    if labels is None or samples == 1 or not labels.numel():
        return False
    return bool((labels < NOBODY).any() | (labels.amax(0) != labels.amin(0)).any())


COMPLEX = "it is complex"
NO_LABEL = (
    "it is in front of a normalisation over the batch, and some of its rows get their gradient "
    "from the statistics alone, which are of all samples"
)
UNUSED = "the loss doesn't depend on it, or in a way that autograd doesn't follow"
BESIDE = "the loss depends on it in a way that no sample has a share in, as a regulariser does"
HIDDEN = "a reentrant checkpoint hides whose gradients are whose: pass use_reentrant=False to it"
COMPILED = (
    "its layer ran compiled, where per-sample gradients can't be seen: at tracked steps, run the "
    'forward pass inside torch.compiler.set_stance("force_eager")'
)
NOT_READABLE = (
    "the gradient in front of it has NaN, infinities, or numbers too small for its precision, so "
    "that whose they are can't be read off"
)
ACROSS_PROCESSES = (
    "it is in front of a normalisation with the statistics of all processes: use BatchNorm, or "
    "eval mode"
)
MEETING = (
    "samples meet between it and {behind}: its gradient comes from rows that several of the "
    "{samples} samples depend on (they are normalised together, compared with each other, or "
    "attend to each other); if N = {samples} is wrong, pass batch_size=... to the context"
)
UNKNOWN_TERM = (
    "a term of the loss is computed from a tensor of shape {shape}, whose rows can't be told apart "
    "into {samples} samples, and it depends on this parameter"
)
