"""Numbers of each parameter or layer over time as a map of layers × steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.colors import LogNorm, Normalize, SymLogNorm

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line
from gradlens.instruments.instrument import Instrument, Normalisation
from gradlens.instruments.panel import Curve, Lines, Map
from gradlens.instruments.scales import Scale, log_if_wide
from gradlens.instruments.series import (
    LayerTable,
    are_shares,
    layer_class,
    layout,
    short_names,
    table,
)

DECADES = 12.0
"""Largest number of decades of a colour scale; values below them have the last colour."""


class LayerMapInstrument(Instrument):
    """A number for each parameter or layer over time: rows from input to output, colour its size.

    Draws every series of dicts by parameter or layer, and of dicts whose entry ``"parameters"`` or
    ``"layers"`` is such a dict. These dicts have numbers, or dicts with a ``"value"`` or a
    ``"trace"``. The colour scale is logarithmic unless the view is linear and the values are of
    similar size; the scale of fractions goes from 0 to 1. A cell is hatched if the record isn't a
    finite number, and blank if there is no record.
    """

    secondary = True
    by_layer = True

    def _own_title(self, history: History, name: str) -> str:
        found = layout(history[name], history)
        own = super()._own_title(history, name)
        return f"{own} by {found.noun}" if found else own

    def content(self, history: History) -> Lines | Map:
        records = history[self.names[0]]
        found = layout(records, history)
        assert found is not None  # ``series`` has only those with a layout
        view = self.view(history)
        whole = table(records, found, history)
        if not np.isfinite(whole.values).any():
            return Lines((Curve("", Line(whole.steps, whole.values[0], whole.reason)),))
        shares = are_shares(whole.values, view)
        if self.options.normalise and not shares:
            whole = normalised(whole, self.options.normalise, history)
        norm = Normalize(0, 1) if shares else colour_norm(whole.values, view.yscale)
        log = ", log" if isinstance(norm, (LogNorm, SymLogNorm)) else ""
        field = "" if found.field == "value" else found.field
        what = (field or view.label or "value") + OVER[self.options.normalise] * (not shares) + log
        return Map(
            whole,
            row_labels(whole.names, history),
            norm,
            what,
            shares,
            colors="signed" if (norm.vmin or 0.0) < 0 else "sizes",
        )


OVER: Mapping[Normalisation, str] = {
    "": "",
    "row": " over the row's median",
    "kind": " over the kind's median",
}


def row_labels(names: Sequence[str], history: History) -> list[str]:
    """Short names, with the class of a layer that has only a number."""
    found = []
    for name, label in zip(names, short_names(names), strict=True):
        kind = layer_class(name, history)
        number = [word for word in name.split(".") if word not in PARAMETERS][-1:]
        found.append(f"{label} {kind}" if kind and number and number[0].isdigit() else label)
    return found


PARAMETERS = ("weight", "bias")


def normalised(found: LayerTable, by: Normalisation, history: History) -> LayerTable:
    """The table with its rows divided by the medians of their sizes, or of those of their kind.

    A kind is a class of layers, and of their parameters the last word of the name.
    """
    kinds = [_kind(name, history) if by == "kind" else name for name in found.names]
    values = found.values.copy()
    for kind in {*kinds}:
        rows = np.array([one == kind for one in kinds])
        sizes = np.abs(values[rows])
        known = sizes[np.isfinite(sizes) & (sizes > 0)]
        values[rows] /= np.median(known) if known.size else 1.0
    return replace(found, values=values)


def _kind(name: str, history: History) -> str:
    word = name.rpartition(".")[2] if name in history.parameters else ""
    return f"{layer_class(name, history)} {word}"


def colour_norm(values: Floats, wish: Scale) -> Normalize:
    """The scale of colours for finite numbers of one or both signs; NaN is left out.

    It is linear if ``wish`` is and the sizes don't span too much, and otherwise logarithmic. With
    values of both signs, it is symmetric.
    """
    found = values[np.isfinite(values)]
    sizes = np.abs(found[found != 0])
    if not sizes.size:
        return Normalize(0, 1)
    low, high = float(sizes.min()), float(sizes.max())
    linear = wish == "linear" and log_if_wide([sizes]) == "linear"
    if (found < 0).any():
        threshold = 10.0 ** math.floor(math.log10(max(low, 1e-3 * high)))
        log = SymLogNorm(threshold, linscale=0.5, vmin=-high, vmax=high, base=10)
        return Normalize(-high, high) if linear else log
    if linear:
        start = 0.0 if (found == 0).any() or low == high else low
        return Normalize(start, high)
    low = max(low / 10 if (found == 0).any() else low, high * 10**-DECADES)
    # At least a decade, so that noise isn't magnified.
    return LogNorm(min(low, high / 10), high)
