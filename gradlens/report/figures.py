"""Colours of a page, and figures of bokeh.

Colours are those of the figures of matplotlib, and for a dark background those of dark ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    CustomJSTickFormatter,
    CustomJSTransform,
    FixedTicker,
    LinearColorMapper,
    LinearScale,
    Range1d,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from matplotlib.colors import Colormap, to_hex

from gradlens.instruments.scales import Ruler, StepAxis
from gradlens.instruments.style import ALARM, BLUE, COLORMAPS, FAINT, GRID, INK, MUTED, PAPER, Color
from gradlens.plotting.dark import DARK, dark, dark_colormap
from gradlens.report.plots import SHADES, Layer, Plot, to_places

# Colours ------------------------------------------------------------------------------------

LIGHT: Mapping[str, str] = {
    "page": "#f4f6f8",
    "paper": PAPER,
    "ink": INK,
    "muted": MUTED,
    "faint": FAINT,
    "grid": GRID,
    "alarm": ALARM,
    "accent": BLUE,
}
IN_DARK: Mapping[str, str] = {
    "page": "#0f1317",
    **{name: DARK[color] for name, color in LIGHT.items() if color in DARK},
}
"""Colours of a page by their names as CSS variables."""

OF_THE_GROUND = ("density", "signal")
"""Colours of maps that have the background's in them."""


def in_dark(color: Color) -> str:
    """A line's colour on a dark background."""
    return to_hex(dark(color))


def variables(colors: Mapping[str, str], is_dark: bool) -> str:
    """Colours of a page, and those of maps from small to large, as CSS variables."""
    found = {**colors}
    for name, one in COLORMAPS.items():
        shades = (dark_colormap(one) if is_dark else one)(np.linspace(0, 1, 9))
        found[name] = f"linear-gradient(90deg, {', '.join(map(to_hex, shades))})"
    return " ".join(f"--{name}: {color};" for name, color in found.items())


def palette(colors: Colormap) -> list[str]:
    """256 colours: of what is no number of the scale, and from small to large."""
    shades = [to_hex(color) for color in colors(np.linspace(0, 1, SHADES))]
    return ["#00000000", ALARM, FAINT, MUTED, *shades]


# Figures ------------------------------------------------------------------------------------


class Shared:
    """What all figures of a page over the steps of ``axis`` share; the page gets it too."""

    def __init__(self, axis: StepAxis) -> None:
        self.x_range = _range(*axis.ends)
        self.span = Span(dimension="height", line_color=MUTED, line_width=1, line_alpha=0.7)
        self.ticks = BasicTicker(desired_num_ticks=5, mantissas=[1, 2, 5])
        decades = (math.log10(1 + 10**n) for n in range(16))
        self.log_ticks = FixedTicker(ticks=[0.0, *decades])
        self.steps = CustomJSTickFormatter(code="return gradlens.stepLabel(tick)")
        # The places of steps on a logarithmic axis.
        at_once = "return Float64Array.from(xs, (x) => Math.log10(1 + Math.max(x, 0)))"
        at = "return Math.log10(1 + Math.max(x, 0))"
        self.places = CustomJSTransform(func=at, v_func=at_once)
        self.mappers = {
            name: LinearColorMapper(palette=palette(colors), low=-0.5, high=255.5)
            for name, colors in COLORMAPS.items()
        }
        # Of the maps whose colours depend on the background.
        self.palettes = {
            name: {
                "light": palette(COLORMAPS[name]),
                "dark": palette(dark_colormap(COLORMAPS[name])),
            }
            for name in OF_THE_GROUND
        }


LEFT = 46
"""Pixels for the labels of a value axis, so that axes below each other begin at one place."""
SQUARE = 136
"""Pixels of the sides of a figure whose axes have the same unit."""

AXIS: Mapping[str, Any] = {
    "major_tick_line_color": FAINT,
    "minor_tick_line_color": None,
    "major_tick_in": 0,
    "major_tick_out": 3,
    "axis_line_color": FAINT,
    "major_label_text_color": MUTED,
    "axis_label_text_color": MUTED,
    "major_label_text_font_size": "11px",
    "axis_label_text_font_size": "11px",
    "axis_label_text_font_style": "normal",
    "axis_label_standoff": 4,
}
EVENTS = {
    "mousemove": "gradlens.hover(cb_obj.x, cb_obj.y, cb_obj.origin)",
    "mouseleave": "gradlens.leave()",
    "doubletap": "gradlens.reset()",
    "tap": "gradlens.select(cb_obj.y, cb_obj.origin)",
}
"""What the page does at an event of a figure over the steps."""


def draw(plot: Plot, common: Shared) -> figure:
    """A figure, which is over the range of steps that all such figures of a page share."""
    across, up = plot.across, plot.up
    one = figure(
        height=plot.height,
        sizing_mode="stretch_width",
        x_range=common.x_range if across is None else _range(*across.limits),
        y_range=_range(*_places(up.limits, up.linear)),
        y_axis_type="log" if up.log else "linear",
        tools="",
        toolbar_location=None,
        lod_threshold=None,
        min_border_left=LEFT,
        min_border_right=8,
        min_border_top=6,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        visible=plot.visible,
        tags=[{"steps": across is None, "fits": plot.fits}],
    )
    one.extra_y_ranges = {"pixels": _range(0, plot.height)}
    one.extra_y_scales = {"pixels": LinearScale()}
    one.xgrid.visible, one.ygrid.visible = False, up.ticks is None
    one.grid.grid_line_color = GRID
    for axis in one.axis:
        axis.update(**AXIS)
    one.yaxis[0].update(axis_line_color=None, major_tick_line_color=None, major_label_standoff=2)
    one.yaxis.update(axis_label=up.label, ticker=_ticker(up))
    args: dict[str, Any] = {"linear": up.linear, "rows": [*plot.rows]}
    label = "rows[Math.floor(tick)]" if plot.rows else "gradlens.valueLabel(tick, linear)"
    one.yaxis.formatter = CustomJSTickFormatter(args=args, code=f"return {label}")
    if across is None:
        one.add_tools(BoxZoomTool(dimensions="width"), CrosshairTool(overlay=common.span))
        one.xaxis.update(ticker=common.ticks, formatter=common.steps)
        for event, code in EVENTS.items():
            one.js_on_event(event, CustomJS(code=code))
    else:
        plain = CustomJSTickFormatter(code="return gradlens.valueLabel(tick, 0)")
        one.xaxis.update(axis_label=across.label, ticker=_ticker(across), formatter=plain)
    if plot.square:
        one.update(sizing_mode=None, frame_width=SQUARE, frame_height=SQUARE)
    for layer in plot.layers:
        _add(one, layer, common)
    for level in _places(plot.levels, up.linear):
        line = Span(location=level, dimension="width", line_dash=[4, 3], line_color=FAINT)
        one.add_layout(line)
    return one


def _add(one: figure, layer: Layer, common: Shared) -> None:
    """Add a layer, and tell the page what it needs to change it."""
    source = ColumnDataSource(dict(layer.columns))
    # Unlike ``figure.line``, this makes no glyphs for selections, which would double the page.
    renderer = one.add_glyph(source, layer.glyph, name=layer.name)
    if layer.over:
        renderer.update(y_range_name="pixels", level="annotation")
    if layer.part == "color_mapper":
        layer.glyph.color_mapper = common.mappers[str(layer.color)]
        renderer.tags = [{**layer.tags}]
        return
    found = {"part": layer.part, "light": to_hex(layer.color), "dark": in_dark(layer.color)}
    layer.glyph.update(**{layer.part: found["light"]})
    renderer.tags = [{**layer.tags, **found}]


def _ticker(ruler: Ruler) -> BasicTicker | FixedTicker:
    if ruler.ticks is not None:
        return FixedTicker(ticks=[*ruler.ticks])
    if ruler.linear:
        ticks = ruler.locator(4).tick_values(*ruler.limits)
        return FixedTicker(ticks=_places(ticks, ruler.linear))
    # The page sets the ticks of logarithmic axes.
    rounded = BasicTicker(desired_num_ticks=4, mantissas=[1, 2, 5])
    return FixedTicker(ticks=[], tags=["log"]) if ruler.log else rounded


def _places(values: Any, linear: float) -> list[float]:
    found = np.array([*values], dtype=np.float64)
    return (to_places(found, linear) if linear else found).tolist()


def update(one: figure, plot: Plot) -> None:
    """Bring a figure up to date, and its ranges unless the page sets them by itself."""
    drawn: Any = one.renderers
    for renderer, layer in zip(drawn, plot.layers, strict=True):
        renderer.data_source.data = dict(layer.columns)
    if not plot.fits:
        start, end = _places(plot.up.limits, plot.up.linear)
        one.y_range.update(start=start, end=end)
    if plot.across is not None:
        start, end = plot.across.limits
        one.x_range.update(start=start, end=end)


def _range(start: float, end: float) -> Range1d:
    return Range1d(start=start, end=end)
