"""Numbers as a page has them: few, in little memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradlens.history.lines import Floats
from gradlens.instruments.scales import StepAxis

EXACT = 2.0**24
"""Whole numbers up to it are exact as float32."""


def compact_steps(steps: Floats) -> NDArray[np.floating]:
    """Steps as float32 where that is exact, and otherwise as float64."""
    exact = not steps.size or ((np.abs(steps) <= EXACT).all() and (steps == np.rint(steps)).all())
    return steps.astype(np.float32) if exact else steps


def compact_values(values: Floats) -> NDArray[np.floating]:
    """Numbers as float32, which has seven digits, unless they are out of its range; ∞ is a NaN."""
    known = np.where(np.isfinite(values), values, np.nan)
    sizes = np.abs(known[np.isfinite(known) & (known != 0)])
    limits = np.finfo(np.float32)
    if sizes.size and (sizes.max() > limits.max or sizes.min() < limits.tiny):
        return known
    return known.astype(np.float32)


def edges(steps: Floats, axis: StepAxis) -> Floats:
    """Ends ``[K + 1]`` of the pieces of a step axis that belong to each step, as places on it."""
    places = axis.warp(steps)
    if places.size < 2:
        return np.array([places[0] - 0.5, places[0] + 0.5])
    inner = (places[1:] + places[:-1]) / 2
    return np.concatenate(([2 * places[0] - inner[0]], inner, [2 * places[-1] - inner[-1]]))


def pixels(ends: Floats, most: int) -> NDArray[np.int64]:
    """For at most ``most`` equal parts of an axis, which of the pieces between ``ends`` is there.

    As few as show each piece, if these are equally wide.
    """
    widths = np.diff(ends)
    equal = np.allclose(widths, widths[0], rtol=1e-6)
    count = widths.size if equal and widths.size <= most else most
    middles = ends[0] + (np.arange(count) + 0.5) / count * (ends[-1] - ends[0])
    return np.clip(np.searchsorted(ends, middles, side="right") - 1, 0, widths.size - 1)
