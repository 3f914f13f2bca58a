"""The common style of all instruments: colours, titles, keys, messages.

Everything is set on the artists themselves; matplotlib's global settings stay as they are. Its
``font.size`` is followed: sizes of type are relative to it, and so is the room for texts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnchoredOffsetbox, DrawingArea, HPacker, OffsetBox, TextArea
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.transforms import ScaledTranslation

RGB = tuple[float, float, float]
Color = str | RGB

PAPER = "#ffffff"
INK = "#1f2933"
MUTED = "#66727f"
FAINT = "#c3cad2"
GRID = "#e7eaee"
ALARM = "#b42318"

BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
PURPLE = "#a6488a"
AMBER = "#c98a00"
SKY = "#56b4e9"
CATEGORICAL = (BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY)

Size = float | str
"""Points of type, or one of matplotlib's names of sizes relative to ``font.size``."""

HEADER_SIZE = "large"
TITLE_SIZE = "small"
TEXT_SIZE = TICK_SIZE = "x-small"
SMALLEST_SIZE = "xx-small"
DEFAULT_FONT_SIZE = 10.0
"""Matplotlib's default of ``font.size``."""
TITLE_GAP = 15.0
KEY_GAP = 4.5
SWATCH = 9.0
SPACE, LEAST_SPACE = 10.0, 6.0
"""Points between the entries of a key, and where they wouldn't fit otherwise."""
DOT = " · "
"""What separates the parts of a subtitle."""


def font_scale() -> float:
    """matplotlib's ``font.size`` over its default, by which all room for texts grows."""
    return float(matplotlib.rcParams["font.size"]) / DEFAULT_FONT_SIZE


def points(size: float) -> float:
    """Points that a text takes which takes ``size`` points at the default ``font.size``."""
    return size * font_scale()


def _part_of(name: str, first: float, last: float, called: str) -> Colormap:
    """The colours of one of matplotlib's maps between two shares of it."""
    colors = matplotlib.colormaps[name](np.linspace(first, last, 64))
    return LinearSegmentedColormap.from_list(f"gradlens {called}", list(colors))


def sequence_colors(count: int) -> list[RGB]:
    """Colours for ``count`` ordered lines, the first one darkest."""
    shades = SEQUENCE(np.linspace(0, 1, max(count, 2)))
    return [(float(r), float(g), float(b)) for r, g, b, _ in shades[:count]]


def categorical_colors(count: int) -> list[RGB]:
    """Colours for ``count`` lines without an order."""
    if count <= len(CATEGORICAL):
        return [to_rgb(color) for color in CATEGORICAL[:count]]
    return sequence_colors(count)


def tint(color: Color, share: float) -> RGB:
    """The colour mixed with white; ``share`` is the fraction of the colour."""
    r, g, b = (1 - share * (1 - channel) for channel in to_rgb(color))
    return (r, g, b)


SEQUENCE = _part_of("viridis", 0.0, 0.86, "sequence")
"""Dark to light for input to output, without the light end, which has little contrast."""
COLORMAPS: Mapping[str, Colormap] = {
    # Dark to light for sizes, perceptually uniform and readable with colour blindness.
    "sizes": matplotlib.colormaps["viridis"],
    # Blue below zero, red above, pale between.
    "signed": matplotlib.colormaps["RdBu_r"],
    # Light to dark blue for counts; even the smallest differs from the background.
    "density": _part_of("Blues", 0.18, 1.0, "density"),
    # Orange for noise, blue for signal, pale between.
    "signal": LinearSegmentedColormap.from_list(
        "gradlens signal", [tint(ORANGE, 0.6), tint(MUTED, 0.06), tint(BLUE, 1.0)]
    ),
}
"""The colours of maps and pictures."""


def darker(color: Color) -> RGB:
    """A line's colour with enough contrast for a text."""
    r, g, b = (0.58 * channel for channel in to_rgb(color))
    return (r, g, b)


def dress(ax: Axes) -> None:
    """Give an axis the common style: a base line, a light grid, small ticks."""
    ax.set_facecolor(PAPER)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set(color=FAINT, linewidth=0.8)
    ax.grid(visible=False)
    ax.grid(visible=True, axis="y", color=GRID, linewidth=0.7, linestyle="-")
    ax.set_axisbelow(True)
    ax.tick_params(which="both", length=0, pad=3, labelsize=TICK_SIZE, labelcolor=MUTED)
    ax.tick_params(axis="x", which="major", length=2.5, width=0.8, color=FAINT, direction="out")


def inside(ax: Axes, left: float, bottom: float, width: float, height: float) -> Axes:
    """An axis in the common style inside another one, placed by fractions of its size.

    The outer axis keeps only its position and titles.
    """
    ax.set_axis_off()
    inner = ax.inset_axes((left, bottom, width, height))
    dress(inner)
    return inner


def figure_of(ax: Axes) -> Figure:
    """The whole figure that an axis is in; ``ValueError`` if it has been removed."""
    parent = ax.get_figure()  # a subfigure, or the figure itself
    if parent is None:
        raise ValueError("the axis is in no figure (it was removed): pass one that is")
    return parent.figure


def size_in_points(ax: Axes) -> tuple[float, float]:
    """Width and height of an axis on paper."""
    dpi = figure_of(ax).dpi
    return float(ax.bbox.width * 72 / dpi), float(ax.bbox.height * 72 / dpi)


def literal(artist: Artist) -> None:
    """Show all texts as they are, also with dollar signs; only labels of ticks are formulas."""
    for child in artist.get_children():
        part = child.label if isinstance(child, Axis) else child
        if isinstance(part, Text):
            part.set_parse_math(False)
        literal(part)


def text_width(text: str, size: Size, weight: str = "normal") -> float:
    """Width of a text in points, without a canvas."""
    if not text.strip():
        return 0.0
    font = FontProperties(size=size, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return float(width)


def wrapped(text: str, width: float, size: Size, most: int, weight: str = "normal") -> list[str]:
    """The text in at most ``most`` lines of ``width`` points, broken between words.

    If it needs more lines, the last one ends in "…".
    """
    text = " ".join(text.split())
    full = text_width(text, size, weight)
    if full <= width:
        return [text]
    # Measuring is slow, so the search starts near the result.
    for letters in range(max(int(1.05 * len(text) * width / full), 8), 7, -1):
        lines = textwrap.wrap(text, letters, max_lines=most, placeholder=" …")
        if max(text_width(line, size, weight) for line in lines) <= width:
            break
    return lines


def shorten(text: str, width: float, size: Size, weight: str = "normal") -> str:
    """The text, with its middle left out if it is wider than ``width`` points."""
    full = text_width(text, size, weight)
    if full <= width:
        return text
    # Measuring is slow, so the search starts near the result.
    kept = min(len(text), int(len(text) * max(width, 0) / full) + 2)
    shown = text
    while kept > 2 and text_width(shown, size, weight) > width:
        kept -= 1
        tail = kept // 2
        shown = f"{text[: kept - tail]}…{text[len(text) - tail :]}"
    return shown


def shorten_apart(texts: Sequence[str], width: float, size: Size) -> list[str]:
    """The texts, each at most ``width`` points wide, and different where the whole texts are.

    Those that would look the same without their middles are shown around the place where they
    differ.
    """
    shown = [shorten(text, width, size) for text in texts]
    alike: dict[str, list[str]] = {}
    for text, short in {*zip(texts, shown, strict=True)}:
        alike.setdefault(short, []).append(text)
    return [
        short if len(alike[short]) == 1 else _around(text, alike[short], width, size)
        for text, short in zip(texts, shown, strict=True)
    ]


def _around(text: str, others: Sequence[str], width: float, size: Size) -> str:
    """What a text has that others have not, with as much in front of it as there is room for."""
    head, tail = common(others), common([other[::-1] for other in others])
    end = max(len(text) - tail, head + 1)
    after = "…" if end < len(text) else ""
    start = next(
        (place for place in range(head) if text_width(f"…{text[place:end]}{after}", size) <= width),
        head,
    )
    return shorten(f"…{text[start:end]}{after}", width, size)


def common(parts: Sequence[Sequence[str]]) -> int:
    """The number of letters, or of words, with which all parts begin."""
    alike = takewhile(lambda each: len({*each}) == 1, zip(*parts, strict=False))
    return sum(1 for _ in alike)


def fitted(text: str, options: Sequence[tuple[Size, float]]) -> tuple[str, Size]:
    """A bold text in the first size that has room on one line, or else on two in the last one."""
    for size, room in options:
        if text_width(text, size, "bold") <= room:
            return text, size
    lines = wrapped(text, room, size, 2, "bold")
    return "\n".join(shorten(line, room, size, "bold") for line in lines), size


def title(
    ax: Axes, text: str, readout: str = "", alarm: bool = False, width: float | None = None
) -> None:
    """Bold title on the left, and the latest value on the right, in red if ``alarm``.

    They are on ``width`` points, by default that of the axis. Where there is no room for both, the
    title becomes smaller, then the value is left out, and then the title has two lines.
    """
    own = size_in_points(ax)[0]
    width = own if width is None else width
    left = width - text_width(readout, TITLE_SIZE) - (points(8) if readout else 0)
    sizes: tuple[Size, ...] = (TITLE_SIZE, TEXT_SIZE)
    shown, size = fitted(text, [(size, room) for room in (left, width) for size in sizes])
    readout = readout if text_width(text, size, "bold") <= left else ""
    # With a given height, matplotlib doesn't search for labels that the title might overlap.
    place: dict[str, Any] = {"y": 1.0, "pad": points(TITLE_GAP), "fontsize": TITLE_SIZE}
    color = ALARM if alarm else MUTED
    ax.set_title(readout, loc="right", fontweight="normal", color=color, x=width / own, **place)
    place |= {"fontsize": size, "linespacing": 1.05}
    ax.set_title(shown, loc="left", fontweight="bold", color=INK, **place)


def subtitle(ax: Axes, text: str) -> Text:
    """A muted line between title and axis, as wide as the axis at most.

    Of parts between dots, the last ones are left out where there is no room.
    """
    width = size_in_points(ax)[0]
    while DOT in text and text_width(text, TEXT_SIZE) > width:
        text = text.rpartition(DOT)[0]
    size = TEXT_SIZE if text_width(text, TEXT_SIZE) <= width else SMALLEST_SIZE
    shown = shorten(text, width, size)
    return written(ax, shown, (0, 1), (0, points(KEY_GAP)), fontsize=size, va="baseline")


def written(
    ax: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **look: Any
) -> Text:
    """A muted text at a place in fractions of an axis, and so many points from there."""
    usual: dict[str, Any] = {"color": MUTED, "annotation_clip": False}
    usual |= {"xycoords": "axes fraction", "textcoords": "offset points"}
    return ax.annotate(text, place, xytext=offset, **usual | look)


def message(ax: Axes, text: str) -> Text:
    """A text in the middle of a panel that has nothing to draw, in front of marks at steps."""
    ax.set_yticks([])
    ax.grid(visible=False)
    lines = wrapped(text, 0.9 * size_in_points(ax)[0], TEXT_SIZE, 6)
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_SIZE, "color": MUTED}
    box = {"boxstyle": "square,pad=0.3", "facecolor": PAPER, "linewidth": 0}
    text = "\n".join(lines)
    return ax.text(0.5, 0.5, text, transform=ax.transAxes, zorder=5, bbox=box, **look)


@dataclass(frozen=True)
class Entry:
    """One label of a key, and the mark that it explains."""

    label: str
    color: Color
    mark: Literal["line", "thin", "dashed", "box"] = "line"


def key(ax: Axes, entries: Sequence[Entry], width: float | None = None) -> Artist | None:
    """Explain marks in one line under the title, with the number of entries that don't fit.

    It is on ``width`` points, by default that of the axis.
    """
    if not entries:
        return None
    room = size_in_points(ax)[0] if width is None else width
    labels, space = _fitting([entry.label for entry in entries], room)
    texts: dict[str, Any] = {"textprops": {"fontsize": TEXT_SIZE, "color": MUTED}}
    parts: list[Artist] = []
    for entry, label in zip(entries, labels, strict=False):
        # There are three points on either side of each part of a key.
        parts += [_swatch(entry), TextArea(label, **texts), DrawingArea(space - 6, 5, 0, 0)]
    if len(labels) < len(entries):
        parts.append(TextArea(f"+{len(entries) - len(labels)}", **texts))
    above = ScaledTranslation(0, points(KEY_GAP - 2) / 72, figure_of(ax).dpi_scale_trans)
    line = HPacker(children=parts, pad=0, sep=3, align="baseline")
    look: dict[str, Any] = {"loc": "lower left", "pad": 0, "borderpad": 0, "frameon": False}
    at: dict[str, Any] = {"bbox_to_anchor": (0, 1), "bbox_transform": ax.transAxes + above}
    box = AnchoredOffsetbox(child=line, **look, **at)
    box.set_clip_on(False)
    return ax.add_artist(box)


def explained(
    ax: Axes, entries: Sequence[Entry], words: str, width: float | None = None
) -> dict[str, Artist]:
    """A key, or words where there are no entries for one."""
    found = key(ax, entries, width)
    if found is not None:
        return {"key": found}
    return {"subtitle": subtitle(ax, words)} if words else {}


def _fitting(labels: Sequence[str], room: float) -> tuple[list[str], float]:
    """The labels that fit, or what fits of them, and the space between them."""
    for space in (SPACE, LEAST_SPACE):
        # There need be no space behind the last one.
        if sum(_room(label, space) for label in labels) <= room + space:
            return list(labels), space
    whole = _first(labels, room)
    least = max(room / len(labels) - SWATCH - 14, points(34))
    short = _first([shorten(label, least, TEXT_SIZE) for label in labels], room)
    # A key of one label and a number would say too little.
    return (short if len(whole) == 1 < len(short) else whole or short), SPACE


def _first(labels: Sequence[str], room: float) -> list[str]:
    """The first labels that fit, with a number behind them."""
    ends = accumulate(_room(label) for label in labels)
    return [one for one, end in zip(labels, ends, strict=True) if end <= room - points(16)]


def _room(label: str, space: float = SPACE) -> float:
    return SWATCH + 3 + text_width(label, TEXT_SIZE) + space


def _swatch(entry: Entry) -> OffsetBox:
    area = DrawingArea(SWATCH, 5, 0, 0)
    if entry.mark == "box":
        area.add_artist(Rectangle((1, 0), SWATCH - 2, 5, color=entry.color, linewidth=0))
        return area
    width = 0.9 if entry.mark == "thin" else 1.8
    style: Any = (0, (1.6, 0.8)) if entry.mark == "dashed" else "-"
    line = Line2D([0, SWATCH], [2.5, 2.5], color=entry.color, linewidth=width, linestyle=style)
    area.add_artist(line)
    return area
