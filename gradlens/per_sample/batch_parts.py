"""One batch from several backward passes: of micro-batches, of processes, or of both.

The loss of the whole is Σᵢ wᵢ Lᵢ, where wᵢ are the factors that backward was called with, over
their sum (1/k for each of k micro-batches, 1/R for each of R processes). A sample of a part with
Nᵢ of all N samples thus has gₙ = N·wᵢ/Nᵢ·∇ℓₙ under a mean loss; under a sum loss gₙ = ∇ℓₙ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch import distributed as dist

from gradlens.numerics.exchange import all_gathered
from gradlens.per_sample.labelling.batch import LossReduction
from gradlens.per_sample.operators.convolution import Convolution, Geometry
from gradlens.per_sample.operators.dense import Dense
from gradlens.per_sample.operators.grouped import Grouped
from gradlens.per_sample.operators.joined import Joined
from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.per_sample.operators.outer_product import OuterProduct, SumOfOuterProducts
from gradlens.per_sample.operators.rows import IndexedRows
from gradlens.per_sample.operators.stored import Stored
from gradlens.per_sample.operators.summed import Summed


@dataclass(frozen=True)
class BatchPart:
    """The results of one backward pass.

    ``weight`` is that of its loss in what the optimizer minimises: the factor that backward was
    called with, over R. ``loss`` is Lᵢ and ``individual_losses`` are ℓₙ ``[Nᵢ]``. ``missing`` are
    the reasons why parameters have no operator.
    """

    batch_size: int | None
    weight: float
    loss: float | None = None
    individual_losses: Tensor | None = None
    operators: Mapping[str, GradientOperator] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    coupling: frozenset[str] = frozenset()


def joined(parts: Sequence[BatchPart], loss_reduction: LossReduction) -> BatchPart:
    """All parts as one. A parameter is missing if it is missing in one of them."""
    sizes = [part.batch_size or 0 for part in parts]
    factors = [1.0] * len(parts)
    weights = [1.0] * len(parts)
    total = sum(part.weight for part in parts)
    if loss_reduction == "mean":
        weights = [part.weight / total for part in parts]
        factors = [
            sum(sizes) * weight / size if size else 1.0
            for weight, size in zip(weights, sizes, strict=True)
        ]
    missing = {name: reason for part in parts for name, reason in part.missing.items()}
    everywhere = [n for n in parts[0].operators if all(n in s.operators for s in parts)]
    return BatchPart(
        sum(sizes) or None,
        total if loss_reduction == "mean" else total / len(parts),
        _joined_loss(parts, weights),
        _joined_losses(parts, factors),
        {n: Joined([part.operators[n] for part in parts], factors) for n in everywhere},
        missing,
        frozenset().union(*(part.coupling for part in parts)),
    )


def _joined_loss(parts: Sequence[BatchPart], weights: Sequence[float]) -> float | None:
    pairs = zip(parts, weights, strict=True)
    known = [weight * part.loss for part, weight in pairs if part.loss is not None]
    return sum(known) if len(known) == len(parts) else None


def _joined_losses(parts: Sequence[BatchPart], factors: Sequence[float]) -> Tensor | None:
    pairs = zip(parts, factors, strict=True)
    known = [f * s.individual_losses for s, f in pairs if s.individual_losses is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def exchanged(
    part: BatchPart, device: torch.device, group: dist.ProcessGroup | None
) -> list[BatchPart]:
    """The parts of all processes of a group, in the order of their ranks.

    The factors of structured gradients are exchanged, not the gradients themselves. All processes
    must call this at the same steps.
    """
    parts = all_gathered(part, CLASSES, device, group)
    # Gradients are averaged over the processes.
    return [replace(each, weight=each.weight / len(parts)) for each in parts]


CLASSES = (
    BatchPart, Convolution, Dense, Geometry, Grouped, IndexedRows, Joined, OuterProduct, Stored,
    Summed, SumOfOuterProducts,
)  # fmt: skip
"""What a part consists of."""
