"""CockpitPlotter: one figure of instruments for a whole run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.instruments import BUILT_IN, Instrument
from gradlens.instruments.axes import TextFigure
from gradlens.instruments.instrument import Normalisation, Options
from gradlens.instruments.panel import Panel
from gradlens.messages import GradlensWarning, log
from gradlens.plotting.comparison import compare
from gradlens.plotting.layout import FigureSize, Look, pages
from gradlens.plotting.loading import Run, history_of
from gradlens.plotting.output import NotebookFigure, write_figure
from gradlens.plotting.screen import Screen


class CockpitPlotter:
    """Draws the recorded quantities of a run as one figure.

    ``secondary_screen``
        Also draw a second figure of single layers and parameters, which may have several pages. The
        figures of the latest call are ``figure``, ``secondary_figure`` and ``secondary_figures``.
    ``instruments``
        The classes that draw panels, in the order of the panels within a group.
        ``(*gradlens.instruments.BUILT_IN, Mine())`` adds one. If several instruments can draw a
        quantity, those for the most specific class are used: an instrument for a class derived from
        ``GradNorm`` replaces that for ``GradNorm``. A series without an instrument is drawn
        according to its view.
    ``findings``
        Mark in the panels what ``gradlens.diagnose`` finds wrong with the run, and explain it below
        them.
    ``pyplot``
        Register the figures with ``matplotlib.pyplot``, even if they aren't shown, and draw into
        the same figures at each call.
    """

    def __init__(
        self,
        secondary_screen: bool = False,
        instruments: Iterable[Instrument] = BUILT_IN,
        findings: bool = True,
        pyplot: bool = False,
    ) -> None:
        if not isinstance(secondary_screen, bool):
            raise TypeError(
                f"secondary_screen={secondary_screen!r} is no bool: what is drawn is passed to "
                "plot, as in CockpitPlotter().plot(cockpit)"
            )
        self.secondary_screen = secondary_screen
        self.pyplot = pyplot
        self.findings = findings
        given: object = instruments
        found = tuple(given) if isinstance(given, Iterable) else ()
        self.instruments = tuple(one for one in found if isinstance(one, Instrument))
        if not isinstance(given, Iterable) or len(self.instruments) < len(found):
            raise TypeError(
                f"instruments={instruments!r}: pass a list of instances, as in "
                "CockpitPlotter(instruments=(*BUILT_IN, Mine()))"
            )
        self._figures: dict[str, Figure] = {}

    @property
    def figure(self) -> Figure | None:
        """The figure that the latest call returned; ``None`` before the first one."""
        return self._figures.get("primary") or self._figures.get("secondary")

    @property
    def secondary_figure(self) -> Figure | None:
        """The figure of single layers and parameters, or its first page; ``None`` without one."""
        return self._figures.get("secondary")

    @property
    def secondary_figures(self) -> tuple[Figure, ...]:
        """All figures of single layers and parameters, page by page."""
        return tuple(figure for screen, figure in self._figures.items() if screen != "primary")

    def plot(
        self,
        source: Run | Mapping[str, Run] | Sequence[Run],
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
        panels: Sequence[str] = (),
        size: FigureSize = None,
        style: Look = "screen",
        single_lines: bool = False,
        normalise: Normalisation = "",
    ) -> Figure:
        """Draw a run, and return the figure.

        ``source``
            A cockpit, a history, or the path of a run's file. Several, in a list or in a dict by
            their names, are drawn over each other: each number in one panel, a line for each run.
        ``panels``, ``size``
            The titles of panels, or names of series, that are drawn, and the size of the figure in
            inches, or only its width. By default, all panels are drawn.
        ``style``
            ``"paper"`` draws only the panels, with labels on the value axes. ``"dark"`` has a dark
            background. Font sizes are relative to matplotlib's ``font.size``.
        ``show_plot``, ``block``
            Open windows, or draw in those of the previous call, and wait until they are closed.
        ``save_plot``, ``savedir``, ``savename``, ``savename_append``, ``savefig_kwargs``
            Write ``{savename}__primary.png`` to ``savedir``, by default the folder of the run's
            file or the working directory, or ``{savename}__primary__{savename_append}.png``. The
            secondary screen has ``__secondary`` instead, and its further pages ``__secondary_2``
            and so on. ``savefig_kwargs`` are passed to ``Figure.savefig``; their ``format`` is also
            the extension of the file.
        ``discard``
            Leave out the steps after this one.
        ``plot_title``
            The heading of the figure.
        ``show_log_iter``
            Make the step axis logarithmic.
        ``single_lines``
            Draw a line for each parameter, also if there are many, instead of quantiles.
        ``normalise``
            Divide each row of a map by its median (``"row"``), or by the median of its kind of
            parameters (``"kind"``), such as biases of linear layers.
        ``debug``
            Log what is drawn.

        If there is nothing to draw, the figure says why. ``ValueError`` if the path is not a run.
        """
        if not isinstance(show_plot, bool):
            raise TypeError(
                f"show_plot={show_plot!r} is no bool: a figure is saved by plot(cockpit, "
                "show_plot=False).savefig(path), or by save_plot=True with savedir and savename"
            )
        if isinstance(panels, str):
            raise TypeError(f"panels={panels!r}: pass a list, as in panels=[{panels!r}]")
        runs = _named(source) if source and isinstance(source, (Mapping, list, tuple)) else {}
        name = Path(source).stem if isinstance(source, (str, Path)) else "Cockpit"
        screen = Screen(
            plot_title or ("Comparison" if runs else name),
            log_steps=show_log_iter,
            instruments=self.instruments,
            findings=self.findings,
            names=tuple(panels),
            size=size,
            look=style,
            options=Options(single_lines, normalise),
        )
        history = History() if runs else up_to(history_of(source), discard)
        screens = {"primary": (screen, ())} if runs else self._screens(history, screen)
        found = screen.marked(history)
        drawn: dict[str, Figure] = {}
        for name, (one, shown) in screens.items():
            old = self._figures.get(name)
            figure = windowed(old) if show_plot or self.pyplot else TextFigure()
            if runs:
                histories = {run: up_to(history_of(each), discard) for run, each in runs.items()}
                compare(histories, one.title, show_log_iter, panels, style, size, figure=figure)
            else:
                # A window keeps the size that the user has given it.
                one.draw(history, figure, shown, figure is not old, found)
            drawn[name] = figure
        if debug and not runs:
            log(describe(history, {name: shown for name, (_, shown) in screens.items()}))
        self._figures = drawn
        if save_plot:
            beside = Path(source).parent if isinstance(source, (str, Path)) else Path()
            folder = beside if savedir is None else Path(savedir)
            options = {**(savefig_kwargs or {})}
            ending = str(options.pop("format", "png")).removeprefix(".")
            for name, figure in drawn.items():
                file = "__".join(filter(None, (savename, name, savename_append)))
                write_figure(figure, folder / f"{file}.{ending}", options)
        if show_plot:
            show(list(drawn.values()), block)
        return drawn.get("primary") or drawn["secondary"]

    def _screens(
        self, history: History, screen: Screen
    ) -> dict[str, tuple[Screen, tuple[Panel, ...]]]:
        """The panels of each screen by name; of the primary one alone if there are none."""
        if screen.names:
            return {"primary": (screen, screen.panels(history))}
        layers = replace(screen, layers=True)
        primary = screen.panels(history)
        secondary = layers.panels(history) if self.secondary_screen else ()
        if self.secondary_screen:
            primary = tuple(panel for panel in primary if panel.group != "layers")
        found = [("primary", screen, primary)] if primary or not secondary else []
        every = pages(secondary)
        for number, page in enumerate(every, 1):
            of = f", page {number} of {len(every)}" * (len(every) > 1)
            name = "secondary" if number == 1 else f"secondary_{number}"
            found.append((name, replace(layers, title=f"{screen.title}{of}"), page))
        if self.secondary_screen and primary and not secondary:
            warnings.warn(
                "there is nothing by layer or parameter to draw on a secondary screen: record "
                "GradNorm, GradHist1d or GradCovariance for them",
                GradlensWarning,
                stacklevel=3,
            )
        return {name: (one, shown) for name, one, shown in found}


# The run and its panels -------------------------------------------------------------------


def _named(sources: Mapping[str, Run] | Sequence[Run]) -> dict[str, Run]:
    """Several runs by their names: their paths, or numbers."""
    if isinstance(sources, Mapping):
        return dict(sources)
    return {
        str(Path(one).with_suffix("")) if isinstance(one, (str, Path)) else f"run {number}": one
        for number, one in enumerate(sources, 1)
    }


def up_to(history: History, last: int | None) -> History:
    """The same history without the values and notes after step ``last``."""
    return history if last is None else history[: last + 1]


def describe(history: History, screens: Mapping[str, Sequence[Panel]]) -> str:
    panels = [(screen, panel) for screen, found in screens.items() for panel in found]
    shown = [f"{screen}: {p.title} [{p.group}] {', '.join(p.names)}" for screen, p in panels]
    drawn = {name for _, panel in panels for name in panel.names}
    return "\n".join([*shown, *(f"not drawn: {n}" for n in history.names if n not in drawn)])


# Windows ------------------------------------------------------------------------------------


def windowed(old: Figure | None) -> Figure:
    """``old`` if it still has a window, and otherwise a new figure with a window."""
    # Imported only here, because importing pyplot chooses the backend for windows.
    from matplotlib import pyplot

    if old is not None and _has_window(old):
        return old
    current = pyplot.gcf() if pyplot.get_fignums() else None
    figure = pyplot.figure(FigureClass=NotebookFigure)
    if current is not None and not isinstance(current, NotebookFigure):
        # The user's current figure stays the current one.
        pyplot.figure(current)
    return figure


def _has_window(figure: Figure) -> bool:
    """Whether a figure is one of pyplot's, whose current one stays as it is."""
    from matplotlib import pyplot

    numbers = pyplot.get_fignums()
    current = pyplot.gcf() if numbers else None
    found = any(pyplot.figure(number) is figure for number in numbers)
    if current is not None:
        pyplot.figure(current)
    return found


def show(figures: Sequence[Figure], block: bool) -> None:
    from matplotlib import pyplot

    pyplot.show(block=block)
    # A notebook has closed its figures by now.
    for figure in filter(_has_window, figures):
        figure.canvas.draw_idle()
        figure.canvas.flush_events()
