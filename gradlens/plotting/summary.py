"""What there is to say of a run: what is wrong with it, and its latest values in a table."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradlens.diagnosis.diagnose import diagnose
from gradlens.history.coverage import CoverageTable
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import Floats, Line
from gradlens.history.records import LeftOutWarning, Source
from gradlens.history.scalars import Scalar
from gradlens.instruments.series import layout, row_lines


def extent(history: History) -> str:
    """The number of a run's steps, and the first and the last one."""
    steps = history.steps
    if len(steps) < 2:
        return f"one step, {steps[0]:,}" if steps else "no steps"
    return f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"


MOST = 5
"""So many findings are shown in a figure and in a summary."""


def findings_of(history: History) -> tuple[Finding, ...]:
    """What is wrong with a run, ordered by cause.

    If the run can't be diagnosed, nothing, with a ``LeftOutWarning``: the values of a run may be
    anything.
    """
    try:
        # Of numbers that are too large to be compared, nothing follows.
        with np.errstate(all="ignore"):
            return tuple(diagnose(history))
    except Exception as error:
        text = f"the run can't be diagnosed ({type(error).__name__}: {error})"
        warnings.warn(text, LeftOutWarning, stacklevel=2)
        return ()


def main_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The first of those that no other one explains; alarms come before notices."""
    return tuple(finding for finding in findings if not finding.explained_by)[:MOST]


def others(findings: Sequence[Finding], run: str = "RUN") -> str:
    """How many findings there are besides the main ones, and how to see them."""
    main = main_findings(findings)
    rest = [finding for finding in findings if finding not in main]
    if not rest:
        return ""
    follow = "that follows" if len(rest) == 1 else "that follow"
    word = follow if all(finding.explained_by for finding in rest) else "more"
    return f"and {len(rest)} {word}: gradlens diagnose {run}"


# The table ------------------------------------------------------------------------------------

RECENT = 0.2
"""Share of a series whose median is compared with that of the same share before it."""


@dataclass(frozen=True)
class Row:
    """What there is to say of one number per step.

    ``change`` is that of ``relative_change``. The extremes are those of the first steps that have
    them, and ``None`` if there is no number at all. ``steps`` counts the records and ``undefined``
    those without a number; ``reason`` says why the latest of these, at step ``undefined_step``, has
    none, where that is known.
    """

    scalar: Scalar
    last: float
    change: float
    min: float | None
    min_step: int | None
    max: float | None
    max_step: int | None
    steps: int
    undefined: int
    undefined_step: int | None
    reason: str


@dataclass(frozen=True, eq=False)
class Summary:
    """What there is to say of a run besides its history: its rows, and what is wrong with it.

    ``noise`` ranks layers or parameters, where their noise was recorded. ``dead_units`` are those
    of the latest step, where their indices were recorded.
    """

    history: History
    rows: tuple[Row, ...]
    noise: tuple[NoiseRanking, ...]
    findings: tuple[Finding, ...]
    dead_units: tuple[DeadUnits, ...]

    @property
    def others(self) -> dict[str, int]:
        """The series that no single numbers tell, with their numbers of records."""
        told, history = {row.scalar.series for row in self.rows}, self.history
        return {name: len(history[name]) for name in history.names if name not in told}

    @property
    def coverage(self) -> CoverageTable | None:
        """The latest; ``None`` if nothing was made of per-sample gradients."""
        found = self.history.latest("coverage")
        return None if found is None else CoverageTable(found, self.history.parameters)


def summarize(history: History) -> Summary:
    """The summary of a run, from its history alone."""
    rows = tuple(map(_row, history.scalars()))
    noise, found = noise_rankings(history), findings_of(history)
    return Summary(history, rows, noise, found, dead_units(history))


def relative_change(values: Floats) -> float:
    """Change of the median over the last fifth from that over the fifth before, per its size.

    NaN with fewer than two numbers, and if the two medians differ in sign or one is zero.
    """
    found = values[np.isfinite(values)]
    if found.size < 2:
        return math.nan
    count = max(1, round(RECENT * found.size))
    before, after = float(np.median(found[-2 * count : -count])), float(np.median(found[-count:]))
    if not before or not after or (before > 0) != (after > 0):
        return math.nan
    return after / abs(before) - math.copysign(1, before)


def _row(scalar: Scalar) -> Row:
    line = scalar.line
    missing = line.steps[np.isnan(line.values)]
    low, at_low = _extreme(line, np.nanargmin)
    high, at_high = _extreme(line, np.nanargmax)
    return Row(
        scalar,
        line.latest,
        relative_change(line.values),
        low,
        at_low,
        high,
        at_high,
        steps=line.steps.size,
        undefined=missing.size,
        undefined_step=int(missing[-1]) if missing.size else None,
        reason=line.reason,
    )


def _extreme(
    line: Line, place: Callable[[Floats], np.intp]
) -> tuple[float, int] | tuple[None, None]:
    """A value and the first step that has it."""
    if np.isnan(line.values).all():
        return None, None
    found = place(line.values)
    return float(line.values[found]), int(line.steps[found])


# Dead units ---------------------------------------------------------------------------------

KIND = "OutputActivation"


@dataclass(frozen=True)
class DeadUnits:
    """The indices of a layer's dead units, by the latest record of a series."""

    series: str
    step: int
    layer: str
    units: tuple[int, ...]


def dead_units(history: History) -> tuple[DeadUnits, ...]:
    """The layers with dead units, where ``OutputActivation(units=True)`` was tracked."""
    found = []
    for name in history.of_kind(KIND):
        step = max(history[name], default=0)
        record = history[name].get(step)
        layers = record.get("layers") if isinstance(record, Mapping) else None
        for layer, value in layers.items() if isinstance(layers, Mapping) else ():
            units = value.get("dead_units") if isinstance(value, Mapping) else None
            if isinstance(units, np.ndarray) and units.dtype.kind in "iu" and units.size:
                found.append(DeadUnits(name, step, layer, tuple(units.ravel().tolist())))
    return tuple(found)


# Noise --------------------------------------------------------------------------------------

LARGE_IS_NOISY: Mapping[str, bool] = {
    "NormTest": True,
    "InnerTest": True,
    "OrthoTest": True,
    "GradNoiseScale": True,
    "MeanGSNR": False,
}
"""Kinds of quantities that measure noise, and whether a larger value means more of it."""


@dataclass(frozen=True)
class RankedLayer:
    """A layer or parameter with its latest value, and the median of all that are numbers.

    ``reason`` says why the latest value that isn't a number has none. Both values are NaN if there
    is no number at all.
    """

    name: str
    last: float
    median: float
    reason: str = ""


@dataclass(frozen=True)
class NoiseRanking:
    """The layers or parameters (``noun``) of a series, by their medians, the noisiest first.

    Those without a number are at the end. ``label`` says what the numbers are.
    """

    series: str
    noun: str
    label: str
    large_is_noisy: bool
    layers: tuple[RankedLayer, ...]


def noise_rankings(history: History) -> tuple[NoiseRanking, ...]:
    """A ranking for each series that has the noise of layers or parameters."""
    found = (_ranking(name, source, history) for name, source in history.sources.items())
    return tuple(ranking for ranking in found if ranking is not None)


def _ranking(series: str, source: Source, history: History) -> NoiseRanking | None:
    kind = next((kind for kind in source.kinds if kind in LARGE_IS_NOISY), "")
    found = layout(history[series], history) if kind and series in history else None
    if found is None:
        return None
    rows = row_lines(history[series], found, history)
    norms = replace(found, field="squared_norm") if found.field == "value" else None
    squares = {} if norms is None else row_lines(history[series], norms, history)
    layers = []
    for name, one in rows.items():
        values = one.values
        if name in squares:
            # A noise scale is tr(Σ)/‖G‖², and a NaN where the estimate of the denominator isn't
            # positive: there, it has no bound.
            values = np.where(np.isnan(values) & (squares[name].values <= 0), np.inf, values)
        last = Line(one.steps, values).latest
        layers.append(RankedLayer(name, last, _median(values), one.reason))
    sign = -1 if LARGE_IS_NOISY[kind] else 1
    layers.sort(key=lambda one: (math.isnan(one.median), sign * one.median))
    label = source.view.label
    return NoiseRanking(series, found.noun, label, LARGE_IS_NOISY[kind], tuple(layers))


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    with np.errstate(invalid="ignore"):  # +∞ and −∞ have no mean
        # Of halves, since the sum of the two middle values may be larger than any float.
        return 2 * float(np.median(known / 2)) if known.size else math.nan
