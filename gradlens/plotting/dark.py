"""The colours of the common style on a dark ground, and a drawn figure in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.collections import Collection
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_hex, to_rgb, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.typing import ColorType

from gradlens.instruments.style import (
    ALARM,
    AMBER,
    BLUE,
    COLORMAPS,
    FAINT,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    RGB,
    SKY,
    Color,
)

DARK: Mapping[str, str] = {
    PAPER: "#181d23",
    INK: "#e8ecf0",
    MUTED: "#9aa6b2",
    FAINT: "#46505b",
    GRID: "#28303a",
    ALARM: "#ff8a7a",
    BLUE: "#6bb5e8",
    ORANGE: "#ff9d5c",
    GREEN: "#3fc79f",
    PURPLE: "#d98fc3",
    AMBER: "#e8bd4a",
    SKY: "#b4e0ff",
}
"""The named colours of the style, with those that take their place. Text on the ground has a
contrast of 4.5 at least, which the Web Content Accessibility Guidelines 2.2 (1.4.3) want."""

PALER = 0.4
"""Share of a pure colour on a dark ground; the rest is white."""


def dark(color: Color) -> RGB:
    """The colour on a dark ground that takes the place of one on white.

    A colour without a name is a mixture of a pure one and white: the pure one becomes paler, and
    the ground takes the place of white.
    """
    named = DARK.get(to_hex(color))
    if named:
        return to_rgb(named)
    channels = to_rgb(color)
    white = min(channels)
    if max(channels) < DARKEST:
        return to_rgb(DARK[INK])
    pure = [(channel - white) / ((1 - white) or 1.0) for channel in channels]
    pairs = zip(pure, to_rgb(DARK[PAPER]), strict=True)
    r, g, b = ((1 - white) * (PALER * p + 1 - PALER) + white * ground for p, ground in pairs)
    return (r, g, b)


DARKEST = 0.2
"""A colour whose channels are below it is black, as matplotlib's own texts are."""


def dark_colormap(colors: Colormap) -> Colormap:
    """The colours of a map on a dark ground: what is pale on white is like the ground.

    Those of sizes and of signed numbers are the same on every ground, but for the grey of zeros.
    """
    if colors.name == COLORMAPS["density"].name:
        return colors.reversed()
    if colors.name == COLORMAPS["signal"].name:
        shades = [dark((r, g, b)) for r, g, b, _ in colors(np.linspace(0, 1, 64)).tolist()]
        return LinearSegmentedColormap.from_list(colors.name, shades)
    r, g, b, _ = colors.get_under().tolist()
    under = to_hex((r, g, b))
    return colors.with_extremes(under=dark(under)) if under == FAINT else colors


# Figures ------------------------------------------------------------------------------------

COLOURED: Mapping[type[Artist], tuple[str, ...]] = {
    Text: ("color",),
    Line2D: ("color", "markerfacecolor", "markeredgecolor"),
    Patch: ("facecolor", "edgecolor"),
    Collection: ("facecolor", "edgecolor"),
}
"""The properties of artists that are colours; what is in others has colours of its own."""


def darken(figure: Figure) -> None:
    """Give all that is drawn on a figure, whoever has drawn it, its colour on a dark ground."""
    for artist in dict.fromkeys(_parts(figure)):
        if isinstance(artist, Axis):
            found = artist.get_tick_params()
            ticks = found.get("color", matplotlib.rcParams["xtick.color"])
            grid = found.get("grid_color", matplotlib.rcParams["grid.color"])
            label = found.get("labelcolor", ticks)
            artist.set_tick_params(
                "both", color=_dark(ticks), labelcolor=_dark(label), grid_color=_dark(grid)
            )
        elif isinstance(artist, Collection) and artist.get_array() is not None:
            artist.set_cmap(dark_colormap(artist.get_cmap()))
        else:
            names = next((COLOURED[kind] for kind in COLOURED if isinstance(artist, kind)), ())
            artist.set(**{name: _dark(getattr(artist, f"get_{name}")()) for name in names})


def _parts(artist: Artist) -> Iterator[Artist]:
    """An artist and what is in it; of an axis without ticks, which have the colours of the axis."""
    yield artist
    if isinstance(artist, Axis):
        yield from (artist.label, artist.offsetText)
        return
    for child in artist.get_children():
        yield from _parts(child)
    if isinstance(artist, Text) and (box := artist.get_bbox_patch()) is not None:
        yield box


def _dark(color: ColorType | Sequence[ColorType]) -> Any:
    """A colour, or several, on a dark ground, as opaque as they were."""
    found = [(*dark((r, g, b)), alpha) for r, g, b, alpha in to_rgba_array(color).tolist()]
    return found if np.ndim(color) == 2 else found[0]
