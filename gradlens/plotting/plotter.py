"""CockpitPlotter: one figure of instruments for a whole run."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradlens.history.history import History
from gradlens.history.view import Group
from gradlens.instruments import LAYERS, MAIN, GenericInstrument, Instrument
from gradlens.instruments.generic import drawable
from gradlens.instruments.instrument import CELL, panel_box, step_axis
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.instruments.series import line
from gradlens.instruments.style import FAINT, INK, MUTED, PAPER, shorten, text_width
from gradlens.plotting.loading import load_run

HEADER, HEADING, FOOTER, EDGE = 0.52, 0.2, 0.3, 0.12
"""Inches for the line on top, for a row's group names, for notes, and around everything."""

ASPECT = 1.65
"""Width over height that a figure should come close to."""

EPOCHS = "epoch_count"
"""What ``Cockpit.log`` calls the epoch: it is said in words, for its line would say no more."""

WIDEST, TALLEST = 4.0, 1.45
"""Cells across on a page of single layers, and its height over its width, at most."""

UNEQUAL = 1.6
"""How many times as high as it needs to be a panel may become by its neighbours."""

GROUPS: tuple[Group, ...] = (
    "performance",
    "step size",
    "gradients",
    "curvature",
    "noise",
    "layers",
    "other",
)
assert set(GROUPS) == set(get_args(Group))


@runtime_checkable
class HasHistory(Protocol):
    """Whatever records a history, such as a live cockpit."""

    @property
    def history(self) -> History:
        """What has been recorded so far."""
        ...


Source = History | HasHistory | str | Path


@dataclass(frozen=True)
class Panel:
    """An instrument for certain series, its group, and its size in cells."""

    instrument: Instrument
    group: Group
    width: float = 1.0
    height: float = 1.0


Row = tuple[Panel, ...]


class CockpitPlotter:
    """Draws all recorded quantities that can be drawn, as one figure.

    With ``secondary_screen`` there is a second figure of what is known of single layers and
    parameters, or several pages of it. The figures of the latest call stay reachable as ``figure``,
    ``secondary_figure`` and ``secondary_figures``.
    """

    def __init__(self, secondary_screen: bool = False) -> None:
        self.secondary_screen = secondary_screen
        self._figures: dict[str, Figure] = {}

    @property
    def figure(self) -> Figure | None:
        """The figure that the latest call returned; ``None`` before the first one."""
        return self._figures.get("primary") or self._figures.get("secondary")

    @property
    def secondary_figure(self) -> Figure | None:
        """The figure of single layers and parameters, if there is one; of several, the first."""
        return self._figures.get("secondary")

    @property
    def secondary_figures(self) -> tuple[Figure, ...]:
        """All figures of single layers and parameters, page by page."""
        return tuple(figure for screen, figure in self._figures.items() if screen != "primary")

    def plot(
        self,
        source: Source,
        show_plot: bool = True,
        block: bool = False,
        save_plot: bool = False,
        savedir: str | Path | None = None,
        savename: str = "cockpit",
        savename_append: str | None = None,
        savefig_kwargs: Mapping[str, Any] | None = None,
        show_log_iter: bool = False,
        discard: int | None = None,
        plot_title: str | None = None,
        debug: bool = False,
    ) -> Figure:
        """Draw a run; returns the figure of the first screen.

        ``source`` is a history, something that has one (a cockpit), or the path of a run file.
        Steps after ``discard`` are left out. ``show_plot`` opens windows, or redraws those of the
        call before; ``block`` waits until they are closed. ``save_plot`` writes
        ``{savename}{savename_append}.png`` to ``savedir``, by default next to the run file,
        otherwise to the working directory; the second screen is a file of its own, with
        ``__secondary`` after ``savename``, and its pages from the second on with
        ``__secondary_2`` and so on. ``savefig_kwargs`` go to
        ``Figure.savefig``, whose ``format`` is also the file's ending. ``show_log_iter`` makes the
        step axis logarithmic, ``debug`` prints what is drawn. ``ValueError`` if there is nothing
        to draw or the path is not a run.
        """
        history = up_to(read(source), discard)
        screens = self._screens(history)
        heading = plot_title or default_title(source)
        figures: dict[str, Figure] = {}
        headings = _headings(heading, [*screens])
        for (screen, panels), title in zip(screens.items(), headings, strict=True):
            if panels:
                old = self._figures.get(screen)
                figure = windowed(old) if show_plot else Figure(facecolor=PAPER)
                widest = math.inf if screen == "primary" else WIDEST
                # A window keeps the size that somebody gave it.
                draw(figure, history, panels, title, show_log_iter, figure is not old, widest)
                figures[screen] = figure
        if debug:
            print(describe(history, screens))
        self._figures = figures
        if save_plot:
            folder = default_folder(source) if savedir is None else Path(savedir)
            for screen, figure in figures.items():
                suffix = "" if screen == "primary" else f"__{screen}"
                save(figure, folder, f"{savename}{suffix}{savename_append or ''}", savefig_kwargs)
        if show_plot:
            show(list(figures.values()), block)
        return figures.get("primary") or figures["secondary"]

    def _screens(self, history: History) -> dict[str, tuple[Panel, ...]]:
        primary = main_panels(history)
        layers = layer_panels(history) if self.secondary_screen else ()
        moved = {panel.instrument for panel in layers}
        screens = {"primary": tuple(p for p in primary if p.instrument not in moved)}
        for number, page in enumerate(pages(layers), 1):
            screens["secondary" if number == 1 else f"secondary_{number}"] = page
        if not any(screens.values()):
            raise ValueError(nothing(history))
        if self.secondary_screen and not layers:
            warnings.warn(
                "there is nothing by layer or parameter to draw on a second screen: record "
                "GradNorm, GradHist1d or GradCovariance for them",
                stacklevel=3,
            )
        return screens


def _headings(heading: str, screens: Sequence[str]) -> list[str]:
    """The heading of each screen; pages of the second one are numbered."""
    last = len(screens) - 1
    if last < 2:
        return [heading] * len(screens)
    return [heading, *(f"{heading}, page {page} of {last}" for page in range(1, last + 1))]


# What is drawn ------------------------------------------------------------------------------


def read(source: Source) -> History:
    """The history of a source; ``ValueError`` for a file that is not a run."""
    if isinstance(source, History):
        return source
    if isinstance(source, (str, Path)):
        return load_run(source)
    if isinstance(source, HasHistory) and isinstance(source.history, History):
        return source.history
    raise TypeError(
        f"a {type(source).__name__} can't be plotted: pass a cockpit, a History, or a run's path"
    )


def up_to(history: History, last: int | None) -> History:
    """The same history without what happened after step ``last``."""
    if last is None:
        return history
    notes = [note for note in history.notes if note.step <= last]
    kept = History(history.sources, history.parameters, notes, history.truncated)
    for name in history.names:
        for step, value in history[name].items():
            if step <= last:
                kept.append(step, {name: value})
    return kept


def main_panels(history: History) -> tuple[Panel, ...]:
    """What the first screen can show, group by group: known instruments, then other series."""
    return _panels([*MAIN, *_others(history)], history)


def layer_panels(history: History) -> tuple[Panel, ...]:
    """What the second screen shows: single layers, and whatever is of the group "layers"."""
    moved = [panel.instrument for panel in main_panels(history) if panel.group == "layers"]
    return _panels([*LAYERS, *moved], history)


def _others(history: History) -> list[Instrument]:
    claimed = {name for one in MAIN for name in one.series(history)} | {EPOCHS}
    names = [n for n in history.names if n not in claimed and drawable(history[n])]
    return [GenericInstrument((name,)) for name in names]


def _panels(instruments: Sequence[Instrument], history: History) -> tuple[Panel, ...]:
    found = [panel for one in instruments for panel in one.panels(history)]
    panels = [Panel(one, one.group(history), *one.size(history)) for one in found]
    return tuple(sorted(panels, key=lambda panel: GROUPS.index(panel.group)))


def nothing(history: History) -> str:
    """Why there is nothing to draw, and what to do."""
    if not history.names:
        return "the history is empty: no quantity was tracked"
    if not history.steps:
        names = ", ".join(history.names)
        return f"the history has no steps: check the track_schedule of {names}, and discard"
    return f"none of the recorded series can be drawn: {', '.join(history.names)}"


def describe(history: History, screens: Mapping[str, Sequence[Panel]]) -> str:
    """One line for each panel, and one for each series that is in none."""
    panels = [(screen, panel) for screen, found in screens.items() for panel in found]
    shown = [
        f"{screen}: {type(p.instrument).__name__} [{p.group}] {', '.join(p.instrument.names)}"
        for screen, p in panels
    ]
    drawn = {name for _, panel in panels for name in panel.instrument.names}
    return "\n".join([*shown, *(f"not drawn: {n}" for n in history.names if n not in drawn)])


def default_title(source: Source) -> str:
    """The name of a run file, and otherwise of this tool."""
    return Path(source).stem if isinstance(source, (str, Path)) else "Cockpit"


def default_folder(source: Source) -> Path:
    """The folder of a run file, and otherwise the working directory."""
    return Path(source).parent if isinstance(source, (str, Path)) else Path()


def facts(history: History) -> tuple[str, ...]:
    """The run in a few words, the most important first."""
    steps = history.steps
    parts = ["file is cut off"] if history.truncated else []
    parts += [f"last step {steps[-1]:,}"] if steps else []
    for name in history.of_kind("Loss")[:1]:
        one = line(history[name])
        parts += [f"last loss {number_label(one.latest)}"] if one.steps.size else []
    if EPOCHS in history:
        one = line(history[EPOCHS])
        parts += [f"epoch {number_label(one.latest)}"] if one.steps.size else []
    return (*parts, _count(len(steps), "recorded step"))


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


# Where it is drawn --------------------------------------------------------------------------


def pages(panels: Sequence[Panel]) -> tuple[tuple[Panel, ...], ...]:
    """Panels of single layers on as few pages as it takes, in their order, about equally full.

    A page has few columns, and is not much taller than wide.
    """
    page = TALLEST * WIDEST**2 * CELL[0] / CELL[1]
    fewest = math.ceil(sum(panel.width * panel.height for panel in panels) / page)
    for count in range(fewest, len(panels)):
        found = _evenly(panels, count)
        if all(_is_page(arrange(part, WIDEST)) for part in found):
            return found
    return tuple((panel,) for panel in panels)


def _evenly(panels: Sequence[Panel], count: int) -> tuple[tuple[Panel, ...], ...]:
    """Panels in ``count`` pieces whose areas are as equal as may be."""
    sums = [0.0, *itertools.accumulate(panel.width * panel.height for panel in panels)]

    @cache
    def best(start: int, pieces: int) -> tuple[float, tuple[int, ...]]:
        """Sum of squared areas from panel ``start`` on, and where the pieces end."""
        if pieces == 1:
            return (sums[-1] - sums[start]) ** 2, (len(panels),)
        ends = range(start + 1, len(panels) - pieces + 2)
        rest = [best(end, pieces - 1) for end in ends]
        options = zip(ends, rest, strict=True)
        return min(((sums[e] - sums[start]) ** 2 + cost, (e, *cuts)) for e, (cost, cuts) in options)

    cuts = (0, *best(0, count)[1])
    return tuple(tuple(panels[a:b]) for a, b in itertools.pairwise(cuts))


def _is_page(rows: Sequence[Row]) -> bool:
    width, height = _size(rows)
    return height <= TALLEST * width


def arrange(panels: Sequence[Panel], widest: float = math.inf) -> tuple[Row, ...]:
    """Break panels into rows, in their order.

    Rows should be about equally wide, the figure about ``ASPECT``, and groups in one piece; all
    rows are then stretched to the width of the widest, so that no place is left empty. No row has
    more than ``widest`` cells, but for one that is a single panel.
    """

    @cache
    def balanced(start: int, rows: int) -> tuple[Row, ...]:
        if rows == 1:
            return (tuple(panels[start:]),)
        cuts = range(start + 1, len(panels) - rows + 2)
        options = [(tuple(panels[start:cut]), *balanced(cut, rows - 1)) for cut in cuts]
        return min(options, key=lambda found: _raggedness(found, widest))

    options = (balanced(0, rows) for rows in range(1, len(panels) + 1))
    return min(options, key=lambda found: _badness(found, widest))


def _raggedness(rows: Sequence[Row], widest: float) -> float:
    uneven = sum(_row_width(row) ** 2 for row in rows)
    torn = sum(a[-1].group == b[0].group for a, b in itertools.pairwise(rows))
    mixed = sum(_row_height(row) > UNEQUAL * min(panel.height for panel in row) for row in rows)
    too_wide = sum(len(row) > 1 and _row_width(row) > widest for row in rows)
    return uneven + 0.6 * torn + 100 * (mixed + 10 * too_wide)


def _badness(rows: Sequence[Row], widest: float) -> float:
    width, height = _size(rows)
    stretch = sum((1 - _row_width(row) * CELL[0] / width) ** 2 for row in rows)
    even = len(rows) * (sum(_row_width(row) for row in rows) / len(rows)) ** 2
    aspect = math.log(width / height / ASPECT)
    return 3 * aspect**2 + stretch + 0.3 * (_raggedness(rows, widest) - even)


def _size(rows: Sequence[Row]) -> tuple[float, float]:
    """Inches across and up."""
    width = max(_row_width(row) for row in rows) * CELL[0]
    return width, HEADER + sum(_row_height(row) * CELL[1] + HEADING for row in rows)


def _row_width(row: Sequence[Panel]) -> float:
    return sum(panel.width for panel in row)


def _row_height(row: Sequence[Panel]) -> float:
    return max(panel.height for panel in row)


def draw(
    figure: Figure,
    history: History,
    panels: Sequence[Panel],
    title: str,
    log_step: bool = False,
    resize: bool = True,
    widest: float = math.inf,
) -> None:
    """Draw panels on a figure, which is emptied first, at most ``widest`` cells in a row.

    With ``resize`` the figure gets the size that they need, otherwise they get the size of the
    figure as long as they stay legible.
    """
    rows = arrange(panels, widest)
    # A few panels may be larger than many.
    zoom = 1 + 0.5 / sum(panel.width for panel in panels)
    across = max(_row_width(row) for row in rows) * CELL[0] * zoom + 2 * EDGE
    fixed = HEADER + (FOOTER if history.notes else EDGE) + len(rows) * HEADING
    cells = sum(_row_height(row) for row in rows)
    up = fixed + cells * CELL[1] * zoom
    figure.clear()
    if resize or figure.get_figheight() < 0.7 * up or figure.get_figwidth() < 0.7 * across:
        figure.set_size_inches(across, up)
    cell = (figure.get_figheight() - fixed) / cells
    _header(figure, title, facts(history))
    _notes(figure, history)
    top, axis = HEADER, step_axis(history, log_step)
    for row in rows:
        _draw_row(figure, history, row, top, cell * _row_height(row), axis)
        top += HEADING + cell * _row_height(row)


def _draw_row(
    figure: Figure, history: History, row: Row, top: float, height: float, axis: StepAxis
) -> None:
    unit = (float(figure.get_figwidth()) - 2 * EDGE) / _row_width(row)
    lefts = itertools.accumulate((panel.width * unit for panel in row), initial=EDGE)
    cells = [(panel, left, panel.width * unit) for panel, left in zip(row, lefts, strict=False)]
    for group, members in itertools.groupby(cells, key=lambda cell: cell[0].group):
        found = list(members)
        _group_heading(figure, group, found[0][1], found[-1][1] + found[-1][2], top)
    for panel, left, width in cells:
        box = panel_box(left, top + HEADING, width, height, figure)
        ax = figure.add_axes((box[0], box[1], box[2], box[3]))
        panel.instrument.draw(history, ax, axis)


def _group_heading(figure: Figure, group: Group, left: float, right: float, top: float) -> None:
    across, up = (float(length) for length in figure.get_size_inches())
    text, size = group.upper(), 6.5
    start = left + 0.1
    figure.text(
        start / across, 1 - (top + 0.09) / up, text, fontsize=size, color=MUTED, va="center"
    )
    begin = start + text_width(text, size) / 72 + 0.1
    height = 1 - (top + 0.09) / up
    rule = Line2D(
        [begin / across, (right - 0.1) / across], [height, height], color=FAINT, linewidth=0.7
    )
    figure.add_artist(rule)


def _header(figure: Figure, title: str, words: Sequence[str]) -> None:
    across, up = (float(length) for length in figure.get_size_inches())
    room = (across - 0.6) * 72
    texts = ["  ·  ".join(words[:count]) for count in range(len(words), 0, -1)]
    left = room - min(text_width(title, 12, "bold"), 0.75 * room) - 18
    text = next((text for text in texts if text_width(text, 8) < left), "")
    shown = shorten(title, room - text_width(text, 8), 12, "bold")
    height = 1 - 0.26 / up
    place: dict[str, Any] = {"va": "center_baseline"}
    figure.text(0.22 / across, height, shown, fontsize=12, fontweight="bold", color=INK, **place)
    figure.text(1 - 0.22 / across, height, text, fontsize=8, color=MUTED, ha="right", **place)


def _notes(figure: Figure, history: History) -> None:
    if not history.notes:
        return
    across, up = (float(length) for length in figure.get_size_inches())
    last = history.notes[-1]
    more = f"  (+{len(history.notes) - 1} earlier)" if len(history.notes) > 1 else ""
    text = f"Note at step {last.step:,}: {' '.join(last.text.split())}"
    # Depending on the resolution, hinting makes small type wider than it is measured.
    room = 0.95 * (across - 0.44) * 72 - text_width(more, 7)
    shown = shorten(text, room, 7) + more
    figure.text(0.22 / across, 0.14 / up, shown, fontsize=7, color=MUTED, va="center")


# Files and windows --------------------------------------------------------------------------


def save(
    figure: Figure, folder: Path, name: str, savefig_kwargs: Mapping[str, Any] | None = None
) -> Path:
    """Write a figure to a file, PNG unless ``savefig_kwargs`` has another ``format``."""
    options: dict[str, Any] = {"format": "png", "dpi": 200, "facecolor": figure.get_facecolor()}
    options |= savefig_kwargs or {}
    options["format"] = str(options["format"]).removeprefix(".")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{options['format']}"
    figure.savefig(path, **options)
    return path


def windowed(old: Figure | None) -> Figure:
    """``old`` if it still has a window, and otherwise a new figure that has one."""
    # Only here, because importing it settles which backend draws windows.
    from matplotlib import pyplot

    numbers = pyplot.get_fignums()
    current = pyplot.gcf() if numbers else None
    alive = old is not None and any(pyplot.figure(number) is old for number in numbers)
    figure = old if alive and old is not None else pyplot.figure(facecolor=PAPER)
    if current is not None:
        # What the user draws next goes where it would have gone.
        pyplot.figure(current)
    return figure


def show(figures: Sequence[Figure], block: bool) -> None:
    """Bring figures made for windows to the screen."""
    from matplotlib import pyplot

    pyplot.show(block=block)
    for figure in figures:
        figure.canvas.draw_idle()
        figure.canvas.flush_events()
