"""Per-sample losses, from the terms of the loss in its graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch, contributions
from gradlens.graph.passes import Gradients
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.samples.plan import LossTerm, Plan
from gradlens.torch_private import backward_pass_id


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
            self._reason = FAILED.format(kind=kind, error=first_line(error))


FAILED = "per-sample losses can't be computed from {kind} ({error})"
NOT_REACHED = "no backward pass went through the loss inside the context"
OTHER_LOSS = (
    "the losses of single samples that were read off the loss's graph don't add up to the loss. "
    "Pass the losses of single samples, of shape [N], to the context, as "
    "individual_losses=..."
)
