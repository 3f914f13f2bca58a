"""Cards as bokeh's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Literal

from bokeh.models import (
    BasicTicker,
    BoxZoomTool,
    Column,
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    CustomJSTickFormatter,
    CustomJSTransform,
    DataRange1d,
    FixedTicker,
    LinearColorMapper,
    Range1d,
    Spacer,
)
from bokeh.models.annotations import Span
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from matplotlib.colors import LogNorm

from gradlens.instruments.layer_map import short_names
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.style import BLUE, Color
from gradlens.report.cards import Card, LinesCard, MapCard, PictureCard, ShapesCard
from gradlens.report.columns import Columns, columns
from gradlens.report.palette import (
    DENSITY,
    LIGHT,
    SIGNED,
    SIZES,
    in_dark,
    in_light,
    palette,
)
from gradlens.report.value_axis import is_on_both_sides, limits, scale, threshold, ticks

HEIGHT = 178
"""Pixels of a figure."""

ROW = 15
"""Pixels of a row of a map, where it has room; its lowest and greatest height."""
MAP_HEIGHTS = (110, 520)
EDGE = 32

LEFT = 46
"""Pixels for the labels of a value axis, so that axes below each other begin at one place."""

AXIS: Mapping[str, Any] = {
    "major_tick_line_color": LIGHT["faint"],
    "minor_tick_line_color": None,
    "major_tick_in": 0,
    "major_tick_out": 3,
    "axis_line_color": LIGHT["faint"],
    "major_label_text_color": LIGHT["muted"],
    "axis_label_text_color": LIGHT["muted"],
    "major_label_text_font_size": "11px",
    "axis_label_text_font_size": "11px",
    "axis_label_text_font_style": "normal",
    "axis_label_standoff": 4,
}

MAPS = {"sizes": SIZES, "signed": SIGNED, "density": DENSITY}

ValueScale = Literal["linear", "log"]
Range = Range1d | DataRange1d

FEW = 30
"""Up to so many values have points."""


@dataclass(frozen=True)
class Shared:
    """What all figures of a page have in common: the range of steps, the line that follows the
    pointer, and what happens on events."""

    x_range: Range1d
    span: Span = field(
        default_factory=lambda: Span(
            dimension="height", line_color=LIGHT["muted"], line_width=1, line_alpha=0.7
        )
    )
    hover: CustomJS = field(
        default_factory=lambda: CustomJS(code="gradlens.hover(cb_obj.x, cb_obj.y, cb_obj.origin)")
    )
    leave: CustomJS = field(default_factory=lambda: CustomJS(code="gradlens.leave()"))
    reset: CustomJS = field(default_factory=lambda: CustomJS(code="gradlens.reset()"))
    select: CustomJS = field(
        default_factory=lambda: CustomJS(code="gradlens.select(cb_obj.y, cb_obj.origin)")
    )
    steps: CustomJSTickFormatter = field(
        default_factory=lambda: CustomJSTickFormatter(code="return gradlens.stepLabel(tick)")
    )
    ticks: BasicTicker = field(
        default_factory=lambda: BasicTicker(desired_num_ticks=5, mantissas=[1, 2, 5])
    )
    log_ticks: FixedTicker = field(
        default_factory=lambda: FixedTicker(
            ticks=[0.0, *(math.log10(1 + 10**n) for n in range(16))]
        )
    )
    places: CustomJSTransform = field(
        default_factory=lambda: CustomJSTransform(
            func="return Math.log10(1 + Math.max(x, 0))",
            v_func="return Float64Array.from(xs, (x) => Math.log10(1 + Math.max(x, 0)))",
        )
    )
    mappers: Mapping[str, LinearColorMapper] = field(
        default_factory=lambda: {
            name: LinearColorMapper(palette=palette(colors), low=-0.5, high=255.5)
            for name, colors in MAPS.items()
        }
    )


def shared(axis: StepAxis) -> Shared:
    """For figures over the steps of an axis."""
    return Shared(_range(*ends(axis)))


def ends(axis: StepAxis) -> tuple[float, float]:
    """Ends of the step axis with margins."""
    if axis.high <= axis.low:
        return axis.low - 1, axis.high + 1
    pad = 0.015 * (axis.high - axis.low)
    return axis.low - pad, axis.high + pad


def _range(start: float, end: float) -> Range1d:
    return Range1d(start=start, end=end)


@dataclass(frozen=True)
class Drawn:
    """The figures of a card, and the sources that they are drawn from, by name.

    The page puts the figures into the ``frame`` as soon as that is on the screen, because drawing
    is what takes the time.
    """

    frame: Column | None
    figures: tuple[figure, ...]
    sources: Mapping[str, ColumnDataSource]


def draw(card: Card, key: str, common: Shared, axis: StepAxis) -> Drawn:
    """A card's figures, called ``key`` and a number; none if there is nothing to draw."""
    if not is_drawn(card):
        return Drawn(None, (), {})
    found = columns(card, axis)
    sources = {name: ColumnDataSource(dict(one), name=name) for name, one in found.items()}
    figures = _figures(card, common, sources)
    for number, one in enumerate(figures):
        one.name = f"{key}-{number}"
    room = Spacer(height=height(card))
    frame = Column(children=[room], name=key, sizing_mode="stretch_width")
    return Drawn(frame, figures, sources)


def is_drawn(card: Card) -> bool:
    """Whether a card has figures, rather than a text that says why there is nothing to draw."""
    return not isinstance(card, LinesCard) or any(c.line.finite.any() for c in card.curves)


def height(card: Card) -> int:
    """Pixels of a card's first figure."""
    if not isinstance(card, MapCard):
        return HEIGHT
    return min(max(ROW * len(card.table.names) + EDGE, MAP_HEIGHTS[0]), MAP_HEIGHTS[1])


def update(drawn: Drawn, card: Card, axis: StepAxis) -> None:
    """Bring a card's sources up to date; what was added at the end alone is streamed."""
    found = columns(card, axis) if drawn.figures else {}
    for name, source in drawn.sources.items():
        new = dict(found[name])
        count = len(next(iter(source.data.values())))
        if "map" not in name and _begins_with(new, source.data):
            added = {key: values[count:] for key, values in new.items()}
            if len(next(iter(added.values()))):
                source.stream(added)
        else:
            source.data = new
    if isinstance(card, MapCard):
        _set_range(drawn.figures[1], _range_of_colours(card))
    elif isinstance(card, LinesCard) and card.spiky and drawn.figures:
        _set_range(drawn.figures[0], limits(card))


def _set_range(one: figure, found: tuple[float, float]) -> None:
    one.y_range.update(start=found[0], end=found[1])


def _range_of_colours(card: MapCard) -> tuple[float, float]:
    return card.norm.vmin or 0.0, card.norm.vmax or 1.0


def _begins_with(new: Columns, old: Mapping[str, Any]) -> bool:
    return all(
        key in old
        and len(old[key]) <= len(values)
        and old[key].dtype == values.dtype
        and old[key].tobytes() == values[: len(old[key])].tobytes()
        for key, values in new.items()
    )


@singledispatch
def _figures(
    card: Card, common: Shared, sources: Mapping[str, ColumnDataSource]
) -> tuple[figure, ...]:
    raise NotImplementedError(type(card))


@_figures.register
def _(
    card: LinesCard, common: Shared, sources: Mapping[str, ColumnDataSource]
) -> tuple[figure, ...]:
    kind, linear = scale(card), threshold(card)
    one = _over_steps(common, "log" if kind == "log" else "linear")
    _label_values(one, kind == "log", linear)
    if linear:
        one.yaxis.ticker = FixedTicker(ticks=ticks(card))
    y = "place" if linear else "value"
    for place, curve in enumerate(card.curves):
        raw, smooth = sources[f"values {place}"], sources.get(f"trend {place}")
        few = len(raw.data["step"]) <= FEW
        tags: dict[str, Any] = {
            "name": curve.name,
            "curve": place,
            "unit": curve.unit,
            "smooth": bool(smooth),
        }
        width, alpha = (0.8, 0.38) if smooth else (1.7, 1.0)
        line = one.line("step", y, source=raw, line_width=width, line_alpha=alpha, name="values")
        _paint(line, curve.color, **tags)
        if few:
            dots = one.scatter("step", y, source=raw, size=5, line_color=None, name="dots")
            _paint(dots, curve.color, "fill_color", curve=place)
        if smooth:
            front = one.line("step", y, source=smooth, line_width=1.9, name="trend")
            _paint(front, curve.color, curve=place)
        gaps = sources[f"gaps {place}"]
        gaps.tags = [list(curve.gaps.reasons)]
        _mark_gaps(one, gaps)
    one.y_range = _range(*limits(card))
    one.tags = [{"steps": True, "fits": not card.spiky}]
    if is_on_both_sides(card):
        zero = Span(location=0, dimension="width", line_dash=[4, 3], line_color=LIGHT["faint"])
        one.add_layout(zero)
    return (one,)


def _mark_gaps(one: figure, gaps: ColumnDataSource) -> None:
    """Ticks on the base line where a value is missing."""
    marks = one.scatter(
        "step", 3, source=gaps, marker="dash", angle=1.5708, size=8, line_width=1.4,
        line_color=LIGHT["alarm"], name="gaps", y_range_name="pixels",
    )  # fmt: skip
    marks.tags = [{}]


@_figures.register
def _(card: MapCard, common: Shared, sources: Mapping[str, ColumnDataSource]) -> tuple[figure, ...]:
    names = short_names(card.table.names)
    signed = (card.norm.vmin or 0.0) < 0
    one = _over_steps(common, "linear", height(card))
    one.y_range = _range(len(names), 0)
    mapper = common.mappers["signed" if signed else "sizes"]
    image = _image(one, sources["map"], (0, len(names)), color_mapper=mapper)
    image.tags = [{"names": list(card.table.names)}]
    stride = max(1, -(-len(names) * ROW // (height(card) - EDGE)))
    one.yaxis.ticker = FixedTicker(ticks=[n + 0.5 for n in range(0, len(names), stride)])
    one.yaxis.formatter = CustomJSTickFormatter(
        args={"names": [_short(name) for name in names]}, code="return names[Math.floor(tick)]"
    )
    one.ygrid.visible = False
    one.js_on_event("tap", common.select)
    is_log = isinstance(card.norm, LogNorm)
    below = _over_steps(common, "log" if is_log else "linear", 120)
    _label_values(below, is_log)
    line = below.line("step", "row 0", source=sources["cells"], line_width=1.7, name="row")
    _paint(line, BLUE)
    # The range of the colours, so that rows can be compared.
    below.y_range = _range(*_range_of_colours(card))
    below.visible = False
    return one, below


def _short(name: str, most: int = 13) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) :]}"


@_figures.register
def _(
    card: PictureCard, common: Shared, sources: Mapping[str, ColumnDataSource]
) -> tuple[figure, ...]:
    low, high = card.up
    if card.steps is not None:
        one = _over_steps(common, "linear")
    else:
        one = _plain(_range(*card.across), card.label)
    one.y_range = _range(low, high)
    _label_values(one, False)
    one.yaxis.axis_label = card.up_label
    image = _image(one, sources["map"], card.up, color_mapper=common.mappers["density"])
    image.tags = [{}]
    return (one,)


@_figures.register
def _(
    card: ShapesCard, common: Shared, sources: Mapping[str, ColumnDataSource]
) -> tuple[figure, ...]:
    one = _plain(DataRange1d(range_padding=0.04), card.label, "log")
    _label_values(one, True)
    for place, (name, _, _, color) in enumerate(card.shapes):
        line = one.line(
            "x", "value", source=sources[f"shape {place}"], line_width=1.6, name="shape"
        )
        _paint(line, color, name=name, curve=place)
    return (one,)


def _image(one: figure, source: ColumnDataSource, up: tuple[float, float], **more: Any) -> Any:
    """An image between two ends of the value axis."""
    low, high = up
    found = one.image("image", x="x", y=low, dw="dw", dh=high - low, source=source, **more)
    found.name = "map"
    return found


# Parts of figures ---------------------------------------------------------------------------


def _over_steps(common: Shared, value_scale: ValueScale, height: int = HEIGHT) -> figure:
    one = _base(common.x_range, value_scale, height)
    one.add_tools(BoxZoomTool(dimensions="width"), CrosshairTool(overlay=common.span))
    one.xaxis.ticker, one.xaxis.formatter = common.ticks, common.steps
    one.extra_y_ranges = {"pixels": _range(0, height)}
    one.js_on_event("mousemove", common.hover)
    one.js_on_event("mouseleave", common.leave)
    one.js_on_event("doubletap", common.reset)
    one.tags = [{"steps": True}]
    return one


def _plain(x_range: Range, label: str, value_scale: ValueScale = "linear") -> figure:
    one = _base(x_range, value_scale, HEIGHT)
    one.xaxis.axis_label = label
    one.xaxis.ticker = BasicTicker(desired_num_ticks=4, mantissas=[1, 2, 5])
    one.xaxis.formatter = CustomJSTickFormatter(code="return gradlens.valueLabel(tick, 0)")
    one.tags = [{"steps": False}]
    return one


def _base(x_range: Range, value_scale: ValueScale, height: int) -> figure:
    one = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_axis_type=value_scale,
        tools="",
        toolbar_location=None,
        lod_threshold=None,
        min_border_left=LEFT,
        min_border_right=8,
        min_border_top=6,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    one.xgrid.visible = False
    one.grid.grid_line_color = LIGHT["grid"]
    for axis in one.axis:
        axis.update(**AXIS)
    one.yaxis[0].update(axis_line_color=None, major_tick_line_color=None, major_label_standoff=2)
    return one


def _label_values(one: figure, log: bool, linear: float = 0.0) -> None:
    # The page sets the ticks of logarithmic axes.
    ticker = BasicTicker(desired_num_ticks=4, mantissas=[1, 2, 5])
    one.yaxis.ticker = FixedTicker(ticks=[], tags=["log"]) if log else ticker
    one.yaxis.formatter = CustomJSTickFormatter(
        args={"linear": linear}, code="return gradlens.valueLabel(tick, linear)"
    )


def _paint(
    renderer: GlyphRenderer[Any], color: Color, part: str = "line_color", **tags: Any
) -> None:
    """Give a part of a glyph its colour, and the page what it needs to change it."""
    renderer.glyph.update(**{part: in_light(color)})
    renderer.tags = [tags | {"part": part, "light": in_light(color), "dark": in_dark(color)}]
