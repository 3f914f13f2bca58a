"""A run as an animation: the figure as it was at several steps, on the axes of the whole run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
from matplotlib.animation import FFMpegWriter
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from PIL import Image

from gradlens.history.history import History
from gradlens.history.run_file import replacing
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Content, Grid, Lines, Map, Panel, Picture, Shapes
from gradlens.instruments.scales import StepLabels
from gradlens.instruments.style import PAPER
from gradlens.plotting.output import check_suffix
from gradlens.plotting.panels import panels
from gradlens.plotting.plotter import up_to
from gradlens.plotting.progress import progress
from gradlens.plotting.screen import Screen

ANIMATIONS = (".gif", ".mp4")
FRAMES_PER_SECOND = 10
LAST = 20
"""Frames for which the last one stays."""
DPI = 100


def animate(history: History, screen: Screen, path: Path, most: int) -> None:
    """Write a run as a ``.gif`` or ``.mp4`` of at most ``most`` frames; progress on stderr.

    ``ValueError`` for another ending or if there is nothing to draw, ``OSError`` if there is no
    ffmpeg for a video.
    """
    suffix = check_suffix(path, ANIMATIONS)
    if suffix == ".mp4" and not FFMpegWriter.isAvailable():
        raise OSError(
            f"{path} needs ffmpeg, which matplotlib doesn't find: install it, or use .gif"
        )
    screen.parts(history)  # nothing to draw is said before any work
    steps = frame_steps(history, most, screen.log_steps)
    with replacing(path) as partial:
        if suffix == ".gif":
            _write_gif(history, screen, steps, partial)
        else:
            _write_mp4((figure for _, figure in frames(history, screen, steps)), partial)


def frames(history: History, screen: Screen, steps: Sequence[int]) -> Iterator[tuple[int, Figure]]:
    """Each of the ascending ``steps`` with the figure of the run up to it.

    It is one figure, drawn anew each time. Axes, their scales and colours are those of the whole
    run, and so are findings, which are marked as soon as their steps are there; an axis that shows
    single steps has room for all that are shown.
    """
    parts, findings = screen.parts(history), screen.marked(history)
    every = panels(parts, history)

    def until(step: int, chosen: Sequence[int]) -> tuple[Panel, ...]:
        known = panels((parts[place] for place in chosen), up_to(history, step))
        pairs = zip(known, chosen, strict=True)
        return tuple(replace(every[place], content=one.content) for one, place in pairs)

    whole = Figure(dpi=DPI, facecolor=PAPER)
    screen.draw(_until(history, history.steps[-1], steps[0]), whole, every, True, findings)
    changing = [place for place, panel in enumerate(every) if _shows_single_steps(panel.content)]
    sketch = Figure(facecolor=PAPER)
    for step in _with_progress(steps, "axes  ") if changing else ():
        known = _until(history, step, steps[0])
        screen.draw(known, sketch, until(step, changing), findings=())
        for place, ax in zip(changing, sketch.axes, strict=True):
            for one, other in _pairs(whole.axes[place], ax):
                _widen(one, other)
    figure = Figure(dpi=DPI, facecolor=PAPER)
    figure.set_size_inches(*whole.get_size_inches())
    for step in _with_progress(steps, "frames"):
        known = _until(history, step, steps[0])
        screen.draw(known, figure, until(step, range(len(parts))), False, findings)
        for panel, ax in zip(whole.axes, figure.axes, strict=True):
            for one, other in _pairs(panel, ax):
                _set_like(other, one)
        yield step, figure


def _shows_single_steps(shown: Content) -> bool:
    """Whether a panel shows single steps, besides all steps or instead of these."""
    return isinstance(shown, (Picture, Shapes, Grid)) or (
        isinstance(shown, (Lines, Map)) and shown.beside is not None
    )


def _until(history: History, step: int, first: int) -> History:
    # With the notes of the first frame only: a later one would move everything up.
    known = up_to(history, step)
    known.notes[:] = [note for note in known.notes if note.step <= first]
    return known


def _with_progress(steps: Sequence[int], label: str) -> Iterator[int]:
    for _, step in zip(progress(len(steps), label), steps, strict=True):
        yield step


def frame_steps(history: History, most: int, log: bool = False) -> list[int]:
    """At most ``most`` recorded steps, evenly on the step axis, with the first and the last."""
    steps = np.array(history.steps, dtype=np.float64)
    places = step_axis(history, log).warp(steps)
    wanted = np.linspace(places[0], places[-1], most) if most > 1 else places[-1:]
    chosen = np.searchsorted(places, wanted).clip(0, steps.size - 1)
    return [int(step) for step in np.unique(steps[chosen])]


# Axes ---------------------------------------------------------------------------------------


def _pairs(panel: Axes, other: Axes) -> list[tuple[Axes, Axes]]:
    """The axes of a panel and those of the same panel at another step."""
    pairs = [*_with_children(panel)], [*_with_children(other)]
    # A panel without data may have no axes inside.
    return list(zip(*pairs, strict=True)) if len(pairs[0]) == len(pairs[1]) else []


def _with_children(ax: Axes) -> Iterator[Axes]:
    yield ax
    for child in ax.child_axes:
        if isinstance(child, Axes):
            yield from _with_children(child)


def _shows_all_steps(ax: Axes) -> bool:
    return isinstance(ax.xaxis.get_major_formatter(), StepLabels) or not ax.axison


def _widen(ax: Axes, other: Axes) -> None:
    """Extend the ranges of an axis by those of another one, unless one of them has all steps."""
    if _shows_all_steps(ax) or _shows_all_steps(other) or not other.has_data():
        return
    for axis, another in ((ax.xaxis, other.xaxis), (ax.yaxis, other.yaxis)):
        if axis.get_scale() == another.get_scale():
            low, high = axis.get_view_interval()
            ends = sorted((low, high, *another.get_view_interval()))
            first, last = (ends[0], ends[-1]) if low <= high else (ends[-1], ends[0])
            axis.set_view_interval(first, last, ignore=True)


def _set_like(ax: Axes, other: Axes) -> None:
    """Give an axis the ranges, scales, ticks and colours of another one."""
    for axis, model, set_scale in (
        (ax.xaxis, other.xaxis, ax.set_xscale),
        (ax.yaxis, other.yaxis, ax.set_yscale),
    ):
        names = ("base", "linthresh", "linscale") if model.get_scale() == "symlog" else ()
        set_scale(model.get_scale(), **{n: getattr(model.get_transform(), n) for n in names})
        axis.set_major_locator(copy.copy(model.get_major_locator()))
        axis.set_minor_locator(copy.copy(model.get_minor_locator()))
        axis.set_major_formatter(copy.copy(model.get_major_formatter()))
    ax.set(xlim=other.get_xlim(), ylim=other.get_ylim())
    if _shows_all_steps(ax):
        for mesh, model_mesh in zip(_meshes(ax), _meshes(other), strict=False):
            mesh.set_norm(model_mesh.norm)


def _meshes(ax: Axes) -> list[QuadMesh]:
    return [mesh for mesh in ax.collections if isinstance(mesh, QuadMesh)]


# Files --------------------------------------------------------------------------------------


def _write_gif(history: History, screen: Screen, steps: Sequence[int], path: Path) -> None:
    palette = _palette(history, screen, (steps[0], steps[len(steps) // 2], steps[-1]))
    images = (
        _image(figure).quantize(palette=palette, dither=Image.Dither.NONE)
        for _, figure in frames(history, screen, steps)
    )
    first = next(images)
    stay = 1000 // FRAMES_PER_SECOND
    durations = [stay] * (len(steps) - 1) + [LAST * stay]
    # Pillow takes one image after the other.
    first.save(path, save_all=True, append_images=images, duration=durations, loop=0)


def _palette(history: History, screen: Screen, steps: Sequence[int]) -> Image.Image:
    """256 colours for all frames: with colours of its own for each, areas would flicker."""
    parts, findings = screen.parts(history), screen.marked(history)
    figure = Figure(dpi=DPI, facecolor=PAPER)
    pixels = []
    for step in steps:
        known = up_to(history, step)
        screen.draw(known, figure, panels(parts, known), True, findings)
        pixels.append(np.asarray(_image(figure)).reshape(1, -1, 3))
    image = Image.fromarray(np.concatenate(pixels, axis=1))
    # The usual choice would drop rare colours, such as that of an alarm.
    return image.quantize(method=Image.Quantize.MAXCOVERAGE, kmeans=1)


def _image(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _write_mp4(figures: Iterator[Figure], path: Path) -> None:
    stay = f"tpad=stop_mode=clone:stop={LAST - 1}"
    writer = FFMpegWriter(fps=FRAMES_PER_SECOND, extra_args=["-vf", stay])
    first = next(figures)
    try:
        with writer.saving(first, str(path), DPI):
            for _ in itertools.chain([first], figures):
                writer.grab_frame()
    except CalledProcessError as error:
        why = (error.stderr or f"exit code {error.returncode}").strip().splitlines()[-1]
        raise OSError(f"ffmpeg can't write the video ({why}): use .gif") from error
