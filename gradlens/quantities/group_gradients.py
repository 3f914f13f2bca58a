"""Gradients of groups of samples: their norms, and the angles between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from gradlens.history.spikes import SampleId
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import NOT_FINITE
from gradlens.numerics.noise_scales import NO_SQUARED_NORM
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import Gram

Array = NDArray[np.float64]

FEWEST = 3
"""Samples of a group: without one of them, two have a pair that isn't one sample with itself."""
MOST = 16
"""Groups, which have 120 pairs: more are rarely told apart in one batch."""
ROUNDING = 1e-6
"""Ten roundings of single precision, by which products are off, over the largest of them."""


class GroupGradients(SingleStepQuantity):
    """Norms of the gradients of groups of samples, and cosines between each two of them.

    Groups are classes, domains, sources or annotators: pass the one of each sample to the context,
    as in ``info={"groups": ["web", "code", ...]}``. With the gradient Gₐ of the expected loss of
    group a, unbiased estimates are used, in which no sample is multiplied by itself: ⟨gₙ, gₘ⟩
    averaged over n ≠ m in a for ‖Gₐ‖², and over n in a and m in b for ⟨Gₐ, G_b⟩. The noise of
    the samples so doesn't make groups look different, nor large.

    A value has ``"groups"``, with the ``"norm"`` of each and its number of ``"samples"``, and
    ``"pairs"`` such as ``"code and web"``, with the cosine as ``"value"``, cut off where noise
    puts it beyond −1 or 1. ``"low"`` and ``"high"`` are the ends of 95 % confidence intervals: for
    a cosine, Fieller's for a ratio, with the jackknife's covariance, and −1 and 1 where nothing can
    be said. The ``"value"`` of the whole record is the smallest cosine. A group with fewer than
    three samples, and its pairs, are a NaN with this reason. It takes the products of all samples.
    """

    needs = ("groups",)
    reductions = (Gram(),)
    view = View("Groups of samples", group="gradients", label="cosine of two groups")

    def compute(self, step: Step) -> dict[str, Any]:
        groups: Sequence[SampleId] | None = step.info.get("groups")
        if groups is None:
            raise UnavailableError(SOME_PARTS)
        if len(groups) != step.samples:
            raise UnavailableError(OTHER_COUNT.format(groups=len(groups), samples=step.samples))
        return between_groups(step.total(Gram()).numpy(), groups)


@np.errstate(all="ignore")
def between_groups(gram: Array, groups: Sequence[SampleId]) -> dict[str, Any]:
    """What ``GroupGradients`` records, from the products ``[N, N]`` of all gradients."""
    of_each = [*map(str, groups)]
    names = sorted({*of_each}, key=_order)
    if not 2 <= len(names) <= MOST:
        raise UnavailableError(COUNT.format(count=len(names), most=MOST))
    if not np.isfinite(gram).all():
        raise UnavailableError(NOT_FINITE)
    unit = float(np.abs(gram).max()) or 1.0
    places = {name: np.array([each == name for each in of_each]).nonzero()[0] for name in names}
    found = {
        name: _Group(gram[np.ix_(own, own)] / unit)
        for name, own in places.items()
        if len(own) >= FEWEST
    }
    few = {n: FEW.format(group=n, count=len(places[n])) for n in names if n not in found}
    pairs: dict[str, dict[str, float]] = {}
    for one, other in combinations(names, 2):
        why = few.get(one) or few.get(other)
        if why:
            pairs[f"{one} and {other}"] = dict.fromkeys(("value", "low", "high"), Undefined(why))
        else:
            between = gram[np.ix_(places[one], places[other])] / unit
            pairs[f"{one} and {other}"] = _cosine(found[one], found[other], between)
    known = [each["value"] for each in pairs.values() if not math.isnan(each["value"])]
    return {
        "value": min(known) if known else next(iter(pairs.values()))["value"],
        "groups": {
            name: {
                **(
                    dict.fromkeys(("norm", "low", "high"), Undefined(few[name]))
                    if name in few
                    else found[name].norm(unit)
                ),
                "samples": len(own),
            }
            for name, own in places.items()
        },
        "pairs": pairs,
    }


def _order(name: str) -> tuple[bool, int, str]:
    """Numbers by their sizes, and then texts."""
    is_number = name.isdecimal()
    return not is_number, len(name) if is_number else 0, name


@dataclass(frozen=True)
class _Group:
    """A group's own products ``[n, n]``."""

    gram: Array

    @property
    def squared_norm(self) -> float:
        """The mean over all pairs of two samples."""
        n = len(self.gram)
        return float(self._with_others.sum()) / (n * (n - 1))

    @property
    def left_out(self) -> Array:
        """The same without each of the samples, ``[n]``."""
        n, of_each = len(self.gram), self._with_others
        found: Array = (of_each.sum() - 2 * of_each) / ((n - 1) * (n - 2))
        return found

    @property
    def _with_others(self) -> Array:
        found: Array = self.gram.sum(1) - self.gram.diagonal()
        return found

    def norm(self, unit: float) -> dict[str, float]:
        """The norm with its interval, times the root of a ``unit``."""
        n, squared = len(self.gram), self.squared_norm
        spread = float(stdtrit(n - 1, 0.975)) * math.sqrt(float(_covariance(self.left_out)))
        return {
            "norm": math.sqrt(squared * unit) if squared > 0 else Undefined(NO_SQUARED_NORM),
            "low": math.sqrt(max(squared - spread, 0.0) * unit),
            "high": math.sqrt(max(squared + spread, 0.0) * unit),
        }


def _covariance(*left_out: Array) -> Array:
    """The jackknife's (Efron, 1982), of numbers ``[n]`` that each lack another sample."""
    n = left_out[0].size
    return (n - 1) ** 2 / n * np.cov(np.stack(left_out))


def _cosine(one: _Group, other: _Group, between: Array) -> dict[str, float]:
    """⟨Gₐ, G_b⟩ over √(‖Gₐ‖²‖G_b‖²), with its interval, of groups whose samples are independent.

    To first order, the denominator without a sample changes by half of what its squares do, in
    parts. Student's t has the degrees of freedom of the smaller group, which is conservative.
    """
    squares = one.squared_norm, other.squared_norm
    if min(squares) <= 0:
        return {"value": Undefined(NO_SQUARED_NORM), "low": -1.0, "high": 1.0}
    (n, m), total = between.shape, between.sum()
    product, size = float(between.mean()), math.sqrt(squares[0]) * math.sqrt(squares[1])
    covariance = _covariance(
        (total - between.sum(1)) / ((n - 1) * m), size * one.left_out / squares[0] / 2
    ) + _covariance(
        (total - between.sum(0)) / (n * (m - 1)), size * other.left_out / squares[1] / 2
    )
    t = float(stdtrit(min(n, m) - 1, 0.975))
    a = size**2 - t**2 * covariance[1, 1]
    b = product * size - t**2 * covariance[0, 1]
    root = b**2 - a * (product**2 - t**2 * covariance[0, 0])
    ends = -math.inf, math.inf
    if a > 0 and root >= 0:
        slack = ROUNDING / size
        ends = (b - math.sqrt(root)) / a - slack, (b + math.sqrt(root)) / a + slack
    found = {"value": product / size, "low": ends[0], "high": ends[1]}
    return {name: min(max(float(each), -1.0), 1.0) for name, each in found.items()}


FEW = (
    f"group {{group}} has {{count}} of the batch's samples, and takes {FEWEST}, since no sample is "
    "multiplied by itself: use larger batches, or join groups"
)
COUNT = (
    "the batch has samples of {count} groups, and angles take from 2 to {most}: join groups, or "
    "use batches that have several"
)
OTHER_COUNT = (
    "{groups} groups were passed, and the batch has {samples} samples: pass the group of each "
    'sample, as in info={{"groups": groups}}'
)
SOME_PARTS = (
    "the groups of some samples aren't known: pass them to the context of each micro-batch, in all "
    "processes"
)
