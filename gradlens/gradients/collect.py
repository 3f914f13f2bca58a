"""Hooks on the nodes of a plan for one backward pass, and the operators that they collect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from gradlens.gradients.rules import NodeGradient, operator_of
from gradlens.graph.graph import Graph, recomputation
from gradlens.graph.loss import Batch
from gradlens.graph.torch_private import backward_pass_id, output_metadata
from gradlens.graph.undisturbed import buffers_as, buffers_of
from gradlens.numerics.precision import autocast_off
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.operators.operator import GradientOperator
from gradlens.operators.summed import summed
from gradlens.samples.labels import lowest
from gradlens.samples.plan import LabelledUse, Plan


class BackwardPass:
    """Hooks on the nodes of a plan, which turn the gradients there into operators.

    Whatever goes wrong is a reason why a parameter has none; backward goes on in any case.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        batch: Batch,
        collector: Collector,
        model: nn.Module | None = None,
    ) -> None:
        self.batch = batch
        self.paused = False
        self._graph = graph
        self._collector = collector
        self._at: dict[int, list[tuple[str, LabelledUse]]] = {}
        for name, uses in plan.uses.items():
            for use in uses:
                self._at.setdefault(use.use.node, []).append((name, use))
        self._handles: list[RemovableHandle] = []
        self._recomputed = recomputation()
        # A checkpoint that the pass has recomputed already has changed buffers.
        self._kept = (
            partial(buffers_as, buffers_of(model), model) if plan.changes_buffers else nullcontext
        )

    def start(self) -> None:
        """Set the hooks."""
        for number in self._at:
            node = self._graph.nodes[number]
            self._handles.append(node.register_prehook(partial(self._reach, number)))

    def stop(self) -> None:
        """Remove the hooks and release the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._at, self._graph = [], {}, Graph(torch.zeros(()))

    def run(self, outputs: Tensor, start: Tensor) -> None:
        """Run a separate backward pass from outputs, without the gradients of parameters."""
        above = lowest(self._graph, set(self._at))
        nodes = self._graph.nodes
        edges = [(number, o) for number in above for o in self._graph.outputs_of(number)]
        asked = [GradientEdge(nodes[number], output) for number, output in edges]
        self.start()
        try:
            found = torch.autograd.grad(
                [outputs], asked, [start], retain_graph=True, allow_unused=True
            )
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        for number in above:
            given: list[Tensor | None] = [None] * len(output_metadata(nodes[number]))
            for (other, output), gradient in zip(edges, found, strict=True):
                if other == number:
                    given[output] = gradient
            self._reach(number, tuple(given))

    def _reach(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        known = next((g for g in gradients if g is not None), None)
        if known is None or self.paused:
            return
        try:
            self._take_all(number, gradients, known)
        except Exception as error:  # the user's backward pass goes on
            reason = FAILED.format(kind=self._graph.kinds[number], error=first_line(error))
            self._collector.refuse_all([name for name, _ in self._at.get(number, ())], reason)

    def _take_all(self, number: int, gradients: tuple[Tensor | None, ...], known: Tensor) -> None:
        backward_pass = backward_pass_id()
        saved: dict[str, Tensor | None] = {}
        by_rule: dict[str, Tensor] = {}
        with torch.no_grad(), autocast_off(known), self._kept():
            for name, labelled in self._at.get(number, ()):
                self._take(name, labelled, gradients, backward_pass, saved, by_rule)

    def _take(
        self,
        name: str,
        labelled: LabelledUse,
        gradients: Sequence[Tensor | None],
        backward_pass: int,
        saved: dict[str, Tensor | None],
        by_rule: dict[str, Tensor],
    ) -> None:
        found = NodeGradient(
            self._graph,
            labelled.use,
            tuple(gradients),
            labelled.rows,
            labelled.features,
            self.batch.scale,
            labelled.fine,
            self._recomputed,
            self._kept,
            saved,
            by_rule,
        )
        try:
            operator = operator_of(found)
            if operator is not None:
                self._collector.receive(name, backward_pass, operator)
        except UnavailableError as reason:
            self._collector.refuse(name, str(reason))
        except Exception as error:  # other parameters may be had
            kind = self._graph.kinds[labelled.use.node]
            self._collector.refuse(name, FAILED.format(kind=kind, error=first_line(error)))


FAILED = "its per-sample gradients can't be computed from its {kind} ({error})"


class Collector:
    """Operators by parameter and backward pass, appended to as nodes are reached.

    A gradient that the user asks for inside the context, without accumulating it into the
    parameters, must not be mixed with the one that is, so each backward pass is kept apart.
    ``unavailable`` are the reasons why parameters have no operator.
    """

    def __init__(self, unavailable: Mapping[str, str]) -> None:
        self.unavailable = dict(unavailable)
        self._uses: dict[str, dict[int, list[GradientOperator]]] = {}

    def receive(self, name: str, backward_pass: int, operator: GradientOperator) -> None:
        """Add one use of a parameter."""
        self._uses.setdefault(name, {}).setdefault(backward_pass, []).append(operator)

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a parameter's gradients, for a reason."""
        self.unavailable[name] = reason

    def refuse_all(self, names: Iterable[str], reason: str) -> None:
        """Refuse several parameters' gradients, for the same reason."""
        self.unavailable |= dict.fromkeys(names, reason)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that have operators."""
        return tuple(self._uses)

    def latest_pass(self, name: str) -> int:
        """The last backward pass that has reached a parameter."""
        return max(self._uses[name])

    def take(self, name: str, backward_pass: int | None = None) -> GradientOperator | None:
        """Remove and return a parameter's operator, its uses in one or all passes added up."""
        passes = self._uses.get(name, {})
        if backward_pass is not None and backward_pass not in passes:
            return None
        self.drop(name)
        wanted = passes if backward_pass is None else [backward_pass]
        uses = [use for number in wanted for use in passes[number]]
        if not all(use.is_unchanged for use in uses):
            self.refuse(name, OVERWRITTEN)
        return summed(uses) if uses and name not in self.unavailable else None

    def drop(self, name: str) -> None:
        """Release a parameter's operators."""
        self._uses.pop(name, None)

    def clear(self) -> None:
        """Release all operators."""
        self._uses.clear()


OVERWRITTEN = (
    "what its per-sample gradients are computed from was overwritten before they were used: an "
    "input of the model by the next one, or a gradient by a backward function of your own. Make "
    "a new tensor for each"
)
