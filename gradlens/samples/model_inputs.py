"""Whether labels agree with what the model was called with.

Where an axis of positions has as many entries as there are samples, or as many positions as samples
were selected by chance, the loss's rows are ambiguous. Layers that compute with the model's input
itself decide it, since the sample of each of its rows is known.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import lgamma, log, prod

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_saved, why_not_to_read
from gradlens.graph.graph import Graph, Use
from gradlens.graph.kinds import kind_of
from gradlens.graph.model_calls import Given
from gradlens.samples.rows import NO_SAMPLE

MAX_ELEMENTS = 2**22
"""Larger tensors, of 16 MiB in single precision, aren't searched for the model's input."""

CHANCE = 1e4
"""How many other orders or choices of rows there must be for one to be taken for the inputs'."""


@dataclass(frozen=True)
class ModelInputs:
    """The tensors that a model was called with for ``samples``, and the axis that counts these.

    ``either`` means that another axis may count them.
    """

    given: Sequence[Given]
    axis: int
    samples: int
    either: bool = False

    def agree(self, graph: Graph, uses: Sequence[tuple[Use, Tensor]]) -> bool | None:
        """Whether the labels ``[*S]`` of uses are one for each sample of the inputs.

        ``None`` if it isn't known of at least two samples which rows of layers are theirs.
        """
        links = (link for use, _ in uses for link in use.chain)
        if any(self._is_shared(graph, link.node) for link in links):
            return False
        pairs = self._pairs(graph, uses)
        # A layer may compute with the samples in one order, and another one in another order.
        if not all(_one_to_one(each) for each in pairs):
            return False
        together = torch.cat(pairs, dim=1) if pairs else torch.empty(2, 0)
        certain = any(self._is_proof(each) for each in pairs)
        certain = certain or (self._is_proof(together, len(pairs)) and _one_to_one(together))
        return certain or None

    def _is_proof(self, pairs: Tensor, uses: int = 1) -> bool:
        """Whether samples and labels of the same rows, one to one, aren't so by chance.

        A row for each sample, chosen from both axes, may happen to be one for each position, too.
        """
        if not self.either or pairs.shape[1] > self.samples * uses:
            return _seen(pairs) > 1
        return self.samples * log(self.samples) - lgamma(self.samples + 1) > log(CHANCE)

    def order(self, graph: Graph, uses: Sequence[tuple[Use, Tensor]]) -> Tensor | None:
        """The label of each sample of the inputs, ``[N]``; ``None`` if some are unknown."""
        pairs = self._pairs(graph, uses)
        together = torch.cat(pairs, dim=1) if pairs else None
        if together is None or not _one_to_one(together) or _seen(together) < self.samples:
            return None
        labels = torch.full((self.samples,), NO_SAMPLE)
        labels[together[0]] = together[1]
        return labels

    def _pairs(self, graph: Graph, uses: Sequence[tuple[Use, Tensor]]) -> list[Tensor]:
        """Samples of the inputs and labels of the same rows, ``[2, R]``, by use."""
        pairs: list[Tensor] = []
        for use, labels in uses:
            rows = self._samples_read(graph, use.node, labels.numel())
            if rows is not None:
                each = torch.stack([rows, labels.flatten().cpu()])
                pairs.append(each[:, (each >= 0).all(0)])
        return pairs

    def _is_shared(self, graph: Graph, number: int) -> bool:
        """Whether a node that all samples should share computes with the inputs of each."""
        read = _read_by(graph, number)
        storage = None if read is None else read.untyped_storage().data_ptr()
        return any(given.storage == storage for given in self._of_samples)

    @property
    def _of_samples(self) -> list[Given]:
        """The tensors that have an entry for each sample."""
        return [
            given
            for given in self.given
            if len(given.shape) > self.axis and given.shape[self.axis] == self.samples
        ]

    def _samples_read(self, graph: Graph, number: int, rows: int) -> Tensor | None:
        """The input's sample of each row that a node computes with; -1 where that isn't known."""
        read = _read_by(graph, number)
        if read is None:
            return None
        for given in self._of_samples:
            samples = self._samples_of(given.shape, rows)
            if samples is not None and _is_whole(read, given):
                return samples.flatten()
        if read.requires_grad or read.is_complex() or read.numel() > MAX_ELEMENTS:
            return None
        if not rows or read.numel() % rows:
            return None
        if any(given.reference() is None for given in self.given):
            return None  # it may be the one that was read
        candidates = (self._compared(read.reshape(rows, -1), given) for given in self._of_samples)
        return next((found for found in candidates if found is not None), None)

    def _samples_of(self, shape: tuple[int, ...], rows: int) -> Tensor | None:
        """The sample of each row, if the rows are those of the leading axes."""
        fitting = range(self.axis + 1, len(shape) + 1)
        axes = next((n for n in fitting if prod(shape[:n]) == rows), None)
        if axes is None:
            return None
        along = [1] * axes
        along[self.axis] = -1
        numbers = torch.arange(self.samples).reshape(along)
        return numbers.expand(shape[:axes])

    def _compared(self, rows: Tensor, given: Given) -> Tensor | None:
        """The sample of each row ``[R, F]`` that was taken or computed from a tensor's rows."""
        tensor = given.reference()
        if tensor is None or tensor.numel() > MAX_ELEMENTS or tensor.is_complex():
            return None
        found = self._matched(rows, tensor.detach())
        if found is not None and bool((found >= 0).all()):
            return found
        samples = self._samples_of(given.shape, len(rows))
        if samples is None:
            return found
        if len(rows) == self.samples and rows.numel() == tensor.numel():
            # A row for each of the samples, whatever was computed of its elements.
            return samples.flatten() if given.shape.count(self.samples) == 1 else found
        before = tensor.detach().reshape(len(rows), -1)
        in_order = _in_same_order(_sizes(rows), _sizes(before).reshape(samples.shape), samples)
        return found if in_order is None else in_order

    def _matched(self, rows: Tensor, given: Tensor) -> Tensor | None:
        """Samples of rows that a tensor has, too; -1 where it has the same row several times."""
        features = given.shape[-1]
        fits = given.dtype == rows.dtype and features == rows.shape[1]
        if not fits or given.dim() <= self.axis + 1 or not features:
            return None
        samples = self._samples_of(tuple(given.shape), given.numel() // features)
        return None if samples is None else _matched(rows, given, samples.flatten())


def reads_data(graph: Graph, model_inputs: Sequence[Given]) -> list[bool]:
    """Whether a node may be made of what the model was called with, by number."""
    storages = {given.storage for given in model_inputs}
    sizes = {size for given in model_inputs for size in _sizes_computed(given)}
    found: list[bool] = []
    for number, edges in enumerate(graph.children):
        below = any(edge is not None and found[edge[0]] for edge in edges)
        read = None if below or not storages else _read_by(graph, number)
        found.append(below or (read is not None and _may_be_of(read, storages, sizes)))
    return found


def _sizes_computed(given: Given) -> list[tuple[int, int]]:
    """Numbers of elements and of rows of what is computed from a tensor, or one of its positions.

    Integers may become vectors of any length, so that the number of elements isn't known, which is
    written as -1; of real numbers, it is that of rows.
    """
    shapes = [given.shape]
    if len(given.shape) > 1:
        shapes.append((given.shape[0], *given.shape[2:]))
    return [(prod(shape), -1) if given.is_real else (-1, prod(shape)) for shape in shapes]


def _may_be_of(read: Tensor, storages: Set[int], sizes: Set[tuple[int, int]]) -> bool:
    """Whether a tensor is one of the model's inputs, or was computed from one without a graph."""
    if read.untyped_storage().data_ptr() in storages:
        return True
    rows = read.numel() // read.shape[-1] if read.dim() and read.shape[-1] else 0
    return not read.requires_grad and not sizes.isdisjoint({(read.numel(), -1), (-1, rows)})


def _read_by(graph: Graph, number: int) -> Tensor | None:
    name = kind_of(graph.kinds[number]).data
    if not name or why_not_to_read(graph.nodes[number]):
        return None
    read = read_saved(graph.nodes[number], name)
    return None if read is None or read.layout != torch.strided else read


def _is_whole(read: Tensor, given: Given) -> bool:
    """Whether a saved tensor is one of the model's inputs, element by element, reshaped or not."""
    if read.data_ptr() != given.address or read.numel() != prod(given.shape):
        return False
    same = (tuple(read.shape), read.stride()) == (given.shape, given.strides)
    return same or (read.is_contiguous() and given.contiguous)


def _matched(rows: Tensor, given: Tensor, samples: Tensor) -> Tensor | None:
    """Samples of rows, by the same numbers; ``None`` if some rows aren't among the given ones."""
    places: dict[bytes, int] = {}
    for place, key in enumerate(_bytes_of_rows(given)):
        places[key] = -1 if key in places else place
    keys = _bytes_of_rows(rows)
    if any(key not in places for key in keys):
        return None
    found = torch.tensor([places[key] for key in keys], dtype=torch.long)
    return torch.where(found < 0, NO_SAMPLE, samples[found.clamp(min=0)])


def _in_same_order(sizes: Tensor, before: Tensor, samples: Tensor) -> Tensor | None:
    """Samples of rows ``[R]`` that were computed one by one from rows ``[*S]``, or transposed.

    Scaling, standardising, other precisions and one-hot vectors leave the order of rows by size
    what it was, or reverse it.
    """
    if _arrangements(sizes) < CHANCE:
        return None
    found = {
        tuple(numbers.flatten().tolist())
        for ranks, numbers in ((before, samples), (_transposed(before), _transposed(samples)))
        if any(torch.equal(sizes, each.flatten()) for each in (ranks, ranks.amax() - ranks))
    }
    return torch.tensor(found.pop()) if len(found) == 1 else None


def _transposed(rows: Tensor) -> Tensor:
    """With the first two axes exchanged, if there are two."""
    return rows.transpose(0, 1) if rows.dim() > 1 else rows


def _sizes(rows: Tensor) -> Tensor:
    """The place of each row among all different ones in lexicographic order, ``[R]``."""
    return torch.unique(rows.cpu(), dim=0, return_inverse=True)[1]


def _arrangements(sizes: Tensor) -> float:
    """In how many ways rows could have been put in order, equal ones not told apart."""
    counts = torch.bincount(sizes).double()
    return float(((counts.sum() + 1).lgamma() - (counts + 1).lgamma().sum()).exp())


def _bytes_of_rows(tensor: Tensor) -> list[bytes]:
    """The memory of each row along the last axis, as bytes, since NumPy has no bfloat16."""
    rows = tensor.detach().cpu().reshape(-1, tensor.shape[-1]).contiguous()
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def _one_to_one(pairs: Tensor) -> bool:
    """Whether each sample has one label, and each label one sample, in pairs ``[2, R]``."""
    samples, labels = pairs
    return _is_function(samples, labels) and _is_function(labels, samples)


def _is_function(arguments: Tensor, values: Tensor) -> bool:
    """Whether equal arguments ``[R]``, integers from 0 on, have equal values."""
    if not len(arguments):
        return True
    found = values.new_zeros(int(arguments.amax()) + 1)
    found[arguments] = values
    return torch.equal(found[arguments], values)


def _seen(pairs: Tensor) -> int:
    """How many samples there are in pairs ``[2, R]``."""
    return len(pairs[0].unique())
