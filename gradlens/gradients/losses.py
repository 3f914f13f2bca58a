"""Per-sample losses, from the terms of the loss in its graph."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradlens.graph.checkpoints import recompute
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch, contributions
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.samples.plan import LossTerm, Plan
from gradlens.torch_private import backward_pass_id, unseen


class GraphLosses:
    """Hooks on the terms of a loss, which find ℓₙ when the backward pass reaches them.

    Whatever goes wrong is a reason why there are none; backward goes on in any case.
    """

    def __init__(self, graph: Graph, plan: Plan, loss: Tensor) -> None:
        self._graph = graph
        self._terms = plan.terms
        self._reason = plan.without_losses or ("" if plan.terms else plan.known_by)
        self._loss = loss.detach()
        self._found: dict[int, Tensor] = {}
        self._eps = torch.finfo(loss.dtype).eps
        self._backward_pass: int | None = None
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Set the hooks."""
        for term in self._terms:
            node = self._graph.nodes[term.node]
            self._handles.append(node.register_prehook(partial(self._reach, term)))

    def stop(self) -> None:
        """Remove the hooks and release the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._graph = [], Graph(torch.zeros((), device="cpu"))

    def values(self, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """ℓₙ ``[N]`` of a loss that was passed as ``scale`` times the step's.

        With a flag on their device: whether they add up to the loss, up to rounding, to half of the
        digits of the loss and its terms. ``UnavailableError`` if there are none.
        """
        if self._reason:
            raise UnavailableError(self._reason)
        if len(self._found) < len(self._terms):
            raise UnavailableError(NOT_REACHED)
        total = torch.stack([*self._found.values()]).sum(0)
        found = total.double()
        difference = (found.sum() - self._loss.to(found).sum() * (batch.factor / scale)).abs()
        return total * batch.scale, ~(difference > self._eps**0.5 * found.abs().sum())

    def _reach(self, term: LossTerm, gradients: tuple[Tensor | None, ...]) -> None:
        """Called when the gradient at a term's output is known; only the latest pass counts."""
        gradient = gradients[0]
        if gradient is None or self._reason:
            return
        if backward_pass_id() != self._backward_pass:
            self._backward_pass, self._found = backward_pass_id(), {}
        try:
            recompute(self._graph.nodes[term.node])
            with unseen(), torch.no_grad():
                found = contributions(self._graph.nodes[term.node], gradient.detach())
                self._found[term.node] = term.rows.sum(term.edge.rows(found).sum(-1))
            self._eps = max(self._eps, torch.finfo(gradient.dtype).eps)
        except Exception as error:  # the user's backward pass goes on
            kind = self._graph.kinds[term.node]
            self._reason = FAILED.format(kind=kind, error=first_line(error))


FAILED = "per-sample losses can't be computed from {kind} ({error})"
NOT_REACHED = "no backward pass went through the loss inside the context"
OTHER_LOSS = (
    "the losses of single samples that were read off the loss's graph don't add up to the loss. "
    "Pass the losses of single samples, of shape [N], to the context, as "
    "info={'individual_losses': ...}"
)
