"""Mean, standard error and skewness of samples that come one at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RunningMean:
    """Mean of independent samples of any one shape, without keeping them (Welford, 1962).

    Equal samples have a standard error of exactly zero.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())
        self._cubes = torch.zeros(())

    @classmethod
    def of(cls, samples: Tensor) -> RunningMean:
        """The mean of all samples of a tensor, which are along its first axis."""
        found = cls()
        found.samples = len(samples)
        found.mean = samples.mean(0)
        deviations = samples - found.mean
        found._squares, found._cubes = deviations.square().sum(0), (deviations**3).sum(0)
        return found

    def add(self, sample: Tensor) -> None:
        """Add one sample, of the same shape as those before."""
        if self.samples == 0:
            self.mean = torch.zeros_like(sample)
            self._squares, self._cubes = torch.zeros_like(sample), torch.zeros_like(sample)
        self.samples += 1
        n = self.samples
        deviation = sample - self.mean
        step = deviation / n
        # Central moments of third order from those before (Terriberry, 2007).
        self._cubes += step**2 * deviation * (n - 1) * (n - 2) - 3 * step * self._squares
        self._squares += deviation * step * (n - 1)
        self.mean = self.mean + step

    def standard_error(self) -> Tensor:
        """Standard error of the mean, of a sample's shape; NaN for fewer than two samples."""
        if self.samples < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.samples * (self.samples - 1))).sqrt()

    def skewness(self) -> Tensor:
        """Skewness of the samples, of a sample's shape, corrected for their number.

        Zero for fewer than three samples, and for equal ones.
        """
        n = self.samples
        if n < 3:
            return torch.zeros_like(self.mean)
        raw = math.sqrt(n) * self._cubes / self._squares**1.5
        corrected = raw * (math.sqrt(n * (n - 1)) / (n - 2))
        return corrected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
