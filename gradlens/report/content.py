"""From histories to the cards of a page: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line, rms_lines
from gradlens.history.records import Source
from gradlens.history.scalars import Scalar
from gradlens.history.series import Series
from gradlens.instruments import (
    CorrelationsInstrument,
    CovarianceRanksInstrument,
    CovarianceSpectrumInstrument,
    DirectionsInstrument,
    Instrument,
    LayerLinesInstrument,
    LayerMapInstrument,
    LayerStableRanksInstrument,
    OverlapInstrument,
    ParametersInstrument,
    StabilityInstrument,
)
from gradlens.instruments.covariance import eigenvalue_lines
from gradlens.instruments.hess_eigenvalues import HessEigenvaluesInstrument, curvature_lines
from gradlens.instruments.scales import Scale, value_scale
from gradlens.instruments.style import INK, Color, categorical_colors, sequence_colors
from gradlens.plotting.comparison import SPIKY, numbers, run_colors
from gradlens.plotting.panels import EPOCHS, GROUPS, all_main_panels
from gradlens.report.cards import Card, Curve, LinesCard
from gradlens.report.gaps import gaps
from gradlens.report.hints import HINTS
from gradlens.report.pictures import PICTURES, layer_map

UNITS = {
    "s/step": "s/step",
    "samples": "samples",
    "batch size": "samples",
}
"""Units by the part of a series, or by the label of its view; other numbers have none."""

WORDS = {"clipped": "share of elements out of range"}
"""What the part of a series is."""

PARTS: Mapping[type[Instrument], tuple[str, ...]] = {
    CovarianceSpectrumInstrument: ("trace",),
    CovarianceRanksInstrument: ("rank",),
    LayerLinesInstrument: ("median", "least", "most"),
    CorrelationsInstrument: ("correlation",),
    LayerStableRanksInstrument: ("median stable rank",),
    StabilityInstrument: ("sharpness",),
    DirectionsInstrument: ("median SNR",),
    OverlapInstrument: ("overlap",),
}
"""Parts of a series that share a panel, of those that have different units."""

LINES: Mapping[type[Instrument], Callable[[Series], Mapping[str, Line]]] = {
    CovarianceSpectrumInstrument: eigenvalue_lines,
    CovarianceRanksInstrument: lambda records: {"stable": field_line(records, "stable_rank")},
    HessEigenvaluesInstrument: lambda records: dict([*curvature_lines(records).items()][1:]),
    ParametersInstrument: rms_lines,
    StabilityInstrument: lambda records: {"threshold": field_line(records, "threshold")},
}
"""Lines of a panel that the summary doesn't have."""


def cards(runs: Mapping[str, History]) -> tuple[Card, ...]:
    """The cards of a page, group by group: those of one run, or of a comparison."""
    found = _of_one(*runs.values()) if len(runs) == 1 else _of_several(runs)
    return tuple(sorted(found, key=lambda card: GROUPS.index(card.group)))


# One run ------------------------------------------------------------------------------------


def _of_one(history: History) -> list[Card]:
    """The panels of a figure, the numbers of the summary that none of them has, and layers."""
    waiting = {one.name: one for one in history.scalars() if one.series != EPOCHS}
    found: list[Card] = []
    panels = all_main_panels(history)
    for panel in panels:
        instrument = panel.instrument
        picture = PICTURES.get(type(instrument))
        if picture is not None:
            found += picture(history, instrument)
            continue
        shown = [one for one in waiting.values() if _is_on(one, instrument)]
        curves = _curves(history, shown, instrument)
        if curves:
            card = _lines_card(instrument.heading(history), shown, curves)
            found.append(replace(card, group=panel.group, hint=_hint(history, instrument)))
        for one in shown:
            del waiting[one.name]
    titles = {
        n: p.instrument.heading(history) for p in reversed(panels) for n in p.instrument.names
    }
    for one in waiting.values():
        found.append(_alone(history, one, titles.get(one.series, one.view.title or one.series)))
    found += [layer_map(history, one) for one in LayerMapInstrument().panels(history)]
    return found


def _is_on(one: Scalar, instrument: Instrument) -> bool:
    parts = PARTS.get(type(instrument), (one.part,))
    return one.series in instrument.names and one.part in parts


def _curves(history: History, shown: Sequence[Scalar], instrument: Instrument) -> tuple[Curve, ...]:
    records = history[instrument.names[0]]
    more = LINES[type(instrument)](records) if type(instrument) in LINES else {}
    own: Sequence[Color] = [INK] if len(more) > 1 else categorical_colors(len(shown) + len(more))
    others = sequence_colors(len(more)) if len(more) > 1 else own[len(shown) :]
    curves = [_curve(history, one, color) for one, color in zip(shown, own, strict=False)]
    curves += [
        Curve(name, line, color, gaps(line, records))
        for (name, line), color in zip(more.items(), others, strict=False)
        if line.finite.any()
    ]
    return tuple(curves)


def _curve(history: History, one: Scalar, color: Color, name: str = "") -> Curve:
    unit = UNITS.get(one.part, UNITS.get(one.view.label, ""))
    return Curve(name or one.name, one.line, color, gaps(one.line, history[one.series]), unit)


def _lines_card(title: str, shown: Sequence[Scalar], curves: tuple[Curve, ...]) -> LinesCard:
    view = shown[0].view if shown else Source().view
    spiky = any(kind in SPIKY for one in shown for kind in one.kinds)
    return LinesCard(title, view.group, view.label, curves, _scale(view.yscale, curves), spiky)


def _scale(wish: Scale, curves: Sequence[Curve]) -> Scale:
    return value_scale(wish, [curve.line.values for curve in curves])


def _alone(history: History, one: Scalar, title: str) -> LinesCard:
    """A number of the summary that no panel has."""
    curve = _curve(history, one, categorical_colors(1)[0])
    heading = f"{title}: {one.part}" if one.part else title
    return replace(_lines_card(heading, [one], (curve,)), words=WORDS.get(one.part, ""))


def _hint(history: History, instrument: Instrument) -> str:
    name = instrument.names[0]
    kinds = history.sources.get(name, Source()).kinds
    return next((HINTS[kind] for kind in (*kinds, name) if kind in HINTS), "")


# Several runs -------------------------------------------------------------------------------


def _of_several(runs: Mapping[str, History]) -> list[Card]:
    """A card for each number that a run has, with a line for each run."""
    colors = run_colors([*runs])
    found: list[Card] = []
    for one in numbers(runs):
        unit = UNITS.get(one.part, UNITS.get(one.view.label, ""))
        curves = tuple(
            Curve(run, line, colors[run], gaps(line, runs[run][one.series]), unit)
            for run, line in one.lines.items()
        )
        words = one.name if one.name.endswith(one.words) else f"{one.name} · {one.words}"
        scale = _scale(one.view.yscale, curves)
        spiky = any(kind in SPIKY for kind in one.kinds)
        hint = next((HINTS[kind] for kind in one.kinds if kind in HINTS), "")
        found.append(LinesCard(one.title, one.view.group, words, curves, scale, spiky, hint))
    return found
