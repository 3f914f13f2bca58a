"""A figure that a notebook shows once, although it is both shown and returned."""

from __future__ import annotations

from importlib import import_module

from gradlens.plotting.output import TextFigure


class NotebookFigure(TextFigure):
    """A figure that is displayed once in each cell.

    In a notebook, pyplot displays a figure when it is shown, and the notebook displays the result
    of a cell's last line, which may be the same figure.
    """

    _cell: int | None = None
    """The cell in which the figure was displayed last."""

    def _ipython_display_(self) -> None:
        """Called by IPython, which displays the figure as any other on ``NotImplementedError``."""
        cell = import_module("IPython").get_ipython().execution_count
        if cell != self._cell:
            self._cell = cell
            raise NotImplementedError
