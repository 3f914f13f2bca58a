"""Cards as bokeh's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from bokeh.models import (
    Column,
    ColumnDataSource,
    CustomJSTickFormatter,
    DataRange1d,
    FixedTicker,
    Spacer,
    glyphs,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from matplotlib.colors import LogNorm

from gradlens.instruments.layers import short_names
from gradlens.instruments.panel import Curve
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.style import ALARM, BLUE, Color
from gradlens.report.axes import HEIGHT, label_values, over_steps, paint, plain
from gradlens.report.cards import Card, LinesCard, MapCard, PictureCard, ShapesCard
from gradlens.report.columns import columns
from gradlens.report.marks import mark
from gradlens.report.palette import LIGHT
from gradlens.report.shared import Shared, value_range
from gradlens.report.value_axis import is_on_both_sides, limits, scale, threshold, ticks, to_places

ROW = 15
"""Pixels of a row of a map, where it has room."""
MAP_HEIGHTS = (110, 520)
"""Least and most pixels of a map."""
EDGE = 32
"""Pixels for the labels of the step axis."""

FEW = 30
"""Up to so many values have points."""

Sources = Mapping[str, ColumnDataSource]


@dataclass(frozen=True)
class Drawn:
    """The figures of a card, and the sources that they are drawn from, by name.

    The page puts the figures into the ``frame`` as soon as that is on the screen, because drawing
    is what takes the time.
    """

    frame: Column | None
    figures: tuple[figure, ...]
    sources: Sources


def draw(card: Card, key: str, common: Shared, axis: StepAxis) -> Drawn:
    """A card's figures, called ``key`` and a number; none if there is nothing to draw."""
    if not is_drawn(card):
        return Drawn(None, (), {})
    found = columns(card, axis)
    sources = {name: ColumnDataSource(dict(one), name=name) for name, one in found.items()}
    figures = _figures(card, common, sources)
    for number, one in enumerate(figures):
        one.name = f"{key}-{number}"
        if one.tags[0]["steps"]:
            mark(one, common.marks)
    room = Spacer(height=height(card))
    frame = Column(children=[room], name=key, sizing_mode="stretch_width")
    return Drawn(frame, figures, sources)


def is_drawn(card: Card) -> bool:
    """Whether a card has figures, rather than a text that says why there is nothing to draw."""
    return not isinstance(card, LinesCard) or any(c.line.finite.any() for c in card.curves)


def has_points(curve: Curve) -> bool:
    """Whether a curve has so few values that each is a point."""
    return int(curve.line.finite.sum()) <= FEW


def range_of_colours(card: MapCard) -> tuple[float, float]:
    """The least and the greatest value of a map's colours."""
    return card.map.norm.vmin or 0.0, card.map.norm.vmax or 1.0


def height(card: Card) -> int:
    """Pixels of a card's first figure."""
    if not isinstance(card, MapCard):
        return HEIGHT
    return min(max(ROW * len(card.map.table.names) + EDGE, MAP_HEIGHTS[0]), MAP_HEIGHTS[1])


@singledispatch
def _figures(card: Card, common: Shared, sources: Sources) -> tuple[figure, ...]:
    raise NotImplementedError(type(card))


@_figures.register
def _(card: LinesCard, common: Shared, sources: Sources) -> tuple[figure, ...]:
    kind, linear = scale(card), threshold(card)
    one = over_steps(common, "log" if kind == "log" else "linear")
    label_values(one, kind == "log", linear)
    if linear:
        one.yaxis.ticker = FixedTicker(ticks=ticks(card))
    y = "place" if linear else "value"
    if "danger" in sources:
        _shade(one, sources["danger"], ALARM, 0.09)
    for place, (curve, missing) in enumerate(zip(card.curves, card.gaps, strict=True)):
        for number in range(len(curve.spreads)):
            _shade(one, sources[f"band {place} {number}"], curve.color, 0.2, curve=place)
        raw, smooth = sources[f"values {place}"], sources.get(f"trend {place}")
        tags: dict[str, Any] = {
            "name": curve.name,
            "curve": place,
            "unit": curve.unit,
            "smooth": bool(smooth),
        }
        width, alpha = (0.8, 0.38) if smooth else (curve.width + 0.1, 1.0)
        # Unlike ``figure.line``, this makes no glyphs for selections, which would double the page.
        glyph = glyphs.Line(x="step", y=y, line_width=width, line_alpha=alpha)
        line = one.add_glyph(raw, glyph, name="values")
        paint(line, curve.color, **tags)
        if has_points(curve):
            dot = glyphs.Scatter(x="step", y=y, size=5, line_color=None)
            dots = one.add_glyph(raw, dot, name="dots")
            paint(dots, curve.color, "fill_color", curve=place)
        if smooth:
            glyph = glyphs.Line(x="step", y=y, line_width=curve.width + 0.3)
            front = one.add_glyph(smooth, glyph, name="trend")
            paint(front, curve.color, curve=place)
        gaps = sources[f"gaps {place}"]
        gaps.tags = [list(missing.reasons)]
        _mark_gaps(one, gaps)
    one.y_range = value_range(*limits(card))
    fits = not card.lines.spiky and card.lines.limits is None
    one.tags = [{"steps": True, "fits": fits}]
    levels = {*card.lines.levels, *([0.0] if is_on_both_sides(card) else [])}
    for level in to_places(np.array([*levels]), linear) if linear else levels:
        one.add_layout(
            Span(
                location=float(level),
                dimension="width",
                line_dash=[4, 3],
                line_color=LIGHT["faint"],
            )
        )
    return (one,)


def _shade(one: figure, source: ColumnDataSource, color: Color, alpha: float, **tags: Any) -> None:
    """The area between two lines."""
    area = one.varea("step", "low", "high", source=source, fill_alpha=alpha, name="band")
    paint(area, color, "fill_color", **tags)


def _mark_gaps(one: figure, gaps: ColumnDataSource) -> None:
    """Ticks on the base line where a value is missing."""
    glyph = glyphs.Scatter(
        x="step", y=3, marker="dash", angle=1.5708, size=8, line_width=1.4,
        line_color=LIGHT["alarm"],
    )  # fmt: skip
    marks = one.add_glyph(gaps, glyph, name="gaps", y_range_name="pixels")
    marks.tags = [{}]


@_figures.register
def _(card: MapCard, common: Shared, sources: Sources) -> tuple[figure, ...]:
    names = short_names(card.map.table.names)
    signed = (card.map.norm.vmin or 0.0) < 0
    one = over_steps(common, "linear", height(card))
    one.y_range = value_range(len(names), 0)
    mapper = common.mappers["signed" if signed else "sizes"]
    image = _image(one, sources["map"], mapper)
    image.tags = [{"names": list(card.map.table.names)}]
    stride = max(1, -(-len(names) * ROW // (height(card) - EDGE)))
    one.yaxis.ticker = FixedTicker(ticks=[n + 0.5 for n in range(0, len(names), stride)])
    one.yaxis.formatter = CustomJSTickFormatter(
        args={"names": [_short(name) for name in names]}, code="return names[Math.floor(tick)]"
    )
    one.ygrid.visible = False
    one.js_on_event("tap", common.select)
    is_log = isinstance(card.map.norm, LogNorm)
    below = over_steps(common, "log" if is_log else "linear", 120)
    label_values(below, is_log)
    line = below.line("step", "row 0", source=sources["cells"], line_width=1.7, name="row")
    paint(line, BLUE)
    # The range of the colours, so that rows can be compared.
    below.y_range = value_range(*range_of_colours(card))
    below.visible = False
    return one, below


def _short(name: str, most: int = 13) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) :]}"


@_figures.register
def _(card: PictureCard, common: Shared, sources: Sources) -> tuple[figure, ...]:
    if card.steps is not None:
        one = over_steps(common, "linear")
    else:
        one = plain(value_range(*card.across), card.label)
    one.y_range = value_range(*card.up)
    label_values(one, False)
    one.yaxis.axis_label = card.up_label
    image = _image(one, sources["map"], common.mappers["density"])
    image.tags = [{}]
    return (one,)


@_figures.register
def _(card: ShapesCard, common: Shared, sources: Sources) -> tuple[figure, ...]:
    one = plain(DataRange1d(range_padding=0.04), card.label, "log")
    label_values(one, True)
    for place, (name, _, _, color) in enumerate(card.shapes):
        line = one.line(
            "x", "value", source=sources[f"shape {place}"], line_width=1.6, name="shape"
        )
        paint(line, color, name=name, curve=place)
    return (one,)


def _image(one: figure, source: ColumnDataSource, mapper: Any) -> Any:
    fields: dict[str, Any] = {"x": "x", "y": "y", "dw": "dw", "dh": "dh", "color_mapper": mapper}
    found = one.image("image", source=source, **fields)
    found.name = "map"
    return found
