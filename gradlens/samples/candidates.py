"""How many samples a batch may have, by all the evidence.

The number of samples N is known at the loss and nowhere else. The evidence is the batch size that
the user passes, per-sample losses, the rows of the loss's inputs, and what the model was called
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import SupportsIndex, TypeAlias

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import LEAF, kind_of
from gradlens.graph.torch_private import sequence_number
from gradlens.numerics.unavailable import UnavailableError

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class BatchEvidence:
    """What is known of a batch besides the loss's graph.

    ``batch_size`` is the number that the user has passed, ``losses`` the number of per-sample
    losses. ``calls`` are the shapes of the tensors that the model was called with, by call.
    ``positions_first`` means that some of the model's layers count samples along the second axis,
    and ``has_positions`` that a tensor has an axis besides those of samples and features.
    """

    batch_size: SupportsIndex | None = None
    losses: int | None = None
    calls: tuple[tuple[Shape, ...], ...] = ()
    positions_first: bool = False
    has_positions: bool = False

    @property
    def called_with(self) -> list[Shape]:
        """Shapes of the tensors of all calls, each once."""
        return list(dict.fromkeys(shape for shapes in self.calls for shape in shapes))

    @property
    def rows_of_calls(self) -> list[int]:
        """The number of rows in each call; a vector of real numbers is one."""
        return [_first_rows(shapes) for shapes in self.calls]

    @property
    def single_samples(self) -> int:
        """The number of calls, if there were several on one row each."""
        rows = self.rows_of_calls
        return len(rows) if len(rows) > 1 and set(rows) == {1} else 0


def _first_rows(shapes: Sequence[Shape]) -> int:
    """The length of the first tensor: vectors may be the elements of all samples in one list."""
    tensors = [shape for shape in shapes if len(shape) > 1]
    return next((shape[0] for shape in tensors or shapes), 1)


@dataclass(frozen=True)
class Candidate:
    """A number of samples that agrees with the evidence, and how it is known.

    ``axis`` counts the samples in the loss's inputs, unless these have too few axes, and one of
    ``input_axes`` in the model's inputs; there are none where that isn't known. ``rows_together``
    is the number of rows that each sample has in the model's inputs. With ``in_each_call``, each
    call of the model got all samples.
    """

    samples: int
    axis: int
    known_by: str
    input_axes: tuple[int, ...] = ()
    rows_together: int = 1
    in_each_call: bool = False

    @property
    def needs_proof(self) -> bool:
        """Whether the loss counts samples along the second axis, but not the model's inputs."""
        return self.axis == 1 and 1 not in self.input_axes

    @property
    def is_rival(self) -> bool:
        """Whether it is never right, but leaves no other one certain.

        Outputs of several calls that are stacked may be those of parts of the batch.
        """
        return self.axis == 1 and self.in_each_call and self.known_by == AGREED


def candidates_of(inputs: LossInputs, evidence: BatchEvidence) -> list[Candidate]:
    """Numbers of samples that the batch may have, and their axes, the likeliest first.

    ``UnavailableError`` if there is none, or if the evidence contradicts itself.
    """
    if not inputs.edges:
        raise UnavailableError("the loss isn't computed from any rows of samples")
    if not any(inputs.rows):
        raise UnavailableError("the loss is computed from a tensor without any rows")
    if evidence.batch_size is not None:
        samples = _checked(evidence.batch_size, evidence.losses)
        return _on_both_axes(samples, PASSED, evidence)
    if evidence.losses is not None:
        return _on_both_axes(evidence.losses, "the per-sample losses", evidence)
    found = _of_calls(inputs, evidence)
    if not found:
        raise UnavailableError(_unknown(inputs, evidence))
    return found


PASSED = "batch_size="
AGREED = "the rows of the loss's inputs and of the model's"
CALLED = "the rows that the model was called with"
TOGETHER = "the rows of the loss's inputs and of all calls of the model together"
BY_LOSS = "the rows of the loss's inputs"
CHECK = "pass another number, or compute the loss from a tensor with one row for each sample"
PASS_BATCH_SIZE = "pass the number of samples as batch_size=... to the context"

OTHER_AXIS = (
    "more than one axis, or a selection of rows, has {samples} entries in the tensors that the "
    "loss is computed from, so that it isn't certain which of them are the samples: use a batch of "
    "another size, or compute the loss from a tensor with one row for each sample"
)
EITHER = (
    "the loss is computed from {rows} rows, and the model was called with a tensor of shape "
    "{shape}, of which either axis may count the samples: " + PASS_BATCH_SIZE
)
SEVERAL = (
    "the loss is a sum of {count} losses of {rows} rows, which may be parts of the batch or "
    "several losses of the whole: " + PASS_BATCH_SIZE
)
NO_CALLS = (
    ". No recorded call of the model has led to this loss: calls are recorded after "
    "gradlens.extend, but not those of compiled models or inside torch.func's transforms"
)


def _checked(batch_size: SupportsIndex, losses: int | None) -> int:
    """The number of samples that the user has passed."""
    try:
        samples = index(batch_size)
    except TypeError:
        samples = 0
    if samples < 1:
        raise UnavailableError(
            f"batch_size={batch_size!r} was passed: pass the number of samples as an int"
        )
    if losses not in (None, samples):
        raise UnavailableError(
            f"batch_size={batch_size} was passed, but there are {losses} per-sample losses: pass "
            "the number of samples in the batch"
        )
    return samples


def _on_both_axes(samples: int, known_by: str, evidence: BatchEvidence) -> list[Candidate]:
    """A known number of samples, which either axis may count."""
    places = [axis for axis in (0, 1) if samples in _lengths(evidence.called_with, axis)]
    # Of two axes with N entries, the leading one counts the samples, unless layers have
    # positions first.
    axes = tuple(places if evidence.positions_first else places[:1])
    calls = evidence.rows_of_calls
    in_each_call = len(calls) > 1 and set(calls) == {samples}
    return _along_both(Candidate(samples, 0, known_by, axes, in_each_call=in_each_call))


def _along_both(candidate: Candidate) -> list[Candidate]:
    """Along the axis of the loss's inputs that counts the samples in the model's, and the other."""
    first = candidate.input_axes[0] if candidate.input_axes else 0
    return [replace(candidate, axis=axis) for axis in (first, 1 - first)]


def _lengths(shapes: Sequence[Shape], axis: int) -> list[int]:
    return list(dict.fromkeys(shape[axis] for shape in shapes if len(shape) > axis))


def _of_calls(inputs: LossInputs, evidence: BatchEvidence) -> list[Candidate]:
    """By what the model was called with, and the rows of the loss's inputs."""
    calls = len(evidence.calls)
    if not inputs.connected and calls in (0, len(inputs.edges)):
        raise UnavailableError(SEVERAL.format(count=len(inputs.edges), rows=listed(inputs.rows)))
    if calls > 1:
        return _of_several_calls(inputs, evidence)
    if _may_be_either(inputs, evidence):
        shape = list(evidence.called_with[0])
        raise UnavailableError(EITHER.format(rows=inputs.rows[0], shape=shape))
    axes = (0, 1) if evidence.positions_first else (0,)
    found = [each for axis in axes for each in _agreed(inputs, evidence, axis)]
    found += [each for axis in axes for each in _called(inputs, evidence, axis)]
    return found + _by_loss_alone(inputs, evidence)


def _of_several_calls(inputs: LossInputs, evidence: BatchEvidence) -> list[Candidate]:
    """On parts of the batch whose outputs are put together, or each of them on all samples."""
    calls = evidence.rows_of_calls
    if inputs.rows == (sum(calls),):
        return [Candidate(sum(calls), 0, TOGETHER)]
    if all(rows == inputs.rows[0] for rows in (*calls, *inputs.rows)):
        return _along_both(Candidate(calls[0], 0, AGREED, (0,), in_each_call=True))
    return []


def _may_be_either(inputs: LossInputs, evidence: BatchEvidence) -> bool:
    """Whether the second axis of what the model was called with may count the samples, too."""
    if len(evidence.calls) != 1 or len(inputs.rows) != 1:
        return False
    (rows,) = inputs.rows
    second = [shape for shape in evidence.called_with if len(shape) > 1 and shape[1] == rows]
    if rows in _lengths(evidence.called_with, 0) or not second:
        return False
    # With one row in front, all rows belong to it, unless layers have positions first. Other rows
    # of the loss are traced back to those of the model.
    return rows == 1 or (second[0][0] == 1 and evidence.positions_first)


def _agreed(inputs: LossInputs, evidence: BatchEvidence, axis: int) -> list[Candidate]:
    """The length of the model's inputs, if the loss's inputs have as many rows."""
    lengths = {*inputs.rows, *(_lengths(inputs.shapes, 1) if axis else [])}
    # Vectors may be lists of all samples' elements, with the places where samples begin.
    tensors = [shape for shape in evidence.called_with if len(shape) > 1][:1]
    found = _lengths(tensors or evidence.called_with, axis)
    fitting = [n for n in found if n in lengths][:1]
    return [each for n in fitting for each in _of_axis(n, axis, AGREED, evidence)]


def _called(inputs: LossInputs, evidence: BatchEvidence, axis: int) -> list[Candidate]:
    """The length of the model's inputs alone, to which the loss's rows have to be traced back."""
    lengths = _lengths(evidence.called_with, axis)
    # An input of length 1 behind others is the same for all samples; in front, it may be the only
    # sample. Several other lengths are ambiguous.
    if len(lengths) > 1 and lengths[0] == 1:
        return []
    if len({n for n in lengths if n != 1}) > 1 or not lengths:
        return []
    # The loss may have some of the samples' rows, but along the second axis only all of them.
    if axis == 1 and any(rows % max(lengths) for rows in inputs.rows):
        return []
    return _of_axis(max(lengths), axis, CALLED, evidence)


def _of_axis(samples: int, axis: int, known_by: str, evidence: BatchEvidence) -> list[Candidate]:
    """The number of entries of an axis of the model's inputs, and of the other one by chance."""
    same = evidence.positions_first and samples in _lengths(evidence.called_with, 1 - axis)
    return _along_both(Candidate(samples, axis, known_by, (axis, 1 - axis) if same else (axis,)))


def _by_loss_alone(inputs: LossInputs, evidence: BatchEvidence) -> list[Candidate]:
    """The rows of the loss's inputs, for each of which the model has got several."""
    if len(inputs.rows) > 1 or not evidence.calls:
        return []
    (rows,), (together,) = inputs.rows, evidence.rows_of_calls
    if rows == together or together % rows:
        return []
    return [Candidate(rows, 0, BY_LOSS, rows_together=together // rows)]


def second_axis_may_count(
    candidate: Candidate, inputs: LossInputs, evidence: BatchEvidence
) -> bool:
    """Whether nothing but a rule of thumb says that the samples are along the leading axis.

    The second axis may be one of positions, or is as long as one of the loss's inputs.
    """
    if evidence.batch_size is not None or evidence.losses is not None:
        return False
    rows = {*_lengths(inputs.shapes, 0), *_lengths(inputs.shapes, 1)} - {candidate.samples}
    return evidence.has_positions or not rows.isdisjoint(_lengths(evidence.called_with, 1))


def second_axis_fits_better(
    candidate: Candidate, inputs: LossInputs, evidence: BatchEvidence
) -> bool:
    """Whether the loss has all positions along the second axis, but not all rows of the first.

    A loss of the first T - 1 of T positions has them if these come first.
    """
    if candidate.input_axes[:1] != (0,) or not evidence.has_positions:
        return False
    lengths = _lengths(evidence.called_with, 1)
    if candidate.known_by == PASSED:
        lengths = [n for n in lengths if n == candidate.samples]
    return all(
        len(shape) > 1 and len(shape) != 4 and shape[0] < candidate.samples and shape[1] in lengths
        for shape in inputs.shapes
    )


def _unknown(inputs: LossInputs, evidence: BatchEvidence) -> str:
    """Why no number of samples agrees with the evidence."""
    calls = evidence.rows_of_calls
    if len(calls) > 1:
        called = f", and the model was called {len(calls)} times, with {listed(calls)} rows"
    else:
        lengths = _lengths(evidence.called_with, 0)
        called = f", and the model was called with {listed(lengths)}" if lengths else ""
    return (
        f"the loss is computed from tensors of {listed(inputs.rows)} rows{called}: "
        f"{PASS_BATCH_SIZE}" + ("" if calls else NO_CALLS)
    )


def listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written in a sentence."""
    return " and ".join(str(number) for number in numbers)


@dataclass(frozen=True)
class LossInputs:
    """The edges at which the loss is computed from tensors with axes, and their shapes.

    ``connected`` means that they come from the same tensors, and so from the same samples.
    """

    edges: tuple[Edge, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    connected: bool = True

    @property
    def rows(self) -> tuple[int, ...]:
        """The lengths of leading axes, each once."""
        return tuple(dict.fromkeys(shape[0] for shape in self.shapes))


def loss_inputs(graph: Graph, alone: Sequence[bool], single_samples: int = 0) -> LossInputs:
    """The inputs of a loss, without terms of parameters alone, or of these and constants.

    If the model was called on ``single_samples`` one by one, as many numbers that are stacked are
    their losses.
    """
    every = _behind(graph, [graph.root], alone, single_samples)
    found = [edge for edge in every if not _is_of_weights(graph, edge, alone)] or every
    # In the order in which the user's code has computed them.
    found.sort(key=lambda edge: (sequence_number(graph.nodes[edge[0]]), edge[1]))
    shapes = tuple(graph.shape(edge) for edge in found)
    return LossInputs(tuple(found), shapes, _are_connected(graph, found, alone))


def _is_of_weights(graph: Graph, edge: Edge, alone: Sequence[bool]) -> bool:
    """Whether a term compares weights with constants, as a penalty on their change does.

    No layer computes with such weights, and they are repeated for no sample.
    """
    passed: set[Edge] = set()
    weights: set[Edge] = set()
    waiting = [edge]
    while waiting:
        above = waiting.pop()
        kind = graph.kinds[above[0]]
        if alone[above[0]]:
            weights.add(above)
        elif kind == LEAF or kind_of(kind).is_layer or kind_of(kind).brings_data:
            return False
        elif above not in passed:
            passed.add(above)
            waiting += graph.descend(above)
    most = max((prod(graph.shape(each)) for each in weights), default=0)
    return all(prod(graph.shape(each)) <= most for each in passed)


def _behind(
    graph: Graph, edges: Sequence[Edge], alone: Sequence[bool], single_samples: int
) -> list[Edge]:
    """The first edges that hold rows."""
    found: list[Edge] = []
    visited, waiting = set(), list(edges)
    while waiting:
        edge = waiting.pop()
        if edge in visited or alone[edge[0]]:
            continue
        visited.add(edge)
        if graph.kinds[edge[0]] == LEAF:
            continue
        below = list(graph.descend(edge))
        joined = _joined(graph, edge, below, alone, single_samples)
        if joined or _is_one_number(graph, edge, below, alone):
            waiting += joined or below
        else:
            found.append(edge)
    return found


def _is_one_number(graph: Graph, edge: Edge, below: Sequence[Edge], alone: Sequence[bool]) -> bool:
    """Whether rows are summed up to a number; a layer's output may be one, too."""
    shape = graph.shape(edge)
    is_layer = not below or any(alone[number] for number, _ in below)
    return not shape or (prod(shape) == 1 and not is_layer and not _is_row(graph, edge))


def _is_row(graph: Graph, edge: Edge) -> bool:
    """Whether a single element is computed from single rows of other tensors alone."""
    waiting = [edge]
    found = False
    while waiting:
        above = waiting.pop()
        for below in graph.descend(above):
            shape = graph.shape(below)
            if prod(shape) == 1 and shape:
                waiting.append(below)
            elif kind_of(graph.kinds[above[0]]).parts and shape[0] > graph.shape(above)[0]:
                found = True
            else:
                return False
    return found


def _joined(
    graph: Graph, edge: Edge, below: Sequence[Edge], alone: Sequence[bool], single_samples: int
) -> list[Edge]:
    """The first edges that hold rows behind numbers that were stacked, such as several losses."""
    if not kind_of(graph.kinds[edge[0]]).joins or len(below) == single_samples:
        return []
    if any(prod(graph.shape(child)) > 1 for child in below):
        return []
    found = _behind(graph, below, alone, single_samples)
    # Outputs of a layer, one number for each sample, aren't losses.
    return [] if any(prod(graph.shape(each)) == 1 for each in found) else found


def _are_connected(graph: Graph, edges: Sequence[Edge], alone: Sequence[bool]) -> bool:
    """Whether each of several edges has nodes behind it that are also behind another one."""
    behind = [{n for n in graph.below([edge[0]]) if not alone[n]} for edge in edges]
    together, apart = behind[:1], behind[1:]
    while apart:
        joined = [each for each in apart if any(each & other for other in together)]
        if not joined:
            return False
        together += joined
        apart = [each for each in apart if each not in joined]
    return True
