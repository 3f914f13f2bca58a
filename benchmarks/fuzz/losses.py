"""Losses of outputs ``[N, CLASSES]``, as modules with the reductions of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

CLASSES = 3


class ByHand(nn.Module):
    """A loss of the user's own: ℓₙ = Σⱼ sin²(0.7·fₙⱼ)."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.reduced((0.7 * outputs).sin().square().sum(-1))

    def reduced(self, losses: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


class Distances(ByHand):
    """Distances to two fixed points by ``cdist``."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        points = torch.eye(2, CLASSES, dtype=outputs.dtype)
        return self.reduced(torch.cdist(outputs.reshape(-1, CLASSES), points).square().sum(-1))


class Ctc(ByHand):
    """CTC on three times the same outputs; it has no second derivative."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = outputs.reshape(-1, CLASSES).log_softmax(-1)
        lengths = torch.full((len(rows),), 3), torch.ones(len(rows), dtype=torch.long)
        labels = targets.reshape(-1, 1).clamp(min=1)
        return F.ctc_loss(torch.stack([rows] * 3), labels, *lengths, reduction=self.reduction)


@dataclass(frozen=True)
class Loss:
    """A loss module by its reduction; ``targets`` are ``"labels"`` or ``"vectors"``."""

    module: Callable[[str], nn.Module]
    targets: str = "labels"


LOSSES: dict[str, Loss] = {
    "cross entropy": Loss(lambda r: nn.CrossEntropyLoss(reduction=r)),
    "smoothed": Loss(lambda r: nn.CrossEntropyLoss(reduction=r, label_smoothing=0.1)),
    "squared error": Loss(lambda r: nn.MSELoss(reduction=r), "vectors"),
    "binary": Loss(lambda r: nn.BCEWithLogitsLoss(reduction=r), "vectors"),
    "huber": Loss(lambda r: nn.SmoothL1Loss(reduction=r), "vectors"),
    "absolute error": Loss(lambda r: nn.L1Loss(reduction=r), "vectors"),
    "margin": Loss(lambda r: nn.MultiMarginLoss(reduction=r)),
    "by hand": Loss(ByHand),
    "distances": Loss(Distances),
    "ctc": Loss(Ctc),
}


WITHOUT_LOW_PRECISION = {"margin", "distances", "ctc"}
"""Losses that torch computes in single precision at the least."""


def per_sample(name: str, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """ℓₙ ``[N]``: N times each sample's share of a mean loss, or its share of a sum."""
    found = LOSSES[name].module("none")(outputs, targets)
    if found.dim() < 2:
        return found.reshape(-1)
    return found.mean(-1) if reduction == "mean" else found.sum(-1)


def draw_targets(kind: str, samples: int, generator: torch.Generator) -> Tensor:
    if kind == "labels":
        return torch.randint(CLASSES, (samples,), generator=generator)
    return torch.rand(samples, CLASSES, generator=generator)
