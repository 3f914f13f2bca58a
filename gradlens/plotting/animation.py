"""A run as an animation: the figure as it was at several steps, on the axes of the whole run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import TypeVar

import numpy as np
from matplotlib.animation import FFMpegWriter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from gradlens.history.history import History
from gradlens.history.run_file import replacing
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Content, Grid, Lines, Map, Picture, Shapes
from gradlens.instruments.scales import Ruler
from gradlens.instruments.series import Warp
from gradlens.plotting.output import check_suffix, progress
from gradlens.plotting.plotter import up_to
from gradlens.plotting.screen import Screen, panels

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
    if lacks := screen.lacks(history):
        raise ValueError(lacks)
    steps = frame_steps(history, most, screen.log_steps)
    with replacing(path) as partial:
        if suffix == ".gif":
            _write_gif(history, screen, steps, partial)
        else:
            _write_mp4((figure for _, figure in frames(history, screen, steps)), partial)


def frames(
    history: History, screen: Screen, steps: Sequence[int], label: str = "frames"
) -> Iterator[tuple[int, Figure]]:
    """Each of the ascending ``steps`` with the figure of the run up to it.

    It is one figure, drawn anew each time. Axes, their scales and colours are those of the whole
    run, and so are findings, which are marked as soon as their steps are there; an axis that shows
    single steps has room for all that are shown.
    """
    history = replace(history, notes=[])  # a later one would move everything up
    parts, findings = screen.parts(history), screen.marked(history)
    every = panels(parts, history)
    axis = step_axis(history, screen.log_steps)
    whole = [panel.content for panel in every]
    for step in progress(steps, "axes  "):
        known = panels(parts, up_to(history, step))
        whole = [
            _on_axes(one, panel.content, _joined) for one, panel in zip(whole, known, strict=True)
        ]
    figure = Figure(dpi=DPI)
    screen.draw(history, figure, every, True, findings)
    for step in progress(steps, label):
        until = up_to(history, step)
        known = panels(parts, until)
        shown = tuple(
            replace(
                panel, content=_on_axes(one.content, content, lambda own, whole: whole, axis.warp)
            )
            for panel, one, content in zip(every, known, whole, strict=True)
        )
        screen.draw(until, figure, shown, False, findings, axis)
        yield step, figure


Shown = TypeVar("Shown", bound=Content)
Choice = Callable[[Ruler, Ruler], Ruler]


def _on_axes(
    shown: Shown, other: Content | None, choose: Choice, warp: Warp | None = None
) -> Shown:
    """What a panel shows, on axes chosen of its own and another's; those over steps by a warp."""
    match shown, other:
        case (Picture() | Shapes(), Picture() | Shapes()):
            across, up = choose(shown.across, other.across), choose(shown.up, other.up)
            return replace(shown, across=across, up=up)
        case (Lines() | Map(), Lines() | Map()):
            beside = shown.beside and _on_axes(shown.beside, other.beside, choose)
            if warp and isinstance(shown, Lines) and isinstance(other, Lines):
                return replace(shown, axis=other.up(warp), beside=beside)
            if warp and isinstance(shown, Map) and isinstance(other, Map):
                return replace(shown, norm=other.norm, beside=beside)
            return replace(shown, beside=beside)
        case (Grid(), Grid()):
            others = other.parts
            parts = {n: _on_axes(o, others.get(n), choose, warp) for n, o in shown.parts.items()}
            return replace(shown, parts=parts)
    return shown


def _joined(one: Ruler, other: Ruler) -> Ruler:
    """The axis with room for both, which keeps its direction."""
    ends = sorted((*one.limits, *other.limits))
    downwards = one.limits[0] > one.limits[1]
    return replace(one, limits=(ends[-1], ends[0]) if downwards else (ends[0], ends[-1]))


def frame_steps(history: History, most: int, log: bool = False) -> list[int]:
    """At most ``most`` recorded steps, evenly on the step axis, with the first and the last."""
    steps = np.array(history.steps, dtype=np.float64)
    places = step_axis(history, log).warp(steps)
    wanted = np.linspace(places[0], places[-1], most) if most > 1 else places[-1:]
    chosen = np.searchsorted(places, wanted).clip(0, steps.size - 1)
    return [int(step) for step in np.unique(steps[chosen])]


# Files --------------------------------------------------------------------------------------


def _write_gif(history: History, screen: Screen, steps: Sequence[int], path: Path) -> None:
    samples = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    pixels = [
        np.asarray(_image(figure)).reshape(1, -1, 3)
        for _, figure in frames(history, screen, [*samples], "colours")
    ]
    # 256 colours for all frames: with colours of its own for each, areas would flicker. The usual
    # choice would drop rare colours, such as that of an alarm.
    palette = Image.fromarray(np.concatenate(pixels, axis=1)).quantize(
        method=Image.Quantize.MAXCOVERAGE, kmeans=1
    )
    images = (
        _image(figure).quantize(palette=palette, dither=Image.Dither.NONE)
        for _, figure in frames(history, screen, steps)
    )
    first = next(images)
    stay = 1000 // FRAMES_PER_SECOND
    durations = [stay] * (len(steps) - 1) + [LAST * stay]
    # Pillow takes one image after the other.
    first.save(path, save_all=True, append_images=images, duration=durations, loop=0)


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
