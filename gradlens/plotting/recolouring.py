"""A drawn figure with the colours of a dark ground."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.collections import Collection
from matplotlib.colors import to_rgba, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.typing import ColorType

from gradlens.instruments.dark import dark, dark_colormap

RGBA = tuple[float, float, float, float]


def darken(figure: Figure) -> None:
    """Give all that is drawn on a figure, whoever has drawn it, its colour on a dark ground."""
    for artist in dict.fromkeys(_parts(figure)):
        _recolour(artist)


def _parts(artist: Artist) -> Iterator[Artist]:
    """An artist and what is in it; of an axis without ticks, which have the colours of the axis."""
    yield artist
    if isinstance(artist, Axis):
        yield from (artist.label, artist.offsetText)
        return
    for child in artist.get_children():
        yield from _parts(child)


@singledispatch
def _recolour(artist: Artist) -> None:
    """By default, nothing: what is in the artist has colours of its own."""


@_recolour.register
def _(artist: Axis) -> None:
    found = artist.get_tick_params()
    ticks = found.get("color", matplotlib.rcParams["xtick.color"])
    artist.set_tick_params(
        "both",
        color=_dark(ticks),
        labelcolor=_dark(found.get("labelcolor", ticks)),
        grid_color=_dark(found.get("grid_color", matplotlib.rcParams["grid.color"])),
    )


@_recolour.register
def _(artist: Text) -> None:
    artist.set_color(_dark(artist.get_color()))
    box = artist.get_bbox_patch()
    if box is not None:
        _recolour(box)


@_recolour.register
def _(artist: Line2D) -> None:
    line, face, edge = (
        _dark(color)
        for color in (
            artist.get_color(), artist.get_markerfacecolor(), artist.get_markeredgecolor()
        )
    )  # fmt: skip
    artist.set(color=line, markerfacecolor=face, markeredgecolor=edge)


@_recolour.register
def _(artist: Patch) -> None:
    face, edge = _dark(artist.get_facecolor()), _dark(artist.get_edgecolor())
    artist.set(facecolor=face, edgecolor=edge)


@_recolour.register
def _(artist: Collection) -> None:
    if artist.get_array() is not None:
        artist.set_cmap(dark_colormap(artist.get_cmap()))
        return
    faces, edges = map(to_rgba_array, (artist.get_facecolor(), artist.get_edgecolor()))
    artist.set_facecolor([_dark(color) for color in faces])
    artist.set_edgecolor([_dark(color) for color in edges])


def _dark(color: ColorType) -> RGBA:
    """A colour on a dark ground, as opaque as it was."""
    r, g, b, alpha = to_rgba(color)
    return (*dark((r, g, b)), alpha)
