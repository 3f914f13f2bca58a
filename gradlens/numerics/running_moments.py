"""Mean, standard deviation and extremes of a stream of numbers, in constant memory."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        return self.merge(RunningMoments(1, value, 0.0, value, value))

    def merge(self, other: RunningMoments) -> RunningMoments:
        """The moments of the numbers of both (Chan et al., 1979)."""
        count = self.count + other.count
        if not count:
            return self
        low, high = min(self.low, other.low), max(self.high, other.high)
        if math.isinf(low) or math.isinf(high):
            return RunningMoments(count, low + high, math.nan, low, high)
        share = other.count / count
        apart = other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + share * apart,
            self.squares + other.squares + self.count * share * apart * apart,
            low,
            high,
        )
