"""Empty figures with their axes, and the colours of what is drawn on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from bokeh.models import (
    BasicTicker,
    BoxZoomTool,
    CrosshairTool,
    CustomJSTickFormatter,
    FixedTicker,
    LinearScale,
    Range1d,
)
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure

from gradlens.instruments.panel import Ruler
from gradlens.instruments.style import Color
from gradlens.report.palette import LIGHT, in_dark, in_light
from gradlens.report.shared import Shared, value_range

ValueScale = Literal["linear", "log"]

HEIGHT = 178
"""Pixels of a figure."""

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


def over_steps(common: Shared, value_scale: ValueScale, height: int = HEIGHT) -> figure:
    """An empty figure over the steps, which all such figures of a page share."""
    one = _base(common.x_range, value_scale, height)
    one.add_tools(BoxZoomTool(dimensions="width"), CrosshairTool(overlay=common.span))
    one.xaxis.ticker, one.xaxis.formatter = common.ticks, common.steps
    one.extra_y_ranges = {"pixels": value_range(0, height)}
    one.extra_y_scales = {"pixels": LinearScale()}
    one.js_on_event("mousemove", common.hover)
    one.js_on_event("mouseleave", common.leave)
    one.js_on_event("doubletap", common.reset)
    one.tags = [{"steps": True}]
    return one


def plain(across: Ruler, up: Ruler) -> figure:
    """An empty figure over something else than the step."""
    one = _base(value_range(*across.limits), "log" if up.log else "linear", HEIGHT)
    one.y_range = value_range(*up.limits)
    one.xaxis.axis_label, one.yaxis.axis_label = across.label, up.label
    rounded = BasicTicker(desired_num_ticks=4, mantissas=[1, 2, 5])
    one.xaxis.ticker = rounded if across.ticks is None else FixedTicker(ticks=[*across.ticks])
    one.xaxis.formatter = CustomJSTickFormatter(code="return gradlens.valueLabel(tick, 0)")
    one.tags = [{"steps": False}]
    return one


def _base(x_range: Range1d, value_scale: ValueScale, height: int) -> figure:
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


def label_values(one: figure, log: bool, linear: float = 0.0) -> None:
    """Set the ticks of a value axis, which is about linear up to the size ``linear``, if any."""
    # The page sets the ticks of logarithmic axes.
    ticker = BasicTicker(desired_num_ticks=4, mantissas=[1, 2, 5])
    one.yaxis.ticker = FixedTicker(ticks=[], tags=["log"]) if log else ticker
    one.yaxis.formatter = CustomJSTickFormatter(
        args={"linear": linear}, code="return gradlens.valueLabel(tick, linear)"
    )


def paint(
    renderer: GlyphRenderer[Any], color: Color, part: str = "line_color", **tags: Any
) -> None:
    """Give a part of a glyph its colour, and the page what it needs to change it."""
    renderer.glyph.update(**{part: in_light(color)})
    renderer.tags = [tags | {"part": part, "light": in_light(color), "dark": in_dark(color)}]
