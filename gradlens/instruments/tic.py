"""Takeuchi's information criterion: how far noise and curvature are from matching."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.instruments.drawing import Artists, curves, readout
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide
from gradlens.instruments.series import line
from gradlens.instruments.style import categorical_colors, subtitle, title

SHORT = {"TICDiag": "diagonal", "TICTrace": "trace"}


class TICInstrument(Instrument):
    """Takeuchi's information criterion, from the diagonals and from the traces of its matrices."""

    kinds: ClassVar[tuple[str, ...]] = ("TICDiag", "TICTrace")
    title: ClassVar[str] = "TIC"

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        kinds = [
            history.sources[name].kind if name in history.sources else "" for name in self.names
        ]
        usual = len(set(kinds)) == len(kinds)
        labels = [
            SHORT.get(kind, name) if usual else name
            for name, kind in zip(self.names, kinds, strict=True)
        ]
        lines = {label: line(history[name]) for label, name in zip(labels, self.names, strict=True)}
        scale = log_if_wide([one.values for one in lines.values()])
        artists = curves(ax, axis, lines, categorical_colors(len(lines)), scale)
        if len(lines) == 1:
            (label,) = lines
            title(ax, self.title, *readout(lines[label]))
            artists["subtitle"] = subtitle(ax, f"Takeuchi's information criterion, {label}")
        return artists
