"""Totals over a batch of which some samples were drawn at random, with their standard errors.

The samples of a batch are in strata, one for each process. Of each stratum, some samples were drawn
without replacement, all with the same probability; values are known of these alone, one stratum
after another. Source of all formulas: Cochran, Sampling Techniques (1977), sections 2.5 and 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stratum:
    """``drawn`` of ``samples`` samples."""

    samples: int
    drawn: int

    @property
    def is_complete(self) -> bool:
        """Whether all samples were drawn."""
        return self.drawn == self.samples


Strata = tuple[Stratum, ...]


@dataclass(frozen=True)
class Drawn:
    """Values ``[n]`` of the drawn samples."""

    values: Tensor
    strata: Strata

    def merge(self, other: Drawn) -> Drawn:
        """Of the strata of both."""
        values = torch.cat([self.values, other.values])
        return Drawn(values, (*self.strata, *other.strata))


def all_drawn(strata: Strata) -> bool:
    """Whether all samples of all strata were drawn."""
    return all(stratum.is_complete for stratum in strata)


def count(strata: Strata) -> int:
    """N, the number of samples, whether drawn or not."""
    return sum(stratum.samples for stratum in strata)


def weights(strata: Strata) -> Tensor:
    """The number of samples that each drawn one stands for, in float64 ``[n]``."""
    parts = [torch.full((s.drawn,), s.samples / s.drawn, device="cpu") for s in strata if s.drawn]
    return torch.cat(parts).double() if parts else torch.empty(0, dtype=torch.float64, device="cpu")


def total(values: Tensor, strata: Strata) -> Tensor:
    """Unbiased estimate of the sum over all samples, from the values ``[n]`` of drawn ones."""
    return (weights(strata) * values).sum()


def total_error(values: Tensor, strata: Strata) -> float:
    """Standard error of ``total``; infinite where a stratum has too few drawn samples for one."""
    return math.sqrt(
        sum(
            s.samples**2 * (1 - s.drawn / s.samples) * _variance_of_mean(part)
            for part, s in _by_stratum(values, strata)
            if not s.is_complete
        )
    )


def mean_variance(values: Tensor, strata: Strata) -> tuple[Tensor, Tensor]:
    """Mean over all samples, and its variance as an estimate of what all samples are drawn from.

    The variance is that of the drawn samples over their effective number (Kish, 1965).
    """
    stands_for = weights(strata)
    number = stands_for.sum().square() / stands_for.square().sum()
    return total(values, strata) / count(strata), torch.cov(values, aweights=stands_for) / number


def _by_stratum(values: Tensor, strata: Strata) -> Sequence[tuple[Tensor, Stratum]]:
    inhabited = [stratum for stratum in strata if stratum.samples]
    return list(zip(values.split([s.drawn for s in inhabited]), inhabited, strict=True))


def _variance_of_mean(values: Tensor) -> float:
    return float(values.var()) / len(values) if len(values) > 1 else math.inf
