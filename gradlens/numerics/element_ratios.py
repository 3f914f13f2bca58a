"""Ratios of the squared mean gradient to the variance over samples, element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ElementDeviations
from gradlens.numerics.histograms import CHUNK
from gradlens.numerics.tensors import double

TOLERATED = 0.1
"""Error of a mean over elements, relative to it, above which it is NaN.

A trade-off. The bound of a squared error is a hundred times as large as what was found (see
``ROUNDINGS``), so the error itself is far smaller.
"""


@dataclass(frozen=True)
class ElementRatios:
    """ḡⱼ²/(vⱼ + ε), summed over the elements j of one parameter or of several.

    ``sums`` ``[3]``, in float64, are those of Σₙ(gₙⱼ − ḡⱼ)², of the ratios, and of their squares.
    An error of noise·ḡⱼ² in a denominator is one of noise·ratio relative to it, so that the sum of
    squares times ``noise`` is a bound for the errors of the ratios.
    """

    sums: Tensor
    elements: int
    noise: float


def sum_of_ratios(parts: Sequence[ElementRatios]) -> ElementRatios:
    """Of several parameters."""
    sums = torch.stack([each.sums for each in parts]).sum(0)
    elements = sum(each.elements for each in parts)
    return ElementRatios(sums, elements, max(each.noise for each in parts))


def element_ratios(found: ElementDeviations, divisor: int, eps: float) -> ElementRatios:
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
    return ElementRatios(total, found.mean.numel(), found.noise)


def mean_ratio(found: ElementRatios) -> float:
    """Mean of the ratios over all elements; NaN where rounding errors may make up a tenth of it."""
    if not found.elements:
        return Undefined("the parameter has no elements")
    spread, total, squares = found.sums.tolist()
    if not math.isfinite(spread):
        return Undefined(NOT_FINITE)
    if not found.noise * squares <= TOLERATED * total < math.inf:
        return Undefined(f"{EQUAL}, or a larger epsilon")
    return total / found.elements
