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
        self._backward_pass: int | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def are_expected(self) -> bool:
        """Whether the graph has what they are computed from, in single precision at least."""
        types = [self._graph.like((term.node, 0)).dtype for term in self._terms]
        return not self._reason and all(torch.finfo(each).bits >= 32 for each in types)

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
        """ℓₙ ``[N]`` of a loss that was passed as ``scale`` times the step's; see ``adds_up``.

        ``UnavailableError`` if there are none.
        """
        if self._reason:
            raise UnavailableError(self._reason)
        if len(self._found) < len(self._terms):
            raise UnavailableError(NOT_REACHED)
        total = torch.stack([*self._found.values()]).sum(0)
        loss = self._loss * (batch.factor / scale)
        return total * batch.scale, adds_up(total, loss, self._loss.dtype)

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
        except Exception as error:  # the user's backward pass goes on
            kind = self._graph.kinds[term.node]
            self._reason = FAILED.format(kind=kind, error=first_line(error))


FAILED = "per-sample losses can't be computed from {kind} ({error})"
NOT_REACHED = "no backward pass went through the loss inside the context"


def adds_up(
    contributions: Tensor, loss: Tensor, computed_in: torch.dtype, precision: float = 0.0
) -> Tensor:
    """Whether contributions add up to a loss, up to rounding, on their device.

    ``precision`` is the relative one of what the loss was computed from, if that is less than that
    of its dtype.
    """
    found = contributions.double()
    difference = (found.sum() - loss.detach().to(found).sum()).abs()
    # To half of the digits: the loss has rounding errors of many operations.
    relative = max(precision, torch.finfo(computed_in).eps) ** 0.5
    return ~(difference > relative * found.abs().sum())


OTHER_LOSS = (
    "the loss isn't the sum or the mean of the losses that loss modules have computed: other terms "
    "are added to it, or it is a function of them. Pass the losses of single samples, of shape "
    "[N], to the context, as info={'individual_losses': ...}"
)
