"""Hooks on the nodes of a plan for one backward pass, and the operators that they collect."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradlens.gradients.changing_hooks import ChangingHooks
from gradlens.gradients.rules import NodeGradient, operator_of
from gradlens.graph.checkpoints import recompute
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch
from gradlens.graph.passes import Instead, run_backward
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.operators.operator import GradientOperator
from gradlens.operators.summed import summed
from gradlens.samples.plan import LabelledUse, Plan
from gradlens.torch_private import backward_pass_id, unseen


class BackwardPass:
    """Hooks on the nodes of a plan, which turn the gradients there into operators.

    Whatever goes wrong is a reason why a parameter has none; backward goes on in any case. Where
    hooks of others change a gradient, what lies behind has none, if it ``looks_for_hooks``.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        batch: Batch,
        collector: Collector,
        looks_for_hooks: bool = False,
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
        self._hooks: ChangingHooks | None = None
        if looks_for_hooks:
            self._hooks = ChangingHooks(graph, self._at.keys(), self._refuse_behind)

    def start(self) -> None:
        """Set the hooks."""
        if self._hooks is not None:  # before those that use the gradients
            self._hooks.start()
        for number in self._at:
            node = self._graph.nodes[number]
            self._handles.append(node.register_prehook(partial(self._reach, number)))

    def stop(self) -> None:
        """Remove the hooks and release the graph."""
        if self._hooks is not None:
            self._hooks.stop()
            self._hooks = None  # which refers to this object: a graph must not wait for a collector
        for handle in self._handles:
            handle.remove()
        self._handles, self._at, self._graph = [], {}, Graph(torch.zeros((), device="cpu"))

    def _refuse_behind(self, number: int) -> None:
        """A hook of others has changed the gradient at a node."""
        reason = CHANGED_ON_THE_WAY.format(kind=self._graph.kinds[number])
        for behind in self._graph.below([number]) & self._at.keys():
            names = {name for name, _ in self._at[behind]} - self._collector.unavailable.keys()
            self._collector.refuse_all(names, reason)

    def run(self, start: Tensor, instead: Instead = MappingProxyType({})) -> None:
        """Run a separate backward pass from the graph's tensor, which has the gradient ``start``.

        Nothing accumulates. Some nodes may hand on something else ``instead``.
        """
        run_backward(
            self._graph, [(self._graph.root, start)], self._at.keys(), self._reach, instead
        )

    def _reach(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        known = next((g for g in gradients if g is not None), None)
        if known is None or self.paused:
            return
        here, kind = self._at.get(number, ()), self._graph.kinds[number]
        shared: dict[Hashable, Any] = {}
        try:
            recompute(self._graph.nodes[number])
            backward_pass, scale = backward_pass_id(), self.batch.scale
            with unseen(), torch.no_grad():
                for name, labelled in here:
                    try:
                        found = NodeGradient(self._graph, labelled, tuple(gradients), scale, shared)
                        self._collector.receive(name, backward_pass, operator_of(found))
                    except UnavailableError as reason:
                        self._collector.refuse(name, str(reason))
                    except Exception as error:  # other parameters may be had
                        failed = FAILED.format(kind=kind, error=first_line(error))
                        self._collector.refuse(name, failed)
        except Exception as error:  # the user's backward pass goes on
            failed = FAILED.format(kind=kind, error=first_line(error))
            self._collector.refuse_all([name for name, _ in here], failed)


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
        self._uses.pop(name, None)
        wanted = passes if backward_pass is None else [backward_pass]
        uses = [use for number in wanted for use in passes[number]]
        if not all(use.is_unchanged for use in uses):
            self.refuse(name, OVERWRITTEN)
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
