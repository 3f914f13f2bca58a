"""Statistics of numbers that come one at a time, in constant memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.quantile_sketch import QuantileSketch
from gradlens.stateful import State, load_state, state_of


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


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean, sum of squared deviations, minimum and maximum of some numbers.

    If infinities are among them, the sum of squared deviations is NaN, and the mean is the
    infinity, or NaN if there are infinities of both signs.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def std(self) -> float:
        """Standard deviation of the population; NaN if there is no number."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def add(self, value: float) -> RunningMoments:
        """The moments with one number more (Welford, 1962)."""
        count, low, high = self.count + 1, min(self.low, value), max(self.high, value)
        if math.isinf(low) or math.isinf(high):
            return RunningMoments(count, low + high, math.nan, low, high)
        apart = value - self.mean
        squares = self.squares + self.count / count * apart * apart
        return RunningMoments(count, self.mean + apart / count, squares, low, high)


Statistic: TypeAlias = Literal["mean", "std", "min", "q1", "median", "q3", "max", "iqr"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
_QUANTILES: Mapping[str, float] = {"q1": 0.25, "median": 0.5, "q3": 0.75}

INFINITE = "there are infinities among the numbers"
TOO_LARGE = "the numbers, or their squares, are too large to be added up"


class RunningStatistics:
    """Statistics of a stream of numbers; those that are NaN are left out and counted."""

    def __init__(self, statistics: Sequence[Statistic] = STATISTICS) -> None:
        self.statistics = tuple(statistics)
        self.moments = RunningMoments()
        self.undefined = 0
        self.reason = ""
        needs_order = {*self.statistics} & {*_QUANTILES, "iqr"}
        self._sketch = QuantileSketch() if needs_order else None

    def add(self, value: float) -> None:
        """Add a number."""
        if math.isnan(value):
            self.undefined += 1
            self.reason = value.reason if isinstance(value, Undefined) else self.reason
            return
        self.moments = self.moments.add(value)
        if self._sketch is not None:
            self._sketch.add(value)

    def state_dict(self) -> State:
        """The statistics so far."""
        return {
            "moments": asdict(self.moments),
            "undefined": self.undefined,
            "reason": self.reason,
            "sketch": state_of(self._sketch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.moments = RunningMoments(**state["moments"])
        self.undefined, self.reason = state["undefined"], state["reason"]
        load_state(self._sketch, state["sketch"])

    def record(self) -> dict[str, float]:
        """The statistics by name, and the ``"count"`` of the numbers.

        ``"undefined"`` is the count of those that are NaN, if there are any.
        """
        counts = {"count": self.moments.count}
        if self.undefined:
            counts["undefined"] = self.undefined
        if not self.moments.count:
            why = "all numbers were NaN" if self.undefined else "there was no number"
            nothing = Undefined(self.reason or why)
            return {**dict.fromkeys(self.statistics, nothing), **counts}
        return {
            **{name: self._explained(self._statistic(name)) for name in self.statistics},
            **counts,
        }

    def _explained(self, value: float) -> float:
        """The value; a NaN with the reason if it overflows, or is NaN because of infinities."""
        infinite = math.isinf(self.moments.low) or math.isinf(self.moments.high)
        if math.isnan(value):
            return Undefined(INFINITE if infinite else TOO_LARGE)
        return Undefined(TOO_LARGE) if math.isinf(value) and not infinite else value

    def _statistic(self, name: Statistic) -> float:
        if name in _QUANTILES:
            return self._quantile(_QUANTILES[name])
        if name == "iqr":
            return self._quantile(0.75) - self._quantile(0.25)
        moments = self.moments
        return {"mean": moments.mean, "std": moments.std, "min": moments.low,
                "max": moments.high}[name]  # fmt: skip

    def _quantile(self, share: float) -> float:
        assert self._sketch is not None  # made in __init__ if the statistics need it
        return self._sketch.quantile(share)
