"""How many samples a batch has, and which rows of the loss are theirs.

N is the first of these that there is: the number that the user passes, that of per-sample losses,
the rows of what the model was called with. The rows of the model's inputs are followed up to the
loss (``gradlens.samples.names``), which confirms or contradicts that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import index
from typing import SupportsIndex

import numpy as np

from gradlens.graph.graph import Edge, Graph, each_once
from gradlens.graph.kinds import LEAF, is_linear, kind_of
from gradlens.graph.model_calls import Given, ModelCall
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.labels import (
    UNREADABLE,
    Labels,
    Shape,
    are_known,
    axes_of,
    counted,
    differ,
    distinct,
    only,
)
from gradlens.samples.model_inputs import (
    LOSSES,
    PASSED,
    Reading,
    counting_axes,
    lengths_of,
    rows_of,
    shapes_of,
)
from gradlens.samples.names import Names
from gradlens.torch_private import sequence_number

CALLED = "the rows that the model was called with"
TOGETHER = "the rows of all calls of the model together"
OF_EACH_CALL = "the rows of each call of the model"
OUTPUTS = "the rows of the outputs"


@dataclass(frozen=True)
class BatchEvidence:
    """What is known of a batch besides the loss's graph.

    ``batch_size`` is the number that the user has passed, ``losses`` the number of per-sample
    losses, and ``losses_at`` where these are in the graph, if they are. ``calls`` are those of the
    model that have led to the loss. ``positions_first`` means that some of the model's layers count
    samples along the second axis.
    """

    batch_size: SupportsIndex | None = None
    losses: int | None = None
    losses_at: Edge | None = None
    calls: Sequence[ModelCall] = field(default=(), compare=False)
    positions_first: bool = False


def readings(evidence: BatchEvidence) -> list[Reading]:
    """What the number of samples may be; the graph decides which of them it is.

    ``UnavailableError`` if there is no evidence, or if it contradicts itself.
    """
    calls, axes = evidence.calls, (0, 1) if evidence.positions_first else (0,)
    several, rows = len(calls) > 1, [*map(rows_of, calls)]
    samples = _given(evidence)
    if samples is not None:
        known_by = LOSSES if evidence.batch_size is None else PASSED
        fitting = [axis for axis in (0, 1) if samples in lengths_of(calls, axis)]
        fitting = fitting if evidence.positions_first else fitting[:1]
        found = [Reading(calls, samples, known_by, axis) for axis in fitting]
        as_many = samples in (sum(rows), len(rows))
        have_all = {*rows} == {samples}  # so that each call may be on all samples
        if several and as_many and (evidence.positions_first or not have_all):
            in_turn = Reading(calls, samples, known_by, in_turn=True, needs_names=have_all)
            found = [*found, in_turn]
        # Whichever axis of the loss has N.
        return found or [Reading(calls, samples, known_by, axis=1)]
    if not calls:
        raise UnavailableError(NO_CALLS)
    if several:
        of_each: list[Reading] = []
        for axis in axes:
            of_calls = [lengths_of([call], axis)[:1] for call in calls]
            if of_calls[0] and all(each == of_calls[0] for each in of_calls):
                of_each.append(Reading(calls, of_calls[0][0], OF_EACH_CALL, axis))
        if of_each and _have_same_inputs(calls):
            return of_each
        return [Reading(calls, sum(rows), TOGETHER, in_turn=True), *of_each]
    found, shapes = [], shapes_of(calls)
    has_tensors = any(len(shape) > 1 for shape in shapes)
    for axis in axes:
        lengths = lengths_of(calls, axis)
        # A tensor of one row behind others is the same for all samples.
        first = [shape[0] for shape in shapes]
        others = [n for n in (first if lengths[:1] == [1] else lengths[1:]) if n != 1]
        every = dict.fromkeys([*lengths[:1], *others])
        doubtful = len(every) > 1 and has_tensors
        found += [Reading(calls, n, CALLED, axis, needs_names=doubtful) for n in every]
    if not found:
        raise UnavailableError(NO_ROWS)
    return found


def _have_same_inputs(calls: Sequence[ModelCall]) -> bool:
    """Whether all calls are of the same tensors, and so of the same samples, as of experts."""
    first, *others = ([given.reference() for given in call.inputs] for call in calls)
    are_alive = all(each is not None for each in first)
    return are_alive and all([*map(id, each)] == [*map(id, first)] for each in others)


def may_be_parts(given: Given) -> bool:
    """Whether rows may be the parts of a single sample: words ``[T]``, or steps ``[T, 1, ...]``."""
    if len(given.shape) == 1:
        return not given.is_real
    return counting_axes(given.shape, given.is_real)[1:2] == (1,)


def _given(evidence: BatchEvidence) -> int | None:
    """The number of samples that the user has passed, or that of the losses."""
    if evidence.batch_size is None:
        return evidence.losses
    try:
        samples = index(evidence.batch_size)
    except TypeError:
        samples = 0
    if samples < 1:
        raise UnavailableError(
            f"batch_size={evidence.batch_size!r} was passed: pass the number of samples as an int"
        )
    if evidence.losses not in (None, samples):
        raise UnavailableError(
            f"batch_size={samples} was passed, but there are {evidence.losses} per-sample losses: "
            "pass the number of samples in the batch"
        )
    return samples


# The rows of the loss ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LossRows:
    """Where the loss is computed from rows of samples, with the samples of these.

    ``by_place`` says that some were found by their places alone, and ``has_row_for_each`` that a
    tensor has as many rows as there are samples.
    """

    sources: Mapping[Edge, Labels]
    by_place: bool
    has_row_for_each: bool

    @property
    def samples(self) -> list[int]:
        """The samples that have rows."""
        every = set[int]().union(*map(distinct, self.sources.values()))
        return sorted(sample for sample in every if sample >= 0)

    @property
    def are_in_order(self) -> bool:
        """Whether the samples come one after the other, in the order of their numbers."""
        first = [[*dict.fromkeys(each[each >= 0].tolist())] for each in self.sources.values()]
        return all(each == sorted(each) for each in first)

    def in_order(self, order: Labels) -> LossRows:
        """The same rows with other samples, by the present ones."""
        found = {e: np.where(each < 0, each, order[each]) for e, each in self.sources.items()}
        return replace(self, sources=found)

    def are_those_of(self, other: LossRows) -> bool:
        """Whether the same rows have the same samples."""
        return self.sources.keys() == other.sources.keys() and all(
            np.array_equal(each, other.sources[edge]) for edge, each in self.sources.items()
        )


def loss_edges(
    graph: Graph,
    inputs: Collection[Shape],
    are_rows: Callable[[Edge], bool] = lambda edge: False,
) -> list[Edge]:
    """The first edges, from the loss down, at which it is computed from rows.

    Numbers are passed that aren't a sample's own, and what is linear in rows of samples. Terms of
    parameters alone, or of these and constants, are left out. The edges are in the order in which
    the user's code has computed them.
    """
    found: list[Edge] = []
    waiting = [graph.root]
    has_terms_of_weights = False
    for edge in each_once(waiting):
        if graph.alone[edge[0]] or graph.kinds[edge[0]] == LEAF:
            has_terms_of_weights |= graph.alone[edge[0]]
            continue
        below = list(graph.descend(edge))
        is_row = are_rows(edge)
        is_number = prod(graph.shape(edge)) == 1
        is_number |= not is_row and bool(_numbers_in(graph, edge))
        is_passed = is_linear(graph.nodes[edge[0]]) if is_number == is_row else is_number
        if is_number and is_row and _is_of_parameters(graph, edge):
            is_passed = False
        if below and is_passed:
            waiting += below
        else:
            found.append(edge)
    compared = {edge: _shapes_of_weights(graph, edge) for edge in found}
    if has_terms_of_weights or not all(compared.values()):
        for shape in set[Shape]().union(*compared.values()):
            if shape in inputs or (1, *shape) in inputs:
                raise UnavailableError(COMPARED.format(shape=[*shape]))
        found = [edge for edge in found if not compared[edge]] or found
    found.sort(key=lambda edge: (sequence_number(graph.nodes[edge[0]]), edge[1]))
    return found


def _numbers_in(graph: Graph, edge: Edge) -> list[Edge]:
    """The single numbers, such as means of losses, that an edge is computed from with parameters.

    Empty if it is computed from anything else.
    """
    numbers: list[Edge] = []
    waiting = [edge]
    for above in each_once(waiting):
        number, shape = above[0], graph.shape(above)
        if graph.alone[number]:
            continue
        if prod(shape) == 1:
            numbers.append(above)
            continue
        below = list(graph.descend(above))
        weights = [graph.shape(each) for each in below if graph.alone[each[0]]]
        # Weights that are repeated meet the data of several rows.
        is_repeated = len(weights) == len(below) and prod(shape) > max(
            map(prod, weights), default=0
        )
        has_data = None in graph.children[number] and not is_linear(graph.nodes[number])
        if kind_of(graph.kinds[number]).is_layer or has_data or is_repeated:
            return []
        waiting += below
    return numbers


def _is_of_parameters(graph: Graph, edge: Edge) -> bool:
    """Whether data picks the only sample's number from parameters, or these are repeated for it."""
    below = list(graph.descend(edge))
    weights = [each for each in below if graph.alone[each[0]]]
    if len(weights) == len(below):
        return kind_of(graph.kinds[edge[0]]).brings_data
    return any(len(graph.shape(each)) < len(graph.shape(edge)) for each in weights)


def _shapes_of_weights(graph: Graph, edge: Edge) -> set[Shape]:
    """The shapes of weights that a term compares with constants, as a penalty on their change does.

    Empty if it is another term: no layer computes with such weights, and they are repeated for no
    sample, not even for the only one.
    """
    shapes: set[Shape] = set()
    largest, axes, waiting = 0, 0, [edge]
    for above in each_once(waiting):
        kind = graph.kinds[above[0]]
        if graph.alone[above[0]]:
            shapes.add(graph.shape(above))
        elif kind == LEAF or kind_of(kind).is_layer or kind_of(kind).brings_data:
            return set()
        elif kind_of(kind).joins:  # such as the norms of weights, some of which are frozen
            waiting += graph.descend(above)
        else:
            largest = max(largest, prod(graph.shape(above)))
            axes = max(axes, len(graph.shape(above)))
            waiting += graph.descend(above)
    is_larger = largest > max(map(prod, shapes), default=0)
    return set() if is_larger or axes > max(map(len, shapes), default=0) else shapes


def loss_rows(names: Names, reading: Reading) -> LossRows:
    """The loss's rows with their samples; ``UnavailableError`` if the reading isn't certain."""
    found: dict[Edge, Labels] = {}
    graph, samples = names.graph, reading.samples

    def are_rows(edge: Edge) -> bool:
        shape = graph.shape(edge)
        own = only(0, len(shape)) if samples == 1 else names.at(edge)
        is_open = reading.is_one_axis and not are_known(own)
        # Means over several samples aren't a sample's, even if they are as many.
        means = _numbers_in(graph, edge) if is_open else []
        is_open &= not any(_may_be_of_all(names, each, samples) for each in means)
        places = _by_place(shape, reading) if is_open else None
        if places is not None and names.may_be_in_order(edge, places):
            own = places
        found[edge] = own if are_known(own) else only(UNREADABLE, len(shape))
        return are_known(own)

    edges = loss_edges(graph, shapes_of(reading.calls), are_rows)
    if not edges:
        raise UnavailableError(NO_LOSS_ROWS)
    labels = {edge: found[edge] for edge in edges}
    named = {edge: each for edge, each in labels.items() if are_known(each)}
    meeting = meeting_edges(graph, named) if samples > 1 else []
    if meeting:
        raise _not_followed(meeting, names, reading)
    unnamed = [e for e in labels if e not in named and not names.are_behind(e)]
    as_many = [edge for edge in edges if graph.shape(edge)[:1] == (samples,)]
    by_place = [edge for edge in named if not are_known(names.at(edge))]
    own = set[int]().union(*map(distinct, named.values()))
    unclear: list[Edge] = []
    if not named:
        unclear = unnamed or edges
    elif len(own) == 1 < samples:
        # As many rows may be of all samples, and depend on one, as by the mean of a masked batch.
        unclear = as_many
    elif len(by_place) >= samples > 1:  # these may be of one sample each
        unclear = by_place
    remedy = PASS_LOSSES if reading.is_given else PASS_OTHER if unclear else PASS
    unclear = unclear if reading.is_given else unnamed or unclear
    if unclear:
        raise _not_followed(unclear, names, reading, remedy)
    if len(own) < samples:
        shapes = [*map(graph.shape, edges), *_selected_from(graph, edges)]
        _check_left_out(reading, names, shapes)
    known = [*named.values()]
    if reading.known_by == CALLED and not names.selects and _are_equal_parts(known, samples):
        raise UnavailableError(UNSURE.format(samples=samples))
    return LossRows(labels, bool(by_place) and samples > 1, bool(as_many))


def _may_be_of_all(names: Names, number: Edge, samples: int) -> bool:
    """Whether a number is computed from rows of several samples, or from N rows without names."""
    graph, waiting = names.graph, [number]
    if len(names.samples_behind(number)) > 1:
        return True
    for edge in each_once(waiting):
        if graph.shape(edge)[:1] == (samples,) and not graph.alone[edge[0]] and samples > 1:
            return not are_known(names.at(edge))
        waiting += graph.descend(edge) if prod(graph.shape(edge)) == 1 else []
    return False


def meeting_edges(graph: Graph, labels: Mapping[Edge, Labels]) -> list[Edge]:
    """The edges of which one node combines rows of different samples, as squared errors do."""
    for number in {consumer for edge in labels for consumer, _, _ in graph.consumers[edge[0]]}:
        both = [edge for edge in graph.descend((number, 0)) if edge in labels]
        if len(both) > 1 and not is_linear(graph.nodes[number]):
            first, *others = (labels[edge] for edge in both)
            if any(not _agree(first, other) for other in others):
                return both
    return []


def _agree(one: Labels, other: Labels) -> bool:
    """Whether rows that are combined have the same samples, where both have one."""
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return all(n == m or 1 in (n, m) for n, m in pairs) and not differ(one, other)


def _by_place(shape: Shape, reading: Reading) -> Labels | None:
    """Samples 0 to N - 1 along the only axis with N entries, if it may be the one of samples."""
    axes = counting_axes(shape, is_real=False)
    if axes.count(reading.samples) != 1:
        return None
    axis = axes.index(reading.samples)
    return counted(range(reading.samples), axis, len(shape)) if axis <= reading.axis else None


def _are_equal_parts(labels: Sequence[Labels], samples: int) -> bool:
    """Whether as many other samples each are those of several tensors, or of rows of one."""
    own = [distinct(each) for each in labels]
    if any(len(axes_of(each)) > 1 for each in labels):
        return len(labels) == 1 and labels[0].size == len(own[0]) == samples
    sizes = {len(each) for each in own}
    together = set[int]().union(*own)
    apart = sum(map(len, own)) == len(together) == samples > len(own)
    return len(own) > 1 and len(sizes) == 1 and apart


class UnsureError(UnavailableError):
    """It isn't certain that rows are samples; along another axis, as many aren't certain either."""


class EitherAxisError(UnavailableError):
    """Rows along this axis may be samples, although it isn't known which."""


class UnknownOrderError(UnavailableError):
    """The loss's rows may be in another order than the batch; their axis may be right."""


def unknown_order(reading: Reading) -> UnknownOrderError:
    """With what to pass: another number of samples, unless it was given."""
    remedy = PASS_LOSSES if reading.is_given else PASS_OTHER
    return UnknownOrderError(UNKNOWN_ORDER.format(remedy=remedy))


def _selected_from(graph: Graph, edges: Sequence[Edge]) -> list[Shape]:
    """The shapes of what rows were selected from, on the way to some edges."""
    found: list[Shape] = []
    waiting = [*edges]
    for edge in each_once(waiting):
        below = list(graph.descend(edge))
        if kind_of(graph.kinds[edge[0]]).selects:
            found += map(graph.shape, below)
        else:
            waiting += [e for e in below if graph.shape(e)[:1] == graph.shape(edge)[:1]]
    return found


def _check_left_out(reading: Reading, names: Names, shapes: Sequence[Shape]) -> None:
    """``UnavailableError`` if the rows that the loss leaves out may be positions."""
    samples, given = reading.samples, reading.inputs
    square = any(each.shape[:2] == (samples, samples) for each in given)
    by_second = reading.is_given and reading.axis == 1 and not names.selects
    if by_second or (square and reading.is_given != names.selects):
        raise UnsureError(EITHER_AXIS.format(samples=samples))
    if reading.is_given:
        return
    axes = [counting_axes(each.shape, each.is_real) for each in given if len(each.shape) < 4]
    other = {each[1 - reading.axis] for each in axes if len(each) > 1} - {samples}
    doubtful = any(prod(shape) == 1 or {*shape[:1]} & other for shape in shapes)
    if doubtful or not names.selects:
        raise UnsureError(UNSURE.format(samples=samples))


def _not_followed(
    edges: Sequence[Edge], names: Names, reading: Reading, remedy: str = ""
) -> UnavailableError:
    """Why none of the loss's rows has a sample of its own; without a ``remedy``, samples meet."""
    graph = names.graph
    meeting = [edge for edge in edges if not remedy or names.meet_behind(edge)]
    # One row may be of one sample, whose parts the model was called with.
    is_single = not reading.is_given and all(graph.shape(e)[:1] == (1,) for e in meeting or edges)
    if names.are_shuffled and not (meeting or is_single):
        return unknown_order(reading)
    square = [edge for edge in edges if graph.shape(edge).count(reading.samples) > 1]
    # Along the wrong axis of the inputs, samples may seem to meet.
    is_either = not reading.is_one_axis or (square and not meeting)
    as_many = (graph.shape(edge)[:1] == (reading.samples,) for edge in meeting or edges)
    are_other = not (reading.is_given or any(as_many))
    met, followed = (MEET_IN_ROWS, OTHER_ROWS) if are_other else (MEET, NOT_FOLLOWED)
    reason = EITHER_AXIS if is_either else met if meeting else followed
    reason = ONE_ROW if is_single else reason
    every = dict.fromkeys(str([*graph.shape(edge)]) for edge in meeting or square or edges)
    shapes = " and ".join([*every][:2])
    reason += "" if reading.is_given or reason != MEET else OTHER_N
    known = {"samples": reading.samples, "known_by": reading.known_by}
    error = EitherAxisError if reason == EITHER_AXIS else UnavailableError
    return error(reason.format(shapes=shapes, remedy=remedy, **known))


COMPARED = (
    "a term of the loss compares a parameter of shape {shape} with something that may be the "
    "model's input, of the same shape, or a constant: use a batch of another size"
)
PASS = "pass the number of samples as batch_size=... to the context"
PASS_LOSSES = (
    "compute the loss from one loss of each sample, and pass these, of shape [N], as "
    "individual_losses=... to the context"
)
PASS_OTHER = f"pass N as batch_size=... to the context if it is another number, else {PASS_LOSSES}"
NO_LOSS_ROWS = (
    "the loss is computed from parameters alone, or from single numbers, of which it can't be "
    "followed whether each belongs to one sample: " + PASS_LOSSES
)
NO_CALLS = (
    "no recorded call of the model has led to this loss, so that the number of samples isn't known "
    "(calls are recorded after gradlens.extend or inside the context, but not those of compiled "
    "models or in torch.func's transforms): run the forward pass there, or " + PASS
)
NO_ROWS = (
    "the model was called without a tensor of two axes or more, and a vector of real numbers may "
    f"be one sample, so that the number of samples isn't known: {PASS}, or {PASS_LOSSES}"
)
UNKNOWN_ORDER = (
    "the loss may have the samples in another order than the batch, and it isn't known of all of "
    "its rows which samples these are: {remedy}"
)
OTHER_ORDER = (
    "a loss that was passed in individual_losses=... depends on the row of another sample in what "
    "the model was called with, or on those of several: put the losses in the order of these rows, "
    "if each is of one row"
)
NOT_FOLLOWED = (
    "N = {samples} by {known_by}, but the loss is computed from tensors of shape {shapes}, and it "
    "can't be followed which sample each of their rows belongs to: {remedy}"
)
MEET = (
    "samples meet in the loss, which is computed from a tensor of shape {shapes} with entries of "
    "several of the {samples} samples, as a loss of pairs is"
)
MEET_IN_ROWS = (
    "several of the {samples} rows that the model was called with meet in one row of a tensor of "
    "shape {shapes}, from which the loss is computed: pass batch_size=... to the context if a "
    "sample has several rows, as a graph or a sequence has; a loss of pairs has no per-sample "
    "gradients"
)
OTHER_ROWS = (
    "the model was called with {samples} rows, but the loss is computed from tensors of shape "
    "{shapes}, whose rows can't be followed among these: {remedy}"
)
PARTS_OF_ONE = (
    "pass batch_size=1 to the context if these are parts of one sample, such as words or steps, "
)
ONE_ROW = (
    "the model was called with {samples} rows, and the loss is computed from one, of shape "
    f"{{shapes}}: {PARTS_OF_ONE}else {PASS_LOSSES}"
)
ONE_SAMPLE = (
    "the model was called with {samples} rows, which meet on the way to the loss: "
    f"{PARTS_OF_ONE}else the number of samples"
)
OTHER_N = "; if N = {samples} is wrong, pass batch_size=... to the context"
AMBIGUOUS = (
    "the number of samples isn't certain, since more than one agrees with the network ({numbers}): "
    f"{PASS} if it is one of these, else {PASS_LOSSES}"
)
UNSURE = (
    "the model was called with {samples} rows, but these may be no samples: the loss leaves out "
    "some of them, is computed from equal parts of them, or can't be followed to all of them: "
    + PASS
)
EITHER_AXIS = (
    "two axes have {samples} entries in what the model was called with, or in what the loss is "
    "computed from, and either may count the samples: use a batch of another size, or "
    + PASS_LOSSES
)
SEVERAL = (
    "the model was called {count} times, with {rows} each, and the loss neither has all of "
    "these in one tensor nor combines those of each call, so that they may be parts of the batch "
    f"or the same samples: {PASS}, or {PASS_LOSSES}"
)
