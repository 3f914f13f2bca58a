"""Which rows of a graph are those of what the model was called with, or has returned."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from gradlens.graph.checkpoints import read_saved, why_not_to_read
from gradlens.graph.graph import Edge, Graph, Use
from gradlens.graph.kinds import kind_of
from gradlens.graph.model_calls import Given, ModelCall
from gradlens.samples.rows import NO_SAMPLE

MAX_ELEMENTS = 2**22
"""Larger tensors, of 16 MiB in single precision, aren't searched for the model's input."""

CHANCE = 1e4
"""How many other orders of rows there must be for one to be taken for the inputs'."""


@dataclass(frozen=True)
class Named:
    """The samples of elements, -1 where they aren't known; an axis of length 1 has the same ones.

    ``in_order`` says that they are in the order of what the model was called with, and
    ``by_order`` that they are taken for rows of that only since there are as many.
    """

    names: Tensor
    in_order: bool = True
    by_order: bool = False


@dataclass(frozen=True)
class ModelInputs:
    """The tensors that a model was called with for ``samples``, and the axis that counts these.

    They are those of several ``calls``. If the calls are ``in_turn``, each of them got other
    samples, in the order of the calls; as many calls as there are samples got one each.
    """

    calls: Sequence[ModelCall]
    axis: int
    samples: int
    in_turn: bool = False

    def named(
        self, graph: Graph, alone: Sequence[bool], reading_data: Set[int]
    ) -> dict[Edge, Named]:
        """The samples at the edges where the inputs are, or where the graph computes with them.

        Nodes that are ``alone`` compute with parameters alone, and others are ``reading_data``.
        """
        found: dict[Edge, Named] = {}
        for given, own in self._of_samples:
            edge = _edge(graph, given)
            if edge is not None and not alone[edge[0]] and graph.shape(edge) == given.shape:
                found[edge] = Named(_along(given.shape, own, self.axis))
        by_order: dict[Edge, Tensor] = {}
        for number in first_nodes(graph, alone):
            kind, whole = kind_of(graph.kinds[number]), graph.shape((number, 0))
            features = kind.feature_axes(kind.weights[-1] if kind.weights else 0, len(whole))
            rows = [1 if axis in features else length for axis, length in enumerate(whole)]
            read = self._read(graph, number, prod(rows)) if kind.data else None
            if read is not None:
                found[number, 0] = replace(read, names=read.names.reshape(rows))
            elif kind.data and number in reading_data and rows.count(self.samples) == 1:
                by_order[number, 0] = _along(whole, range(self.samples), rows.index(self.samples))
        if not found and self.is_one_axis and not self.in_turn:
            found = {edge: Named(names, by_order=True) for edge, names in by_order.items()}
        return found

    def returned(self, graph: Graph, alone: Sequence[bool]) -> dict[Edge, Tensor]:
        """What the model has returned, whose rows are taken for those of its inputs."""
        found: dict[Edge, Tensor] = {}
        for call, own in zip(self.calls, self._samples_of_calls, strict=True):
            for made, output in call.made:
                edge = (graph.by_sequence_number.get(made, -1), output)
                shape = graph.shape(edge) if edge[0] >= 0 and not alone[edge[0]] else ()
                axis = self.axis if _has_rows(shape, own, self.axis) else 0
                is_one_axis = counting_axes(shape).count(len(own)) < 2 or len(own) == 1
                if _has_rows(shape, own, axis) and is_one_axis:
                    found[edge] = _along(shape, own, axis)
        return found

    def are_shared(self, graph: Graph, uses: Sequence[Use]) -> bool:
        """Whether a node that all samples should share computes with the inputs of each."""
        links = (link for use in uses for link in use.chain)
        return any(self._is_shared(graph, link.node) for link in links)

    def _is_shared(self, graph: Graph, number: int) -> bool:
        """Whether a node that all samples should share computes with the inputs of each."""
        read = _read_by(graph, number)
        storage = None if read is None else read.untyped_storage().data_ptr()
        return any(given.storage == storage for given, _ in self._of_samples)

    @property
    def are_gone(self) -> bool:
        """Whether some of them can't be compared any more, since no variable holds them."""
        return any(given.reference() is None for call in self.calls for given in call.inputs)

    @property
    def is_one_axis(self) -> bool:
        """Whether no other axis of what the model was called with may have N entries, too."""
        given = [given for call in self.calls for given in call.inputs]
        shapes = [counting_axes(each.shape, each.is_real) for each in given]
        return all(shape.count(self.samples) < 2 for shape in shapes)

    @cached_property
    def _of_samples(self) -> list[tuple[Given, range]]:
        """The tensors that have an entry for each sample, or for those of their call, and which."""
        return [
            (given, own)
            for call, own in zip(self.calls, self._samples_of_calls, strict=True)
            for given in call.inputs
            if _has_rows(given.shape, own, self.axis)
        ]

    @cached_property
    def _samples_of_calls(self) -> list[range]:
        if not self.in_turn:
            return [range(self.samples)] * len(self.calls)
        if len(self.calls) == self.samples:
            return [range(n, n + 1) for n in range(self.samples)]
        found: list[range] = []
        for call in self.calls:
            start = found[-1].stop if found else 0
            found.append(range(start, start + rows_of(call.shapes)))
        return found

    def _read(self, graph: Graph, number: int, rows: int) -> Named | None:
        """The samples of the rows ``[R]`` that a node computes with."""
        read = _read_by(graph, number)
        if read is None:
            return None
        for given, own in self._of_samples:
            samples = self._samples_of(given.shape, rows, own)
            if samples is not None and _is_whole(read, given):
                return Named(samples.flatten())
        if read.requires_grad or read.is_complex() or read.numel() > MAX_ELEMENTS:
            return None
        if not rows or read.numel() % rows:
            return None
        for given, own in self._of_samples:
            found = _by_memory(read, given, _along(given.shape, own, self.axis))
            rows_of = None if found is None else found.reshape(rows, -1)
            if rows_of is not None and bool((rows_of == rows_of[:, :1]).all()):
                return Named(rows_of[:, 0])
        if self.are_gone:
            return None  # it may be the one that was read
        for given, own in self._of_samples:
            whole = self._whole_rows(read, given, own, rows)
            if whole is not None:
                return whole
            compared = self._compared(read.reshape(rows, -1), given, own)
            if compared is not None:
                samples = self._samples_of(given.shape, rows, own)
                known = compared >= 0
                for order in () if samples is None else (samples, _transposed(samples)):
                    if torch.equal(order.flatten()[known], compared[known]):
                        return Named(order.flatten(), by_order=not bool(known.all()))
                return Named(compared, in_order=False)
        return None

    def _whole_rows(self, read: Tensor, given: Given, own: range, rows: int) -> Named | None:
        """The samples of a tensor that has the rows of one of the same shape, in another order.

        They are unknown where some rows are the same.
        """
        tensor = given.reference()
        if self.axis or tensor is None or tuple(read.shape) != given.shape or len(own) < 2:
            return None
        if read.dtype != tensor.dtype or rows % len(own):
            return None
        one, other = (each.detach().reshape(len(own), -1) for each in (read, tensor))
        if torch.equal(one, other):
            return None
        numbers = torch.arange(own.start, own.stop)
        found = _matched(one, other, numbers)
        if found is None or len({*_bytes_of_rows(one)}) != len({*_bytes_of_rows(other)}):
            return None
        return Named(found.repeat_interleave(rows // len(own)), in_order=False)

    def _samples_of(self, shape: tuple[int, ...], rows: int, own: range) -> Tensor | None:
        """The sample of each row, if the rows are those of the leading axes."""
        if len(own) == 1:
            return torch.full([rows], own.start)
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
        if found is not None and not given.is_real and _arrangements(_sizes(rows)) < CHANCE:
            found = None  # integers are often the same by chance
        if found is not None and bool((found >= 0).all()):
            return found
        samples = self._samples_of(given.shape, len(rows), own)
        if samples is None or tensor.numel() % len(rows):
            return found
        before = tensor.detach().reshape(len(rows), -1)
        in_order = _in_same_order(_sizes(rows), _sizes(before).reshape(samples.shape), samples)
        return found if in_order is None else in_order

    def _matched(self, rows: Tensor, given: Tensor, own: range) -> Tensor | None:
        """Samples of rows that a tensor has, too; -1 where it has the same row several times."""
        features = given.shape[-1]
        fits = given.dtype == rows.dtype and features == rows.shape[1]
        if not fits or given.dim() <= self.axis + 1 or not features:
            return None
        samples = self._samples_of(tuple(given.shape), given.numel() // features, own)
        return None if samples is None else _matched(rows, given, samples.flatten())


def places_of_inputs(graph: Graph, calls: Sequence[ModelCall]) -> Hashable:
    """Where in a graph the model's inputs are, as they are in memory, and its calls' outputs.

    Graphs of the same structure may differ in that, as where rows are shuffled later on.
    """
    addresses = {given.address: n for call in calls for n, given in enumerate(call.inputs)}
    reading = (
        number
        for number, edges in enumerate(graph.children)
        if None in edges and kind_of(graph.kinds[number]).data
    )
    read = ((number, _read_by(graph, number)) for number in reading)
    inputs = tuple((n, -1 if t is None else addresses.get(t.data_ptr(), -1)) for n, t in read)
    made = [(graph.by_sequence_number.get(n, -1), o) for call in calls for n, o in call.made]
    return inputs, tuple(made)


def lengths_of(calls: Sequence[Sequence[tuple[int, ...]]], axis: int) -> list[int]:
    """The lengths of an axis of the tensors of calls, each once.

    Vectors count only if there is nothing else: they may be the elements of all samples in a list.
    """
    shapes = [shape for shapes in calls for shape in shapes]
    tensors = [shape for shape in shapes if len(shape) > 1] or shapes
    return list(dict.fromkeys(shape[axis] for shape in tensors if len(shape) > axis))


def rows_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """The number of rows of a call with these shapes; a vector of real numbers is one row."""
    return (lengths_of([shapes], 0) or [1])[0]


def counting_axes(shape: tuple[int, ...], is_real: bool = True) -> tuple[int, ...]:
    """The lengths of the axes that may count samples.

    The last one of real numbers is that of features, and images have channels along the second.
    """
    if len(shape) >= 4:
        return shape[:1]
    return shape[:-1] if is_real and len(shape) > 1 else shape


def first_nodes(graph: Graph, alone: Sequence[bool]) -> list[int]:
    """The nodes that compute with data, and else with parameters alone."""
    return [
        number
        for number, edges in enumerate(graph.children)
        if edges and not alone[number] and all(edge is None or alone[edge[0]] for edge in edges)
    ]


def nodes_reading_data(graph: Graph, alone: Sequence[bool]) -> set[int]:
    """Those of the first nodes that compute with data, which may be different for each sample."""
    found = set()
    for number in first_nodes(graph, alone):
        kind = kind_of(graph.kinds[number])
        if None in graph.children[number] or kind.data or kind.selects:
            found.add(number)
    return {number for number in found if not _are_alike(_read_by(graph, number))}


def _are_alike(data: Tensor | None) -> bool:
    """Whether all rows are the same, as in the first state of a recurrent network."""
    if data is None or data.dim() < 2 or data.numel() > MAX_ELEMENTS:
        return False
    return bool((data == data[:1]).all())


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


def _by_memory(read: Tensor, given: Given, samples: Tensor) -> Tensor | None:
    """Samples of elements that are in the memory of another tensor; ``None`` if some aren't.

    A model may compute with views of its inputs, such as slices, or their transpose.
    """
    if read.untyped_storage().data_ptr() != given.storage or prod(given.shape) > MAX_ELEMENTS:
        return None
    places = _offsets(given.shape, given.strides).flatten()
    shift, rest = divmod(read.data_ptr() - given.address, read.element_size())
    wanted = _offsets(tuple(read.shape), read.stride()).flatten() + shift
    order = places.argsort()
    found = torch.searchsorted(places[order], wanted).clamp(max=max(len(places) - 1, 0))
    if rest or not torch.equal(places[order][found], wanted):
        return None
    return samples.expand(given.shape).flatten()[order][found].reshape(read.shape)


def _offsets(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Where the elements of a tensor are, counted from the first one."""
    found = torch.zeros([1] * len(shape), dtype=torch.long)
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        along = [length if each == axis else 1 for each in range(len(shape))]
        found = found + (torch.arange(length) * stride).reshape(along)
    return found


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


def _edge(graph: Graph, given: Given) -> Edge | None:
    """Where a tensor is in a graph, if it is there: a leaf, or what a node has made."""
    tensor = given.reference()
    leaf = None if tensor is None else graph.leaves.get(id(tensor))
    if leaf is not None:
        return None if isinstance(tensor, nn.Parameter) else (leaf, 0)
    number = None if given.made is None else graph.by_sequence_number.get(given.made[0])
    return None if given.made is None or number is None else (number, given.made[1])


def _along(shape: Sequence[int], own: range, axis: int) -> Tensor:
    """The samples along an axis; other axes have length 1."""
    samples = torch.arange(own.start, own.stop)
    return samples.reshape([len(own) if each == axis else 1 for each in range(len(shape))])


def _has_rows(shape: Sequence[int], own: range, axis: int) -> bool:
    """Whether a tensor has a row for each of some samples, or belongs to the only one."""
    return bool(shape) and (len(own) == 1 or (len(shape) > axis and shape[axis] == len(own)))
