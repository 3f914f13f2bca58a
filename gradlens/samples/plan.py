"""The nodes at which each parameter's samples are apart, and the sample of each of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gradlens.graph.graph import Graph, Use, recomputation
from gradlens.graph.torch_private import saved


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

    The rows are those of its output, or of its input.
    """

    node: int
    rows: LabelledUse


@dataclass(frozen=True, eq=False)
class Selection:
    """The index number ``place`` of a node that selects rows by indices."""

    node: int
    place: int
    index: Tensor

    def is_in(self, graph: Graph) -> bool:
        """Whether another graph of the same structure has the same index there."""
        with recomputation():
            other = saved(graph.nodes[self.node], "indices")[self.place]
        return other is not None and torch.equal(other, self.index)


@dataclass(frozen=True)
class Plan:
    """The nodes of a graph at which each parameter's gradients are collected, by their numbers.

    ``samples`` is N and ``known_by`` how it is known, or why it isn't. ``uses`` are by parameter
    name, ``unavailable`` are the reasons why others have none, and ``beside`` names parameters that
    the loss also depends on without any samples. ``coupling`` are nodes that normalise over
    samples. With ``changes_buffers``, reading what nodes have saved changes the model's buffers.
    ``holds`` means that the plan is that of other graphs of the same structure, too, if these have
    the same ``selections``. ``mixed`` means that the samples of some parameters meet, or can't be
    told apart. ``terms`` are the nodes from which the losses of single samples are computed, and
    ``without_losses`` is the reason why there are none.
    """

    samples: int | None
    known_by: str
    uses: Mapping[str, tuple[LabelledUse, ...]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    coupling: tuple[int, ...] = ()
    changes_buffers: bool = False
    holds: bool = False
    selections: tuple[Selection, ...] = ()
    mixed: bool = False
    terms: tuple[LossTerm, ...] = ()
    without_losses: str = ""

    def holds_for(self, graph: Graph) -> bool:
        """Whether this is also the plan of another graph with the same structure."""
        return self.holds and all(selection.is_in(graph) for selection in self.selections)

    @property
    def is_balanced(self) -> bool:
        """Whether each sample has as many rows in all uses."""
        uses = [use for labelled in self.uses.values() for use in labelled]
        return all(index.is_balanced for use in uses for index in use.rows.values())

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """The plan without some parameters, and why."""
        uses = {name: each for name, each in self.uses.items() if name not in reasons}
        return replace(self, uses=uses, unavailable={**self.unavailable, **reasons})

    def part(self, kept: Tensor) -> Plan:
        """The plan for some of the samples alone, in the order of ``kept``."""
        samples = len(kept)
        numbers = torch.full(((self.samples or 0) + 1,), NO_SAMPLE)
        numbers[kept.cpu()] = torch.arange(samples)
        parts: dict[int, RowIndex] = {}

        def part_of(index: RowIndex) -> RowIndex:
            if id(index) not in parts:
                # The last entry is for rows of no sample, whose label is -1.
                labels = numbers.to(index.labels.device)[index.labels]
                parts[id(index)] = RowIndex(labels, samples, some=samples != self.samples)
            return parts[id(index)]

        def part_of_use(use: LabelledUse) -> LabelledUse:
            return replace(use, rows={o: part_of(index) for o, index in use.rows.items()})

        uses = {name: tuple(map(part_of_use, labelled)) for name, labelled in self.uses.items()}
        terms = tuple(replace(term, rows=part_of_use(term.rows)) for term in self.terms)
        return replace(self, samples=samples, uses=uses, terms=terms)


NO_SAMPLE = -1
"""Label of a row without gradient, which belongs to no sample."""


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The sample of each row: ``labels`` ``[*S]`` on the rows' device, from 0 to N - 1.

    Rows with the label ``NO_SAMPLE`` are left out of all results. They have no gradient, unless the
    samples are only ``some`` of the batch. ``completed`` are the labels that were read, if those of
    other rows follow from them.
    """

    labels: Tensor
    samples: int
    some: bool = False
    completed: Tensor | None = None

    @property
    def read(self) -> Tensor:
        """The labels that were read, ``[*S]``."""
        return self.labels if self.completed is None else self.completed

    @cached_property
    def axis(self) -> int | None:
        """The axis that counts the samples, if the labels are 0 to N - 1 along one axis."""
        for axis, length in enumerate(self.labels.shape):
            if length == self.samples and bool((self.labels == self._along(axis)).all()):
                return axis
        return None

    def _along(self, axis: int) -> Tensor:
        shape = [1] * self.labels.dim()
        shape[axis] = self.samples
        return torch.arange(self.samples, device=self.labels.device).reshape(shape)

    @cached_property
    def fold(self) -> tuple[int, int] | None:
        """``(a, b)`` if the rows are those of ``[a, N, b]``, in order."""
        found = self._folds(self.labels.flatten()) if self.is_complete else []
        return found[0] if found else None

    def _folds(self, labels: Tensor) -> list[tuple[int, int]]:
        """All ``(a, b)`` that agree with the labels of known rows."""
        if not len(labels) or len(labels) % self.samples:
            return []
        rows = len(labels) // self.samples
        known = labels != NO_SAMPLE
        found = []
        for inner in (n for n in range(1, rows + 1) if rows % n == 0):
            numbers = torch.arange(self.samples, device=labels.device)[None, :, None]
            pattern = numbers.expand(rows // inner, self.samples, inner).flatten()
            if bool((~known | (labels == pattern)).all()):
                found.append((rows // inner, inner))
        return found

    @cached_property
    def is_balanced(self) -> bool:
        """Whether every row has a sample, and every sample as many rows."""
        return self.is_complete and int(self._counts.amin()) == int(self._counts.amax())

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
        folds = self._folds(self.labels.flatten())
        if len(folds) != 1:
            return self
        outer, inner = folds[0]
        numbers = torch.arange(self.samples, device=self.labels.device)[None, :, None]
        labels = numbers.expand(outer, self.samples, inner).reshape(self.labels.shape)
        return RowIndex(labels, self.samples, completed=self.labels)

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
        return rows, owners, torch.arange(len(rows), device=flat.device) - starts[owners]

    def split(self, values: Tensor) -> Tensor:
        """``[*S, ...]`` as ``[N, rows of a sample, ...]``; shorter ones end with zeros.

        A view where rows are in the order of samples.
        """
        rest = values.shape[self.labels.dim() :]
        if self.fold is not None:
            outer, inner = self.fold
            unfolded = values.reshape(outer, self.samples, inner, *rest)
            return unfolded.movedim(1, 0).reshape(self.samples, outer * inner, *rest)
        values = values.reshape(self.labels.numel(), *rest)
        rows, owners, places = self._places
        longest = int(self._counts.amax()) if len(rows) else 0
        if len(rows) == self.samples * longest:
            return values[rows].reshape(self.samples, longest, *rest)
        padded = values.new_zeros(self.samples, longest, *rest)
        padded[owners, places] = values[rows]
        return padded

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the rows of each sample, ``[*S, ...] -> [N, ...]``; a new tensor."""
        rest = values.shape[self.labels.dim() :]
        if self.fold is not None:
            outer, inner = self.fold
            return values.reshape(outer, self.samples, inner, *rest).sum((0, 2))
        rows, owners, _ = self._places
        flat = values.reshape(self.labels.numel(), *rest)
        return values.new_zeros(self.samples, *rest).index_add_(0, owners, flat[rows])

    def of_sample(self, sample: int) -> Tensor:
        """Where rows belong to a sample, ``[*S]``."""
        return self.labels == sample

    @cached_property
    def owners(self) -> list[int]:
        """The samples that have rows."""
        return self._counts.nonzero()[:, 0].tolist()


MAX_PLANS = 64
"""Plans that are kept: those of as many lengths of sequences, say."""


@dataclass
class Plans:
    """Plans that hold for other graphs, by their structure; ``steps`` counts these graphs.

    Those that were used last are kept.
    """

    found: dict[int, Plan] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def of(
        self, graph: Graph, key: int, again: Callable[[Plan], bool] = lambda plan: True
    ) -> Plan | None:
        """The plan of a graph; ``None`` if labelled passes are due.

        They are due at the first, second, fourth, eighth step of a structure and so on, since hooks
        of the user's own on activations, which the graph doesn't show, may change what they do;
        of plans that needn't be found ``again``, only at the first.
        """
        if key not in self.found:
            return None
        self.found[key] = plan = self.found.pop(key)
        self.steps[key] += 1
        due = self.steps[key].bit_count() == 1 and again(plan)
        return plan if not due and plan.holds_for(graph) else None

    def store(self, key: int, plan: Plan) -> None:
        """Keep a plan if it holds for other graphs."""
        self.found.pop(key, None)
        if plan.holds:
            self.found[key] = plan
        self.steps = {k: self.steps.get(k, 1) for k in list(self.found)[-MAX_PLANS:]}
        self.found = {k: self.found[k] for k in self.steps}
