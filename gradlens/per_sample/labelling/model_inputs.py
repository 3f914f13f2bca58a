"""Whether labels agree with what the model was called with.

Where an axis of positions has as many entries as there are samples, or as many positions as samples
were selected by chance, the loss's rows are ambiguous. Layers that compute with the model's input
itself decide it, since the sample of each of its rows is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradlens.hooks.model_calls import Given
from gradlens.per_sample.labelling.graph import Graph, Use
from gradlens.per_sample.labelling.node_kinds import node_kind
from gradlens.per_sample.labelling.row_index import NO_SAMPLE
from gradlens.per_sample.labelling.saved import recomputation

MAX_ELEMENTS = 2**22
"""Larger tensors, of 16 MiB in single precision, aren't searched for the model's input."""


@dataclass(frozen=True)
class ModelInputs:
    """The tensors that a model was called with, and the axis that counts their samples."""

    given: Sequence[Given]
    axis: int

    def agree(self, graph: Graph, uses: Sequence[tuple[Use, Tensor]], samples: int) -> bool | None:
        """Whether the labels ``[*S]`` of uses are one for each sample of the inputs.

        ``None`` if no layer computes with the inputs themselves.
        """
        links = (link for use, _ in uses for link in use.chain)
        if any(self._is_shared(graph, link.node, samples) for link in links):
            return False
        pairs = self._pairs(graph, uses)
        return None if pairs is None else _one_to_one(pairs)

    def order(
        self, graph: Graph, uses: Sequence[tuple[Use, Tensor]], samples: int
    ) -> Tensor | None:
        """The label of each sample of the inputs, ``[N]``; ``None`` if some are unknown."""
        pairs = self._pairs(graph, uses)
        if pairs is None or not _one_to_one(pairs):
            return None
        labels = torch.full((samples,), NO_SAMPLE)
        known = pairs[:, (pairs >= 0).all(0)]
        labels[known[0]] = known[1]
        return labels if bool((labels >= 0).all()) else None

    def _pairs(self, graph: Graph, uses: Sequence[tuple[Use, Tensor]]) -> Tensor | None:
        """Samples of the inputs and labels of the same rows, ``[2, R]``."""
        pairs: list[Tensor] = []
        for use, labels in uses:
            rows = self._samples_read(graph, use.node, labels)
            if rows is not None:
                pairs.append(torch.stack([rows, labels.flatten().cpu()]))
        return torch.cat(pairs, dim=1) if pairs else None

    def _is_shared(self, graph: Graph, number: int, samples: int) -> bool:
        """Whether a node that all samples should share computes with the inputs of each."""
        read = _read_by(graph, number)
        given = None if read is None else self._by_storage(read)
        return given is not None and given.shape[self.axis] == samples

    def _samples_read(self, graph: Graph, number: int, labels: Tensor) -> Tensor | None:
        """The input's sample of each row that a node computes with; -1 where that isn't known."""
        read = _read_by(graph, number)
        if read is None:
            return None
        given = self._by_storage(read)
        if given is not None and _is_whole(read, given):
            return self._samples_of(given.shape, labels.numel())
        if read.is_floating_point() and read.numel() <= MAX_ELEMENTS:
            return self._by_values(read, labels.numel())
        return None

    def _by_storage(self, read: Tensor) -> Given | None:
        storage = read.untyped_storage().data_ptr()
        same = [g for g in self.given if g.storage == storage and len(g.shape) > self.axis]
        exact = [given for given in same if _is_whole(read, given)]
        return next(iter([*exact, *same]), None)

    def _samples_of(self, shape: tuple[int, ...], rows: int) -> Tensor | None:
        """The sample of each row, if the rows are those of the leading axes."""
        fitting = range(self.axis + 1, len(shape) + 1)
        axes = next((n for n in fitting if prod(shape[:n]) == rows), None)
        if axes is None:
            return None
        along = [1] * axes
        along[self.axis] = -1
        numbers = torch.arange(shape[self.axis]).reshape(along)
        return numbers.expand(shape[:axes]).flatten()

    def _by_values(self, read: Tensor, rows: int) -> Tensor | None:
        """The sample of each row that occurs in an input, once."""
        features = read.shape[-1] if read.dim() else 0
        if not features or read.numel() != rows * features:
            return None
        for given in (each.reference() for each in self.given):
            fits = given is not None and given.dim() > self.axis + 1
            if given is None or not fits or given.shape[-1] != features:
                continue
            if given.dtype == read.dtype and given.numel() <= MAX_ELEMENTS:
                samples = self._samples_of(tuple(given.shape), given.numel() // features)
                return None if samples is None else _matched(read, given, samples)
        return None


def reads_data(graph: Graph, model_inputs: Sequence[Given]) -> list[bool]:
    """Whether a node depends on the tensors that the model was called with, by number."""
    addresses = {given.storage for given in model_inputs}
    found: list[bool] = []
    for number, edges in enumerate(graph.children):
        below = any(edge is not None and found[edge[0]] for edge in edges)
        read = None if below or not addresses else _read_by(graph, number)
        found.append(below or (read is not None and read.untyped_storage().data_ptr() in addresses))
    return found


def _read_by(graph: Graph, number: int) -> Tensor | None:
    name = node_kind(graph.kinds[number]).data
    if not name:
        return None
    with recomputation():
        read: Tensor | None = getattr(graph.nodes[number], name)
    return None if read is None else read.detach()


def _is_whole(read: Tensor, given: Given) -> bool:
    """Whether a saved tensor is one of the model's inputs, element by element, reshaped or not."""
    if read.data_ptr() != given.address or read.numel() != prod(given.shape):
        return False
    same = (tuple(read.shape), read.stride()) == (given.shape, given.strides)
    return same or (read.is_contiguous() and given.contiguous)


def _matched(read: Tensor, given: Tensor, samples: Tensor) -> Tensor | None:
    """Samples of rows, by the same numbers; ``None`` if some rows aren't among the given ones."""
    places: dict[bytes, int] = {}
    for place, key in enumerate(_bytes_of_rows(given)):
        places[key] = -1 if key in places else place
    keys = _bytes_of_rows(read)
    if any(key not in places for key in keys):
        return None
    found = torch.tensor([places[key] for key in keys], dtype=torch.long)
    return torch.where(found < 0, NO_SAMPLE, samples[found.clamp(min=0)])


def _bytes_of_rows(tensor: Tensor) -> list[bytes]:
    """The memory of each row along the last axis, as bytes, since NumPy has no bfloat16."""
    rows = tensor.detach().cpu().reshape(-1, tensor.shape[-1]).contiguous()
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def _one_to_one(pairs: Tensor) -> bool:
    """Whether each sample has one label, and each label one sample, in pairs ``[2, R]``."""
    known = pairs[:, (pairs >= 0).all(0)]
    distinct = torch.unique(known, dim=1)
    return len(distinct[0].unique()) == len(distinct[1].unique()) == distinct.shape[1]


def inputs_by_axis(given: Sequence[Given], axis: int | None) -> ModelInputs | None:
    """A model's inputs, if they are known."""
    return ModelInputs(given, axis) if given and axis is not None else None
