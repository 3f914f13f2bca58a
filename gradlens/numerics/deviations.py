"""Per-sample gradients about their mean.

A variance that is computed from sums of squares loses all digits where the samples' gradients
differ little. Everything here is therefore computed from gₙ − ḡ, or from products in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

ROUNDINGS = 16
"""Roundings of its precision that an element of gₙ may be off by.

In the networks of ``tests/quantities/test_precision.py``, the root mean square of errors is up to
1.6 roundings; the rest is a margin for networks of more layers and for longer sums. Samples that
differ by less than the bound have variances that are off by a percent or more.
"""


@dataclass(frozen=True)
class SampleDeviations:
    """Deviations of all samples from the mean gradient; in float64.

    ``squared_norms`` are ‖gₙ − ḡ‖² and ``dots`` ⟨gₙ − ḡ, ḡ⟩, both ``[N]``; ``squared_mean`` is
    ‖ḡ‖². Two bounds are of the error of Σₙ‖gₙ − ḡ‖²: ``noise`` from rounding in gₙ, which gradients
    that are equal may have, and ``rounding`` from rounding in the sum. The last three are scalars.
    """

    squared_norms: Tensor
    dots: Tensor
    squared_mean: Tensor
    noise: Tensor
    rounding: Tensor

    def __add__(self, other: SampleDeviations) -> SampleDeviations:
        names = [field.name for field in fields(self)]
        return SampleDeviations(*(getattr(self, n) + getattr(other, n) for n in names))

    @property
    def vanish(self) -> bool:
        """Whether the deviations are nothing but rounding errors of gradients that aren't zero."""
        bound = self.noise + self.rounding
        return bool((self.squared_norms.sum() <= bound) & (self.squared_mean > 0))

    def cpu(self) -> SampleDeviations:
        """The same on the host."""
        return SampleDeviations(*(getattr(self, field.name).cpu() for field in fields(self)))


@dataclass(frozen=True)
class ElementDeviations:
    """Deviations of each element from its mean: ``mean`` ḡ and ``squares`` Σₙ(gₙⱼ − ḡⱼ)², ``[*P]``.

    Squares are in float64, or in float32 where that is as precise. ``noise``, times ḡⱼ², is a bound
    for the error of (gₙⱼ − ḡⱼ)² from rounding in gₙⱼ.
    """

    mean: Tensor
    squares: Tensor
    noise: float


def by_products(squared_norms: Tensor, with_mean: Tensor) -> SampleDeviations:
    """Deviations, but for ``noise``, from ‖gₙ‖² and ⟨gₙ, ḡ⟩ in float64, both ``[N]``."""
    squared_mean = with_mean.mean()
    along = with_mean - squared_mean
    # Rounding can push a vanishing norm below zero.
    apart = (squared_norms - squared_mean - 2 * along).clamp_(min=0)
    rounding = ROUNDINGS * torch.finfo(apart.dtype).eps * squared_norms.sum()
    return SampleDeviations(apart, along, squared_mean, rounding, rounding)


def less_mean(sum_of_squares: Tensor, total: Tensor, n: int) -> Tensor:
    """Σₙ(gₙ − ḡ)² of each element from Σₙgₙ² and Σₙgₙ; in place of the former."""
    return sum_of_squares.addcmul_(total, total, value=-1 / max(n, 1)).clamp_(min=0)
