"""Axis ranges, scales and ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedLocator,
    Formatter,
    FuncFormatter,
    Locator,
    MaxNLocator,
    NullLocator,
)

from gradlens.history.lines import Floats
from gradlens.instruments.style import MUTED, TICK_SIZE

Scale = Literal["linear", "log", "symlog"]


@dataclass(frozen=True)
class StepAxis:
    """The range of steps that all panels of a figure share, and its scale.

    A logarithmic axis is linear between the steps 0 and 1, so that step 0 has a place.
    """

    low: float
    high: float
    log: bool = False

    def warp(self, steps: Floats) -> Floats:
        """Places on the axis, up to shift and scale."""
        return np.log10(1 + np.maximum(steps, 0)) if self.log else steps

    def unwarp(self, places: Floats) -> Floats:
        """Steps, which needn't be whole, at places on the axis."""
        return 10.0**places - 1 if self.log else places

    @property
    def ends(self) -> tuple[float, float]:
        """The range with margins."""
        if self.high <= self.low:
            return (0, 2 * self.high + 1) if self.log else (self.low - 1, self.high + 1)
        if self.log:
            return max(0.0, self.low * 0.9), self.high * 1.05
        pad = 0.015 * (self.high - self.low)
        return self.low - pad, self.high + pad

    def apply(self, ax: Axes) -> None:
        """Give an axis this range."""
        if self.log:
            ax.set_xscale("symlog", linthresh=1, linscale=0.4)
            ax.xaxis.set_major_locator(Ticks(log_step_ticks))
        else:
            ax.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, steps=[1, 2, 5, 10]))
        ax.set_xlim(self.ends)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(StepLabels())
        ax.set_xlabel("step", loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1)


def log_if_wide(values: Sequence[Floats], ratio: float = 30) -> Scale:
    """Logarithmic for positive values with a maximum over ``ratio`` times the minimum."""
    positive = _finite(values)
    if not positive.size or positive.min() <= 0:
        return "linear"
    return "log" if positive.max() > ratio * positive.min() else "linear"


def log_if_far(values: Sequence[Floats], ratio: float = 30) -> Scale:
    """Logarithmic for values of either sign with a largest size over ``ratio`` times the median."""
    # The median and not the smallest size, because noise may bring single values close to zero.
    sizes = np.abs(_finite(values))
    sizes = sizes[sizes > 0]
    return "log" if sizes.size and sizes.max() > ratio * np.median(sizes) else "linear"


def value_scale(wish: Scale, values: Sequence[Floats]) -> Scale:
    """The scale for lines of a quantity whose view has the scale ``wish``."""
    if wish == "log":
        return "log"
    return log_if_far(values) if wish == "symlog" else log_if_wide(values)


def without_spikes(values: Floats, log: bool = False) -> Floats:
    """The finite values, clipped to half an interquantile range beyond the 5 % and 95 % quantiles.

    With ``log``, logarithms of the positive values are clipped. For the range of an axis on which
    single values may be out of range.
    """
    found = _finite([values])
    found = np.log10(found[found > 0]) if log else found
    if found.size:
        low, high = np.quantile(found, (0.05, 0.95))
        found = np.clip(found, low - 0.5 * (high - low), high + 0.5 * (high - low))
    return np.asarray(10.0**found if log else found, dtype=np.float64)


def within_reach(ends: Floats, middle: Floats, log: bool = False) -> Floats:
    """The ends of intervals, clipped to once the range of the middle above it and below it.

    With ``log``, the range is that of the logarithms of positive values. For the range of an axis
    on which intervals may end outside, so that they leave the middle a third of it.
    """
    found, ends = _finite([middle]), _finite([ends])
    if log:
        found, ends = np.log10(found[found > 0]), np.log10(ends[ends > 0])
    if found.size:
        low, high = found.min(), found.max()
        reach = max(high - low, 0.3 if log else 0.3 * abs(high))
        ends = np.clip(ends, low - reach, high + reach)
    return np.asarray(10.0**ends if log else ends, dtype=np.float64)


def padded(low: float, high: float, log: bool = False) -> tuple[float, float]:
    """The range of an axis for values from ``low`` to ``high``; a page has the same rule."""
    if log:
        first, last = math.log10(low), math.log10(high)
        pad = 0.06 * (last - first) if last - first > 0.02 else 0.2
        return 10.0 ** max(first - pad, -307.0), 10.0 ** min(last + pad, 307.0)
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if low == 0 < high else low - pad), high + pad


@dataclass(frozen=True)
class Ruler:
    """An axis as data: its label, its range, and its scale.

    It is linear or logarithmic; if it is ``linear`` up to that size, it is logarithmic on both
    sides of zero. It has labels at round numbers, or else at the ``ticks`` alone; those of
    ``shares`` are percents.
    """

    label: str
    limits: tuple[float, float]
    log: bool = False
    ticks: tuple[float, ...] | None = None
    linear: float = 0.0
    shares: bool = False

    @property
    def scale(self) -> Scale:
        """The scale by the name that matplotlib has for it."""
        return "symlog" if self.linear else "log" if self.log else "linear"

    def locator(self, most: int) -> Locator:
        """About ``most`` ticks."""
        if self.ticks is not None:
            return FixedLocator(self.ticks)
        return round_ticks(most, self.log, self.linear)

    def apply(self, ax: Axes, across: bool = False, most: int = 5) -> None:
        """Give an axis of matplotlib this range, scale, and about ``most`` labels."""
        options = {"linthresh": self.linear, "linscale": 0.5} if self.linear else {}
        (ax.set_xscale if across else ax.set_yscale)(self.scale, **options)
        (ax.set_xlim if across else ax.set_ylim)(self.limits)
        axis = ax.xaxis if across else ax.yaxis
        axis.set_major_locator(self.locator(most))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(value_labels(self.shares))


def round_ticks(most: int, log: bool = False, linear: float = 0.0) -> Locator:
    """About ``most`` ticks at round numbers on an axis of this scale."""
    if linear:
        return Ticks(partial(symlog_ticks, linear=linear))
    if log:
        return Ticks(partial(log_ticks, most=most))
    return MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])


SMALLEST = 1e-4
"""Share of the largest size below which an axis that is logarithmic on both sides is linear."""


def ruler(values: Sequence[Floats], wish: Scale) -> Ruler:
    """The axis for the finite ones of some values.

    A logarithmic axis is one on both sides of zero if there are values on both sides, or zeros.
    """
    found = _finite(values)
    scale = allowed(found, wish)
    low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
    if scale != "symlog":
        return Ruler("", padded(low, high, scale == "log"), scale == "log")
    sizes = np.abs(found[found != 0])
    linear = 10.0 ** math.floor(math.log10(max(sizes.min(), sizes.max() * SMALLEST)))
    low, high = 1.8 * min(0.0, low) - 0.1 * linear, 1.8 * max(0.0, high) + 0.1 * linear
    return Ruler("", (low, high), linear=linear)


def fit(ax: Axes, values: Sequence[Floats], wish: Scale, ticks: int = 5) -> Scale:
    """Set the range and scale of the value axis; returns the scale that the values allow."""
    found = ruler(values, wish)
    found.apply(ax, most=ticks)
    return found.scale


def allowed(found: Floats, wish: Scale) -> Scale:
    """The scale ``wish`` if all finite values ``found`` can be shown on it, or the nearest one."""
    if wish == "linear" or not np.any(found):
        return "linear"
    if wish == "log" and found.min() > 0:
        return "log"
    return "symlog"


def _finite(values: Sequence[Floats]) -> Floats:
    joined = np.concatenate([np.ravel(array) for array in values]) if values else np.array([])
    return joined[np.isfinite(joined)]


class Ticks(Locator):
    """Ticks that depend on the range of the axis alone, by a function of its ends."""

    def __init__(self, find: Callable[[float, float], list[float]]) -> None:
        self._find = find

    def __call__(self) -> list[float]:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        return self._find(*sorted((vmin, vmax)))


def log_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers on a logarithmic axis, ``most`` of them or a few more.

    There are several also where it spans less than a decade.
    """
    if low <= 0:
        return []
    decades = math.log10(high) - math.log10(low)
    exponents = np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = max(1, math.ceil(decades / most))
    options = [
        (1.9, 10.0 ** exponents[exponents % stride == 0]),
        (1.9, 10.0**exponents),
        (1.2, np.ravel(np.outer(10.0**exponents, (1, 3)))),
        (0.5, np.ravel(np.outer(10.0**exponents, (1, 2, 5)))),
        (0.0, np.asarray(round_ticks(most).tick_values(low, high))),
    ]
    for least, ticks in options:
        found = ticks[(low * 0.999 <= ticks) & (ticks <= high * 1.001)]
        # With a single tick, the scale could not be read.
        if decades >= least and found.size > 1:
            break
    return [float(tick) for tick in found]


def symlog_ticks(low: float, high: float, linear: float) -> list[float]:
    """Zero, and at most two powers of ten on each side that are not too close to it."""
    first = round(math.log10(linear))
    last = math.floor(math.log10(max(-low, high, linear)))
    stride = max(1, math.ceil((last - first) / 2))
    powers = [10.0**n for n in range(last, max(first, last - 2 * stride), -stride)]
    sizes = powers or [linear]
    ticks = [*(-size for size in sizes), 0.0, *reversed(sizes)]
    return [tick for tick in ticks if low <= tick <= high]


def log_step_ticks(low: float, high: float) -> list[float]:
    """Zero and powers of ten; 1, 2 and 5 times these where the range is short."""
    low, high = max(low, 0.0), max(high, 1.0)
    ticks = {0.0, *map(round, log_ticks(max(low, 1.0), high, 5) if high > 1 else [1.0])}
    return sorted(float(tick) for tick in ticks if low <= tick <= high)


def value_labels(shares: bool) -> Formatter:
    """What formats the labels of a value axis, where ``shares`` are percents."""
    return FuncFormatter(percent_label) if shares else NumberLabels()


class NumberLabels(Formatter):
    """Short numbers without an offset, with as many digits as make them different."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return number_label(x)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        sizes = [abs(value) for value in values if value]
        powers = np.log10(sizes)
        far = bool(sizes) and (min(sizes) < 0.9e-3 or max(sizes) > 1.1e4)
        if far and np.ptp(powers) > 0.95 and np.abs(powers - powers.round()).max() < 1e-6:
            # In the font of the other labels, and not in that of formulas.
            texts = (f"10^{{{round(math.log10(abs(v)))}}}" if v else "0" for v in values)
            signed = zip(("-" if value < 0 else "" for value in values), texts, strict=True)
            return [f"$\\mathdefault{{{sign}{text}}}$" for sign, text in signed]
        for digits in range(3, 9):
            labels = [number_label(value, digits) for value in values]
            if len(set(labels)) == len(labels):
                break
        return labels


def percent_label(share: float, pos: int | None = None) -> str:
    """A fraction as a percent, 0 without a unit."""
    return f"{number_label(100 * share)} %" if share else "0"


class StepLabels(Formatter):
    """Whole steps, in thousands from ten thousand on."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return step_label(x)


def step_label(step: float) -> str:
    """The shortest exact label of a step; empty for negative numbers."""
    if step < 0:
        return ""
    if step >= 1e6 and step % 1e4 == 0:
        return f"{step / 1e6:g}M"
    if step >= 1e4 and step % 100 == 0:
        return f"{step / 1e3:g}k"
    return f"{step:,.0f}"


def number_label(value: float, digits: int = 3) -> str:
    """A number in few characters: 0.25, 12.5, 2.5e-5, 3e6."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}".replace("inf", "∞")
    value = 0.0 if abs(value) < 1e-300 else value
    size = abs(value)
    if value == 0 or (size >= 1e-3 * (1 - 1e-9) and round(size) < 1e5):
        return f"{value:.{max(digits, len(str(round(size))))}g}".replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}".replace("-", "−")
