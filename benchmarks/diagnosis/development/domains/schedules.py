"""Factors of the learning rate, by step and number of steps."""

from __future__ import annotations

import math

WARM_UP = 0.15
"""Share of the steps in which the rate rises."""


def cosine(step: int, steps: int) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017)."""
    return 0.5 + 0.5 * math.cos(math.pi * step / steps)


def warmed_up(step: int, steps: int) -> float:
    """A straight line up to 1, and 1 from there on."""
    return min(1.0, (step + 1) / (WARM_UP * steps))


def warmed_up_cosine(step: int, steps: int) -> float:
    """A straight line up to 1, then half a cosine."""
    first = WARM_UP * steps
    return (step + 1) / (first + 1) if step < first else cosine(int(step - first), steps)


def inverse_root(step: int, steps: int) -> float:
    """A straight line up to 1, then in proportion to 1/sqrt(step) (Vaswani et al., 2017)."""
    first = WARM_UP * steps
    return min((step + 1) / first, math.sqrt(first / (step + 1)))


def exponential(step: int, steps: int) -> float:
    """The same factor at each step, down to a tenth."""
    return 0.1 ** (step / steps)
