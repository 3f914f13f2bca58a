"""Colours of a page, and empty figures with their axes.

Colours are those of the figures, and for a dark background those of dark figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from matplotlib.colors import Colormap, to_hex

from gradlens.history.finding import Finding
from gradlens.instruments.scales import Ruler, StepAxis
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    FAINT,
    GRID,
    INK,
    MUTED,
    PAPER,
    Color,
    density_colormap,
    signal_colormap,
    signed_colormap,
    size_colormap,
)
from gradlens.plotting.dark import DARK, dark, dark_colormap
from gradlens.plotting.findings import main_findings

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


def in_light(color: Color) -> str:
    """A line's colour on a white background."""
    return to_hex(color)


def in_dark(color: Color) -> str:
    """A line's colour on a dark background."""
    return to_hex(dark(color))


def variables(colors: Mapping[str, str]) -> str:
    """Colours as CSS variables."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


ABSENT, UNDEFINED, ZERO, EXPLAINED = 0, 1, 2, 3
"""Numbers of the colours of a cell without a record, of one whose record isn't a number, of one
whose number is exactly zero on a logarithmic scale, and of one that has no number for a reason."""

FIRST = 4
SHADES = 256 - FIRST
"""The number of the first of a map's other colours, and how many there are."""


def palette(colors: Colormap) -> list[str]:
    """256 colours: of what is no number of the scale, and from small to large."""
    shades = [to_hex(color) for color in colors(np.linspace(0, 1, SHADES))]
    return ["#00000000", ALARM, FAINT, MUTED, *shades]


SIZES, SIGNED = size_colormap(), signed_colormap()
OF_THE_GROUND: Mapping[str, tuple[Colormap, Colormap]] = {
    name: (colors, dark_colormap(colors))
    for name, colors in (("density", density_colormap()), ("signal", signal_colormap()))
}
"""Colours on a white and on a dark background that have the background's in them."""


def gradient(colors: Colormap) -> str:
    """A colour bar as a CSS background."""
    stops = ", ".join(to_hex(color) for color in colors(np.linspace(0, 1, 9)))
    return f"linear-gradient(90deg, {stops})"


MAPS = {"sizes": SIZES, "signed": SIGNED} | {n: light for n, (light, _) in OF_THE_GROUND.items()}


# Axes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """The range of steps, marks, the line at the pointer, what events do, ticks, and colours."""

    x_range: Range1d
    marks: Mapping[str, ColumnDataSource]
    span: Span
    hover: CustomJS
    leave: CustomJS
    reset: CustomJS
    select: CustomJS
    steps: CustomJSTickFormatter
    ticks: BasicTicker
    log_ticks: FixedTicker
    places: CustomJSTransform
    mappers: Mapping[str, LinearColorMapper]


def shared(axis: StepAxis, marks: Mapping[str, Mapping[str, Any]]) -> Shared:
    """For figures over the steps of an axis, with the columns of marks by their kind."""
    at_once = "return Float64Array.from(xs, (x) => Math.log10(1 + Math.max(x, 0)))"
    return Shared(
        value_range(*axis.ends),
        {kind: ColumnDataSource(dict(columns)) for kind, columns in marks.items()},
        Span(dimension="height", line_color=LIGHT["muted"], line_width=1, line_alpha=0.7),
        hover=CustomJS(code="gradlens.hover(cb_obj.x, cb_obj.y, cb_obj.origin)"),
        leave=CustomJS(code="gradlens.leave()"),
        reset=CustomJS(code="gradlens.reset()"),
        select=CustomJS(code="gradlens.select(cb_obj.y, cb_obj.origin)"),
        steps=CustomJSTickFormatter(code="return gradlens.stepLabel(tick)"),
        ticks=BasicTicker(desired_num_ticks=5, mantissas=[1, 2, 5]),
        log_ticks=FixedTicker(ticks=[0.0, *(math.log10(1 + 10**n) for n in range(16))]),
        places=CustomJSTransform(func="return Math.log10(1 + Math.max(x, 0))", v_func=at_once),
        mappers={
            name: LinearColorMapper(palette=palette(colors), low=-0.5, high=255.5)
            for name, colors in MAPS.items()
        },
    )


def value_range(start: float, end: float) -> Range1d:
    """A range of an axis."""
    return Range1d(start=start, end=end)


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


ALARMS, NOTICES = "alarms", "notices"

Columns = Mapping[str, Any]


def columns(findings: Sequence[Finding]) -> dict[str, Columns]:
    """The steps of the main alarms and notices, and the numbers of those at each step.

    What there is none of is left out.
    """
    found: dict[str, dict[int, list[str]]] = {ALARMS: {}, NOTICES: {}}
    for number, finding in enumerate(main_findings(findings), 1):
        steps = found[ALARMS if finding.is_alarm else NOTICES]
        steps.setdefault(finding.step, []).append(str(number))
    return {
        kind: {"step": [float(step) for step in steps], "number": [*map(" ".join, steps.values())]}
        for kind, steps in found.items()
        if steps
    }


def mark(one: figure, sources: Mapping[str, ColumnDataSource]) -> None:
    """Draw a line at each of these steps, and the numbers beside it."""
    for kind, source in sources.items():
        color, dash = (ALARM, "solid") if kind == ALARMS else (BLUE, "dashed")
        line = one.vspan("step", source=source, line_dash=dash, level="annotation", name=kind)
        paint(line, color)
        # The numbers of notices are below those of alarms.
        text = one.text(
            "step",
            (one.height or HEIGHT) - (8 if kind == ALARMS else 22),
            "number",
            source=source,
            x_offset=3,
            text_baseline="top",
            text_font_size="11px",
            text_font_style="bold",
            level="annotation",
            name=kind,
            y_range_name="pixels",
        )
        paint(text, color, "text_color")
