"""cockpit's class ``CockpitPlotter``, around gradlens's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from matplotlib import pyplot
from matplotlib.figure import Figure

from gradlens.compat.cockpit.cockpit import Cockpit, log_of
from gradlens.compat.cockpit_log import output_of
from gradlens.plotting.animation import animate
from gradlens.plotting.loading import history_of
from gradlens.plotting.plotter import CockpitPlotter as Plotter
from gradlens.plotting.plotter import up_to
from gradlens.plotting.screen import Screen

if TYPE_CHECKING:
    import pandas

_Source: TypeAlias = Cockpit | str | Path

FRAMES = 100
"""Largest number of frames of an animation."""


class CockpitPlotter:
    """Draws as ``gradlens.CockpitPlotter`` does, in figures of ``matplotlib.pyplot``.

    ``fig`` and ``secondary_fig`` are those of the latest call of ``plot``, and ``tracking_data`` is
    a pandas ``DataFrame`` of what it has drawn, with a row for each step.
    """

    def __init__(self, secondary_screen: bool = False) -> None:
        self._plotter = Plotter(secondary_screen, pyplot=True)
        self._source: _Source | None = None
        self._discard: int | None = None

    @property
    def fig(self) -> Figure | None:
        """The figure of the primary screen; ``None`` before the first call of ``plot``."""
        return self._plotter.figure

    @property
    def secondary_fig(self) -> Figure | None:
        """The figure of the secondary screen, or its first page."""
        return self._plotter.secondary_figure

    def plot(
        self,
        source: _Source,
        show_plot: bool = True,
        block: bool = False,
        *,
        discard: int | None = None,
        **options: Any,
    ) -> Figure:
        """Draw a cockpit, or a log by its path, as ``gradlens.CockpitPlotter.plot``.

        A path that this process has passed to ``Cockpit.write`` is that of the log written then,
        also if its file has another name. Afterwards, ``matplotlib.pyplot.savefig`` saves the
        primary screen.
        """
        source = _found(source)
        figure = self._plotter.plot(source, show_plot, block, discard=discard, **options)
        pyplot.figure(figure)
        self._read_tracking_results(source, discard)
        return figure

    def _read_tracking_results(self, source: _Source, discard: int | None = None) -> None:
        """Choose what ``tracking_data`` is read from; scripts call it to read a log."""
        self._source, self._discard = _found(source), discard

    @property
    def tracking_data(self) -> pandas.DataFrame:
        """Values in cockpit's forms by step, with the step as ``iteration``; needs pandas."""
        import pandas

        if self._source is None:
            raise AttributeError("there is no tracking_data before plot has been called")
        output = output_of(up_to(history_of(self._source), self._discard))
        rows = [{"iteration": step, **values} for step, values in output.items()]
        return pandas.DataFrame(rows, columns=None if rows else ["iteration"])

    def build_animation(self, logpath: str | Path) -> None:
        """Write a log as an animation, ``{logpath}__primary.gif``, and ``__secondary.gif``."""
        history = history_of(log_of(logpath))
        stem = str(logpath).removesuffix(".json")
        for name in ("primary", "secondary")[: 1 + self._plotter.secondary_screen]:
            screen = Screen(Path(stem).name, layers=name == "secondary")
            animate(history, screen, Path(f"{stem}__{name}.gif"), FRAMES)


def _found(source: _Source) -> _Source:
    """A source, whose log may have another name than the one that was asked for."""
    return log_of(source) if isinstance(source, (str, Path)) else source
