"""A run as an animation: the figure as it was at several steps, on the axes of the whole run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
from matplotlib.animation import FFMpegWriter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from gradlens.history.history import History
from gradlens.history.run_file import replacing
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Panel
from gradlens.instruments.style import PAPER
from gradlens.plotting.axes_state import apply, look_of_panel, shows_single_steps, widened
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
    whole = panels(parts, history)

    def until(step: int, chosen: Sequence[int]) -> tuple[Panel, ...]:
        known = panels((parts[place] for place in chosen), up_to(history, step))
        pairs = zip(known, chosen, strict=True)
        return tuple(replace(whole[place], content=one.content) for one, place in pairs)

    figure, every = Figure(dpi=DPI, facecolor=PAPER), range(len(parts))
    screen.draw(_until(history, history.steps[-1], steps[0]), figure, whole, True, findings)
    looks = [look_of_panel(ax) for ax in figure.axes]
    changing = [place for place, panel in enumerate(looks) if shows_single_steps(panel)]
    sketch = Figure(facecolor=PAPER)
    for step in _with_progress(steps, "axes  ") if changing else ():
        known = _until(history, step, steps[0])
        screen.draw(known, sketch, until(step, changing), findings=())
        for place, ax in zip(changing, sketch.axes, strict=True):
            looks[place] = widened(looks[place], ax)
    for step in _with_progress(steps, "frames"):
        known = _until(history, step, steps[0])
        screen.draw(known, figure, until(step, every), False, findings)
        for panel, ax in zip(looks, figure.axes, strict=True):
            apply(panel, ax)
        yield step, figure


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
