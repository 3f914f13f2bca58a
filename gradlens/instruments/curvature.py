"""Instruments of eigenvalues: those of the curvature and of covariances, and of their traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradlens.history.histograms import percent
from gradlens.history.history import History
from gradlens.history.lines import Line, field_line, line, rows
from gradlens.history.series import Series
from gradlens.history.setup import threshold_at, threshold_formula
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import COVARIANCES
from gradlens.instruments.panel import Curve, Grid, Lines, Shape, Shapes, any_finite, readout
from gradlens.instruments.scales import (
    Ruler,
    log_if_wide,
    number_label,
    padded,
    step_label,
)
from gradlens.instruments.series import in_force, ordered
from gradlens.instruments.style import BLUE, FAINT, INK, MUTED, ORANGE, Entry, tint

FAR = 5.0
"""How many times the largest eigenvalue a threshold may be to be drawn; others are only named."""


class HessMaxEVInstrument(Instrument):
    """Largest eigenvalue of the Hessian, which may be negative.

    If the run's optimizer is SGD, there is a line at the threshold of its learning rate and
    momentum, above which it is unstable. Other optimizers have none for this eigenvalue.
    """

    kinds = ("HessMaxEV",)

    def content(self, history: History) -> Lines:
        found = line(history[self.names[0]])
        formula, threshold = _threshold(history, found)
        largest = np.abs(found.values[found.finite]).max(initial=0)
        known = threshold.values[threshold.finite]
        near = bool(known.size) and bool(known.min() <= FAR * largest)
        curves = [Curve("λ₁", found), *([Curve(formula, threshold, MUTED)] if near else [])]
        far = f" · {formula} = {number_label(known[-1])}, far above" if known.size else ""
        return Lines(
            tuple(curves),
            latest=readout(found),
            words=f"λ₁ of the mini-batch{far}",
        )


def _threshold(history: History, found: Line) -> tuple[str, Line]:
    """The formula of the threshold, and the threshold; NaN where none is known."""
    # The rates that the optimizer had, or else those that the training loop has logged.
    setups, facts = history.setups, history.facts["steps"]
    if "lr" in facts.entries:
        last = np.searchsorted(facts.steps, found.steps, side="right") - 1
        values = facts.column("lr").numbers()[last[last >= 0]]
        rates = Line(found.steps[last >= 0], values)
    else:
        rates = in_force("learning_rate", found.steps, history)
    began = np.array([*setups], dtype=np.float64)
    places = np.searchsorted(began, rates.steps, side="right") - 1
    every = [*setups.values()]
    thresholds = [
        threshold_at(every[max(place, 0)], rate) if every else np.nan
        for place, rate in zip(places, rates.values, strict=True)
    ]
    formula = threshold_formula(every[-1]) if every and every[-1].groups else ""
    return formula, Line(rates.steps, np.array(thresholds, dtype=np.float64))


class StabilityInstrument(Instrument):
    """Sharpness and the threshold beyond which a quadratic loss diverges, tinted above it."""

    kinds = ("Stability",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        sharpness, threshold = (field_line(records, n) for n in ("sharpness", "threshold"))
        return Lines(
            (Curve("sharpness", sharpness), Curve("threshold", threshold, MUTED, width=1.0)),
            scale="log",
            latest=readout(field_line(records, "ratio"), "ratio"),
            danger=threshold,
        )


class CriticalSharpnessInstrument(StabilityInstrument):
    """2/η_c, and 2/η, beyond which a step raises the loss of its own batch, tinted above it.

    Where the optimizer has several rates, it is the ratio of both, whose threshold is 1.
    """

    kinds = ("CriticalSharpness",)

    def content(self, history: History) -> Lines:
        shown, ratio = super().content(history), field_line(history[self.names[0]], "ratio")
        if any_finite([shown.curves[0].line]) or not any_finite([ratio]):
            return shown
        threshold = Line(ratio.steps, np.ones_like(ratio.values))
        curves = (Curve("ratio", ratio), Curve("threshold", threshold, MUTED, width=1.0))
        return replace(shown, curves=curves, danger=threshold)


class HessEigenvaluesInstrument(Instrument):
    """Eigenvalues of the curvature, and at which share of the steps they have not converged."""

    kinds = ("HessEigenvalues",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        layers = eigenvalue_lines(records)
        if not layers:
            return Lines(layers={"λ": line(records)})
        failed = [step for step, good in records.having("converged").items() if not good]
        first, alarm = readout(layers["λ1"], "λ1")
        share = f"{percent(len(failed) / len(records))} unconverged"
        return Lines(layers=layers, scale="log", latest=(share if failed else first, alarm))


def eigenvalue_lines(
    records: Series, most: int | None = None, floor: float = 0.0
) -> dict[str, Line]:
    """The largest ``most`` eigenvalues as lines ``λ1``, ``λ2``, ...; NaN where there are fewer.

    One whose share of the largest is at most ``floor``, if that isn't 0, is a NaN: below its
    rounding error an eigenvalue is noise, and would take up most of a logarithmic axis.
    """
    table = rows([*records.column("eigenvalues").values()], most)
    why = records.reason
    if floor:
        why = why or "it is below the rounding error of the largest eigenvalue"
        largest = np.nanmax(np.abs(table), axis=1, initial=0.0, keepdims=True)
        table = np.where(table > floor * largest, table, np.nan)
    columns = enumerate(table.T, start=1)
    found = {f"λ{n}": Line(records.steps, one, why) for n, one in columns}
    return {name: one for name, one in found.items() if one.finite.any() or not floor}


class HessTraceInstrument(Instrument):
    """Trace of the Hessian with the band of its estimation error, unless it is exact."""

    kinds = ("HessTrace",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        trace, low, high = (field_line(records, name) for name in ("trace", "low", "high"))
        estimated = bool((high.values > low.values).any())
        words = [*_methods(records), *(["band: error of the estimate"] if estimated else [])]
        return Lines(
            (Curve("trace", trace, spreads=((low, high),) if estimated else ()),),
            words=" · ".join(words),
            spiky=True,
        )


def _methods(records: Series) -> list[str]:
    """The methods that computed the traces; each change with its first step."""
    found = {s: v for s, v in records.having("method").items() if isinstance(v, str)}
    words, before = [], ""
    for step, method in found.items():
        if method != before:
            words.append(f"{method} from step {step_label(step)}" if before else method)
        before = method
    return [", ".join(words)] if words else []


FLOOR = 1e-4
"""Smallest density that is shown, as a fraction of the largest; estimates below are inaccurate."""
ARRAYS = ("grid", "density", "low", "high")


class SpectralDensityInstrument(Instrument):
    """Density of the Hessian's eigenvalues at the latest step, with its error, and the first."""

    kinds = ("SpectralDensity",)

    def content(self, history: History) -> Lines | Shapes:
        records = history[self.names[0]]
        steps = [step for step, value in records.items() if _usable(value)]
        if not steps:
            return Lines((Curve("", line(records)),))
        before = steps[:-1][:1]
        first, last = (
            {name: np.asarray(records[step][name], dtype=np.float64) for name in ARRAYS}
            for step in (steps[0], steps[-1])
        )
        floor = FLOOR * float(last["density"].max())
        # What is below the axis ends there, because zero isn't on a logarithmic one.
        shown = {name: np.maximum(last[name], floor / 10) for name in ARRAYS[1:]}
        band = Shape("band", last["grid"], shown["high"], tint(BLUE, 0.2), "area", shown["low"])
        behind = [
            Shape("first", first["grid"], np.maximum(first["density"], floor / 10), FAINT)
            for _ in before
        ]
        front = Shape("density", last["grid"], shown["density"], BLUE, width=1.4)
        grid = np.concatenate([one["grid"][one["density"] > floor] for one in (first, last)])
        pad = 0.04 * float(grid.max() - grid.min()) or 0.5
        top = max(float(one.max()) for one in (first["density"], last["density"], last["high"]))
        return Shapes(
            (band, *behind, front),
            Ruler("eigenvalue", (float(grid.min()) - pad, float(grid.max()) + pad)),
            Ruler("density", (floor, padded(floor, top, log=True)[1]), log=True),
            (
                Entry(f"step {step_label(steps[-1])}", BLUE),
                *(Entry(f"step {step_label(step)}", FAINT, "thin") for step in before),
                Entry("error", tint(BLUE, 0.2), "box"),
            ),
        )


def _usable(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {*ARRAYS} <= {*value}:
        return False
    density = np.asarray(value["density"], dtype=np.float64)
    return bool(density.size and np.isfinite(density).all() and density.max() > 0)


# Of gradients and layers --------------------------------------------------------------------

MOST = 10
"""Largest number of eigenvalues of a covariance."""
ROUNDING = 1e-6
"""Share of the largest eigenvalue of a covariance that is its rounding error."""
NONE = "no eigenvalue is a number"
GAP = (30.0, 32.0)
"""Points between small panels, across and up."""


class CovarianceSpectrumInstrument(Instrument):
    """Largest eigenvalues of the gradient covariance, and its trace."""

    kinds = ("GradCovariance",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        trace = field_line(records, "trace")
        return Lines(
            (Curve("trace", trace, INK),),
            eigenvalue_lines(records, MOST, ROUNDING),
            latest=readout(trace, "trace"),
        )


class CovarianceRanksInstrument(Instrument):
    """Effective and stable rank of the gradient covariance."""

    kinds = ("GradCovariance",)
    title = "Covariance rank"
    label = "rank"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        curves = (
            Curve("effective", field_line(records, "effective_rank"), BLUE),
            Curve("stable", field_line(records, "stable_rank"), ORANGE),
        )
        return Lines(curves, scale=log_if_wide([one.line.values for one in curves]))


class LayerSpectraInstrument(Instrument):
    """The largest eigenvalues of the covariance of each layer over time, in small panels."""

    kinds = COVARIANCES
    aspect = "spectra"
    secondary = True
    part = "layers"

    def content(self, history: History) -> Grid:
        records = history[self.names[0]].having(self.part)
        layers = {name: records.column(name) for name in records.entries}
        found = {
            name: eigenvalue_lines(one, MOST, ROUNDING)
            for name, one in ordered(layers, history).items()
        }
        values = [one.values[one.finite] for lines in found.values() for one in lines.values()]
        joined = np.concatenate([*values, []])
        limits = padded(joined.min(), joined.max(), log=True) if joined.size else None
        parts = {
            name: Lines(layers=lines, scale="log", limits=limits, message=NONE * (not lines))
            for name, lines in found.items()
        }
        most = max((len(lines) for lines in found.values()), default=0)
        words = f"eigenvalues λ1 (dark) to λ{most} · all panels have one scale"
        return Grid(parts, words, 4, GAP)
