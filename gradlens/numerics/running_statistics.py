"""Statistics of samples that come one at a time, and of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.history.undefined import Undefined


class RunningMean:
    """Mean of independent samples of any one shape, without keeping them (Welford, 1962).

    Equal samples have a standard error of exactly zero.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.mean = torch.zeros((), device="cpu")
        self._squares = torch.zeros((), device="cpu")

    def add(self, sample: Tensor) -> None:
        """Add one sample, of the same shape as those before."""
        if self.samples == 0:
            self.mean, self._squares = torch.zeros_like(sample), torch.zeros_like(sample)
        self.samples += 1
        n = self.samples
        deviation = sample - self.mean
        self.mean += deviation / n
        self._squares += deviation.square_().mul_((n - 1) / n)

    def standard_error(self) -> Tensor:
        """Standard error of the mean, of a sample's shape; NaN for fewer than two samples."""
        if self.samples < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.samples * (self.samples - 1))).sqrt()


Statistic: TypeAlias = Literal["mean", "std", "min", "q1", "median", "q3", "max", "iqr"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
INFINITE = "there are infinities among the numbers"
TOO_LARGE = "the numbers, or their squares, are too large to be added up"


def summary(
    numbers: Sequence[float], statistics: Sequence[Statistic] = STATISTICS
) -> dict[str, float]:
    """The statistics of numbers by name, and the ``"count"`` of the numbers.

    Those that are NaN are left out; ``"undefined"`` is their count, if there are any.
    """
    known = np.sort([each for each in numbers if not math.isnan(each)])
    counts = {"count": len(known)}
    if len(known) < len(numbers):
        counts["undefined"] = len(numbers) - len(known)
    if not len(known):
        reasons = [each.reason for each in numbers if isinstance(each, Undefined)]
        why = "all numbers were NaN" if numbers else "there was no number"
        return {**dict.fromkeys(statistics, Undefined(reasons[-1] if reasons else why)), **counts}
    found, infinite = _statistics(known), not np.isfinite(known).all()
    return {**{name: _explained(found[name], infinite) for name in statistics}, **counts}


def _statistics(ordered: NDArray[np.float64]) -> dict[Statistic, float]:
    """All statistics of numbers in ascending order, the standard deviation of the population.

    With infinities, the mean is the infinity, or NaN if there are infinities of both signs.
    """
    low, high = float(ordered[0]), float(ordered[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        # From the first on: the mean of equal numbers is exactly that number.
        is_finite = math.isfinite(low) and math.isfinite(high)
        mean = low + float((ordered - low).mean()) if is_finite else low + high
        std = float(np.sqrt(np.square(ordered - mean).mean()))
        q1, median, q3 = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    return {"mean": mean, "std": std, "min": low, "q1": q1, "median": median, "q3": q3,
            "max": high, "iqr": q3 - q1}  # fmt: skip


def _explained(value: float, infinite: bool) -> float:
    """The value; a NaN with the reason if it overflows, or is NaN because of infinities."""
    if math.isnan(value):
        return Undefined(INFINITE if infinite else TOO_LARGE)
    return Undefined(TOO_LARGE) if math.isinf(value) and not infinite else value


def _quantile(ordered: NDArray[np.float64], share: float) -> float:
    """The number below which a share is, interpolated linearly.

    It is infinite next to an infinity, and NaN between infinities of both signs.
    """
    part, place = math.modf(share * (len(ordered) - 1))
    low, high = map(float, ordered[[int(place), math.ceil(place + part)]])
    if low == high or not part:
        return low
    if math.isinf(low) or math.isinf(high):
        return low + high
    # Either form overflows where the other one doesn't.
    return low * (1 - part) + high * part if low < 0 < high else low + part * (high - low)
