"""What a batch is: how many samples it has, how that is known, and where they enter the loss.

The number of samples N is known at the loss and nowhere else. The loss's inputs are the edges of
its graph behind which everything has been summed up to numbers. Each of their rows belongs to a
sample; which one follows from N, or from the rows of a tensor behind them that has an axis of N
entries (``sources_of``). N itself is what witnesses agree on (``candidates_of``): the batch size
that the user passes, per-sample losses, the rows of the loss's inputs, and what the model was
called with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradlens.per_sample.labelling.graph import Edge, Graph
from gradlens.per_sample.labelling.labels import Source, Watched, read_labels
from gradlens.per_sample.labelling.node_kinds import LEAF, REDUCED, SELECTING
from gradlens.per_sample.labelling.row_index import NOBODY

LossReduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True)
class Witnesses:
    """What is known of a batch besides the loss's graph.

    ``batch_size`` is what the user has passed, ``losses`` how many per-sample losses there are,
    ``called_with`` the shapes of the tensors that the model was called with, in ``calls`` calls,
    and ``positions_first`` says that it has layers whose second axis counts the samples.
    """

    batch_size: int | None = None
    losses: int | None = None
    called_with: tuple[tuple[int, ...], ...] = ()
    calls: int = 0
    positions_first: bool = False


@dataclass(frozen=True)
class Candidate:
    """A number of samples that fits the witnesses, and who says so.

    ``axis`` counts them in the loss's inputs, unless these have too few axes, and ``input_axis`` in
    what the model was called with, ``None`` where that isn't known. ``rows_together`` are the rows
    of the model's inputs that each sample has.
    """

    samples: int
    axis: int
    known_by: str
    input_axis: int | None = None
    rows_together: int = 1


@dataclass(frozen=True)
class Batch:
    """The batch of one backward pass.

    ``samples`` is N, ``None`` where it isn't known, and ``known_by`` how it is known, or why it
    isn't. ``loss_reduction`` says whether the loss is a mean or a sum over the samples; ``factor``
    is what backward is called on, over the loss.
    """

    samples: int | None = None
    known_by: str = ""
    loss_reduction: LossReduction = "mean"
    factor: float = 1.0

    @property
    def scale(self) -> float:
        """What a sample's contribution to the gradient is multiplied by to give gₙ."""
        samples = (self.samples or 1) if self.loss_reduction == "mean" else 1
        return samples / self.factor if self.factor else float("nan")


class UnknownBatchError(Exception):
    """Why the number of samples, or whose rows are whose, isn't known."""


@dataclass(frozen=True)
class LossInputs:
    """The edges at which the loss is computed from tensors with axes, and their shapes.

    ``connected`` says that they come from the same tensors, and so from the same samples.
    """

    edges: tuple[Edge, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    connected: bool = True

    @property
    def rows(self) -> tuple[int, ...]:
        """The lengths of leading axes, each once."""
        return tuple(dict.fromkeys(shape[0] for shape in self.shapes))


def loss_inputs(graph: Graph, alone: Sequence[bool]) -> LossInputs:
    """Where the loss is computed from, but for terms of parameters alone."""
    found: list[Edge] = []
    seen, waiting = set(), [graph.root]
    while waiting:
        edge = waiting.pop()
        if edge in seen or alone[edge[0]]:
            continue
        seen.add(edge)
        if graph.kinds[edge[0]] == LEAF:
            continue
        if graph.shape(edge):
            found.append(edge)
        else:
            waiting += graph.descend(edge)
    # In the order in which the user's code has computed them.
    found.sort(key=lambda edge: (graph.nodes[edge[0]]._sequence_nr(), edge[1]))
    shapes = tuple(graph.shape(edge) for edge in found)
    return LossInputs(tuple(found), shapes, _are_connected(graph, found, alone))


def _are_connected(graph: Graph, edges: Sequence[Edge], alone: Sequence[bool]) -> bool:
    """Whether what is behind each of several edges is behind another one, too."""
    behind = [{n for n in graph.below([edge[0]]) if not alone[n]} for edge in edges]
    together, apart = behind[:1], behind[1:]
    while apart:
        joined = [each for each in apart if any(each & other for other in together)]
        if not joined:
            return False
        together += joined
        apart = [each for each in apart if each not in joined]
    return True


def candidates_of(inputs: LossInputs, witnesses: Witnesses) -> list[Candidate]:
    """Numbers of samples that may be the batch's, the likeliest first.

    ``UnknownBatchError`` names witnesses that contradict each other.
    """
    if not inputs.edges:
        raise UnknownBatchError("the loss isn't computed from any rows of samples")
    if witnesses.batch_size is not None:
        _check_losses(witnesses)
        return _on_axes(witnesses.batch_size, PASSED, inputs, witnesses)
    if witnesses.losses is not None:
        return _on_axes(witnesses.losses, "the per-sample losses", inputs, witnesses)
    if not inputs.connected and witnesses.calls in (0, len(inputs.edges)):
        raise UnknownBatchError(SEVERAL.format(count=len(inputs.edges), rows=_listed(inputs.rows)))
    axes = (0, 1) if witnesses.positions_first else (0,)
    if _may_be_either(inputs, witnesses):
        raise UnknownBatchError(
            EITHER.format(rows=inputs.rows[0], shape=list(witnesses.called_with[0]))
        )
    found = [each for axis in axes for each in _agreed(inputs, witnesses, axis)]
    found += [each for axis in axes for each in _called(inputs, witnesses, axis)]
    found += _by_loss_alone(inputs, witnesses)
    if not found:
        called = _listed(_leading(witnesses.called_with, 0))
        raise UnknownBatchError(
            f"the loss is computed from tensors of {_listed(inputs.rows)} rows"
            + (f", and the model was called with {called}" if called else "")
            + ": pass the number of samples as batch_size=... to the context"
            + ("" if called else UNSEEN_MODEL)
        )
    return found


UNSEEN_MODEL = ", or extend the model (gradlens.extend) before its forward pass"
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


def _check_losses(witnesses: Witnesses) -> None:
    if witnesses.losses not in (None, witnesses.batch_size):
        raise UnknownBatchError(
            f"batch_size={witnesses.batch_size} was passed, but there are {witnesses.losses} "
            "per-sample losses: pass the number of samples in the batch"
        )


def _on_axes(
    samples: int, known_by: str, inputs: LossInputs, witnesses: Witnesses
) -> list[Candidate]:
    """The leading axis counts the samples unless none of the loss's inputs has N rows there."""
    second = any(len(s) > 2 and s[0] != samples and s[1] == samples for s in inputs.shapes)
    axes = (1, 0) if second and samples not in inputs.rows else (0,)
    places = [axis for axis in (0, 1) if samples in _leading(witnesses.called_with, axis)]
    place = places[0] if len(places) == 1 or (places and not witnesses.positions_first) else None
    return [Candidate(samples, axis, known_by, place) for axis in axes]


def _leading(shapes: Sequence[tuple[int, ...]], axis: int) -> list[int]:
    return list(dict.fromkeys(shape[axis] for shape in shapes if len(shape) > axis))


def _may_be_either(inputs: LossInputs, witnesses: Witnesses) -> bool:
    """Whether the second axis of what the model was called with may count the samples, too."""
    if witnesses.calls != 1 or len(inputs.rows) != 1:
        return False
    (rows,) = inputs.rows
    second = [shape for shape in witnesses.called_with if len(shape) > 1 and shape[1] == rows]
    if rows in _leading(witnesses.called_with, 0) or not second:
        return False
    # With one row in front, all rows belong to it, unless layers say that positions come first.
    return rows == 1 or (second[0][0] == 1) == witnesses.positions_first


def _agreed(inputs: LossInputs, witnesses: Witnesses, axis: int) -> list[Candidate]:
    """What the model was called with, if the loss's inputs have as many rows."""
    lengths = set(inputs.rows) | ({s[1] for s in inputs.shapes if len(s) > 2} if axis else set())
    # Vectors may be lists of all samples' elements, with the places where samples begin.
    tensors = [shape for shape in witnesses.called_with if len(shape) > 1][:1]
    found = _leading(tensors or witnesses.called_with, axis)
    return [Candidate(n, axis, AGREED, axis) for n in found if n in lengths][:1]


def _called(inputs: LossInputs, witnesses: Witnesses, axis: int) -> list[Candidate]:
    """What the model was called with alone: the loss's rows have to be traced back to that."""
    called_with = _leading(witnesses.called_with, axis)
    # Some inputs are the same for all samples, but of several numbers none is certain.
    if witnesses.calls != 1 or len({n for n in called_with if n != 1}) > 1 or not called_with:
        return []
    # Rows may be selected from samples; that another axis counts them takes all of them.
    if axis == 1 and any(rows % max(called_with) for rows in inputs.rows):
        return []
    return [Candidate(max(called_with), axis, CALLED, axis)]


def _by_loss_alone(inputs: LossInputs, witnesses: Witnesses) -> list[Candidate]:
    """The rows of the loss's inputs, of each of which the model may have got several."""
    called_with = _leading(witnesses.called_with, 0)
    if len(inputs.rows) > 1 or not inputs.rows[0]:
        return []
    (rows,) = inputs.rows
    fitting = [n for n in called_with[:1] if n % rows == 0]
    if witnesses.calls > 1:
        return [Candidate(rows, 0, BY_LOSS)]
    if not called_with:
        return []
    if rows == 1 or not fitting:
        return []
    return [Candidate(rows, 0, BY_LOSS, rows_together=fitting[0] // rows)]


@dataclass(frozen=True)
class LabelledInputs:
    """The loss's inputs as sources of labels.

    ``ambiguous`` says that another of their axes has as many entries as there are samples, and
    ``in_parts`` that samples are numbered in the order of losses of a part of the batch each.
    """

    sources: tuple[Source, ...]
    ambiguous: bool = False
    in_parts: bool = False


def sources_of(
    graph: Graph, inputs: LossInputs, alone: Sequence[bool], candidate: Candidate
) -> LabelledInputs:
    """The samples of the rows of each of the loss's inputs, as far as they can be known.

    ``UnknownBatchError`` if they can't for any of them.
    """
    n = candidate.samples
    total = sum(shape[0] for shape in inputs.shapes)
    found = [_source_of(graph, edge, alone, candidate) for edge in inputs.edges]
    unknown = any(source.labels is None for source, _ in found)
    if unknown and candidate.known_by == PASSED and not inputs.connected:
        if len(inputs.edges) == n:
            return LabelledInputs(tuple(_one_each(inputs)), in_parts=True)
        if total == n:
            return LabelledInputs(tuple(_one_after_another(inputs)), in_parts=True)
    if all(source.labels is None for source, _ in found):
        raise UnknownBatchError(_unlike(inputs, candidate))
    ambiguous = n > 1 and any(_is_square(shape, n) for _, seen in found for shape in seen)
    ambiguous |= n > 1 and any(
        shape == (n, n) and bool(REDUCED.match(graph.kinds[edge[0]]))
        for edge, shape in zip(inputs.edges, inputs.shapes, strict=True)
    )
    return LabelledInputs(tuple(source for source, _ in found), ambiguous)


def _source_of(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> tuple[Source, list[tuple[int, ...]]]:
    """One of the loss's inputs with its labels, and the shapes that these were read off."""
    shape = graph.shape(edge)
    if candidate.samples == 1:
        return Source(edge, torch.zeros([1] * len(shape), dtype=torch.long)), []
    labels = _along_axis(shape, candidate.samples, candidate.axis)
    if labels is None:
        behind = _nearest_with_axis(graph, edge, alone, candidate)
        traced = _traced(graph, edge, behind, candidate)
        return Source(edge, traced), [graph.shape(each) for each in behind]
    behind = _selected_from(graph, edge, alone, candidate)
    if not behind:
        return Source(edge, labels), [shape]
    traced = _traced(graph, edge, behind, candidate)
    if traced is not None and len(traced.unique()) == traced.numel() == candidate.samples:
        # One row of each sample, in the loss's order.
        return Source(edge, labels), [graph.shape(each) for each in behind]
    # Selected positions are in the order of samples, unless these are behind another axis.
    traced = traced if candidate.axis == 0 else None
    return Source(edge, traced), [graph.shape(each) for each in behind]


def _is_square(shape: tuple[int, ...], samples: int) -> bool:
    """Whether another axis may count the samples; of images ``[N, C, H, W]``, it is the first."""
    return len(shape) > 2 and len(shape) != 4 and shape[0] == shape[1] == samples


def _unlike(inputs: LossInputs, candidate: Candidate) -> str:
    return (
        f"N = {candidate.samples} by {candidate.known_by}, but the loss is computed from tensors "
        f"of {_listed(inputs.rows)} rows, which can't be told apart into so many samples: "
        + (
            CHECK
            if candidate.known_by == PASSED
            else "pass the number of samples as batch_size=..."
        )
    )


def _one_each(inputs: LossInputs) -> Iterator[Source]:
    """Losses that were computed from a sample each."""
    for number, (edge, shape) in enumerate(zip(inputs.edges, inputs.shapes, strict=True)):
        yield Source(edge, torch.full([1] * len(shape), number))


def _one_after_another(inputs: LossInputs) -> Iterator[Source]:
    """Losses that were computed from a part of the batch each."""
    start = 0
    for edge, shape in zip(inputs.edges, inputs.shapes, strict=True):
        labels = torch.arange(start, start + shape[0])
        yield Source(edge, labels.reshape(-1, *[1] * (len(shape) - 1)))
        start += shape[0]


def _along_axis(shape: tuple[int, ...], samples: int, axis: int) -> Tensor | None:
    """Labels 0 to N - 1 along the axis that counts the samples."""
    if axis == 1 and len(shape) > 2 and shape[1] == samples:
        return torch.arange(samples).reshape(1, -1, *[1] * (len(shape) - 2))
    if shape[0] == samples and (axis == 0 or len(shape) < 3):
        return torch.arange(samples).reshape(-1, *[1] * (len(shape) - 1))
    return None


def _read_rows(graph: Graph, edge: Edge, behind: Sequence[Edge]) -> dict[Edge, Tensor]:
    """Numbers of an input's rows, as they are found at the rows of tensors behind it."""
    shape = graph.shape(edge)
    rows = shape[:-1] if len(shape) > 1 else shape
    count = torch.Size(rows).numel()
    numbers = torch.arange(count).reshape(*rows, *[1] * (len(shape) - len(rows)))
    watched = [Watched(each, _last_axis(graph.shape(each))) for each in behind]
    found = read_labels(graph, [Source(edge, numbers)], watched, count)
    return {watch.edge: labels.cpu() for watch, labels in found.items()}


def _last_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (len(shape) - 1,) if len(shape) > 1 else ()


def _traced(
    graph: Graph, edge: Edge, behind: Sequence[Edge], candidate: Candidate
) -> Tensor | None:
    """Samples of an input's rows, by the rows of tensors behind it that have an axis of N entries.

    The rows of the input are labelled by their own numbers, and read off at these tensors. ``None``
    if a row there has a share in several rows, or a row comes from several samples.
    """
    if not behind:
        return None
    shape = graph.shape(edge)
    rows = shape[:-1] if len(shape) > 1 else shape
    samples = torch.full((torch.Size(rows).numel(),), NOBODY)
    for below, labels in _read_rows(graph, edge, behind).items():
        along = _along_axis(graph.shape(below), candidate.samples, candidate.axis)
        if along is None or bool((labels < NOBODY).any()):
            return None
        own = along.reshape(along.shape[: labels.dim()]).expand_as(labels)
        known = labels != NOBODY
        before = samples[labels[known]]
        if bool(((before != NOBODY) & (before != own[known])).any()):
            return None
        samples[labels[known]] = own[known]
        # Rows of several samples would overwrite each other.
        if bool((samples[labels[known]] != own[known]).any()):
            return None
    return samples.reshape(*rows, *[1] * (len(shape) - len(rows)))


def _selected_from(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> list[Edge]:
    """What an input's N rows were selected from, if that has more rows or axes.

    There may be N selected elements by chance, such as masked positions of a text.
    """
    found: list[Edge] = []
    seen, waiting = set(), [edge]
    while waiting:
        above = waiting.pop()
        if above in seen or alone[above[0]]:
            continue
        seen.add(above)
        shape = graph.shape(above)
        selects = bool(SELECTING.match(graph.kinds[above[0]]))
        for below in graph.descend(above):
            behind = graph.shape(below)
            if selects and (behind[:1] != shape[:1] or len(behind) > len(shape)):
                found += _nearest_with_axis(graph, above, alone, candidate)
            elif behind[:1] == shape[:1]:
                waiting.append(below)
    return found


def _nearest_with_axis(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> list[Edge]:
    """The first edges behind an edge whose rows are the samples'."""
    found: list[Edge] = []
    seen, waiting = set(), list(graph.descend(edge))
    while waiting:
        below = waiting.pop()
        if below in seen or alone[below[0]] or graph.kinds[below[0]] == LEAF:
            continue
        seen.add(below)
        shape = graph.shape(below)
        if shape and _along_axis(shape, candidate.samples, candidate.axis) is not None:
            found.append(below)
        else:
            waiting += graph.descend(below)
    return found


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(str(number) for number in numbers)
