"""The nodes at which each parameter's samples are apart, and the sample of each of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph, Use
from gradlens.graph.model_calls import ModelCall, say_an_order
from gradlens.samples.labels import NO_SAMPLE
from gradlens.samples.model_inputs import Named, Reading
from gradlens.samples.picks import Selection
from gradlens.samples.rows import LabelledEdge, RowIndex


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
