"""Mean and standard error of samples that come one at a time."""

from __future__ import annotations

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
