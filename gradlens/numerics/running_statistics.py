"""Statistics of samples and numbers that come one at a time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.stateful import State


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


class RunningStatistics:
    """Statistics of numbers that come one at a time; those that are NaN are left out and counted.

    The numbers are kept, as the history keeps those of other quantities: 8 bytes each.
    """

    def __init__(self, statistics: Sequence[Statistic] = STATISTICS) -> None:
        self.statistics = tuple(statistics)
        self.numbers = array("d")
        self.undefined = 0
        self.reason = ""

    def add(self, value: float) -> None:
        """Add a number."""
        if math.isnan(value):
            self.undefined += 1
            self.reason = value.reason if isinstance(value, Undefined) else self.reason
        else:
            self.numbers.append(value)

    def state_dict(self) -> State:
        """The numbers so far."""
        return {"numbers": [*self.numbers], "undefined": self.undefined, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.numbers = array("d", state["numbers"])
        self.undefined, self.reason = state["undefined"], state["reason"]

    def record(self) -> dict[str, float]:
        """The statistics by name, and the ``"count"`` of the numbers.

        ``"undefined"`` is the count of those that are NaN, if there are any.
        """
        counts = {"count": len(self.numbers)}
        if self.undefined:
            counts["undefined"] = self.undefined
        if not self.numbers:
            why = "all numbers were NaN" if self.undefined else "there was no number"
            nothing = Undefined(self.reason or why)
            return {**dict.fromkeys(self.statistics, nothing), **counts}
        found = _statistics(np.sort(np.array(self.numbers)))
        infinite = not np.isfinite(self.numbers).all()
        return {**{name: _explained(found[name], infinite) for name in self.statistics}, **counts}


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
