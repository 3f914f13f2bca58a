"""The nodes of a plan in one backward pass, and the operators that are collected there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradlens.gradients.rules import NodeGradient, operator_of
from gradlens.graph.checkpoints import recompute
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.loss import Batch, contributions
from gradlens.graph.passes import Gradients, Instead, as_engine, nodes_above, run_backward
from gradlens.numerics.checksums import has_other_bits
from gradlens.numerics.tensors import on_host
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.operators.composed import summed
from gradlens.operators.operator import GradientOperator
from gradlens.samples.plan import LabelledUse, LossTerm, Plan
from gradlens.torch_private import (
    backward_pass_id,
    call_first,
    hooks_beside,
    unseen,
    version,
)


class BackwardPass:
    """The nodes of a plan in one backward pass, whose gradients become operators and ``losses``.

    Whatever goes wrong is a reason why a parameter has none; backward goes on in any case. While it
    is ``paused``, there are no operators.

    In the user's own pass, a hook of others on a tensor, a node or a module may change a gradient,
    and isn't in the graph. But a node hands on a gradient, and the next node gets one: without a
    hook in between, both are the same, or the sum of what several nodes have handed on. Where they
    aren't, what lies behind has no operators. That takes no pass of gradlens's own, and runs
    nobody's code.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        batch: Batch,
        collector: Collector,
        losses: GraphLosses | None = None,
    ) -> None:
        self.batch = batch
        self.paused = False
        self._graph = graph
        self._collector = collector
        self._losses = losses
        self._at: dict[int, list[tuple[str, LabelledUse]]] = {}
        for name, uses in plan.uses.items():
            for use in uses:
                self._at.setdefault(use.use.node, []).append((name, use))
        self._terms = {} if losses is None else {term.node: term for term in losses.terms}
        self._watched: frozenset[int] = frozenset()
        self._handed: dict[Edge, list[tuple[Tensor, int]]] = {}
        self._computed: dict[int, list[tuple[Tensor, int] | None]] = {}
        self._sums: list[tuple[int, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Set hooks on the nodes for the user's own pass."""
        nodes = self._graph.nodes
        above = nodes_above(self._graph, self._at.keys())
        self._watched = frozenset(above | self._at.keys())
        # A function in Python may write into the gradient that it gets.
        written = self._graph.python_functions & above
        early = written | self._at.keys() | self._terms.keys()
        for number in above:
            hook = partial(self._hand_on, number, number not in early)
            self._handles.append(nodes[number].register_hook(hook))
            if len(hooks_beside(self._handles[-1])) > 1:
                self._handles.append(nodes[number].register_hook(partial(self._compute, number)))
                call_first(self._handles[-1])
        for number in early:
            prehook = partial(self._arrive, number)
            self._handles.append(nodes[number].register_prehook(prehook))

    def stop(self) -> None:
        """Remove the hooks, and wait once for what all sums of gradients were compared with."""
        for handle in self._handles:
            handle.remove()
        with unseen():
            flags = on_host([flag for _, flag in self._sums])
        for (number, _), is_other in zip(self._sums, flags, strict=True):
            if bool(is_other):
                self._refuse_behind(number)
        self._handles, self._handed, self._computed, self._sums = [], {}, {}, []

    def run(self, start: Tensor, instead: Instead = MappingProxyType({})) -> None:
        """Run a separate backward pass from the graph's tensor, which has the gradient ``start``.

        Nothing accumulates. Some nodes may hand on something else ``instead``.
        """
        graph = self._graph
        with unseen(), torch.no_grad():
            run_backward(graph, [(graph.root, start)], self._at.keys(), self._reach, instead)

    def _compute(self, number: int, computed: Gradients, arrived: Gradients) -> None:
        """A node has computed gradients that hooks of others may change before it hands them on."""
        with unseen():
            self._computed[number] = [g if g is None else (g, version(g)) for g in computed]

    def _hand_on(self, number: int, is_open: bool, handed: Gradients, arrived: Gradients) -> None:
        """A node hands gradients on; whether what has arrived at it changed may still be open."""
        computed = self._computed.pop(number, [None] * len(handed))
        edges = self._graph.children[number]
        # The gradients of parameters and of what isn't watched aren't held or made dense.
        watched = [
            (edge, gradient, before)
            for edge, gradient, before in zip(edges, handed, computed, strict=True)
            if edge and edge[0] in self._watched
        ]
        with unseen(), torch.no_grad():
            if is_open:
                self._compare(number, arrived)
            for edge, gradient, before in watched:
                try:
                    if before is not None and not self._is_what([before], edge[0], gradient):
                        self._refuse_behind(edge[0])
                    if gradient is not None:
                        dense = as_engine(self._graph, edge, gradient)
                        self._handed.setdefault(edge, []).append((dense, version(dense)))
                except Exception:  # such as of a nested tensor, which can't be compared
                    self._refuse_behind(edge[0])

    def _arrive(self, number: int, gradients: Gradients) -> None:
        is_needed = number in self._terms or (number in self._at and not self.paused)
        if is_needed and any(gradient is not None for gradient in gradients):
            recompute(self._graph.nodes[number])
        with unseen(), torch.no_grad():
            self._compare(number, gradients)
            if self._losses is not None and number in self._terms:
                self._losses.reach(self._graph, self._terms[number], gradients)
            if number in self._at and not self.paused:
                self._reach(number, gradients)

    def _compare(self, number: int, gradients: Gradients) -> None:
        """Refuse what is behind a node unless it gets what others have handed on to it."""
        for output, gradient in enumerate(gradients):
            handed = self._handed.pop((number, output), [])
            try:
                is_same = not handed or self._is_what(handed, number, gradient)
            except Exception:  # they can't be compared, and the user's backward pass goes on
                is_same = False
            if not is_same:
                self._refuse_behind(number)

    def _is_what(
        self, handed: Sequence[tuple[Tensor, int]], number: int, gradient: Tensor | None
    ) -> bool:
        """Whether a gradient is what was handed on, or may be its sum, which is still compared."""
        if gradient is None:
            return False
        (first, before), *others = handed
        if not others and first.data_ptr() == gradient.data_ptr():
            return version(gradient) == before
        total = sum((each for each, _ in others), first).to(gradient.dtype)
        if total.shape != gradient.shape:
            return False
        # Added up in the same order, they are the same to the last bit.
        self._sums.append((number, has_other_bits(total, gradient)))
        return True

    def _refuse_behind(self, number: int) -> None:
        """A hook of others has changed the gradient at a node."""
        reason = CHANGED_ON_THE_WAY.format(kind=self._graph.kinds[number])
        for behind in self._graph.below([number]) & self._at.keys():
            names = {name for name, _ in self._at[behind]} - self._collector.unavailable.keys()
            self._collector.refuse(names, reason)

    def _reach(self, number: int, gradients: Gradients) -> None:
        if all(gradient is None for gradient in gradients):
            return
        scale, backward_pass = self.batch.scale, backward_pass_id()
        shared: dict[Hashable, Any] = {}
        for name, labelled in self._at[number]:
            try:
                found = NodeGradient(self._graph, labelled, tuple(gradients), scale, shared)
                self._collector.receive(name, backward_pass, operator_of(found))
            except UnavailableError as reason:
                self._collector.refuse([name], str(reason))
            except Exception as error:  # the user's backward pass goes on
                kind = self._graph.kinds[number]
                self._collector.refuse([name], FAILED.format(kind=kind, error=first_line(error)))


CHANGED_ON_THE_WAY = (
    "the gradient that {kind} got isn't what the loss's graph hands on to it, so that whether it "
    "keeps samples apart can't be seen: remove the hook that changes it, or pass what backward is "
    "called on as loss=..."
)
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

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuse parameters' gradients, for a reason."""
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
        self._uses.pop(name, None)
        wanted = passes if backward_pass is None else [backward_pass]
        uses = [use for number in wanted for use in passes[number]]
        if not all(use.is_unchanged for use in uses):
            self.refuse([name], OVERWRITTEN)
        if not uses or name in self.unavailable:
            return None
        return uses[0] if len(uses) == 1 else summed(uses)

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


class GraphLosses:
    """Finds ℓₙ when the backward pass reaches the ``terms`` of a loss.

    Whatever goes wrong is a reason why there are none; backward goes on in any case.
    """

    def __init__(self, plan: Plan, loss: Tensor) -> None:
        self.terms = plan.terms
        self._reason = plan.without_losses or ("" if plan.terms else plan.known_by)
        self._loss = loss.detach()
        self._found: dict[int, Tensor] = {}
        self._eps = torch.finfo(loss.dtype).eps
        self._backward_pass: int | None = None

    def values(self, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """ℓₙ ``[N]`` of a loss that was passed as ``scale`` times the step's.

        With a flag on their device: whether they add up to the loss, up to rounding, to half of the
        digits of the loss and its terms. ``UnavailableError`` if there are none.
        """
        if self._reason:
            raise UnavailableError(self._reason)
        if len(self._found) < len(self.terms):
            raise UnavailableError(NOT_REACHED)
        total = torch.stack([*self._found.values()]).sum(0)
        found = total.double()
        difference = (found.sum() - self._loss.to(found).sum() * (batch.factor / scale)).abs()
        return total * batch.scale, ~(difference > self._eps**0.5 * found.abs().sum())

    def reach(self, graph: Graph, term: LossTerm, gradients: Gradients) -> None:
        """The gradient at a term's output is known; only those of the latest pass count."""
        gradient, node = gradients[0], graph.nodes[term.node]
        if gradient is None or self._reason:
            return
        if backward_pass_id() != self._backward_pass:
            self._backward_pass, self._found = backward_pass_id(), {}
        try:
            found = contributions(node, gradient.detach())
            self._found[term.node] = term.rows.sum(term.edge.rows(found).sum(-1))
            self._eps = max(self._eps, torch.finfo(gradient.dtype).eps)
        except Exception as error:  # the user's backward pass goes on
            kind = graph.kinds[term.node]
            self._reason = LOSSES_FAILED.format(kind=kind, error=first_line(error))


LOSSES_FAILED = "per-sample losses can't be computed from {kind} ({error})"
NOT_REACHED = "no backward pass went through the loss inside the context"
OTHER_LOSS = (
    "the losses of single samples that were read off the loss's graph don't add up to the loss. "
    "Pass the losses of single samples, of shape [N], to the context, as "
    "individual_losses=..."
)
