"""Cards as bokeh's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    Column,
    ColumnDataSource,
    CustomJSTickFormatter,
    FixedTicker,
    Spacer,
    glyphs,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from matplotlib.colors import LogNorm

from gradlens.instruments.layers import short_names
from gradlens.instruments.panel import (
    Curve,
    Lines,
    Map,
    Picture,
    Shape,
    Shapes,
    any_finite,
)
from gradlens.instruments.scales import Ruler, StepAxis
from gradlens.instruments.style import ALARM, BLUE, Color
from gradlens.report.axes import (
    HEIGHT,
    LIGHT,
    Shared,
    label_values,
    mark,
    over_steps,
    paint,
    plain,
    value_range,
)
from gradlens.report.columns import columns, to_places
from gradlens.report.content import UNKNOWN, Card

ROW = 15
"""Pixels of a row of a map, where it has room."""
MAP_HEIGHTS = (110, 520)
"""Least and most pixels of a map."""
EDGE = 32
"""Pixels for the labels of the step axis."""

SQUARE = 136
"""Pixels of the sides of a figure whose axes have the same unit."""

FEW = 30
"""Up to so many values have points."""

Sources = Mapping[str, ColumnDataSource]


@dataclass(frozen=True)
class DrawnCard:
    """The figures of a card, and the sources that they are drawn from, by name.

    The page puts the figures into the ``frame`` as soon as that is on the screen, because drawing
    is what takes the time.
    """

    frame: Column | None
    figures: tuple[figure, ...]
    sources: Sources


def draw(card: Card, key: str, common: Shared, axis: StepAxis) -> DrawnCard:
    """A card's figures, called ``key`` and a number; none if there is nothing to draw."""
    if not is_drawn(card):
        return DrawnCard(None, (), {})
    found = columns(card, axis)
    sources = {name: ColumnDataSource(dict(one), name=name) for name, one in found.items()}
    figures = _figures(card, common, sources)
    for number, one in enumerate(figures):
        one.name = f"{key}-{number}"
        if one.tags[0]["steps"]:
            mark(one, common.marks)
    room = Spacer(height=height(card))
    frame = Column(children=[room], name=key, sizing_mode="stretch_width")
    return DrawnCard(frame, figures, sources)


def is_drawn(card: Card) -> bool:
    """Whether a card has figures, rather than a picture, or why there is nothing to draw."""
    shown = card.panel.content
    return not card.picture and (not isinstance(shown, Lines) or any_finite(shown.lines))


def has_points(curve: Curve) -> bool:
    """Whether a curve has so few values that each is a point."""
    return int(curve.line.finite.sum()) <= FEW


def range_of_colours(shown: Map) -> tuple[float, float]:
    """The least and the greatest value of a map's colours."""
    return shown.norm.vmin or 0.0, shown.norm.vmax or 1.0


def height(card: Card) -> int:
    """Pixels of a card's first figure."""
    shown = card.panel.content
    if not isinstance(shown, Map):
        return HEIGHT
    return min(max(ROW * len(shown.table.names) + EDGE, MAP_HEIGHTS[0]), MAP_HEIGHTS[1])


def _figures(card: Card, common: Shared, sources: Sources) -> tuple[figure, ...]:
    match card.panel.content:
        case Lines() as lines:
            return (_of_lines(lines, card, common, sources),)
        case Map() as map:
            return _of_map(map, height(card), common, sources)
        case Picture() as picture:
            return (_of_picture(picture, common, sources),)
        case Shapes() as shapes:
            return (_of_shapes(shapes, sources),)
        case other:
            raise NotImplementedError(type(other))


def _of_lines(shown: Lines, card: Card, common: Shared, sources: Sources) -> figure:
    up = card.up
    one = over_steps(common, "log" if up.log else "linear")
    label_values(one, up.log, up.linear)
    if up.linear:
        ticks = np.array(up.locator(4).tick_values(*up.limits))
        one.yaxis.ticker = FixedTicker(ticks=to_places(ticks, up.linear).tolist())
    y = "place" if up.linear else "value"
    if "danger" in sources:
        _shade(one, sources["danger"], ALARM, 0.09)
    for place, (curve, missing) in enumerate(zip(shown.all_curves, card.gaps, strict=True)):
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
    one.y_range = value_range(*_ends(up))
    fits = not shown.spiky and shown.limits is None
    one.tags = [{"steps": True, "fits": fits}]
    levels = {*shown.levels, *([0.0] if up.limits[0] < 0 < up.limits[1] else [])}
    for level in to_places(np.array([*levels]), up.linear) if up.linear else levels:
        one.add_layout(
            Span(
                location=float(level),
                dimension="width",
                line_dash=[4, 3],
                line_color=LIGHT["faint"],
            )
        )
    return one


def _ends(up: Ruler) -> tuple[float, float]:
    """The ends of a value axis as places on it."""
    low, high = to_places(np.array(up.limits), up.linear).tolist() if up.linear else up.limits
    return low, high


def _shade(one: figure, source: ColumnDataSource, color: Color, alpha: float, **tags: Any) -> None:
    """The area between two lines."""
    area = one.varea("step", "low", "high", source=source, fill_alpha=alpha, name="band")
    paint(area, color, "fill_color", **tags)


def _mark_gaps(one: figure, gaps: ColumnDataSource) -> None:
    """Ticks on the base line where a value is missing."""
    glyph = glyphs.Scatter(
        x="step", y=3, marker="dash", angle=1.5708, size=8, line_width=1.4,
        line_color=LIGHT["alarm" if UNKNOWN in gaps.tags[0] else "muted"],
    )  # fmt: skip
    marks = one.add_glyph(gaps, glyph, name="gaps", y_range_name="pixels")
    marks.tags = [{}]


def _of_map(shown: Map, height: int, common: Shared, sources: Sources) -> tuple[figure, ...]:
    names = short_names(shown.table.names)
    one = over_steps(common, "linear", height)
    one.y_range = value_range(len(names), 0)
    mapper = common.mappers[shown.colors]
    image = _image(one, sources["map"], mapper)
    image.tags = [{"names": list(shown.table.names)}]
    stride = max(1, -(-len(names) * ROW // (height - EDGE)))
    one.yaxis.ticker = FixedTicker(ticks=[n + 0.5 for n in range(0, len(names), stride)])
    one.yaxis.formatter = CustomJSTickFormatter(
        args={"names": [_short(name) for name in names]}, code="return names[Math.floor(tick)]"
    )
    one.ygrid.visible = False
    one.js_on_event("tap", common.select)
    is_log = isinstance(shown.norm, LogNorm)
    below = over_steps(common, "log" if is_log else "linear", 120)
    label_values(below, is_log)
    line = below.line("step", "row 0", source=sources["cells"], line_width=1.7, name="row")
    paint(line, BLUE)
    # The range of the colours, so that rows can be compared.
    below.y_range = value_range(*range_of_colours(shown))
    below.visible = False
    return one, below


def _short(name: str, most: int = 13) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) :]}"


def _of_picture(shown: Picture, common: Shared, sources: Sources) -> figure:
    is_over_steps = shown.steps is not None
    one = over_steps(common, "linear") if is_over_steps else plain(shown.across, shown.up)
    one.y_range = value_range(*shown.up.limits)
    label_values(one, False)
    one.yaxis.axis_label = shown.up.label
    image = _image(one, sources["map"], common.mappers["density"])
    image.tags = [{}]
    return one


def _of_shapes(shown: Shapes, sources: Sources) -> figure:
    one = plain(shown.across, shown.up)
    label_values(one, shown.up.log)
    if shown.up.ticks is not None:
        one.yaxis.ticker = FixedTicker(ticks=[*shown.up.ticks])
        one.ygrid.visible = False
    if shown.equal:
        one.update(sizing_mode=None, frame_width=SQUARE, frame_height=SQUARE)
    for place, shape in enumerate(shown.shapes):
        # A shape goes with the entry of its colour.
        entries = [n for n, entry in enumerate(shown.key) if entry.color == shape.color]
        tags = {"curve": entries[0]} if entries else {}
        for glyph, part in _glyphs(shape):
            renderer = one.add_glyph(sources[f"shape {place}"], glyph, name="shape")
            paint(renderer, shape.color, part, **tags)
    return one


def _glyphs(shape: Shape) -> list[tuple[Any, str]]:
    """What a shape is drawn by, and which part of that has its colour."""
    if shape.kind == "area":
        area = glyphs.VArea(x="x", y1="low", y2="value", fill_alpha=shape.opacity)
        return [(area, "fill_color")]
    point: dict[str, Any] = {"x": "x", "y": "value", "line_color": None}
    if shape.kind == "points":
        return [(glyphs.Scatter(size=1.4 * shape.width + 1, **point), "fill_color")]
    dash = (
        []
        if isinstance(shape.style, str)
        else [max(1, round(1.3 * shape.width * part)) for part in shape.style[1]]
    )
    line = glyphs.Line(x="x", y="value", line_width=shape.width + 0.3, line_dash=dash)
    if shape.kind == "line":
        return [(line, "line_color")]
    # The origin is a point that covers its triangle.
    head = glyphs.Scatter(size=8, marker="triangle", angle=-np.pi / 2, **point)
    return [(line, "line_color"), (head, "fill_color")]


def _image(one: figure, source: ColumnDataSource, mapper: Any) -> Any:
    fields: dict[str, Any] = {"x": "x", "y": "y", "dw": "dw", "dh": "dh", "color_mapper": mapper}
    found = one.image("image", source=source, **fields)
    found.name = "map"
    return found


def update(drawn: DrawnCard, card: Card, axis: StepAxis) -> None:
    """Bring a card's sources up to date, and the ranges that the page doesn't fit by itself."""
    if not drawn.figures:
        return
    found = columns(card, axis)
    for name, source in drawn.sources.items():
        source.data = dict(found[name])
    for place, gaps in enumerate(card.gaps):
        drawn.sources[f"gaps {place}"].tags = [list(gaps.reasons)]
    first, *below = drawn.figures
    match card.panel.content:
        case Map() as map:
            _set(below[0].y_range, range_of_colours(map))
        case Lines() if not first.tags[0]["fits"]:
            _set(first.y_range, _ends(card.up))
        case Picture() | Shapes() as shown:
            _set(first.y_range, shown.up.limits)
            if isinstance(shown, Shapes) or shown.steps is None:
                _set(first.x_range, shown.across.limits)


def _set(one: Any, found: tuple[float, float]) -> None:
    one.update(start=found[0], end=found[1])
