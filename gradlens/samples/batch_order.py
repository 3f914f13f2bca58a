"""The order of the batch: which sample of the model's inputs each label stands for.

Samples are numbered as the model was called with them. A loss may have them in another order, since
it sorts them or since the network has put them into another one. Layers that compute with the
model's inputs themselves show it: the sample of each of their rows is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradlens.graph.graph import Graph
from gradlens.graph.model_calls import ModelCall
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.batchnorm import frozen, normalising
from gradlens.samples.candidates import OTHER_AXIS, BatchEvidence, Candidate
from gradlens.samples.labels import Labels
from gradlens.samples.model_inputs import Anchor, ModelInputs, are_one_to_one
from gradlens.samples.rows import NO_SAMPLE, Source


@dataclass(frozen=True)
class BatchOrder:
    """The loss's inputs, with samples numbered in the order of the batch as far as that is known.

    ``agrees`` is whether layers that compute with the model's ``inputs`` confirm it; ``None`` if
    there are none. ``is_other`` says that the loss has them in another order, and ``is_known`` that
    nothing contradicts the order. ``labels`` are those that were needed for it.
    """

    sources: tuple[Source, ...]
    agrees: bool | None = None
    is_other: bool = False
    is_known: bool = True
    inputs: ModelInputs | None = None
    labels: tuple[Labels, ...] = ()


def batch_order(
    graph: Graph,
    alone: Sequence[bool],
    calls: Sequence[ModelCall],
    sources: tuple[Source, ...],
    candidate: Candidate,
    evidence: BatchEvidence,
) -> BatchOrder:
    """The order of the samples in the model's inputs; ``UnavailableError`` if these contradict.

    Nodes that are ``alone`` compute with parameters alone.
    """
    samples = candidate.samples
    if samples == 1:
        return BatchOrder(sources)
    rows = evidence.rows_of_calls
    in_turn = len(rows) > 1 and sum(rows) == samples
    axes = (0,) if in_turn else candidate.input_axes
    contradictions = 0
    for axis in axes:
        inputs = ModelInputs(calls, axis, samples, evidence.positions_first, in_turn)
        anchors, returned = inputs.anchors(graph, alone), inputs.returned(graph)
        found = _Reordering(graph, inputs, anchors).of(sources)
        if found is None:
            contradictions += 1
            continue
        if returned and not any(each.shows_order for each in anchors):
            by_outputs = _Reordering(graph, inputs, returned).of(sources)
            found = found if by_outputs is None else replace(by_outputs, agrees=found.agrees)
        elif not found.is_known and returned:
            both = _Reordering(graph, inputs, [*anchors, *returned]).of(sources)
            found = found if both is None else both
        if found.agrees or len(axes) == 1:
            return found
    if axes and contradictions == len(axes):
        raise UnavailableError(OTHER_AXIS.format(samples=samples))
    return BatchOrder(sources)


class _Reordering:
    """Puts the labels of a loss's inputs in the order of the model's inputs."""

    def __init__(self, graph: Graph, inputs: ModelInputs, anchors: Sequence[Anchor]) -> None:
        self._graph = graph
        self._inputs = inputs
        self._anchors = anchors
        self._instead = frozen(graph, normalising(graph, inputs.samples))
        self._used: list[Labels] = []

    def of(self, sources: tuple[Source, ...]) -> BatchOrder | None:
        """``None`` if rows of the loss belong to several samples of the inputs."""
        pairs = self._pairs(sources)
        order = self._inputs.order(pairs)
        if order is not None:
            orders: list[Tensor | None] = [order] * len(sources)
        else:  # each of the loss's inputs may have an order of its own
            orders = [self._inputs.order(self._pairs([source])) for source in sources]
        if any(each is None for each in orders):
            return None
        reordered = [
            None if each is None else _reordered(source, each)
            for source, each in zip(sources, orders, strict=True)
        ]
        found = tuple(
            source if labels is None else Source(source.edge, labels)
            for source, labels in zip(sources, reordered, strict=True)
        )
        every = self._pairs(found, in_order=False)
        if not all(map(are_one_to_one, every)):
            return None
        if order is None and self._inputs.order(self._pairs(found)) is None:
            return None
        return BatchOrder(
            found,
            self._inputs.is_proof(every) or None,
            any(not _are_same(*both) for both in zip(sources, found, strict=True)),
            all(
                s.labels is None or each is not None
                for s, each in zip(sources, reordered, strict=True)
            ),
            self._inputs,
            tuple(self._used),
        )

    def _pairs(self, sources: Sequence[Source], in_order: bool = True) -> list[Tensor]:
        """Samples and labels of the same rows, where these show the order, or everywhere."""
        anchors = [each for each in self._anchors if each.shows_order or not in_order]
        if not anchors:
            return []
        self._used.append(Labels(self._graph, sources, self._inputs.samples, self._instead))
        labels = self._used[-1].of(anchor.rows for anchor in anchors)
        return self._inputs.pairs(anchors, labels)


def _reordered(source: Source, order: Tensor) -> Tensor | None:
    """Labels by the numbers that samples have in the batch; ``None`` if some aren't known."""
    labels = source.labels
    if labels is None:
        return None
    numbers = order.tolist()
    if all(sample == NO_SAMPLE for sample in numbers):
        return labels  # nothing shows another order
    missing = sorted({*range(len(numbers))} - {*numbers})
    unknown = [label for label, sample in enumerate(numbers) if sample == NO_SAMPLE]
    # One that is left is the last one; several that have no rows may be any.
    if len(missing) > 1 and not {*labels.unique().tolist()}.isdisjoint(unknown):
        return None
    order = order.clone()
    order[unknown] = torch.tensor(missing, dtype=order.dtype)
    return torch.where(labels == NO_SAMPLE, NO_SAMPLE, order[labels.clamp(min=0)])


def _are_same(one: Source, other: Source) -> bool:
    if one.labels is None or other.labels is None:
        return one.labels is other.labels
    return torch.equal(one.labels, other.labels)
