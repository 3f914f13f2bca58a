"""Distribution of all eigenvalues of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradlens.history.history import History
from gradlens.history.lines import Floats, line
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Artists, Curve, Drawn, Lines
from gradlens.instruments.scales import NumberLabels, StepAxis, fit, step_label
from gradlens.instruments.style import BLUE, FAINT, MUTED, TICK_SIZE, Entry, key, tint

FLOOR = 1e-4
"""Smallest density that is shown, as a fraction of the largest; estimates below are inaccurate."""

Density = tuple[int, dict[str, Floats]]


class SpectralDensityInstrument(Instrument):
    """Density of the Hessian's eigenvalues at the latest step, with its error, and the first."""

    kinds: ClassVar[tuple[str, ...]] = ("SpectralDensity",)
    title: ClassVar[str] = "Hessian spectral density"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines | Drawn:
        records = history[self.names[0]]
        found = densities(records)
        return Drawn(partial(_draw, found=found)) if found else Lines((Curve("", line(records)),))


def _draw(ax: Axes, axis: StepAxis, found: Sequence[Density]) -> Artists:
    floor = FLOOR * float(found[-1][1]["density"].max())
    artists = _latest(ax, found[-1][1], floor)
    entries = [Entry(f"step {step_label(found[-1][0])}", BLUE)]
    if len(found) > 1:
        artists["first"] = _outline(ax, found[0][1], floor)
        entries.append(Entry(f"step {step_label(found[0][0])}", FAINT, "thin"))
    _axes(ax, [found[0][1], found[-1][1]], floor)
    entries.append(Entry("error", tint(BLUE, 0.2), "box"))
    shown = key(ax, entries)
    return artists | ({"key": shown} if shown else {})


def densities(records: Series) -> list[Density]:
    """The first and the last record that can be drawn, or the only one."""
    found = [(step, value) for step, value in records.items() if _usable(value)]
    chosen = [found[0], found[-1]] if len(found) > 1 else found
    names = ("grid", "density", "low", "high")
    return [(step, {n: np.asarray(v[n], dtype=np.float64) for n in names}) for step, v in chosen]


def _usable(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"grid", "density", "low", "high"} <= {*value}:
        return False
    density = np.asarray(value["density"], dtype=np.float64)
    return bool(density.size and np.isfinite(density).all() and density.max() > 0)


def _latest(ax: Axes, one: Mapping[str, Floats], floor: float) -> Artists:
    low, high = (np.maximum(one[name], floor / 10) for name in ("low", "high"))
    between = ax.fill_between(one["grid"], low, high, color=tint(BLUE, 0.2), lw=0, zorder=1.5)
    density = np.maximum(one["density"], floor / 10)
    (front,) = ax.plot(one["grid"], density, color=BLUE, linewidth=1.4, zorder=4)
    return {"band": between, "density": front}


def _outline(ax: Axes, one: Mapping[str, Floats], floor: float) -> Any:
    density = np.maximum(one["density"], floor / 10)
    (behind,) = ax.plot(one["grid"], density, color=FAINT, linewidth=1.0, zorder=3)
    return behind


def _axes(ax: Axes, shown: list[dict[str, Floats]], floor: float) -> None:
    tops = [one["density"].max() for one in shown]
    fit(ax, [np.array([floor, *tops, shown[-1]["high"].max()])], "log")
    ax.set_ylim(bottom=floor)
    grids = [one["grid"][one["density"] > floor] for one in shown]
    grid = np.concatenate(grids)
    pad = 0.04 * float(grid.max() - grid.min()) or 0.5
    ax.set_xlim(float(grid.min()) - pad, float(grid.max()) + pad)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(NumberLabels())
    ax.set_ylabel("density", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
    ax.set_xlabel("eigenvalue", loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
