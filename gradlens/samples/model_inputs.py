"""Whether labels agree with what the model was called with.

Where an axis of positions has as many entries as there are samples, or as many positions as samples
were selected by chance, the loss's rows are ambiguous. Layers that compute with the model's input
itself decide it, since the sample of each of its rows is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import lgamma, log, prod

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_saved, why_not_to_read
from gradlens.graph.graph import Graph, Use
from gradlens.graph.kinds import LEAF, kind_of
from gradlens.graph.model_calls import Given, ModelCall
from gradlens.graph.torch_private import sequence_number
from gradlens.samples.rows import NO_SAMPLE, LabelledEdge

MAX_ELEMENTS = 2**22
"""Larger tensors, of 16 MiB in single precision, aren't searched for the model's input."""

CHANCE = 1e4
"""How many other orders or choices of rows there must be for one to be taken for the inputs'."""


@dataclass(frozen=True)
class Anchor:
    """Rows of a node that computes with the model's inputs, and the sample of each, ``[*S]``.

    A sample is negative where it isn't known. ``shows_order`` is false where there is a row for
    each sample, but whether that is in the order of the samples isn't certain.
    """

    rows: LabelledEdge
    samples: Tensor
    shows_order: bool = True


@dataclass(frozen=True)
class ModelInputs:
    """The tensors that a model was called with for ``samples``, and the axis that counts these.

    They are those of several ``calls``. If the calls are ``in_turn``, each of them got other
    samples, in the order of the calls. ``either`` means that another axis may count them.
    """

    calls: Sequence[ModelCall]
    axis: int
    samples: int
    either: bool = False
    in_turn: bool = False

    def anchors(self, graph: Graph, alone: Sequence[bool]) -> list[Anchor]:
        """Where the graph computes with the inputs themselves, and with parameters ``alone``."""
        found: list[Anchor] = []
        for number in first_nodes(graph, alone):
            kind = kind_of(graph.kinds[number])
            if not kind.data:
                continue
            whole = graph.shape((number, 0))
            features = kind.feature_axes(kind.weights[-1] if kind.weights else 0, len(whole))
            rows = LabelledEdge((number, 0), features)
            shape = [length for axis, length in enumerate(whole) if axis not in features]
            samples, shows_order = self._samples_read(graph, number, prod(shape))
            if samples is not None:
                found.append(Anchor(rows, samples.reshape(shape), shows_order))
        return found

    def pairs(
        self, anchors: Sequence[Anchor], labels: Mapping[LabelledEdge, Tensor]
    ) -> list[Tensor]:
        """Samples of the inputs and labels of the same rows, ``[2, R]``, by anchor."""
        found: list[Tensor] = []
        for anchor in anchors:
            of_rows = labels[anchor.rows].flatten().cpu()
            each = torch.stack([anchor.samples.flatten(), of_rows])
            found.append(each[:, (each >= 0).all(0)])
        return [each for each in found if each.numel()]

    def order(self, pairs: Sequence[Tensor]) -> Tensor | None:
        """The sample of each label, ``[N]``, -1 where none is known; ``None`` if they contradict.

        An axis that doesn't count the samples has rows of several samples with one label.
        """
        together = torch.cat([*pairs], dim=1) if pairs else torch.empty(2, 0, dtype=torch.long)
        if not are_one_to_one(together):
            return None
        found = torch.full((self.samples,), NO_SAMPLE)
        found[together[1]] = together[0]
        return found

    def is_proof(self, pairs: Sequence[Tensor]) -> bool:
        """Whether samples and labels of the same rows, one to one, aren't so by chance.

        A row for each sample, chosen from both axes, may happen to be one for each position, too.
        """
        together = torch.cat([*pairs], dim=1) if pairs else torch.empty(2, 0)
        if not self.either or together.shape[1] > self.samples * max(len(pairs), 1):
            return _seen(together) > 1
        return self.samples * log(self.samples) - lgamma(self.samples + 1) > log(CHANCE)

    def are_shared(self, graph: Graph, uses: Sequence[Use]) -> bool:
        """Whether a node that all samples should share computes with the inputs of each."""
        links = (link for use in uses for link in use.chain)
        return any(self._is_shared(graph, link.node) for link in links)

    def _is_shared(self, graph: Graph, number: int) -> bool:
        """Whether a node that all samples should share computes with the inputs of each."""
        read = _read_by(graph, number)
        storage = None if read is None else read.untyped_storage().data_ptr()
        return any(given.storage == storage for given, _ in self._of_samples)

    @cached_property
    def _given(self) -> list[Given]:
        return [given for call in self.calls for given in call.inputs]

    @cached_property
    def _of_samples(self) -> list[tuple[Given, range]]:
        """The tensors that have an entry for each sample, or for those of their call, and which."""
        return [
            (given, own)
            for call, own in zip(self.calls, self._samples_of_calls, strict=True)
            for given in call.inputs
            if len(given.shape) > self.axis and given.shape[self.axis] == len(own)
        ]

    @cached_property
    def _samples_of_calls(self) -> list[range]:
        if not self.in_turn:
            return [range(self.samples)] * len(self.calls)
        found: list[range] = []
        for call in self.calls:
            lengths = [each.shape[self.axis] for each in call.inputs if len(each.shape) > 1]
            start = found[-1].stop if found else 0
            found.append(range(start, start + (lengths or [1])[0]))
        return found

    def returned(self, graph: Graph) -> list[Anchor]:
        """What the model has returned, whose rows are those of its inputs.

        A model that returns them in another order is found out where its inputs are known.
        """
        numbers = {
            sequence_number(node): number
            for number, node in enumerate(graph.nodes)
            if graph.kinds[number] != LEAF
        }
        found: list[Anchor] = []
        for call, own in zip(self.calls, self._samples_of_calls, strict=True):
            for made, output in call.made:
                edge = (numbers.get(made, -1), output)
                shape = graph.shape(edge) if edge[0] >= 0 else ()
                if len(shape) > self.axis and shape[self.axis] == len(own):
                    rest = tuple(axis for axis in range(len(shape)) if axis != self.axis)
                    samples = torch.arange(own.start, own.stop)
                    found.append(Anchor(LabelledEdge(edge, rest), samples))
        return found

    def _samples_read(self, graph: Graph, number: int, rows: int) -> tuple[Tensor | None, bool]:
        """The input's sample of each row that a node computes with, -1 where that isn't known.

        And whether these rows are in the samples' order for certain.
        """
        read = _read_by(graph, number)
        if read is None:
            return None, False
        for given, own in self._of_samples:
            samples = self._samples_of(given.shape, rows, own)
            if samples is not None and _is_whole(read, given):
                return samples.flatten(), True
        if read.requires_grad or read.is_complex() or read.numel() > MAX_ELEMENTS:
            return None, False
        if not rows or read.numel() % rows:
            return None, False
        if any(given.reference() is None for given in self._given):
            return None, False  # it may be the one that was read
        compared = [self._compared(read.reshape(rows, -1), *each) for each in self._of_samples]
        known = [each for each in compared if each is not None]
        if known:
            return known[0], True
        return self._one_row_each(read.reshape(rows, -1)), False

    def _samples_of(self, shape: tuple[int, ...], rows: int, own: range) -> Tensor | None:
        """The sample of each row, if the rows are those of the leading axes."""
        fitting = range(self.axis + 1, len(shape) + 1)
        axes = next((n for n in fitting if prod(shape[:n]) == rows), None)
        if axes is None:
            return None
        along = [1] * axes
        along[self.axis] = -1
        numbers = torch.arange(own.start, own.stop).reshape(along)
        return numbers.expand(shape[:axes])

    def _compared(self, rows: Tensor, given: Given, own: range) -> Tensor | None:
        """The sample of each row ``[R, F]`` that was taken or computed from a tensor's rows."""
        tensor = given.reference()
        if tensor is None or tensor.numel() > MAX_ELEMENTS or tensor.is_complex():
            return None
        found = self._matched(rows, tensor.detach(), own)
        if found is not None and bool((found >= 0).all()):
            return found
        samples = self._samples_of(given.shape, len(rows), own)
        if samples is None:
            return found
        before = tensor.detach().reshape(len(rows), -1)
        in_order = _in_same_order(_sizes(rows), _sizes(before).reshape(samples.shape), samples)
        return found if in_order is None else in_order

    def _one_row_each(self, rows: Tensor) -> Tensor | None:
        """The samples, if there is a row for each, of as many elements as an input has."""
        for given, own in self._of_samples:
            is_one = given.shape.count(len(own)) == 1 and rows.numel() == prod(given.shape)
            if is_one and len(rows) == len(own) and given.reference() is not None:
                return torch.arange(own.start, own.stop)
        return None

    def _matched(self, rows: Tensor, given: Tensor, own: range) -> Tensor | None:
        """Samples of rows that a tensor has, too; -1 where it has the same row several times."""
        features = given.shape[-1]
        fits = given.dtype == rows.dtype and features == rows.shape[1]
        if not fits or given.dim() <= self.axis + 1 or not features:
            return None
        samples = self._samples_of(tuple(given.shape), given.numel() // features, own)
        return None if samples is None else _matched(rows, given, samples.flatten())


def first_nodes(graph: Graph, alone: Sequence[bool]) -> list[int]:
    """The nodes that compute with data, and else with parameters alone."""
    return [
        number
        for number, edges in enumerate(graph.children)
        if edges and not alone[number] and all(edge is None or alone[edge[0]] for edge in edges)
    ]


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


def are_one_to_one(pairs: Tensor) -> bool:
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
