"""The figures of a card as data: glyphs, and the columns of numbers that they are drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.models import glyphs
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from gradlens.history.finding import Finding
from gradlens.history.lines import Floats, Line
from gradlens.instruments.panel import Curve, Lines, Map, Picture, Shape, Shapes, any_finite
from gradlens.instruments.scales import Ruler, StepAxis
from gradlens.instruments.series import (
    SMOOTH_FROM,
    LayerTable,
    columns,
    edges,
    ends_of_area,
    short_names,
    smooth,
    thin,
    trend,
)
from gradlens.instruments.style import ALARM, BLUE, MUTED, Color
from gradlens.plotting.summary import main_findings
from gradlens.report.content import UNKNOWN, Card, Gaps

Columns = Mapping[str, Any]

HEIGHT = 178
"""Pixels of a figure."""
ROW = 15
"""Pixels of a row of a map, where it has room."""
MAP_HEIGHTS = (110, 520)
"""Least and most pixels of a map."""
EDGE = 32
"""Pixels for the labels of the step axis."""
FEW = 30
"""Up to so many values have points."""
PIECES = 600
"""A curve has the least and greatest value of each of so many equal parts of the step axis."""
CELLS = 18_000
COLUMNS = (60, 300)
"""A map has about so many cells, and columns between these two numbers."""
PIXELS = 600
"""Largest number of equal parts of the step axis that a map shows."""

ABSENT, UNDEFINED, ZERO, EXPLAINED = 0, 1, 2, 3
"""Numbers of the colours of a cell without a record, of one whose record isn't a number, of one
whose number is exactly zero on a logarithmic scale, and of one that has no number for a reason."""
FIRST = 4
SHADES = 256 - FIRST
"""The number of the first of a map's other colours, and how many there are."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A glyph, and the columns that it is drawn from.

    Its ``part`` has the ``color``, which is the name of those of a map if the glyph is an image.
    ``tags`` tell the page what it is. What is ``over`` the figure has heights in pixels.
    """

    name: str
    columns: Columns
    glyph: Any
    color: Color
    part: str = "line_color"
    tags: Mapping[str, Any] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True, eq=False)
class Plot:
    """A figure: its layers from back to front, and its axes. Without ``across`` it is over steps.

    Rows that have names are ``rows``, ``levels`` are dashed lines, and the page ``fits`` the value
    axis to what is in view. Both axes of a ``square`` have the same unit.
    """

    layers: tuple[Layer, ...]
    up: Ruler
    across: Ruler | None = None
    height: int = HEIGHT
    rows: tuple[str, ...] = ()
    levels: tuple[float, ...] = ()
    fits: bool = False
    square: bool = False
    visible: bool = True

    @property
    def skeleton(self) -> Sequence[Any]:
        """What can't be changed once the figure is drawn."""
        parts = [(one.name, one.color, one.tags) for one in self.layers]
        return parts, self.up.scale, self.up.linear, self.rows


def plots(card: Card, axis: StepAxis, findings: Sequence[Finding] = ()) -> tuple[Plot, ...]:
    """The figures of a card, with marks of ``findings``; none if there is nothing to draw.

    ``axis`` is the range of all steps of the page.
    """
    shown = card.panel.content
    if card.picture or (isinstance(shown, Lines) and not any_finite(shown.lines)):
        return ()
    match shown:
        case Lines():
            return (_of_lines(shown, card.gaps, marks(findings, HEIGHT)),)
        case Map():
            return _of_map(shown, axis, findings)
        case Picture():
            return (_of_picture(shown, axis, marks(findings, HEIGHT)),)
        case Shapes():
            return (_of_shapes(shown),)
        case _:
            raise NotImplementedError(type(shown))


def marks(findings: Sequence[Finding], height: int) -> list[Layer]:
    """A line at each step of the main alarms and notices, and the numbers of those beside it."""
    found: dict[bool, dict[int, list[str]]] = {True: {}, False: {}}
    for number, finding in enumerate(main_findings(findings), 1):
        found[finding.is_alarm].setdefault(finding.step, []).append(str(number))
    layers = []
    for is_alarm, steps in found.items():
        name, color = ("alarms", ALARM) if is_alarm else ("notices", BLUE)
        texts = [*map(" ".join, steps.values())]
        data = {"step": [float(step) for step in steps], "number": texts}
        line = glyphs.VSpan(x="step", line_dash="solid" if is_alarm else "dashed")
        # The numbers of notices are below those of alarms.
        text = glyphs.Text(
            x="step", y=height - (8 if is_alarm else 22), text="number", x_offset=3,
            text_baseline="top", text_font_size="11px", text_font_style="bold",
        )  # fmt: skip
        layers.append(Layer(name, data, line, color, over=True))
        layers.append(Layer(name, data, text, color, "text_color", over=True))
    return [one for one in layers if one.columns["step"]]


# Lines --------------------------------------------------------------------------------------


def _of_lines(shown: Lines, gaps: Sequence[Gaps], marks: Sequence[Layer]) -> Plot:
    up, layers = shown.up(), []
    if shown.danger is not None:
        beyond = Line(shown.danger.steps, np.full_like(shown.danger.values, np.inf))
        layers.append(_band(up, shown.danger, beyond, ALARM, 0.09))
    for place, (curve, missing) in enumerate(zip(shown.all_curves, gaps, strict=True)):
        layers += _of_curve(curve, place, place >= len(shown.curves), up)
        layers.append(_of_gaps(missing))
    fits = not shown.spiky and shown.limits is None
    return Plot((*layers, *marks), up, levels=shown.dashed, fits=fits)


def _of_curve(curve: Curve, place: int, is_layer: bool, up: Ruler) -> list[Layer]:
    tags, count = {"curve": place}, int(curve.line.finite.sum())
    is_smooth = count >= SMOOTH_FROM and not is_layer
    raw = smooth(curve.line, bridge=True) if is_layer else curve.line
    values = _line(Line(*thin(raw.steps, raw.values, PIECES)), up.linear)
    at: dict[str, Any] = {"x": "step", "y": "place" if up.linear else "value"}
    width, alpha = (0.8, 0.38) if is_smooth else (curve.width + 0.1, 1.0)
    line = glyphs.Line(**at, line_width=width, line_alpha=alpha)
    words = tags | {"name": curve.name, "unit": curve.unit, "smooth": is_smooth}
    layers = [_band(up, low, high, curve.color, 0.2, tags) for low, high in curve.spreads]
    layers.append(Layer("values", values, line, curve.color, tags=words))
    if count <= FEW:
        dot = glyphs.Scatter(**at, size=5, line_color=None)
        layers.append(Layer("dots", values, dot, curve.color, "fill_color", tags))
    if is_smooth:
        found = _line(trend(curve.line, bridge=True), up.linear)
        front = glyphs.Line(**at, line_width=curve.width + 0.3)
        layers.append(Layer("trend", found, front, curve.color, tags=tags))
    return layers


def _of_gaps(missing: Gaps) -> Layer:
    """Ticks on the base line where a value is missing."""
    tick = glyphs.Scatter(x="step", y=3, marker="dash", angle=1.5708, size=8, line_width=1.4)
    found = {"step": compact(np.array([*missing], dtype=np.float64)), "why": [*missing.values()]}
    color = ALARM if UNKNOWN in missing.values() else MUTED
    return Layer("gaps", found, tick, color, over=True)


def _band(
    up: Ruler, low: Line, high: Line, color: Color, alpha: float, tags: Mapping[str, Any] = {}
) -> Layer:
    """The area between two lines, of many points between their trends."""
    ends = ends_of_area(low, high, 10 * abs(up.limits[1]))
    below, above = (_line(end, up.linear) for end in ends)
    y = "place" if up.linear else "value"
    area = glyphs.VArea(x="step", y1="low", y2="high", fill_alpha=alpha)
    found = {"step": below["step"], "low": below[y], "high": above[y]}
    return Layer("band", found, area, color, "fill_color", tags)


def _line(line: Line, linear: float) -> Columns:
    found = {"step": compact(line.steps), "value": compact(line.values)}
    return found | {"place": to_places(line.values, linear)} if linear else found


# Maps and pictures --------------------------------------------------------------------------


def _of_map(shown: Map, axis: StepAxis, findings: Sequence[Finding]) -> tuple[Plot, Plot]:
    """A map, and a hidden figure for the line of a row, over the range of the colours."""
    names = shown.table.names
    height = min(max(ROW * len(names) + EDGE, MAP_HEIGHTS[0]), MAP_HEIGHTS[1])
    stride = max(1, -(-len(names) * ROW // (height - EDGE)))
    thinned, _ = columns(shown.table, int(np.clip(CELLS // len(names), *COLUMNS)), axis.warp)
    images = _images(_codes(thinned, shown.norm), thinned.steps, axis)
    image = _image({**images, "y": [0], "dh": [len(names)]}, shown.colors, {"names": [*names]})
    rows = {f"row {n}": compact(row) for n, row in enumerate(thinned.values)}
    line = glyphs.Line(x="step", y="row 0", line_width=1.7)
    row = Layer("row", {"step": compact(thinned.steps)} | rows, line, BLUE)
    ticks = tuple(n + 0.5 for n in range(0, len(names), stride))
    low, high = shown.norm.vmin or 0.0, shown.norm.vmax or 1.0
    colors = Ruler("", (low, high), isinstance(shown.norm, LogNorm))
    above, below = marks(findings, height), marks(findings, ROW_HEIGHT)
    labels = tuple(_short(name) for name in short_names(names))
    return (
        Plot((image, *above), Ruler("", (len(names), 0), ticks=ticks), None, height, labels),
        Plot((row, *below), colors, height=ROW_HEIGHT, visible=False),
    )


ROW_HEIGHT = 120
"""Pixels of the figure of a row."""


def _short(name: str, most: int = 13) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) :]}"


def _codes(table: LayerTable, norm: Normalize) -> NDArray[np.uint8]:
    low = norm.vmin or 0.0
    codes = _shades(norm, np.maximum(table.values, low) if low > 0 else table.values)
    codes[table.recorded & ~np.isfinite(table.values)] = EXPLAINED if table.reason else UNDEFINED
    if isinstance(norm, LogNorm):
        # Zero isn't on a logarithmic scale, and has a colour of its own.
        codes[table.values == 0] = ZERO
    return codes


def _shades(norm: Normalize, values: Floats) -> NDArray[np.uint8]:
    """The number of each value's colour; of NaN, that of nothing."""
    shares = np.ma.filled(norm(np.ma.masked_invalid(values)), np.nan).clip(0, 1)
    codes = np.where(np.isfinite(shares), np.nan_to_num(shares) * (SHADES - 1) + FIRST, ABSENT)
    return codes.astype(np.uint8)


def _of_picture(shown: Picture, axis: StepAxis, marks: Sequence[Layer]) -> Plot:
    codes = _shades(shown.norm, np.where(shown.sizes > 0, shown.sizes, np.nan))
    low, high = (float(end) for end in shown.rows[[0, -1]])
    up = {"y": [low], "dh": [high - low]}
    if shown.steps is not None:
        image = _image({**_images(codes, shown.steps, axis), **up}, "density")
        return Plot((image, *marks), shown.up)
    low, high = (float(end) for end in shown.columns[[0, -1]])
    image = _image({"image": [codes], "x": [low], "dw": [high - low], **up}, "density")
    return Plot((image,), shown.up, shown.across)


def _image(columns: Columns, colors: str, tags: Mapping[str, Any] = {}) -> Layer:
    glyph = glyphs.Image(image="image", x="x", y="y", dw="dw", dh="dh")
    return Layer("map", columns, glyph, colors, "color_mapper", tags)


def _images(codes: NDArray[np.uint8], steps: Floats, axis: StepAxis) -> Columns:
    """An image of equally wide columns for each kind of step axis."""
    found: dict[str, Any] = {}
    for start, one in (("", axis), ("log ", StepAxis(axis.low, axis.high, log=True))):
        ends = edges(one.warp(steps), one.warp(steps))
        found[f"{start}image"] = [codes[:, pixels(ends, PIXELS)]]
        found[f"{start}x"], found[f"{start}dw"] = [ends[0]], [ends[-1] - ends[0]]
    return found


def pixels(ends: Floats, most: int) -> NDArray[np.int64]:
    """For at most ``most`` equal parts of an axis, which of the pieces between ``ends`` is there.

    As few as show each piece, if these are equally wide.
    """
    widths = np.diff(ends)
    equal = np.allclose(widths, widths[0], rtol=1e-6)
    count = widths.size if equal and widths.size <= most else most
    middles = ends[0] + (np.arange(count) + 0.5) / count * (ends[-1] - ends[0])
    return np.clip(np.searchsorted(ends, middles, side="right") - 1, 0, widths.size - 1)


# Shapes -------------------------------------------------------------------------------------


def _of_shapes(shown: Shapes) -> Plot:
    layers = []
    for shape in shown.shapes:
        # A shape goes with the entry of its colour.
        entries = [n for n, entry in enumerate(shown.key) if entry.color == shape.color]
        tags = {"curve": entries[0]} if entries else {}
        low = np.zeros_like(shape.y) if shape.low is None else shape.low
        found = {"x": shape.x, "value": shape.y} | ({"low": low} if shape.kind == "area" else {})
        data = {name: compact(one) for name, one in found.items()}
        for glyph, part in _glyphs(shape):
            layers.append(Layer("shape", data, glyph, shape.color, part, tags))
    return Plot(tuple(layers), shown.up, shown.across, square=shown.equal)


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


# Numbers ------------------------------------------------------------------------------------

EXACT = 2.0**24
"""Whole numbers up to it are exact as float32."""


def compact(values: Floats) -> NDArray[np.floating]:
    """Numbers as float32 where seven digits, and all of those of whole numbers, fit; ∞ is a NaN."""
    known = np.where(np.isfinite(values), values, np.nan)
    sizes = np.abs(known[np.isfinite(known) & (known != 0)])
    limits = np.finfo(np.float32)
    most = EXACT if (sizes == np.rint(sizes)).all() else limits.max
    fits = not sizes.size or (sizes.max() <= most and sizes.min() >= limits.tiny)
    return known.astype(np.float32) if fits else known


def to_places(values: Floats, linear: float) -> NDArray[np.float32]:
    """Places of values on an axis that is about linear up to the size ``linear``."""
    known = np.where(np.isfinite(values), values, np.nan)
    places = np.sign(known) * np.log10(1 + np.abs(known) / linear)
    return np.asarray(places, dtype=np.float32)
