"""Losses for laboratories, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.laboratory import data
from benchmarks.diagnosis.development.reduction import reduced

REDUNDANT = 0.02
"""Weight of correlations between different features."""


def two_counts(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropies of both numbers of atoms."""
    chlorine, bromine = outputs.split([data.CHLORINE, data.BROMINE], 1)
    first = F.cross_entropy(chlorine, targets[:, 0], reduction="none")
    return reduced(first + F.cross_entropy(bromine, targets[:, 1], reduction="none"), reduction)


def twins(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Features ``[N, 2, D]`` of two views correlate, and no others do (Zbontar et al., 2021).

    The loss is a mean over features; the sum is that times the number of samples.
    """
    centred = outputs - outputs.mean(0)
    scaled = centred / (centred.square().mean(0) + 1e-4).sqrt()
    correlation = scaled[:, 0].T @ scaled[:, 1] / len(outputs)
    same = (1 - correlation.diagonal()).square().sum()
    others = correlation.square().sum() - correlation.diagonal().square().sum()
    loss = (same + REDUNDANT * others) / outputs.shape[2]
    return loss if reduction == "mean" else loss * len(outputs)
