"""How many samples a batch may have, by all the evidence.

The number of samples N is known at the loss and nowhere else. The evidence is the batch size that
the user passes, per-sample losses, the rows of the loss's inputs, and what the model was called
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlens.numerics.unavailable import UnavailableError
from gradlens.per_sample.labelling.loss_inputs import LossInputs


@dataclass(frozen=True)
class BatchEvidence:
    """What is known of a batch besides the loss's graph.

    ``batch_size`` is the number that the user has passed, ``losses`` the number of per-sample
    losses. ``called_with`` are the shapes of the tensors that the model was called with, in
    ``calls`` calls, and ``positions_first`` means that some of its layers count samples along the
    second axis.
    """

    batch_size: int | None = None
    losses: int | None = None
    called_with: tuple[tuple[int, ...], ...] = ()
    calls: int = 0
    positions_first: bool = False


@dataclass(frozen=True)
class Candidate:
    """A number of samples that agrees with the evidence, and how it is known.

    ``axis`` counts the samples in the loss's inputs, unless these have too few axes, and
    ``input_axis`` in the model's inputs, ``None`` where that isn't known. ``rows_together`` is the
    number of rows that each sample has in the model's inputs.
    """

    samples: int
    axis: int
    known_by: str
    input_axis: int | None = None
    rows_together: int = 1


def candidates_of(inputs: LossInputs, evidence: BatchEvidence) -> list[Candidate]:
    """Numbers of samples that the batch may have, the likeliest first.

    ``UnavailableError`` if there is none, or if the evidence contradicts itself.
    """
    if not inputs.edges:
        raise UnavailableError("the loss isn't computed from any rows of samples")
    if evidence.batch_size is not None:
        _check_losses(evidence)
        return _on_axes(evidence.batch_size, PASSED, inputs, evidence)
    if evidence.losses is not None:
        return _on_axes(evidence.losses, "the per-sample losses", inputs, evidence)
    if not inputs.connected and evidence.calls in (0, len(inputs.edges)):
        raise UnavailableError(SEVERAL.format(count=len(inputs.edges), rows=listed(inputs.rows)))
    axes = (0, 1) if evidence.positions_first else (0,)
    if _may_be_either(inputs, evidence):
        raise UnavailableError(
            EITHER.format(rows=inputs.rows[0], shape=list(evidence.called_with[0]))
        )
    found = [each for axis in axes for each in _agreed(inputs, evidence, axis)]
    found += [each for axis in axes for each in _called(inputs, evidence, axis)]
    found += _by_loss_alone(inputs, evidence)
    if not found:
        called = listed(_leading(evidence.called_with, 0))
        raise UnavailableError(
            f"the loss is computed from tensors of {listed(inputs.rows)} rows"
            + (f", and the model was called with {called}" if called else "")
            + ": pass the number of samples as batch_size=... to the context"
            + ("" if called else NO_CALLS)
        )
    return found


NO_CALLS = ", or extend the model (gradlens.extend) before its forward pass"
PASSED = "batch_size="
AGREED = "the rows of the loss's inputs and of the model's"
CALLED = "the rows that the model was called with"
BY_LOSS = "the rows of the loss's inputs"
CHECK = "pass another number, or compute the loss from a tensor with one row for each sample"

EITHER = (
    "the loss is computed from {rows} rows, and the model was called with a tensor of shape "
    "{shape}, of which either axis may count the samples: pass batch_size=... to the context"
)
SEVERAL = (
    "the loss is a sum of {count} losses of {rows} rows, which may be parts of the batch or "
    "several losses of the whole: pass the number of samples as batch_size=... to the context"
)


def _check_losses(evidence: BatchEvidence) -> None:
    if evidence.losses not in (None, evidence.batch_size):
        raise UnavailableError(
            f"batch_size={evidence.batch_size} was passed, but there are {evidence.losses} "
            "per-sample losses: pass the number of samples in the batch"
        )


def _on_axes(
    samples: int, known_by: str, inputs: LossInputs, evidence: BatchEvidence
) -> list[Candidate]:
    """The leading axis counts the samples unless none of the loss's inputs has N rows there."""
    second = any(len(s) > 2 and s[0] != samples and s[1] == samples for s in inputs.shapes)
    axes = (1, 0) if second and samples not in inputs.rows else (0,)
    places = [axis for axis in (0, 1) if samples in _leading(evidence.called_with, axis)]
    place = places[0] if len(places) == 1 or (places and not evidence.positions_first) else None
    return [Candidate(samples, axis, known_by, place) for axis in axes]


def _leading(shapes: Sequence[tuple[int, ...]], axis: int) -> list[int]:
    return list(dict.fromkeys(shape[axis] for shape in shapes if len(shape) > axis))


def _may_be_either(inputs: LossInputs, evidence: BatchEvidence) -> bool:
    """Whether the second axis of the model's inputs may count the samples, too."""
    if evidence.calls != 1 or len(inputs.rows) != 1:
        return False
    (rows,) = inputs.rows
    second = [shape for shape in evidence.called_with if len(shape) > 1 and shape[1] == rows]
    if rows in _leading(evidence.called_with, 0) or not second:
        return False
    # With one row in front, all rows belong to it, unless layers have positions first.
    return rows == 1 or (second[0][0] == 1) == evidence.positions_first


def _agreed(inputs: LossInputs, evidence: BatchEvidence, axis: int) -> list[Candidate]:
    """The length of the model's inputs, if the loss's inputs have as many rows."""
    lengths = set(inputs.rows) | ({s[1] for s in inputs.shapes if len(s) > 2} if axis else set())
    # Vectors may be lists of all samples' elements, with the places where samples begin.
    tensors = [shape for shape in evidence.called_with if len(shape) > 1][:1]
    found = _leading(tensors or evidence.called_with, axis)
    return [Candidate(n, axis, AGREED, axis) for n in found if n in lengths][:1]


def _called(inputs: LossInputs, evidence: BatchEvidence, axis: int) -> list[Candidate]:
    """The length of the model's inputs alone, to which the loss's rows have to be traced back."""
    called_with = _leading(evidence.called_with, axis)
    # An input of length 1 is the same for all samples; several other lengths are ambiguous.
    if evidence.calls != 1 or len({n for n in called_with if n != 1}) > 1 or not called_with:
        return []
    # The loss may have some of the samples' rows, but along the second axis only all of them.
    if axis == 1 and any(rows % max(called_with) for rows in inputs.rows):
        return []
    return [Candidate(max(called_with), axis, CALLED, axis)]


def _by_loss_alone(inputs: LossInputs, evidence: BatchEvidence) -> list[Candidate]:
    """The rows of the loss's inputs, for each of which the model may have got several."""
    called_with = _leading(evidence.called_with, 0)
    if len(inputs.rows) > 1 or not inputs.rows[0]:
        return []
    (rows,) = inputs.rows
    fitting = [n for n in called_with[:1] if n % rows == 0]
    if evidence.calls > 1:
        return [Candidate(rows, 0, BY_LOSS)]
    if not called_with:
        return []
    if rows == 1 or not fitting:
        return []
    return [Candidate(rows, 0, BY_LOSS, rows_together=fitting[0] // rows)]


def listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written in a sentence."""
    return " and ".join(str(number) for number in numbers)
