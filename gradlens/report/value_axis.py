"""The value axis of a card: its scale, and its range where that isn't all values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gradlens.history.lines import Floats
from gradlens.instruments.scales import Scale, SymlogTicks, allowed, without_spikes
from gradlens.report.cards import LinesCard

SMALLEST = 1e-4
"""Share of the largest size below which an axis that is logarithmic on both sides is linear."""


def scale(card: LinesCard) -> Scale:
    """The scale that the values allow: "symlog" for logarithmic ones on both sides of zero."""
    found = known(card)
    return allowed(found, card.lines.scale) if found.size else "linear"


def known(card: LinesCard) -> Floats:
    """All finite values of a card."""
    joined = np.concatenate([curve.line.values for curve in card.curves])
    return joined[np.isfinite(joined)]


def is_on_both_sides(card: LinesCard) -> bool:
    """Whether there are values below and above zero."""
    found = known(card)
    return bool(found.size) and bool(found.min() < 0 < found.max())


def threshold(card: LinesCard) -> float:
    """The size up to which a "symlog" axis is about linear; 0 for other axes."""
    if scale(card) != "symlog":
        return 0.0
    sizes = np.abs(known(card))
    sizes = sizes[sizes > 0]
    return 10.0 ** math.floor(math.log10(max(sizes.min(), sizes.max() * SMALLEST)))


def to_places(values: Floats, linear: float) -> NDArray[np.float32]:
    """Places of values on an axis that is about linear up to the size ``linear``."""
    known = np.where(np.isfinite(values), values, np.nan)
    places = np.sign(known) * np.log10(1 + np.abs(known) / linear)
    return np.asarray(places, dtype=np.float32)


def limits(card: LinesCard) -> tuple[float, float]:
    """The range of the axis, with the margins of a figure's; the page has the same rule."""
    kind, linear = scale(card), threshold(card)
    if card.lines.limits is not None and kind == "linear":
        return card.lines.limits
    values = [curve.line.values for curve in card.curves]
    if card.lines.spiky:
        values = [without_spikes(each, kind == "log") for each in values]
    found = np.concatenate([*values, card.lines.room])
    found = found[np.isfinite(found)]
    places = to_places(found, linear) if linear else found
    low, high = float(places.min()), float(places.max())
    if kind == "log":
        first, last = math.log10(low), math.log10(high)
        pad = 0.06 * (last - first) if last - first > 0.02 else 0.2
        return 10.0 ** max(first - pad, -307.0), 10.0 ** min(last + pad, 307.0)
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if low == 0 < high else low - pad), high + pad


def ticks(card: LinesCard) -> list[float]:
    """Places of the labels of a "symlog" axis."""
    found, linear = known(card), threshold(card)
    values = SymlogTicks(linear).tick_values(min(found.min(), 0.0), max(found.max(), 0.0))
    places: list[float] = to_places(np.array(values), linear).tolist()
    return places
