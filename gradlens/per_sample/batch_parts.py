"""One batch from several backward passes: of micro-batches, of processes, or of both.

The loss of the whole is Σᵢ wᵢ Lᵢ, where wᵢ are the factors that backward was called with, over
their sum (1/k for each of k micro-batches, 1/R for each of R processes). A sample of a part with
Nᵢ of all N samples thus has gₙ = N·wᵢ/Nᵢ·∇ℓₙ under a mean loss; under a sum loss gₙ = ∇ℓₙ.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist

from gradlens.per_sample.labelling.batch import LossReduction
from gradlens.per_sample.operators.joined import Joined
from gradlens.per_sample.operators.operator import GradientOperator


@dataclass(frozen=True)
class Share:
    """What one backward pass has given.

    ``weight`` is the factor that backward was called with, ``loss`` Lᵢ and ``individual_losses``
    ℓₙ ``[Nᵢ]``. ``missing`` says why parameters have no operator.
    """

    batch_size: int | None
    weight: float
    loss: float | None = None
    individual_losses: Tensor | None = None
    operators: Mapping[str, GradientOperator] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    coupling: frozenset[str] = frozenset()


def joined(shares: Sequence[Share], loss_reduction: LossReduction) -> Share:
    """All shares as one. A parameter that one of them misses is missing."""
    sizes = [share.batch_size or 0 for share in shares]
    factors = [1.0] * len(shares)
    weights = [1.0] * len(shares)
    if loss_reduction == "mean":
        total = sum(share.weight for share in shares)
        weights = [share.weight / total for share in shares]
        factors = [
            sum(sizes) * weight / size if size else 1.0
            for weight, size in zip(weights, sizes, strict=True)
        ]
    missing = {name: reason for share in shares for name, reason in share.missing.items()}
    everywhere = [n for n in shares[0].operators if all(n in s.operators for s in shares)]
    return Share(
        sum(sizes) or None,
        1.0,
        _joined_loss(shares, weights),
        _joined_losses(shares, factors),
        {n: Joined([share.operators[n] for share in shares], factors) for n in everywhere},
        missing,
        frozenset().union(*(share.coupling for share in shares)),
    )


def _joined_loss(shares: Sequence[Share], weights: Sequence[float]) -> float | None:
    pairs = zip(shares, weights, strict=True)
    known = [weight * share.loss for share, weight in pairs if share.loss is not None]
    return sum(known) if len(known) == len(shares) else None


def _joined_losses(shares: Sequence[Share], factors: Sequence[float]) -> Tensor | None:
    pairs = zip(shares, factors, strict=True)
    known = [f * s.individual_losses for s, f in pairs if s.individual_losses is not None]
    return torch.cat(known) if len(known) == len(shares) else None


def exchanged(share: Share, device: torch.device, group: dist.ProcessGroup | None) -> list[Share]:
    """The shares of all processes of a group, in the order of their ranks.

    Factors of layers go over the wire, not the gradients that they stand for. All processes must
    call this at the same steps.
    """
    buffer = io.BytesIO()
    torch.save(share, buffer)
    everyone: list[bytes | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, buffer.getvalue(), group=group)
    # Each process has written its own, and trusts the others.
    return [
        torch.load(io.BytesIO(data or b""), map_location=device, weights_only=False)
        for data in everyone
    ]
