"""Factors of the learning rate, by step and number of steps, that ``development`` doesn't have."""

from __future__ import annotations

WARM_UP = 0.1
"""Share of the steps in which the rate rises."""


def linear(step: int, steps: int) -> float:
    """A straight line from 1 to 0."""
    return 1 - step / steps


def warmed_up_linear(step: int, steps: int) -> float:
    """A straight line up to 1, then one down to 0 (Devlin et al., 2019)."""
    first = WARM_UP * steps
    return (step + 1) / (first + 1) if step < first else (steps - step) / (steps - first)


def in_steps(step: int, steps: int) -> float:
    """A tenth of the rate in the last third of the steps."""
    return 1.0 if 3 * step < 2 * steps else 0.1


def polynomial(step: int, steps: int) -> float:
    """The power 0.9 of the share of steps that are left (Chen et al., 2018)."""
    return (1 - step / steps) ** 0.9
