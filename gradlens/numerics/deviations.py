"""Per-sample gradients about their mean.

A variance that is computed from sums of squares loses all digits where the samples' gradients
differ little. There, everything is computed from gₙ − ḡ, or from products in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.histograms import CHUNK
from gradlens.numerics.norms import dots, norm, row_norms, scale_of
from gradlens.numerics.tensors import double, is_small

ONE_SAMPLE = "N = 1: a variance over samples needs two of them"
ZERO_MEAN = "the mean gradient is zero"
NOT_FINITE = "the per-sample gradients contain NaN or Inf"
EQUAL = (
    "the per-sample gradients differ by no more than the rounding errors of their precision: use a "
    "higher precision"
)

ROUNDINGS = 16
"""Roundings of its precision that an element of gₙ may be off by.

In the networks of ``tests/quantities/test_precision.py``, the root mean square of errors is up to
1.6 roundings; the rest is a margin for networks of more layers and for longer sums. Samples that
differ by less than the bound have variances that are off by a percent or more.
"""

APART = 2**20
"""Elements, less their mean or squared, that are in memory at once.

Measured on two cores: with 2**18, which fit into a core's cache, the calls of a dozen small
operations took longer than the work on the elements.
"""

DIGITS = 0.1
"""Largest relative error of squared norms that are shown with two digits."""

Bounds: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True)
class SampleDeviations:
    """Deviations of samples from the mean gradient; in float64.

    ``squared_norms`` are ‖gₙ − ḡ‖² and ``dots`` ⟨gₙ − ḡ, ḡ⟩, both ``[N]``; ``squared_mean`` is
    ‖ḡ‖². Three factors in ``bounds`` give bounds of the error of Σₙ‖gₙ − ḡ‖²: times N‖ḡ‖², from
    rounding in gₙ, which gradients that are equal may have; times the sum itself, from adding up;
    and times N‖ḡ‖², from subtracting products.

    Where ``unknown`` says why the gradients weren't kept until ḡ was known, squared norms and dots
    are empty, and ``known_spread`` is Σₙ‖gₙ − ḡ‖² of a ``number`` of samples.
    """

    squared_norms: Tensor
    dots: Tensor
    squared_mean: Tensor
    bounds: Bounds
    known_spread: Tensor | None = None
    number: int = 0
    unknown: str = ""

    @property
    def samples(self) -> int:
        """N."""
        return self.number or len(self.dots)

    @cached_property
    def spread(self) -> float:
        """Σₙ‖gₙ − ḡ‖²."""
        return float(self._spread)

    @property
    def _spread(self) -> Tensor:
        return self.squared_norms.sum() if self.known_spread is None else self.known_spread

    @cached_property
    def squared_norm_of_mean(self) -> float:
        """‖ḡ‖²."""
        return float(self.squared_mean)

    @property
    def noise(self) -> float:
        """Bound of the error of Σₙ‖gₙ − ḡ‖² from rounding in gₙ."""
        return self.bounds[0] * self.samples * self.squared_norm_of_mean

    @property
    def rounding(self) -> float:
        """Bound of the error of Σₙ‖gₙ − ḡ‖² from rounding in the sum."""
        _, of_sum, of_difference = self.bounds
        cancelled = of_difference * self.samples * self.squared_norm_of_mean
        return of_sum * self.spread + cancelled

    @cached_property
    def squared_dots(self) -> float:
        """Σₙ⟨gₙ − ḡ, ḡ⟩²."""
        return len(self.dots) * float(self.dots.var(correction=0))

    @property
    def vanish(self) -> bool:
        """Whether the deviations are nothing but rounding errors of gradients that aren't zero."""
        return self.spread <= self.noise + self.rounding and self.squared_norm_of_mean > 0

    def norms_without(self) -> Tensor:
        """‖Σₘgₘ‖/(N − 1) over the other samples m ≠ n, over ‖ḡ‖, ``[N]``.

        NaN where rounding may have changed it by more than ``DIGITS``, and for one sample.
        """
        others = len(self.dots) - 1
        mean = self.squared_mean.expand_as(self.dots)
        terms = torch.stack([mean, -2 * self.dots / others, self.squared_norms / others**2])
        left, error = terms.sum(0), terms.abs().sum(0) * sum(self.bounds)
        found = (left / self.squared_mean).sqrt()
        return found.where(error <= DIGITS * left, math.nan)

    def merge(self, other: SampleDeviations) -> SampleDeviations:
        """Of the samples of both, about the same mean."""
        bounds, unknown = coarsest(self.bounds, other.bounds), self.unknown or other.unknown
        if unknown:
            spread, number = self._spread + other._spread, self.samples + other.samples
            nothing = self.dots.new_zeros(0)
            return SampleDeviations(
                nothing, nothing, self.squared_mean, bounds, spread, number, unknown
            )
        return SampleDeviations(
            torch.cat([self.squared_norms, other.squared_norms]),
            torch.cat([self.dots, other.dots]),
            self.squared_mean,
            bounds,
        )

    def times(self, factor: float) -> SampleDeviations:
        """Of gradients times a factor."""
        square = factor**2
        norms, dots = self.squared_norms * square, self.dots * square
        return SampleDeviations(norms, dots, self.squared_mean * square, self.bounds)


def coarsest(*bounds: Bounds) -> Bounds:
    """The largest of each factor, with which the bounds hold for all together."""
    first, second, third = map(max, zip(*bounds, strict=True))
    return first, second, third


def of_all(parameters: Sequence[SampleDeviations]) -> SampleDeviations:
    """Those of several parameters together, of the same samples."""
    if len(parameters) == 1:
        return parameters[0]
    first = parameters[0]
    return SampleDeviations(
        torch.stack([each.squared_norms for each in parameters]).sum(0),
        torch.stack([each.dots for each in parameters]).sum(0),
        torch.stack([each.squared_mean for each in parameters]).sum(),
        coarsest(*(each.bounds for each in parameters)),
        torch.stack([each._spread for each in parameters]).sum() if first.unknown else None,
        first.number,
        first.unknown,
    )


@dataclass(frozen=True)
class ElementDeviations:
    """Deviations of each element from its mean: ``mean`` ḡ and ``squares`` Σₙ(gₙⱼ − ḡⱼ)², ``[*P]``.

    Squares are in float64, or in float32 where that is as precise. ``noise``, times ḡⱼ², is a bound
    for the error of (gₙⱼ − ḡⱼ)² from rounding in gₙⱼ.
    """

    mean: Tensor
    squares: Tensor
    noise: float

    def times(self, factor: float) -> ElementDeviations:
        """Of gradients times a factor."""
        return replace(self, mean=self.mean * factor, squares=self.squares * factor**2)

    def merge(self, other: ElementDeviations, samples: tuple[int, int]) -> ElementDeviations:
        """Of both batches together, of so many samples (Chan et al., 1979, Eq. 2.1)."""
        mean, apart = merged_mean(self.mean, other.mean, samples)
        dtype = torch.promote_types(self.squares.dtype, other.squares.dtype)
        squares = self.squares.to(dtype) + other.squares
        squares += between(samples) * apart.to(dtype).square()
        return ElementDeviations(mean, squares, max(self.noise, other.noise))


@dataclass(frozen=True)
class Spread:
    """ḡ ``[*P]`` and Σₙ‖gₙ − ḡ‖², a scalar in float64, with the ``bounds`` of its error."""

    mean: Tensor
    squares: Tensor
    bounds: Bounds

    def times(self, factor: float) -> Spread:
        """Of gradients times a factor."""
        return replace(self, mean=self.mean * factor, squares=self.squares * factor**2)

    def merge(self, other: Spread, samples: tuple[int, int]) -> Spread:
        """Of both batches together, of so many samples (Chan et al., 1979, Eq. 2.1)."""
        mean, apart = merged_mean(self.mean, other.mean, samples)
        squares = self.squares + other.squares + between(samples) * double(norm(apart)).square()
        return Spread(mean, squares, coarsest(self.bounds, other.bounds))

    def about(self, centre: Tensor, samples: int, unknown: str) -> SampleDeviations:
        """Deviations of so many samples from c ``[*P]``, of which nothing else is known."""
        squares = self.squares + samples * double(norm(self.mean - centre)).square()
        nothing, squared_mean = squares.new_zeros(0), double(norm(centre)).square()
        return SampleDeviations(
            nothing, nothing, squared_mean, self.bounds, squares, samples, unknown
        )


def merged_mean(one: Tensor, other: Tensor, samples: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The mean over two batches of so many samples, and the difference between their means."""
    apart = other - one
    return one + apart * (samples[1] / sum(samples)), apart


def between(samples: tuple[int, int]) -> float:
    """The factor of the squared difference between two batches' means in the joined spread."""
    return samples[0] * samples[1] / sum(samples)


def by_products(
    squared_norms: Tensor, with_centre: Tensor, squared_centre: Tensor, noise: float
) -> SampleDeviations:
    """Deviations from c, from ‖gₙ‖² and ⟨gₙ, c⟩ ``[N]`` and ‖c‖² in float64.

    ``noise`` is the first of the bounds.
    """
    along = with_centre - squared_centre
    # Rounding can push a vanishing norm below zero.
    apart = (squared_norms - squared_centre).sub_(along, alpha=2).clamp_(min=0)
    rounding = ROUNDINGS * torch.finfo(apart.dtype).eps
    return SampleDeviations(apart, along, squared_centre, (noise, rounding, 2 * rounding))


def deviations_in_double(apart: Tensor, centre: Tensor, noise: float) -> SampleDeviations:
    """Deviations from gₙ − c ``[N, M]`` and c ``[M]`` in float64, of numbers in float32."""
    squared_norms = torch.linalg.vector_norm(apart, dim=1).square_()
    rounding = ROUNDINGS * torch.finfo(apart.dtype).eps
    return SampleDeviations(
        squared_norms, apart @ centre, torch.dot(centre, centre), (noise, rounding, 0.0)
    )


def deviations_from(rows: Tensor, centre: Tensor, noise: float) -> SampleDeviations:
    """Deviations of rows gₙ ``[N, M]`` from c ``[M]``; ``noise`` is the first of the bounds.

    By differences, which lose no digits where rows differ little.
    """
    if is_small(rows):
        centre = double(centre)
        return deviations_in_double(double(rows).sub_(centre), centre, noise)
    unit = scale_of(centre)
    direction = centre / unit
    squared_norms, along = (double(rows.new_zeros(len(rows))) for _ in range(2))
    for part, apart in apart_from(rows, centre):
        squared_norms += double(row_norms(apart)).square()
        along += double(dots(apart, direction[part]))
    rounding = ROUNDINGS * torch.finfo(rows.dtype).eps
    squared_centre = double(norm(centre)).square()
    return SampleDeviations(squared_norms, along * unit, squared_centre, (noise, rounding, 0.0))


def apart_from(rows: Tensor, centre: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows ``[N, M]`` less c ``[M]``, in slices of ``APART`` elements, each in a new tensor."""
    length = rows.shape[1]
    at_once = max(APART // max(len(rows), 1), 1) if rows.device.type == "cpu" else max(length, 1)
    for start in range(0, length, at_once):
        part = slice(start, min(start + at_once, length))
        yield part, rows[:, part] - centre[part]


# Ratios of the squared mean to the variance over samples, element by element --------------------

TOLERATED = 0.1
"""Error of a mean over elements, relative to it, above which it is NaN.

A trade-off. The bound of a squared error is a hundred times as large as what was found (see
``ROUNDINGS``), so the error itself is far smaller.
"""


@dataclass(frozen=True)
class RatioSums:
    """ḡⱼ²/(vⱼ + ε), summed over the elements j of one parameter or of several.

    ``sums`` ``[3]``, in float64, are those of Σₙ(gₙⱼ − ḡⱼ)², of the ratios, and of their squares.
    An error of noise·ḡⱼ² in a denominator is one of noise·ratio relative to it, so that the sum of
    squares times ``noise`` is a bound for the errors of the ratios.
    """

    sums: Tensor
    elements: int
    noise: float


def sum_of_ratios(parts: Sequence[RatioSums]) -> RatioSums:
    """Of several parameters."""
    sums = torch.stack([each.sums for each in parts]).sum(0)
    elements = sum(each.elements for each in parts)
    return RatioSums(sums, elements, max(each.noise for each in parts))


def element_ratios(found: ElementDeviations, divisor: int, eps: float) -> RatioSums:
    """Of one parameter, with vⱼ = Σₙ(gₙⱼ − ḡⱼ)²/divisor."""
    # As many at once as stay in a processor's cache.
    few = found.mean.numel() <= CHUNK
    pieces = (
        [each] if few else each.flatten().split(CHUNK) for each in (found.mean, found.squares)
    )
    sums = []
    for mean, squares in zip(*pieces, strict=True):
        ratios = mean.to(squares.dtype).square().div_((squares / divisor).add_(eps))
        known = (squares.sum(), ratios.sum(), ratios.square_().sum())
        sums.append(double(torch.stack(known)))
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return RatioSums(total, found.mean.numel(), found.noise)


def mean_ratio(found: RatioSums) -> float:
    """Mean of the ratios over all elements; NaN where rounding errors may make up a tenth of it."""
    if not found.elements:
        return Undefined("the parameter has no elements")
    spread, total, squares = found.sums.tolist()
    if not math.isfinite(spread):
        return Undefined(NOT_FINITE)
    if not found.noise * squares <= TOLERATED * total < math.inf:
        return Undefined(f"{EQUAL}, or a larger epsilon")
    return total / found.elements
