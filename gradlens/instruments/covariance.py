"""Spectrum and ranks of the covariance of individual gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history import History
from gradlens.instruments.drawing import Artists, curves, readout, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide
from gradlens.instruments.series import Line, Records, entry, keys, line, ordered, reason
from gradlens.instruments.style import BLUE, INK, ORANGE, title

MOST = 10


class CovarianceSpectrumInstrument(Instrument):
    """Largest eigenvalues of the gradient covariance, and its trace."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Gradient covariance"
    together: ClassVar[bool] = False

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        trace = field_line(records, "trace")
        latest, alarm = readout(trace)
        title(ax, self._heading(history), f"trace {latest}" if latest else "", alarm)
        return threads(ax, axis, eigenvalue_lines(records), "log", {"trace": (trace, INK)})


class CovarianceRanksInstrument(Instrument):
    """Effective and stable rank of the gradient covariance."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Covariance rank"
    together: ClassVar[bool] = False

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        lines = {
            "effective": field_line(records, "effective_rank"),
            "stable": field_line(records, "stable_rank"),
        }
        scale = log_if_wide([one.values for one in lines.values()])
        return curves(ax, axis, lines, [BLUE, ORANGE], scale)


def field_line(records: Records, name: str) -> Line:
    """One number of each record; a record that is no dict is a NaN with its reason."""
    found = ordered(records)
    return line({step: v.get(name) if isinstance(v, Mapping) else v for step, v in found.items()})


def eigenvalue_lines(records: Records, most: int = MOST) -> dict[str, Line]:
    """The largest eigenvalues as lines ``λ1``, ``λ2``, ...; NaN where a record has fewer.

    An eigenvalue below the rounding error of the largest one is a NaN: it is noise, and a
    logarithmic axis would show little else.
    """
    found = ordered(records)
    steps = np.array(list(found), dtype=np.float64)
    rows = [_row(value, most) for value in found.values()]
    table = np.array(rows).reshape(len(rows), most)
    columns = [Line(steps, column, reason(found.values())) for column in table.T]
    return {f"λ{n}": one for n, one in enumerate(columns, start=1) if one.finite.any()}


def _row(value: Any, most: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    row = np.full(most, np.nan)
    found = value.get("eigenvalues") if isinstance(value, Mapping) else None
    if isinstance(found, (np.ndarray, list)) and len(found):
        top = np.asarray(found, dtype=np.float64)[:most]
        row[: top.size] = np.where(top > 1e-6 * np.nanmax(np.abs(top), initial=0.0), top, np.nan)
    return row


def layer_lines(records: Records, name: str) -> dict[str, Line]:
    """One number of each layer as lines by layer."""
    layers = entry(records, "layers")
    return {layer: field_line(entry(layers, layer), name) for layer in keys(layers)}
