"""Which rows of a graph are those of what the model was called with, or has returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import lgamma, log, prod

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from gradlens.graph.checkpoints import data_of, read_saved, why_not_to_read
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import kind_of
from gradlens.graph.model_calls import MAX_ELEMENTS, Given, ModelCall
from gradlens.samples.labels import (
    NO_SAMPLE,
    Labels,
    Shape,
    as_tensor,
    counted,
    labels_of,
    only,
    reshaped,
)

MOST_ORDERED = 2**9
"""Samples among which orders are looked for, which takes a time that grows with their cube."""

FEW_COLUMNS = 8
"""Columns that most rows differ in."""

CHANCE = 1e4
"""How unlikely it must be that rows have the inputs' order, or another one, by chance alone."""


PASSED = "batch_size="
LOSSES = "the per-sample losses"


@dataclass(frozen=True)
class Named:
    """The samples of elements, ``NO_SAMPLE`` where they aren't known.

    ``in_order`` says that they are in the order of what the model was called with, and
    ``by_order`` that they are taken for rows of that only since there are as many, and no numbers
    say otherwise. Where numbers were compared, ``compared`` is how many rows were.
    """

    names: Labels
    in_order: bool = True
    by_order: bool = False
    compared: int = 0


@dataclass(frozen=True)
class Reading:
    """A number of samples, how it is known, and the axis of the model's inputs that counts them.

    The inputs are those of several ``calls``. If the calls are ``in_turn``, each of them got other
    samples, in the order of the calls; as many calls as there are samples got one each. N
    ``is_given`` by the user, or follows from the model's inputs alone; it ``needs_names`` of the
    loss's rows if the inputs have other lengths, too.
    """

    calls: Sequence[ModelCall]
    samples: int
    known_by: str
    axis: int = 0
    in_turn: bool = False
    needs_names: bool = False

    @property
    def is_given(self) -> bool:
        """Whether the user says what N is."""
        return self.known_by in (PASSED, LOSSES)

    @property
    def inputs(self) -> list[Given]:
        """The tensors that the model was called with."""
        return [given for call in self.calls for given in call.inputs]

    def named(self, graph: Graph, reading_data: Set[int]) -> dict[Edge, Named]:
        """The samples at the edges where the inputs are, or where the graph computes with them.

        Nodes are ``reading_data``.
        """
        found: dict[Edge, Named] = {}
        for given, own in self._of_samples:
            edge = _edge(graph, given)
            if edge is not None and not graph.alone[edge[0]] and graph.shape(edge) == given.shape:
                found[edge] = Named(_along(given.shape, own, self.axis))
        by_order: dict[Edge, Named] = {}
        for number in first_nodes(graph):
            kind, whole = kind_of(graph.kinds[number]), graph.shape((number, 0))
            features = kind.feature_axes(kind.weights[-1] if kind.weights else 0, len(whole))
            rows = [1 if axis in features else length for axis, length in enumerate(whole)]
            read = self._read(graph, number, prod(rows)) if kind.data else None
            if read is not None:
                names = reshaped(read.names, (prod(rows),), tuple(rows))
                found[number, 0] = replace(read, names=names)
            elif kind.repeats and whole in map(graph.shape, graph.descend((number, 0))):
                continue  # a parameter's own entries, maybe times a constant
            elif kind.data and number in reading_data and rows.count(self.samples) == 1:
                names = _along(whole, range(self.samples), rows.index(self.samples))
                by_order[number, 0] = Named(names, by_order=True, compared=prod(rows))
        return by_order if not found and self.is_one_axis and not self.in_turn else found

    def returned(self, graph: Graph) -> dict[Edge, Labels]:
        """What the model has returned, whose rows are taken for those of its inputs."""
        found: dict[Edge, Labels] = {}
        for call, own in zip(self.calls, self._samples_of_calls, strict=True):
            for made, output in call.made:
                edge = (graph.by_sequence_number.get(made, -1), output)
                shape = graph.shape(edge) if edge[0] >= 0 and not graph.alone[edge[0]] else ()
                axis = self.axis if _has_rows(shape, own, self.axis) else 0
                is_one_axis = counting_axes(shape).count(len(own)) < 2 or len(own) == 1
                if _has_rows(shape, own, axis) and is_one_axis:
                    found[edge] = _along(shape, own, axis)
        return found

    @property
    def returns_an_order(self) -> bool:
        """Whether a call has returned an order of its samples, in which it may have put them."""
        calls = zip(self.calls, self._samples_of_calls, strict=True)
        found = ((each(), len(own)) for call, own in calls for each in call.indices)
        return any(
            indices is not None and sorted(indices.tolist()) == [*range(samples)]
            for indices, samples in found
            if samples > 1
        )

    def compares_in_another_order(self, graph: Graph) -> bool:
        """Whether the loss's targets are what the model was called with, in another order."""
        nodes = zip(graph.nodes, graph.kinds, strict=True)
        losses = [node for node, kind in nodes if kind_of(kind).targets]
        read = [read_saved(each, "target") for each in losses if not why_not_to_read(each)]
        given = [(each.reference(), len(own)) for each, own in self._of_samples]
        return any(
            tensor is not None and target is not None and _are_moved(tensor, target, samples)
            for tensor, samples in given
            for target in read
        )

    @property
    def is_one_axis(self) -> bool:
        """Whether no other axis of what the model was called with may have N entries, too."""
        shapes = [counting_axes(each.shape, each.is_real) for each in self.inputs]
        return all(shape.count(self.samples) < 2 for shape in shapes)

    @cached_property
    def _of_samples(self) -> list[tuple[Given, range]]:
        """The tensors that have an entry for each sample, or for those of their call, and which.

        Or they are those of lists with one for each sample.
        """
        found = [
            (given, own)
            for call, own in zip(self.calls, self._samples_of_calls, strict=True)
            for given in call.inputs
            if _has_rows(given.shape, own, self.axis)
        ]
        lists = self.calls[0].lists if len(self.calls) == 1 else ()
        lists = tuple(each for each in lists if self._has_one_for_each(each))
        items = [(given, range(n, n + 1)) for each in lists for n, given in enumerate(each)]
        in_lists = {given.address for given, _ in items}
        return [*(each for each in found if each[0].address not in in_lists), *items]

    def _has_one_for_each(self, items: Sequence[Given]) -> bool:
        """Whether a list has the rows of one sample in each item, not a row of each sample.

        The latter may be along the second axis, as in the two states of an LSTM.
        """
        alike = {(given.shape[1:], given.is_real) for given in items}
        along = zip(*(counting_axes(each.shape, each.is_real) for each in items), strict=False)
        is_other = {self.samples} in map(set, along)
        return len(items) == self.samples and len(alike) == 1 and not is_other

    @cached_property
    def _samples_of_calls(self) -> list[range]:
        if not self.in_turn:
            return [range(self.samples)] * len(self.calls)
        if len(self.calls) == self.samples:
            return [range(n, n + 1) for n in range(self.samples)]
        found: list[range] = []
        for call in self.calls:
            start = found[-1].stop if found else 0
            found.append(range(start, start + rows_of(call)))
        return found

    def _read(self, graph: Graph, number: int, rows: int) -> Named | None:
        """The samples of the rows ``[R]`` that a node computes with."""
        read = data_of(graph.nodes[number])
        if read is None:
            return None
        for given, own in self._of_samples:
            samples = self._samples_of(given.shape, rows, own)
            if samples is not None and _is_whole(read, given):
                return Named(labels_of(samples.flatten().numpy()))
        if read.requires_grad or read.is_complex() or read.numel() > MAX_ELEMENTS:
            return None
        if not rows or not read.numel() or read.numel() % rows:
            return None
        for given, own in self._of_samples:
            found = _by_memory(read, given, _written(given.shape, own, self.axis))
            if found is not None:
                by_row = found.reshape(rows, -1)
                are_apart = bool((by_row == by_row[:, :1]).all())
                unknown = Named(only(NO_SAMPLE, 1), in_order=False)
                return Named(labels_of(by_row[:, 0].numpy())) if are_apart else unknown
        if any(given.reference() is None for given in self.inputs):
            return None  # it may be the one that was read
        named = self._compared(read.detach().reshape(rows, -1))
        return None if named is None else replace(named, compared=rows)

    def has(self, graph: Graph, edge: Edge, named: Named) -> bool:
        """Whether compared rows that a node reads have the same samples in another graph.

        Of those that were taken for samples, numbers must not say anything.
        """
        read = self._read(graph, edge[0], named.compared)
        if named.by_order:
            return read is None
        return read is not None and np.array_equal(read.names.flatten(), named.names.flatten())

    def _compared(self, rows: Tensor) -> Named | None:
        """The samples of rows ``[R, F]`` that were taken or computed from those of the inputs.

        Taken rows have the same numbers, maybe in another order inside.
        """
        given = self._rows_of(rows)
        may_be_taken = any(_may_have(each.values, rows[:1]) for each in given)
        for changed in (torch.Tensor.clone, _sorted):
            found = _matched(rows, changed, given, self.samples) if may_be_taken else None
            if found is not None:
                return found
        for given_, own in self._of_samples:
            tensor, order = given_.reference(), self._order(given_, len(rows), own)
            if tensor is not None and order is not None and _is_comparable(tensor, len(rows)):
                found = _computed(rows, tensor.detach(), order, self.axis)
                if found is not None:
                    return found
        return None

    def _rows_of(self, rows: Tensor) -> list[_GivenRows]:
        """The rows of the inputs that are as long as some ``[R, F]``, and of the same dtype."""
        found: list[_GivenRows] = []
        for given, own in self._of_samples:
            tensor = given.reference()
            if tensor is None or tensor.dtype != rows.dtype or not _is_comparable(tensor, 1):
                continue
            axis = _axis(given.shape, self.axis) if len(own) > 1 else 0
            leading = range(axis + 1, tensor.dim() + 1)
            split = next((n for n in leading if prod(given.shape[n:]) == rows.shape[1]), None)
            if split is not None:
                samples = _written(given.shape[:split], own, self.axis)
                order = self._order(given, len(rows), own)
                values = tensor.detach().reshape(-1, rows.shape[1])
                found.append(_GivenRows(values, samples.flatten(), order))
        return found

    def _order(self, given: Given, rows: int, own: range) -> Tensor | None:
        """The sample of each row, if there are as many as a tensor with several of them has."""
        return None if len(own) == 1 < self.samples else self._samples_of(given.shape, rows, own)

    def _samples_of(self, shape: tuple[int, ...], rows: int, own: range) -> Tensor | None:
        """The sample of each row, if the rows are those of the leading axes."""
        if len(own) == 1:
            return torch.full([rows], own.start, device="cpu")
        fitting = range(_axis(shape, self.axis) + 1, len(shape) + 1)
        axes = next((n for n in fitting if prod(shape[:n]) == rows), None)
        if axes is None:
            return None
        return _written(shape[:axes], own, self.axis)


def _are_moved(one: Tensor, other: Tensor, samples: int) -> bool:
    """Whether two tensors have the same rows along their first axis, in another order."""
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape) and len(one) == samples
    if not is_alike or not _is_comparable(one, samples):
        return False
    rows = [each.detach().reshape(samples, -1) for each in (one, other)]
    before, after = _numbers_of_rows(rows)
    return not torch.equal(before, after) and torch.equal(before.msort(), after.msort())


def shapes_of(calls: Iterable[ModelCall]) -> dict[Shape, None]:
    """The shapes of the tensors of calls, each once."""
    return dict.fromkeys(shape for call in calls for shape in call.shapes)


def lengths_of(calls: Iterable[ModelCall], axis: int) -> list[int]:
    """The lengths of an axis of the tensors of calls, each once.

    Vectors count only if there is nothing else: they may be the elements of all samples in a list.
    """
    shapes = [*shapes_of(calls)]
    tensors = [shape for shape in shapes if len(shape) > 1] or shapes
    return list(dict.fromkeys(shape[axis] for shape in tensors if len(shape) > axis))


def rows_of(call: ModelCall) -> int:
    """The number of rows of a call; a vector of real numbers is one row."""
    return (lengths_of([call], 0) or [1])[0]


def counting_axes(shape: tuple[int, ...], is_real: bool = True) -> tuple[int, ...]:
    """The lengths of the axes that may count samples.

    The last one of real numbers is that of features, and images have channels along the second.
    """
    if len(shape) >= 4:
        return shape[:1]
    return shape[:-1] if is_real and len(shape) > 1 else shape


def first_nodes(graph: Graph) -> list[int]:
    """The nodes that compute with data, and else with parameters alone."""
    return [
        number
        for number, edges in enumerate(graph.children)
        if edges and not graph.alone[number]
        if all(edge is None or graph.alone[edge[0]] for edge in edges)
    ]


def nodes_reading_data(graph: Graph) -> set[int]:
    """Those of the first nodes that compute with data, which may be different for each sample."""
    found = set()
    for number in first_nodes(graph):
        kind = kind_of(graph.kinds[number])
        if None in graph.children[number] or kind.data or kind.selects:
            found.add(number)
    return {number for number in found if not _are_alike(data_of(graph.nodes[number]))}


def _are_alike(data: Tensor | None) -> bool:
    """Whether all rows are the same, as in the first state of a recurrent network."""
    if data is None or data.dim() < 2 or data.numel() > MAX_ELEMENTS:
        return False
    return bool((data == data[:1]).all())


def takes_channels(graph: Graph, model_inputs: Sequence[Given]) -> bool:
    """Whether a layer counts rows of data by the first axis alone, which has an input's shape."""
    layers = [n for n in first_nodes(graph) if kind_of(graph.kinds[n]).rows == 1]
    read = [each for each in (data_of(graph.nodes[n]) for n in layers) if each is not None]
    return not {tuple(each.shape) for each in read}.isdisjoint(g.shape for g in model_inputs)


def reads_data(graph: Graph, model_inputs: Sequence[Given]) -> list[bool]:
    """Whether a node may be made of what the model was called with, by number."""
    storages = {given.storage for given in model_inputs}
    sizes = {size for given in model_inputs for size in _sizes_computed(given)}
    found: list[bool] = []
    for number, edges in enumerate(graph.children):
        below = any(edge is not None and found[edge[0]] for edge in edges)
        read = None if below or not storages else data_of(graph.nodes[number])
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
    return samples.flatten()[order][found].reshape(read.shape)


def _offsets(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Where the elements of a tensor are, counted from the first one."""
    found = torch.zeros([1] * len(shape), dtype=torch.long, device="cpu")
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        along = [length if each == axis else 1 for each in range(len(shape))]
        found = found + (torch.arange(length, device="cpu") * stride).reshape(along)
    return found


@dataclass(frozen=True)
class _GivenRows:
    """Rows ``[R, F]`` of an input, the sample of each, and the ``order`` in which all are whole."""

    values: Tensor
    samples: Tensor
    order: Tensor | None


def _may_have(values: Tensor, row: Tensor) -> bool:
    """Whether a row ``[1, F]`` may be among others ``[R, F]``, its elements in any order."""
    ends, wanted = (torch.stack([x.amin(1), x.amax(1)]).cpu() for x in (values, row))
    return bool(((ends == wanted) | ends.isnan()).all(0).any())


def _matched(
    rows: Tensor,
    changed: Callable[[Tensor], Tensor],
    given: Sequence[_GivenRows],
    samples: int,
) -> Named | None:
    """Samples of rows ``[R, F]`` that the inputs have, too, after they were ``changed``.

    -1 where several samples have the same row, and these aren't in the order of a whole tensor.
    ``None`` if some rows aren't among them, or, of integers, aren't those of one sample each, as
    the words of a text aren't, or may be the same by chance.
    """
    *taken, wanted = _numbers_of_rows([*(changed(each.values) for each in given), changed(rows)])
    unknown = Named(only(NO_SAMPLE, 1), in_order=False)
    by_chance = not rows.is_floating_point() and _may_be_chance(rows.shape[1], wanted, taken)
    for numbers, each in zip(taken, given, strict=True):
        if each.order is not None and len(numbers) == len(rows):
            layout = numbers.reshape(each.order.shape)
            layouts = (layout, each.order), map(_transposed, (layout, each.order))
            found = [n.flatten() for before, n in layouts if torch.equal(before.flatten(), wanted)]
            if found and (by_chance or not torch.equal(found[0], found[-1])):
                return None  # as of a symmetric matrix of windows of one series
            if found:
                is_seen = _shows_order(wanted, found[0])
                return Named(labels_of(found[0].numpy())) if is_seen else unknown
            if by_chance and torch.equal(numbers.sort().values, wanted.sort().values):
                return unknown
    if by_chance:
        return None
    every, names = torch.cat(taken), torch.cat([each.samples for each in given])
    least = torch.full([int(torch.cat([every, wanted]).max()) + 1], samples, device="cpu")
    most = torch.full_like(least, NO_SAMPLE)
    least.scatter_reduce_(0, every, names, "amin")
    most.scatter_reduce_(0, every, names, "amax")
    labels = most.masked_fill(least != most, NO_SAMPLE)[wanted]
    are_unique = rows.is_floating_point() or bool((labels != NO_SAMPLE).all())
    are_all = bool((most[wanted] != NO_SAMPLE).all())
    return Named(labels_of(labels.numpy()), in_order=False) if are_all and are_unique else None


def _may_be_chance(length: int, wanted: Tensor, taken: Sequence[Tensor]) -> bool:
    """Whether rows of integers may be among others by chance, by the rows' numbers.

    As the codes of a codebook may be among labels: single integers, of which some come again.
    """
    is_moved = any(torch.equal(each.sort().values, wanted.sort().values) for each in taken)
    come_again = length == 1 and int(wanted.bincount().max()) > 1
    return _arrangements(wanted) < CHANCE or (come_again and not is_moved)


def _shows_order(numbers: Tensor, samples: Tensor) -> bool:
    """Whether the numbers of rows ``[R]`` would show if samples were in another order.

    Samples with the same rows might have changed places.
    """
    of_samples = numbers[samples.argsort(stable=True)].reshape(len(samples.unique()), -1)
    kinds = _sizes(of_samples)
    return int(kinds.max()) == len(kinds) - 1 or _arrangements(kinds) >= CHANCE


def _is_comparable(tensor: Tensor, rows: int) -> bool:
    """Whether a tensor has this many rows of numbers that can be compared."""
    return (
        0 < tensor.numel() <= MAX_ELEMENTS
        and not tensor.is_complex()
        and not (tensor.numel() % rows)
    )


def _numbers_of_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A number for each row of some tensors, the same for rows that are the same bit by bit."""
    rows = torch.cat([each.cpu() for each in tensors]).contiguous()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = _sizes(rows.view(whole[rows.element_size()]))
    return [*numbers.split([len(each) for each in tensors])]


def _sorted(rows: Tensor) -> Tensor:
    return rows.sort(1).values


def _computed(rows: Tensor, given: Tensor, samples: Tensor, axis: int) -> Named | None:
    """Samples of rows ``[R, F]`` that were computed one by one from a tensor's, ``[*S]``.

    ``None`` if they can't be compared. They aren't known if they are in another order.
    """
    before = given.reshape(len(rows), -1)
    unknown = Named(only(NO_SAMPLE, 1), in_order=False)
    sizes, ranks = _sizes(rows), _sizes(before)
    if _are_reversed(sizes, ranks):
        return unknown
    same = _in_same_order(sizes, ranks.reshape(samples.shape), samples)
    if same is not None:
        return Named(labels_of(same.numpy()))
    number = samples.shape[0]
    one, other = rows.cpu().double(), before.cpu().double()
    if number == len(rows) and not other.shape[1] % one.shape[1]:  # such as the mean over positions
        other = other.reshape(number, -1, one.shape[1]).mean(1)
    if axis or one.shape != other.shape:
        return None
    turned = one.reshape(-1, number, one.shape[1]).transpose(0, 1).reshape(number, -1)
    found = _are_others((one.reshape(number, -1), turned), other.reshape(number, -1))
    return unknown if found else None


def _are_reversed(ranks: Tensor, before: Tensor) -> bool:
    """Whether sorted rows are reversed: by a decreasing function, or since they come in reverse."""
    is_sorted = torch.equal(before.flip(0), before.amax() - before)
    return is_sorted and torch.equal(ranks, before.flip(0)) and _arrangements(ranks) >= CHANCE


def _are_others(layouts: Sequence[Tensor], given: Tensor) -> bool:
    """Whether samples are more alike to others of the given ones than to those at their places.

    As where noise was added to shuffled samples, or each element was changed by itself, by a
    function that is odd or even. The order with the largest correlation over all elements must be
    likelier than the given one, by the ratio of what they don't explain, than any of the orders
    that move as many samples would be by chance.
    """
    count, features = given.shape
    if not 1 < count <= MOST_ORDERED:
        return False
    pairs = [(_centred(rows), _centred(each)) for rows in layouts for each in (given, given.abs())]
    own = highest = 0.0
    moved = 0
    for alike in (sign * (rows @ each.T) for rows, each in pairs for sign in (1, -1)):
        best = torch.tensor(linear_sum_assignment(-alike.numpy())[1], device="cpu")
        total = float(alike[torch.arange(count, device="cpu"), best].sum())
        own = max(own, float(alike.trace()))
        if total > highest:
            highest, moved = total, int((best != torch.arange(count, device="cpu")).sum())
    degrees = (count - 1) * features - 1
    likelier = degrees / 2 * (_log_unexplained(own) - _log_unexplained(highest))
    return likelier > lgamma(count + 1) - lgamma(count - moved + 1) + log(CHANCE)


def _log_unexplained(correlation: float) -> float:
    # Rounding leaves nothing less.
    return log(max(1 - correlation**2, 1e-12))


def _centred(rows: Tensor) -> Tensor:
    """With mean 0 in each column, and norm 1 altogether."""
    rows = rows - rows.mean(0)
    return (rows / rows.norm()).nan_to_num()


def _in_same_order(sizes: Tensor, before: Tensor, samples: Tensor) -> Tensor | None:
    """Samples of rows ``[R]`` that were computed one by one from rows ``[*S]``, or transposed.

    Scaling, standardising, other precisions and one-hot vectors leave the order of rows by size
    what it was, or reverse it.
    """
    if _arrangements(sizes) < CHANCE:
        return None
    found = {
        tuple(numbers.flatten().tolist())
        for ranks in (before, before.amax() - before)
        for each, numbers in ((ranks, samples), (_transposed(ranks), _transposed(samples)))
        if torch.equal(sizes, each.flatten())
    }
    return torch.tensor(found.pop(), device="cpu") if len(found) == 1 else None


def _transposed(rows: Tensor) -> Tensor:
    """With the first two axes exchanged, if there are two."""
    return rows.transpose(0, 1) if rows.dim() > 1 else rows


def _sizes(rows: Tensor) -> Tensor:
    """The place of each row among all different ones in lexicographic order, ``[R]``."""
    rows, columns = rows.cpu(), FEW_COLUMNS
    while True:
        # Sorting by all columns takes as long as a step of a small network.
        found = torch.unique(rows[:, :columns], dim=0, return_inverse=True)[1]
        numbers = torch.arange(len(rows), device="cpu")
        one_of_each = torch.empty_like(found).scatter_(0, found, numbers)
        if columns >= rows.shape[1] or torch.equal(rows, rows[one_of_each[found]]):
            return found
        columns *= FEW_COLUMNS


def _arrangements(sizes: Tensor) -> float:
    """In how many ways rows could have been put in order, equal ones not told apart."""
    counts = torch.bincount(sizes).double()
    return float(((counts.sum() + 1).lgamma() - (counts + 1).lgamma().sum()).exp())


def _edge(graph: Graph, given: Given) -> Edge | None:
    """Where a tensor is in a graph, if it is there: a leaf, or what a node has made."""
    tensor = given.reference()
    leaf = None if tensor is None else graph.leaves.get(id(tensor))
    if leaf is not None:
        return None if isinstance(tensor, nn.Parameter) else (leaf, 0)
    number = None if given.made is None else graph.by_sequence_number.get(given.made[0])
    return None if given.made is None or number is None else (number, given.made[1])


def _axis(shape: Sequence[int], axis: int) -> int:
    """The axis that counts samples, which is the only one of a vector."""
    return axis if len(shape) > 1 else 0


def _along(shape: Sequence[int], own: range, axis: int) -> Labels:
    """The samples along an axis."""
    return counted(own, _axis(shape, axis), len(shape))


def _written(shape: Sequence[int], own: range, axis: int) -> Tensor:
    """The samples of all elements."""
    return as_tensor(_along(shape, own, axis)).expand(*shape)


def _has_rows(shape: Sequence[int], own: range, axis: int) -> bool:
    """Whether a tensor has a row for each of some samples, or belongs to the only one."""
    axis = _axis(shape, axis)
    return bool(shape) and (len(own) == 1 or (len(shape) > axis and shape[axis] == len(own)))
