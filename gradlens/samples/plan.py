"""The nodes at which each parameter's samples are apart, and the sample of each of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph, Use
from gradlens.graph.kinds import kind_of, positive
from gradlens.graph.model_calls import ModelCall, say_an_order
from gradlens.numerics.tensors import on_device
from gradlens.samples.labels import MIXED, NO_SAMPLE, Labels, joined, moved
from gradlens.samples.model_inputs import Named, Reading
from gradlens.samples.picks import Selection
from gradlens.torch_private import saved


class LabelledEdge(NamedTuple):
    """An edge of a graph, the rows of whose gradient get labels.

    ``features`` are the axes that belong to a row; all others count rows.
    """

    edge: Edge
    features: tuple[int, ...]

    def rows(self, gradient: Tensor) -> Tensor:
        """``[*S, F]`` from a gradient, with F = 1 if each element is a row."""
        rest = [axis for axis in range(gradient.dim()) if axis not in self.features]
        moved = gradient.permute((*rest, *self.features))
        return moved.flatten(len(rest)) if self.features else moved[..., None]

    def rows_of(self, labels: Labels) -> Labels:
        """Labels of rows from those of elements, ``MIXED`` where these differ inside a row."""
        for axis in self.features:
            found = joined(labels, axis, MIXED)
            assert found is not None
            labels = found
        rest = [axis for axis in range(labels.ndim) if axis not in self.features]
        return moved(labels, {axis: place for place, axis in enumerate(rest)}, len(rest))


def rows_of_values(graph: Graph, number: int) -> list[list[LabelledEdge]]:
    """The edges whose rows are those of the values of a loss's term: large rows, and smaller ones.

    All edges of the node's inputs have the same rows.
    """
    its = kind_of(graph.kinds[number])
    edges = [(number, 0)]
    if its.targets:
        edges = [edge for edge in graph.children[number] if edge is not None]
    dims = len(graph.shape(edges[0]))
    if its.row_axis:
        axis = positive(saved(graph.nodes[number], its.row_axis), dims)
        return [[LabelledEdge(edges[0], tuple(axis))]]
    sizes = [tuple(range(1, dims)), ()] if dims > 1 else [()]
    return [[LabelledEdge(edge, features) for edge in edges] for features in sizes]


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The sample of each row: ``labels`` ``[*S]`` on the host, from 0 to N - 1.

    Rows with the label ``NO_SAMPLE`` are left out of all results. They have no gradient, unless the
    samples are only ``some`` of the batch.
    """

    labels: Tensor
    samples: int
    some: bool = False

    @cached_property
    def axis(self) -> int | None:
        """The axis that counts the samples, if the labels are 0 to N - 1 along one axis."""
        return self.counting_axis if self.is_complete else None

    @cached_property
    def counting_axis(self) -> int | None:
        """The only axis along which each known row's label is its place, if all samples have rows.

        Axes along which the labels are views of one entry are read once.
        """
        shape, strides = self.labels.shape, self.labels.stride()
        ends = (n if stride else 1 for n, stride in zip(shape, strides, strict=True))
        few = self.labels[tuple(slice(end) for end in ends)]
        known, places = few != NO_SAMPLE, torch.arange(self.samples, device="cpu")
        if len(few[known].unique()) < self.samples:
            return None
        found = []
        for axis in (a for a, length in enumerate(shape) if length == self.samples):
            along = places.reshape([-1 if each == axis else 1 for each in range(len(shape))])
            if bool(((few == along) | ~known).all()):
                found.append(axis)
        return found[0] if len(found) == 1 or (found and self.samples == 1) else None

    @cached_property
    def fold(self) -> tuple[int, int] | None:
        """``(a, b)`` if the rows are those of ``[a, N, b]``, in order."""
        return self._folds[0] if self.is_complete and self._folds else None

    @cached_property
    def _folds(self) -> list[tuple[int, int]]:
        """All ``(a, b)`` that agree with the labels of known rows."""
        labels = self.labels.flatten()
        if not len(labels) or len(labels) % self.samples:
            return []
        rows = len(labels) // self.samples
        known = labels != NO_SAMPLE
        found = []
        for inner in (n for n in range(1, rows + 1) if rows % n == 0):
            if bool((~known | (labels == self._folded(rows // inner, inner))).all()):
                found.append((rows // inner, inner))
        return found

    @cached_property
    def is_complete(self) -> bool:
        """Whether every row belongs to a sample."""
        return not bool((self.labels == NO_SAMPLE).any())

    def filled(self, some: bool = False) -> RowIndex:
        """With labels for rows of no sample, where these follow from the order of the others.

        They do if rows of all samples, or of ``some`` of them, are known and agree with just one
        order of rows, such as all positions of the first sample, then of the second.
        """
        least = min(2, self.samples) if some else self.samples
        if self.is_complete or len(self.owners) < least:
            return self
        if len(self._folds) != 1:
            return self
        return RowIndex(self._folded(*self._folds[0]).reshape(self.labels.shape), self.samples)

    def _folded(self, outer: int, inner: int) -> Tensor:
        """The samples of rows ``[a, N, b]`` in order, flat."""
        numbers = torch.arange(self.samples, device="cpu")[None, :, None]
        return numbers.expand(outer, self.samples, inner).flatten()

    @cached_property
    def _known(self) -> Tensor:
        return self.labels.flatten() != NO_SAMPLE

    @cached_property
    def _counts(self) -> Tensor:
        """How many rows each sample has, ``[N]``."""
        known = self.labels.flatten()[self._known]
        return torch.bincount(known, minlength=self.samples)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the order of samples, their samples, and their places within these."""
        flat = self.labels.flatten()
        rows = self._known.nonzero()[:, 0]
        rows = rows[flat[rows].argsort(stable=True)]
        owners = flat[rows]
        starts = self._counts.cumsum(0) - self._counts
        return rows, owners, torch.arange(len(rows), device="cpu") - starts[owners]

    def on(self, device: torch.device) -> Tensor:
        """The labels on a device."""
        return self._on(device, self.labels)

    def _on(self, device: torch.device, tensor: Tensor) -> Tensor:
        """A tensor of this index on a device, where it is kept."""
        key = (id(tensor), device)
        if key not in self._copies:
            self._copies[key] = on_device(tensor, device)
        return self._copies[key]

    @cached_property
    def _copies(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    @cached_property
    def counts_samples(self) -> bool:
        """Whether the rows are those of one axis, one for each sample in their order."""
        return self.labels.dim() == 1 and self.fold == (1, 1)

    def split(self, values: Tensor) -> Tensor:
        """``[*S, ...]`` as ``[N, rows of a sample, ...]``; shorter ones end with zeros.

        A view where rows are in the order of samples.
        """
        rest = values.shape[self.labels.dim() :]
        if self.counts_samples:
            return values[:, None]
        if self.fold is not None:
            outer, inner = self.fold
            unfolded = values.reshape(outer, self.samples, inner, *rest)
            return unfolded.movedim(1, 0).reshape(self.samples, outer * inner, *rest)
        values = values.reshape(self.labels.numel(), *rest)
        rows, owners, places = (self._on(values.device, each) for each in self._places)
        longest = int(self._counts.amax()) if len(rows) else 0
        if len(rows) == self.samples * longest:
            return values[rows].reshape(self.samples, longest, *rest)
        padded = values.new_zeros(self.samples, longest, *rest)
        padded[owners, places] = values[rows]
        return padded

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the rows of each sample, ``[*S, ...] -> [N, ...]``; a sole row itself."""
        if self.counts_samples:
            return values
        rest = values.shape[self.labels.dim() :]
        if self.fold is not None:
            outer, inner = self.fold
            return values.reshape(outer, self.samples, inner, *rest).sum((0, 2))
        rows, owners, _ = (self._on(values.device, each) for each in self._places)
        flat = values.reshape(self.labels.numel(), *rest)
        return values.new_zeros(self.samples, *rest).index_add_(0, owners, flat[rows])

    def of_sample(self, sample: int, device: torch.device) -> Tensor:
        """Where rows on a device belong to a sample, ``[*S]``."""
        return self.on(device) == sample

    @cached_property
    def owners(self) -> list[int]:
        """The samples that have rows."""
        return self._counts.nonzero()[:, 0].tolist()


@dataclass(frozen=True)
class LabelledUse:
    """A use of a parameter, with the sample of each row of the node's outputs.

    ``rows`` and ``features`` are by the number of the output; ``features`` are the axes that belong
    to one row. ``fine`` means that each element is a row, although the kind of node has larger
    ones.
    """

    use: Use
    rows: Mapping[int, RowIndex]
    features: Mapping[int, tuple[int, ...]]
    fine: bool = False


@dataclass(frozen=True)
class LossTerm:
    """A node whose values the loss is a weighted sum of, with the samples of their rows.

    The rows are those of an edge: its output, or its input.
    """

    node: int
    edge: LabelledEdge
    rows: RowIndex


@dataclass(frozen=True)
class Plan:
    """The nodes of a graph at which each parameter's gradients are collected, by their numbers.

    ``samples`` is N and ``known_by`` how it is known, or why it isn't. ``uses`` are by parameter
    name, ``unavailable`` are the reasons why others have none, and ``beside`` names parameters that
    the loss also depends on without any samples. ``coupling`` are nodes that normalise over
    samples. ``holds`` means that the plan is that of other graphs of the same structure, too, if
    these have the same ``selections``; where it was ``read`` off numbers, those of another graph
    might tell more samples apart. ``mixed`` means that the samples of some parameters meet, or
    can't be told apart. ``terms`` are the nodes from which the losses of single samples are
    computed, and ``without_losses`` is the reason why there are none. ``edges`` are others at which
    each row has a sample. Rows at the edges in ``compared`` were found among those of the
    ``inputs`` by their numbers; without any that were found, the order of rows is ``guessed``.
    """

    samples: int | None
    known_by: str
    uses: Mapping[str, tuple[LabelledUse, ...]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    coupling: tuple[int, ...] = ()
    holds: bool = False
    read: bool = False
    selections: tuple[Selection, ...] = ()
    mixed: bool = False
    terms: tuple[LossTerm, ...] = ()
    without_losses: str = ""
    edges: Mapping[LabelledEdge, RowIndex] = field(default_factory=dict)
    inputs: Reading | None = None
    compared: Mapping[Edge, Named] = field(default_factory=dict)
    guessed: bool = False

    def holds_for(self, graph: Graph, calls: Sequence[ModelCall] = ()) -> bool:
        """Whether this is also the plan of another graph with the same structure.

        The ``calls`` of the model are those that have led to this graph.
        """
        if not self.holds or not all(selection.is_in(graph) for selection in self.selections):
            return False
        if self.guessed and say_an_order(calls):
            return False
        if self.inputs is None or not self.compared:
            return True
        inputs = replace(self.inputs, calls=calls)
        return all(inputs.has(graph, edge, named) for edge, named in self.compared.items())

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """The plan without some parameters, and why."""
        uses = {name: each for name, each in self.uses.items() if name not in reasons}
        return replace(self, uses=uses, unavailable={**self.unavailable, **reasons})

    def part(self, kept: Tensor) -> Plan:
        """The plan for some of the samples alone, in the order of ``kept``."""
        samples = len(kept)
        numbers = torch.full(((self.samples or 0) + 1,), NO_SAMPLE, device="cpu")
        numbers[kept.cpu()] = torch.arange(samples, device="cpu")
        parts: dict[int, RowIndex] = {}

        def part_of(index: RowIndex) -> RowIndex:
            if id(index) not in parts:
                # The last entry is for rows of no sample, whose label is -1.
                some = samples != self.samples
                parts[id(index)] = RowIndex(numbers[index.labels], samples, some)
            return parts[id(index)]

        def part_of_use(use: LabelledUse) -> LabelledUse:
            return replace(use, rows={o: part_of(index) for o, index in use.rows.items()})

        uses = {name: tuple(map(part_of_use, labelled)) for name, labelled in self.uses.items()}
        terms = tuple(replace(term, rows=part_of(term.rows)) for term in self.terms)
        return replace(self, samples=samples, uses=uses, terms=terms)


MAX_PLANS = 64
"""Plans that are kept: those of as many lengths of sequences, say."""


@dataclass
class Plans:
    """Plans that hold for other graphs, by their structure, each with the number of these so far.

    Those that were used last are kept.
    """

    found: dict[int, tuple[Plan, int]] = field(default_factory=dict)

    def find(
        self, key: int, graph: Graph, make: Callable[[], Plan], calls: Sequence[ModelCall] = ()
    ) -> tuple[Plan, bool]:
        """The plan of a graph that ``calls`` of the model led to, and whether it was made anew.

        One that was read off numbers is made again at the first, second, fourth, eighth step of a
        structure and so on, and one that doesn't hold for other graphs isn't kept.
        """
        plan, steps = self.found.pop(key, (None, 0))
        is_due = plan is not None and plan.read and (steps + 1).bit_count() == 1
        is_new = plan is None or is_due or not plan.holds_for(graph, calls)
        if plan is None or is_new:
            plan = make()
        if plan.holds:
            self.found[key] = plan, steps + 1
        if len(self.found) > MAX_PLANS:
            del self.found[next(iter(self.found))]
        return plan, is_new
