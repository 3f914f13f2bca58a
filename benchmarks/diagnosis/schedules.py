"""Factors of the learning rate, by step and number of steps."""

from __future__ import annotations

import math

WARM_UP = 0.15
"""Share of the steps in which the rate rises."""
SHORT_WARM_UP = 0.1
"""The same of ``warmed_up_linear`` (Devlin et al., 2019)."""


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


def linear(step: int, steps: int) -> float:
    """A straight line from 1 to 0."""
    return 1 - step / steps


def warmed_up_linear(step: int, steps: int) -> float:
    """A straight line up to 1, then one down to 0 (Devlin et al., 2019)."""
    first = SHORT_WARM_UP * steps
    return (step + 1) / (first + 1) if step < first else (steps - step) / (steps - first)


def in_steps(step: int, steps: int) -> float:
    """A tenth of the rate in the last third of the steps."""
    return 1.0 if 3 * step < 2 * steps else 0.1


def polynomial(step: int, steps: int) -> float:
    """The power 0.9 of the share of steps that are left (Chen et al., 2018)."""
    return (1 - step / steps) ** 0.9
