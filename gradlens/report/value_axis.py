"""The value axis of some lines: its scale, and its range where that isn't all values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gradlens.history.lines import Floats
from gradlens.instruments.panel import Lines
from gradlens.instruments.scales import Scale, SymlogTicks, allowed, padded, without_spikes

SMALLEST = 1e-4
"""Share of the largest size below which an axis that is logarithmic on both sides is linear."""


def scale(shown: Lines) -> Scale:
    """The scale that the values allow: "symlog" for logarithmic ones on both sides of zero."""
    found = known(shown)
    return allowed(found, shown.scale) if found.size else "linear"


def known(shown: Lines) -> Floats:
    """All finite values."""
    joined = np.concatenate([curve.line.values for curve in shown.all_curves])
    return joined[np.isfinite(joined)]


def is_on_both_sides(shown: Lines) -> bool:
    """Whether there are values below and above zero."""
    found = known(shown)
    return bool(found.size) and bool(found.min() < 0 < found.max())


def threshold(shown: Lines) -> float:
    """The size up to which a "symlog" axis is about linear; 0 for other axes."""
    if scale(shown) != "symlog":
        return 0.0
    sizes = np.abs(known(shown))
    sizes = sizes[sizes > 0]
    return 10.0 ** math.floor(math.log10(max(sizes.min(), sizes.max() * SMALLEST)))


def to_places(values: Floats, linear: float) -> NDArray[np.float32]:
    """Places of values on an axis that is about linear up to the size ``linear``."""
    known = np.where(np.isfinite(values), values, np.nan)
    places = np.sign(known) * np.log10(1 + np.abs(known) / linear)
    return np.asarray(places, dtype=np.float32)


def limits(shown: Lines) -> tuple[float, float]:
    """The range of the axis."""
    kind, linear = scale(shown), threshold(shown)
    if shown.limits is not None and kind == "linear":
        return shown.limits
    values = [curve.line.values for curve in shown.all_curves]
    if shown.spiky:
        values = [without_spikes(each, kind == "log") for each in values]
    found = np.concatenate([*values, shown.room])
    found = found[np.isfinite(found)]
    places = to_places(found, linear) if linear else found
    low, high = float(places.min()), float(places.max())
    return padded(low, high, kind == "log")


def ticks(shown: Lines) -> list[float]:
    """Places of the labels of a "symlog" axis."""
    found, linear = known(shown), threshold(shown)
    values = SymlogTicks(linear).tick_values(min(found.min(), 0.0), max(found.max(), 0.0))
    places: list[float] = to_places(np.array(values), linear).tolist()
    return places
