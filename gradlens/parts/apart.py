"""The gradients of one part of a batch, apart from those of others that are added to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from gradlens.gradients.gradients import Gradients, find_plan
from gradlens.graph.graph import Graph
from gradlens.graph.hooks import HookOwner, OwnedHook, on_gradient
from gradlens.graph.loss import LossReduction
from gradlens.numerics.noise_scales import PartSums
from gradlens.numerics.norms import norm, norms
from gradlens.numerics.tensors import double
from gradlens.torch_private import unseen


class PartOfBatch(Gradients):
    """The number of samples of a part, and the factor of its loss, without per-sample gradients.

    Its backward pass has no hooks but those that see that it is complete.
    """

    def _attach(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            return
        graph = Graph(loss)
        if any(leaf in graph for leaf in self._setting.leaves.values()):
            plan, _ = find_plan(self._setting, graph, self._info, needs_losses=False)
            self._take_in(graph, plan)

    def receive_factor(self, factor: Tensor) -> float:
        found = super().receive_factor(factor)
        self.batch = replace(self.batch, factor=found)
        return found


class PartGradients(HookOwner):
    """Norms of the gradients that one backward pass adds to parameters.

    Hooks on ``leaves`` get them before they are added to those of earlier micro-batches, and before
    processes take the mean. Nothing but the norms is kept, and compiled code stays as it is, since
    the hooks are there in the backward pass alone.
    """

    def __init__(self, leaves: Mapping[str, nn.Parameter], is_first: bool) -> None:
        """Whether it ``is_first`` of the parts: there is nothing in ``p.grad`` yet."""
        self._leaves = leaves
        self._norms: dict[str, Tensor] = {}
        self._unknown = ""
        with unseen(), torch.no_grad():
            grads = [leaf.grad for leaf in leaves.values()] if is_first else []
            before = norms([grad for grad in grads if grad is not None])
            device = next(iter(leaves.values())).device
            zero = torch.zeros((), device=device)
            sizes = [each.to(zero) for each in before]
            self._left_over = torch.stack([zero, *sizes]).sum()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context for the backward pass."""
        handles = [
            on_gradient(leaf, OwnedHook(self, partial(PartGradients._receive, name=name)))
            for name, leaf in self._leaves.items()
            if leaf.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _receive(self, gradient: Tensor, *, name: str) -> None:
        if name in self._norms:
            self._unknown = SEVERAL
        with torch.no_grad():
            self._norms[name] = norm(gradient)

    def failed(self, error: Exception) -> None:
        self._unknown = f"the norm of a gradient is unknown: {error}"

    def sums(self, factor: float, samples: int | None, reduction: LossReduction) -> PartSums:
        """Of this part alone, on whose loss, times a ``factor``, backward was called."""
        known = [self._norms.get(name) for name in self._leaves]
        zero = double(torch.zeros((), device=self._left_over.device))
        squares = torch.stack(
            [zero if each is None else double(each.to(zero.device)).square() for each in known]
        )
        unknown = self._unknown
        if not samples:
            unknown = unknown or NO_SAMPLES
        elif not factor > 0:
            unknown = unknown or NOT_POSITIVE
        if unknown:
            return PartSums(squares, self._left_over, 1.0, 1.0, 1.0, unknown=unknown)
        assert samples is not None
        weight = factor * samples if reduction == "sum" else factor
        return PartSums(
            squares / weight, self._left_over, weight, weight / samples, weight**2 / samples
        )


SEVERAL = (
    "a parameter got its gradient in several pieces, as from two backward passes inside one "
    "context, or from reentrant checkpoints: call backward once, with use_reentrant=False"
)
NO_SAMPLES = (
    "it isn't known how many samples a part of the batch has: pass batch_size=... to the context"
)
NOT_POSITIVE = "backward was called on zero or a negative multiple of a part's loss"
