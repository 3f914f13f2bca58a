"""Which sample each row of the loss's inputs belongs to.

It follows from the number of samples N, or from the rows of a tensor behind an input that has an
axis of N entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlens.numerics.unavailable import UnavailableError
from gradlens.per_sample.labelling.candidates import CHECK, PASSED, Candidate, listed
from gradlens.per_sample.labelling.graph import Edge, Graph
from gradlens.per_sample.labelling.labels import LabelledEdge, Source, read_labels
from gradlens.per_sample.labelling.loss_inputs import LossInputs
from gradlens.per_sample.labelling.node_kinds import LEAF, REDUCED, SELECTING
from gradlens.per_sample.labelling.row_index import NO_SAMPLE


@dataclass(frozen=True)
class LabelledInputs:
    """The loss's inputs as sources of labels.

    ``ambiguous`` means that another of their axes has as many entries as there are samples, and
    ``in_parts`` that samples are numbered in the order of losses of a part of the batch each.
    """

    sources: tuple[Source, ...]
    ambiguous: bool = False
    in_parts: bool = False


def labelled_inputs(
    graph: Graph, inputs: LossInputs, alone: Sequence[bool], candidate: Candidate
) -> LabelledInputs:
    """The loss's inputs with the samples of their rows, ``None`` where these aren't certain.

    ``UnavailableError`` if they are certain for none of the inputs.
    """
    found = [_labelled_input(graph, edge, alone, candidate) for edge in inputs.edges]
    sources = tuple(source for source, _ in found)
    uncertain = [source for source in sources if source.labels is None]
    if uncertain and candidate.known_by == PASSED and not inputs.connected:
        lengths = [shape[0] for shape in inputs.shapes]
        for samples in ([1] * len(lengths), lengths):
            if sum(samples) == candidate.samples:
                return LabelledInputs(_one_after_another(inputs, samples), in_parts=True)
    if len(uncertain) == len(sources):
        raise UnavailableError(_unlike(inputs, candidate))
    return LabelledInputs(sources, any(ambiguous for _, ambiguous in found))


def _labelled_input(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> tuple[Source, bool]:
    """One of the loss's inputs with its labels, and whether another axis may count the samples."""
    shape, samples = graph.shape(edge), candidate.samples
    if samples == 1:
        return Source(edge, torch.zeros([1] * len(shape), dtype=torch.long)), False
    labels, origins = _labels_and_origins(graph, edge, alone, candidate)
    losses = shape == (samples, samples) and bool(REDUCED.match(graph.kinds[edge[0]]))
    return Source(edge, labels), losses or any(_is_square(each, samples) for each in origins)


def _labels_and_origins(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> tuple[Tensor | None, list[tuple[int, ...]]]:
    """Labels of an input, and the shapes of the tensors that they come from."""
    labels = _along_axis(graph.shape(edge), candidate.samples, candidate.axis)
    find = _nearest_with_axis if labels is None else _selected_from
    behind = find(graph, edge, alone, candidate)
    if labels is not None and not behind:
        return labels, [graph.shape(edge)]
    origins = [graph.shape(each) for each in behind]
    traced = _traced(graph, edge, behind, candidate)
    if labels is None:
        return traced, origins
    if traced is not None and len(traced.unique()) == traced.numel() == candidate.samples:
        # One row of each sample, in the loss's order.
        return labels, origins
    # Selected positions are in the order of samples, unless these are behind another axis.
    return traced if candidate.axis == 0 else None, origins


def _is_square(shape: tuple[int, ...], samples: int) -> bool:
    """Whether another axis may count the samples; of images ``[N, C, H, W]``, it is the first."""
    return len(shape) > 2 and len(shape) != 4 and shape[0] == shape[1] == samples


def _unlike(inputs: LossInputs, candidate: Candidate) -> str:
    remedy = CHECK if candidate.known_by == PASSED else PASS_BATCH_SIZE
    return (
        f"N = {candidate.samples} by {candidate.known_by}, but the loss is computed from tensors "
        f"of {listed(inputs.rows)} rows, which can't be divided among so many samples: {remedy}"
    )


PASS_BATCH_SIZE = "pass the number of samples as batch_size=..."


def _one_after_another(inputs: LossInputs, samples: Sequence[int]) -> tuple[Source, ...]:
    """Losses that were computed from some samples each, in order."""
    sources, start = [], 0
    for edge, shape, count in zip(inputs.edges, inputs.shapes, samples, strict=True):
        labels = torch.arange(start, start + count)
        sources.append(Source(edge, labels.reshape(-1, *[1] * (len(shape) - 1))))
        start += count
    return tuple(sources)


def _along_axis(shape: tuple[int, ...], samples: int, axis: int) -> Tensor | None:
    """Labels 0 to N - 1 along the axis that counts the samples."""
    if axis == 1 and len(shape) > 2 and shape[1] == samples:
        return torch.arange(samples).reshape(1, -1, *[1] * (len(shape) - 2))
    if shape[0] == samples and (axis == 0 or len(shape) < 3):
        return torch.arange(samples).reshape(-1, *[1] * (len(shape) - 1))
    return None


def _read_rows(graph: Graph, edge: Edge, behind: Sequence[Edge]) -> dict[Edge, Tensor]:
    """The numbers of an input's rows, at the rows of tensors behind it that they come from."""
    shape = graph.shape(edge)
    rows = shape[:-1] if len(shape) > 1 else shape
    count = torch.Size(rows).numel()
    numbers = torch.arange(count).reshape(*rows, *[1] * (len(shape) - len(rows)))
    edges = [LabelledEdge(each, _last_axis(graph.shape(each))) for each in behind]
    found = read_labels(graph, [Source(edge, numbers)], edges, count)
    return {each.edge: labels.cpu() for each, labels in found.items()}


def _last_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (len(shape) - 1,) if len(shape) > 1 else ()


def _traced(
    graph: Graph, edge: Edge, behind: Sequence[Edge], candidate: Candidate
) -> Tensor | None:
    """Samples of an input's rows, by the rows of tensors behind it that have an axis of N entries.

    The input's rows get their own numbers as labels, which are read off at these tensors. ``None``
    if a row there has a share in several rows, or a row comes from several samples.
    """
    if not behind:
        return None
    shape = graph.shape(edge)
    rows = shape[:-1] if len(shape) > 1 else shape
    samples = torch.full((torch.Size(rows).numel(),), NO_SAMPLE)
    for below, labels in _read_rows(graph, edge, behind).items():
        along = _along_axis(graph.shape(below), candidate.samples, candidate.axis)
        if along is None or bool((labels < NO_SAMPLE).any()):
            return None
        own = along.reshape(along.shape[: labels.dim()]).expand_as(labels)
        known = labels != NO_SAMPLE
        before = samples[labels[known]]
        if bool(((before != NO_SAMPLE) & (before != own[known])).any()):
            return None
        samples[labels[known]] = own[known]
        # A row of several samples would keep one of them.
        if bool((samples[labels[known]] != own[known]).any()):
            return None
    return samples.reshape(*rows, *[1] * (len(shape) - len(rows)))


def _selected_from(
    graph: Graph, edge: Edge, alone: Sequence[bool], candidate: Candidate
) -> list[Edge]:
    """The edges that an input's N rows were selected from, if these have more rows or axes.

    The number of selected elements, such as masked positions of a text, may be N by chance.
    """
    found: list[Edge] = []
    visited, waiting = set(), [edge]
    while waiting:
        above = waiting.pop()
        if above in visited or alone[above[0]]:
            continue
        visited.add(above)
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
    """The first edges behind an edge that have an axis of N entries."""
    found: list[Edge] = []
    visited, waiting = set(), list(graph.descend(edge))
    while waiting:
        below = waiting.pop()
        if below in visited or alone[below[0]] or graph.kinds[below[0]] == LEAF:
            continue
        visited.add(below)
        shape = graph.shape(below)
        if shape and _along_axis(shape, candidate.samples, candidate.axis) is not None:
            found.append(below)
        else:
            waiting += graph.descend(below)
    return found
