"""Which sample each row of the loss's inputs belongs to.

It follows from the number of samples N, or from the rows of a tensor behind an input that has an
axis of N entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import LEAF, kind_of, positive
from gradlens.graph.torch_private import saved
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.candidates import (
    CHECK,
    OTHER_AXIS,
    PASS_BATCH_SIZE,
    PASSED,
    Candidate,
    LossInputs,
    listed,
)
from gradlens.samples.labels import Labels
from gradlens.samples.rows import NO_SAMPLE, LabelledEdge, Source
from gradlens.samples.uses import FINE_ELEMENTS


@dataclass(frozen=True)
class LabelledInputs:
    """The loss's inputs as sources of labels.

    ``in_parts`` means that samples are numbered in the order of losses of a part of the batch each,
    and ``is_square`` that outputs from which they are computed have two axes of N entries.
    ``is_deep`` means that they were traced back through layers, ``is_unsure`` that they were traced
    back to a tensor with two axes of N entries, or couldn't be traced, and ``are_views`` that they
    are equal parts of outputs with a row for each sample, which may be views of fewer samples.
    ``may_be_one_each`` means that they are computed from N parts of N rows each, which may be those
    of one sample each.
    """

    sources: tuple[Source, ...]
    in_parts: bool = False
    is_square: bool = False
    is_deep: bool = False
    is_unsure: bool = False
    are_views: bool = False
    may_be_one_each: bool = False
    tracing: tuple[Labels, ...] = ()


def labelled_inputs(
    graph: Graph, inputs: LossInputs, alone: Sequence[bool], candidate: Candidate
) -> LabelledInputs:
    """The loss's inputs with the samples of their rows, ``None`` where these aren't certain.

    ``UnavailableError`` if they are certain for none of the inputs.
    """
    tracing: list[Labels] = []
    found = [_labelled_input(graph, edge, alone, candidate, tracing) for edge in inputs.edges]
    sources = tuple(each.source for each in found)
    uncertain = [source for source in sources if source.labels is None]
    if uncertain and candidate.known_by == PASSED and not inputs.connected:
        lengths = [shape[0] for shape in inputs.shapes]
        for samples in ([1] * len(lengths), lengths):
            if sum(samples) == candidate.samples:
                return LabelledInputs(_one_after_another(inputs, samples), in_parts=True)
    if len(uncertain) == len(sources):
        raise UnavailableError(_unlike(inputs, candidate))
    origins = {edge for each in found for edge in each.behind}
    behind_loss = _outputs(graph, inputs.edges, alone)
    outputs = origins | behind_loss
    square = {each for each in outputs if graph.shape(each).count(candidate.samples) > 1}
    return LabelledInputs(
        sources,
        is_square=bool(square),
        is_deep=not origins <= behind_loss,
        is_unsure=not square.isdisjoint(origins) or any(each.is_unsure for each in found),
        are_views=_are_views(graph, inputs, origins, candidate.samples),
        may_be_one_each=len(_square_parts(graph, inputs.edges, candidate.samples))
        >= candidate.samples,
        tracing=tuple(tracing),
    )


def _square_parts(graph: Graph, edges: Sequence[Edge], samples: int) -> set[Edge]:
    """The parts, one for each sample or position, of a tensor that may have N rows of each sample.

    It has them on two axes, or on the leading one together. Parts that are computed with each other
    aren't of one sample each.
    """
    found: set[Edge] = set()
    visited: set[Edge] = set()
    waiting = list(edges) if samples > 1 else []
    while waiting:
        edge = waiting.pop()
        kind, below = graph.kinds[edge[0]], list(graph.descend(edge))
        if edge in visited or (len(below) > 1 and not kind_of(kind).joins):
            continue
        visited.add(edge)
        waiting += below
        if kind_of(kind).parts:
            whole = graph.shape(below[0])
            is_square = whole.count(samples) > 1 or (whole[0] > 0 and whole[0] % samples**2 == 0)
            found |= {edge} if is_square else set()
    return found


def _are_views(graph: Graph, inputs: LossInputs, origins: set[Edge], samples: int) -> bool:
    """Whether inputs of fewer rows than there are samples are equal parts that weren't selected."""
    rows = inputs.rows[0]
    if len(inputs.rows) > 1 or not 1 < rows < samples or samples % rows:
        return False
    between = graph.below(n for n, _ in inputs.edges) - graph.below(n for n, _ in origins)
    return not any(kind_of(graph.kinds[number]).selects for number in between)


def _outputs(graph: Graph, edges: Sequence[Edge], alone: Sequence[bool]) -> set[Edge]:
    """The edges between a loss and the last nodes that compute with parameters."""
    visited: set[Edge] = set()
    waiting = list(edges)
    while waiting:
        edge = waiting.pop()
        below = list(graph.descend(edge))
        if edge not in visited and not any(alone[number] for number, _ in below):
            waiting += below
        visited.add(edge)
    return visited


@dataclass(frozen=True)
class _LabelledInput:
    """One of the loss's inputs with its labels, and the edges ``behind`` that they come from.

    ``is_unsure`` means that its rows may come from other samples than their places say.
    """

    source: Source
    behind: Sequence[Edge] = ()
    is_unsure: bool = False


def _labelled_input(
    graph: Graph,
    edge: Edge,
    alone: Sequence[bool],
    candidate: Candidate,
    tracing: list[Labels],
) -> _LabelledInput:
    shape, samples = graph.shape(edge), candidate.samples
    if samples == 1:
        return _LabelledInput(Source(edge, torch.zeros([1] * len(shape), dtype=torch.long)))
    labels = _along_axis(shape, samples, candidate.axis, least_axes=2)
    if labels is None:
        behind = _nearest_with_axis(graph, edge, alone, candidate)
        return _LabelledInput(
            Source(edge, _traced(graph, edge, behind, candidate, tracing)), behind
        )
    behind, are_stacked = _selected_from(graph, edge, alone, candidate)
    traced = _traced(graph, edge, behind, candidate, tracing)
    if not behind or (traced is not None and _is_one_row_each(traced, samples)):
        return _LabelledInput(Source(edge, labels))  # in the loss's order
    if traced is None and are_stacked:
        return _LabelledInput(Source(edge, labels), is_unsure=True)
    # Selected positions are in the order of samples, unless these are behind another axis.
    return _LabelledInput(Source(edge, traced if candidate.axis == 0 else None), behind)


def _is_one_row_each(labels: Tensor, samples: int) -> bool:
    return len(labels.unique()) == labels.numel() == samples


def _unlike(inputs: LossInputs, candidate: Candidate) -> str:
    if candidate.samples in inputs.rows:
        return OTHER_AXIS.format(samples=candidate.samples)
    remedy = CHECK if candidate.known_by == PASSED else PASS_BATCH_SIZE
    return (
        f"N = {candidate.samples} by {candidate.known_by}, but the loss is computed from tensors "
        f"of {listed(inputs.rows)} rows, and which sample each of these belongs to can't be "
        f"followed: {remedy}"
    )


def _one_after_another(inputs: LossInputs, samples: Sequence[int]) -> tuple[Source, ...]:
    """Losses that were computed from some samples each, in order."""
    sources, start = [], 0
    for edge, shape, count in zip(inputs.edges, inputs.shapes, samples, strict=True):
        labels = torch.arange(start, start + count)
        sources.append(Source(edge, labels.reshape(-1, *[1] * (len(shape) - 1))))
        start += count
    return tuple(sources)


def _along_axis(
    shape: tuple[int, ...], samples: int, axis: int, least_axes: int = 3
) -> Tensor | None:
    """Labels 0 to N - 1 along the axis that counts the samples.

    That is the second one of tensors with ``least_axes`` alone, since the last one may be of
    features, and not of images ``[N, C, H, W]``.
    """
    if axis == 1 and len(shape) >= least_axes and len(shape) != 4 and shape[1] == samples:
        return torch.arange(samples).reshape(1, -1, *[1] * (len(shape) - 2))
    if shape[0] == samples and (axis == 0 or len(shape) < 3):
        return torch.arange(samples).reshape(-1, *[1] * (len(shape) - 1))
    return None


def _traced(
    graph: Graph,
    edge: Edge,
    behind: Sequence[Edge],
    candidate: Candidate,
    tracing: list[Labels],
) -> Tensor | None:
    """Samples of an input's rows, by the rows of tensors behind it that have an axis of N entries.

    Rows of the input may also be single elements, or a whole vector, and those behind it single
    elements. ``None`` if a row comes from several samples whatever rows are.
    """
    shape = graph.shape(edge)
    if not behind:
        return None
    # Elements behind are rows only if nothing else works, since there may be far more of them.
    kinds = [(shape[:-1], False), (shape, False)] if shape[1:] else [(shape, False), ((), False)]
    if prod(shape) <= FINE_ELEMENTS:
        kinds.append((shape, True))
    each = (_traced_rows(graph, edge, behind, candidate, tracing, *kind) for kind in kinds)
    return next((found for found in each if found is not None), None)


def _traced_rows(
    graph: Graph,
    edge: Edge,
    behind: Sequence[Edge],
    candidate: Candidate,
    tracing: list[Labels],
    rows: tuple[int, ...],
    fine: bool,
) -> Tensor | None:
    """Samples of an input's rows, which its leading axes ``rows`` count.

    They get their own numbers as labels, which are read off at tensors behind them, where each
    element is a row if it is ``fine``.
    """
    shape = graph.shape(edge)
    numbers = torch.arange(prod(rows)).reshape(*rows, *[1] * (len(shape) - len(rows)))
    edges = [LabelledEdge(each, () if fine else _last_axis(graph.shape(each))) for each in behind]
    samples = torch.full((prod(rows),), NO_SAMPLE)
    # Two labels more than there are rows, which none has, so that no labels are those of all.
    tracing.append(Labels(graph, [Source(edge, numbers)], prod(rows) + 2))
    for below, found in tracing[-1].of(edges).items():
        labels = found.cpu()
        along = _along_axis(graph.shape(below.edge), candidate.samples, candidate.axis)
        if along is None or bool((labels < NO_SAMPLE).any()):
            return None
        if prod(along.shape[labels.dim() :]) > 1:
            return None  # the elements of a row belong to several samples
        own = along.reshape(along.shape[: labels.dim()]).expand_as(labels)
        known = labels != NO_SAMPLE
        before = samples[labels[known]]
        if bool(((before != NO_SAMPLE) & (before != own[known])).any()):
            return None
        samples[labels[known]] = own[known]
        # A row of several samples would keep one of them.
        if bool((samples[labels[known]] != own[known]).any()):
            return None
    return samples.reshape(numbers.shape)


def _last_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (len(shape) - 1,) if len(shape) > 1 else ()


def _selected_from(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> tuple[list[Edge], bool]:
    """The edges that an input's N rows were selected from, if these have more rows or axes.

    The number of selected elements, such as masked positions of a text, may be N by chance. Rows
    that are stacked may have been selected one by one; the second value says that there are no
    others.
    """
    found: list[Edge] = []
    are_stacked = True
    visited, waiting = set(), [edge]
    while waiting:
        above = waiting.pop()
        if above in visited or alone[above[0]]:
            continue
        visited.add(above)
        shape, kind = graph.shape(above), graph.kinds[above[0]]
        if kind.startswith("StackBackward"):
            found += _nearest_with_axis(graph, above, alone, candidate, whole=True)
            continue
        for below in graph.descend(above):
            behind = graph.shape(below)
            other = behind[:1] != shape[:1] or len(behind) > len(shape)
            if other and kind_of(kind).selects:
                found += _nearest_with_axis(graph, above, alone, candidate)
                are_stacked = False
            elif behind[:1] == shape[:1]:
                waiting.append(below)
    return list(dict.fromkeys(found)), are_stacked


def _is_part(graph: Graph, edge: Edge, axis: int) -> bool:
    """Whether a tensor has some entries of another one's axis, or was computed from such a part.

    A part may have N rows by chance: those of one sample, say.
    """
    visited: set[Edge] = set()
    waiting = [edge]
    while waiting:
        above = waiting.pop()
        if above in visited:
            continue
        visited.add(above)
        shape, below = graph.shape(above), list(graph.descend(above))
        if kind_of(graph.kinds[above[0]]).parts:
            whole = graph.shape(below[0])
            dims = positive(saved(graph.nodes[above[0]], "dim"), len(whole))
            if axis in dims and shape != whole:
                return True
        waiting += [each for each in below if graph.shape(each)[:1] == shape[:1]]
    return False


def _nearest_with_axis(
    graph: Graph,
    edge: Edge,
    alone: Sequence[bool],
    candidate: Candidate,
    whole: bool = False,
) -> list[Edge]:
    """The first edges behind an edge whose rows are the samples'.

    They are no parts of tensors with other rows, some of whose rows may be N by chance. With
    ``whole``, they are no vectors, and no parts at all.
    """
    found: list[Edge] = []
    visited, waiting = set(), list(graph.descend(edge))
    while waiting:
        below = waiting.pop()
        if below in visited or alone[below[0]] or graph.kinds[below[0]] == LEAF:
            continue
        visited.add(below)
        shape = graph.shape(below)
        is_part = _is_part(graph, below, candidate.axis) or (
            whole and (len(shape) < 2 or graph.kinds[below[0]] == "SelectBackward0")
        )
        fits = bool(shape) and not is_part
        if fits and _along_axis(shape, candidate.samples, candidate.axis) is not None:
            found.append(below)
        else:
            waiting += graph.descend(below)
    return found
