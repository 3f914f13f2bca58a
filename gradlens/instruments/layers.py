"""A number of each layer or parameter over time, as lines and as a map; statistics over epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from matplotlib.colors import LogNorm, Normalize, SymLogNorm

from gradlens.history.history import History
from gradlens.history.lines import (
    Floats,
    Line,
    field_line,
    head_lines,
    is_numeric,
    line,
    lines,
    quantile_lines,
    rms_lines,
)
from gradlens.history.records import NOUNS
from gradlens.history.scalars import scalars_of
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument, Normalisation
from gradlens.instruments.panel import Curve, Lines, Map, always_infinite, any_finite
from gradlens.instruments.scales import Scale, log_if_far, log_if_wide, number_label
from gradlens.instruments.series import (
    LayerTable,
    are_shares,
    layer_class,
    layout,
    ordered,
    short_names,
    table,
)
from gradlens.instruments.style import (
    BLUE,
    CATEGORICAL,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    categorical_colors,
)


def layer_lines(records: Series, history: History, fields: Sequence[str]) -> dict[str, Line]:
    """The first of ``fields`` that the layers of some records have, from input to output.

    All lines are at the same steps. Layers that never have a number, such as a first one without a
    gradient at its input, are left out if others have numbers; ∞ counts as a number here. Records
    without layers give one line without numbers and with the reason.
    """
    part = next((name for name in NOUNS if records.having(name)), "layers")
    parts = records.column(part, whole=True)
    for field in fields:
        every = lines(parts, field).items()
        shown = {name: one for name, one in every if _has_numbers(one) or one.reason}
        found = {name: one for name, one in shown.items() if _has_numbers(one)} or shown
        if found:
            return ordered(found, history)
    return {"": line(parts)}


def _has_numbers(one: Line) -> bool:
    return bool(one.finite.any()) or always_infinite(one)


GEOMETRIES = (
    *("OutputGradientGeometry", "InputGradientGeometry"),
    *("GradientGeometry", "UpdateGeometry"),
)


SPECTRA = ("WeightSpectrum", "UpdateSpectrum")


class LayerLinesInstrument(Instrument):
    """Size of each layer's inputs, outputs or gradients, or of each parameter or its update.

    The first of ``fields`` is drawn that layers' records have; an empty one is the record itself.
    Subclasses with other fields, which their ``label`` names, are data.
    """

    kinds: ClassVar[tuple[str, ...]] = (
        *("OutputNorm", "InputNorm", "InputMean", "InputStd", "DeadNeurons", *GEOMETRIES),
        *("ParameterNorm", "ConditionNumber", "WeightSignFlips", "MeanTID", "VarTID", "RankMe"),
        *("ActivationOutliers", *SPECTRA),
    )
    mapped = True
    fields: ClassVar[tuple[str, ...]] = ("norm", "rms", "largest", "")
    limits: ClassVar[tuple[float, float] | None] = None

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, self.fields)
        values = np.array([one.values for one in found.values()])
        if self.label:
            scale = "linear" if self.limits else log_if_wide([values])
            return Lines(layers=found, scale=scale, limits=self.limits)
        view = self.view(history)
        shares = any_finite([*found.values()]) and are_shares(values, view)
        return Lines(layers=found, words=view.label, shares=shares)


class CorrelationsInstrument(LayerLinesInstrument):
    """Cosine of the angle between consecutive gradients or updates, for each layer."""

    kinds: ClassVar[tuple[str, ...]] = GEOMETRIES
    mapped = False
    part = "correlation"
    aspect = "correlation"
    label = "cosine"
    fields: ClassVar[tuple[str, ...]] = ("correlation",)
    limits: ClassVar[tuple[float, float] | None] = (-1.05, 1.05)


class LayerRanksInstrument(LayerLinesInstrument):
    """Effective rank of the gradient covariance of each layer, from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    mapped = False
    title = "Effective rank by layer"
    label = "rank"
    secondary = True
    part = "layers"
    fields: ClassVar[tuple[str, ...]] = ("effective_rank",)


COVARIANCES = ("InputCovariance", "OutputGradientCovariance")


class LayerStableRanksInstrument(LayerLinesInstrument):
    """Stable rank of each layer's covariance, or of each parameter's weights or their update."""

    kinds: ClassVar[tuple[str, ...]] = (*COVARIANCES, *SPECTRA)
    mapped = False
    aspect = "stable rank"
    label = "rank"
    fields: ClassVar[tuple[str, ...]] = ("stable_rank",)


CONDITIONS = {
    "20 %": "condition_20",
    "50 %": "condition_50",
    "80 %": "condition_80",
    "all": "condition",
}


class LayerConditionsInstrument(Instrument):
    """Condition numbers of the covariance, the median over layers."""

    kinds: ClassVar[tuple[str, ...]] = COVARIANCES
    aspect = "condition"
    label = "ratio of eigenvalues"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = [over_layers(records, history, n, np.nanmedian) for n in CONDITIONS.values()]
        colors = (SKY, BLUE, PURPLE, ORANGE)
        return Lines(tuple(map(Curve, CONDITIONS, found, colors)))


def over_layers(
    records: Series, history: History, field: str, reduce: Callable[..., Floats]
) -> Line:
    """One number of those of all layers, such as their median; NaN where no layer has a number."""
    found = [*layer_lines(records, history, (field,)).values()]
    table = np.array([one.values for one in found])
    known = ~np.isnan(table).all(axis=0)
    numbers = np.full(known.size, np.nan)
    numbers[known] = reduce(table[:, known], axis=0)
    reason = next((one.reason for one in found if one.reason), "")
    return Line(found[0].steps, numbers, reason)


def network_norm(history: History, name: str) -> Line:
    """The norm of all parameters together, from the norms of each."""
    (total,) = scalars_of(name, history[name], history.sources.get(name), history.parameters)
    return total.line


class _NormsInstrument(Instrument):
    def content(self, history: History) -> Lines:
        name = self.names[0]
        total = Curve("total", network_norm(history, name), INK)
        return Lines((total,), ordered(lines(history[name]), history))


class GradNormInstrument(_NormsInstrument):
    """Gradient norm of the whole network, and of each parameter from input to output."""

    kinds = ("GradNorm",)


class UpdateSizeInstrument(_NormsInstrument):
    """Length of each step, of the whole network and of each parameter from input to output."""

    kinds = ("UpdateSize",)


class DistanceInstrument(_NormsInstrument):
    """Distance from the start, of the whole network and of each parameter."""

    kinds = ("Distance",)


class ParametersInstrument(Instrument):
    """Root mean square of each parameter's elements, coloured from input to output."""

    kinds = ("Parameters",)
    label = "RMS"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = rms_lines(records) or {self.names[0]: line(records)}
        scale = log_if_wide([one.values for one in found.values()])
        return Lines(layers=ordered(found, history), scale=scale)


LARGE_SCORE = 100.0
"""A score of attention from which on it is an alarm, as in ``gradlens.diagnosis``."""


class AttentionInstrument(Instrument):
    """Largest score of each layer's attention, or its entropy, or those of each of its heads."""

    kinds = ("AttentionLogits", "AttentionEntropy")

    def content(self, history: History) -> Lines:
        name = self.names[0]
        records = history[name]
        found = head_lines(records.column("layers")) or {"": line(records)}
        is_score = self.kind(history, name) == "AttentionLogits"
        latest = {n: one.latest for n, one in found.items() if not math.isnan(one.latest)}
        worst = (max if is_score else min)(latest, key=latest.__getitem__, default="")
        readout = f"{worst}: {number_label(latest[worst])}" if worst else ""
        is_large = is_score and latest.get(worst, 0.0) > LARGE_SCORE
        words = self.view(history).label
        return Lines(layers=found, words=words, latest=(readout, is_large))


MANY = 0.5
"""Fraction of dead units in a layer from which on it is an alarm."""


class ActivationInstrument(Instrument):
    """Fractions of active outputs and dead units over all layers, and of dead ones in the worst."""

    kinds = ("OutputActivation", "GradientActivation")

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        active, dead, worst = (field_line(records, n) for n in ("active", "dead", "worst"))
        latest = f"worst {100 * worst.latest:.0f} % dead" if math.isfinite(worst.latest) else ""
        return Lines(
            (
                Curve("active", active, BLUE),
                Curve("dead", dead, ORANGE),
                Curve("dead, worst", worst, PURPLE, width=1.0),
            ),
            latest=(latest, bool(worst.latest >= MANY)),
            shares=True,
            limits=(-0.02, 1.02),
        )


class KurtosisInstrument(Instrument):
    """Excess kurtosis of each layer's outputs, and the channel of the largest where it is most."""

    kinds = ("ActivationOutliers",)
    aspect = "excess kurtosis"
    label = "excess kurtosis"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = layer_lines(records, history, ("kurtosis",))
        scale = log_if_far([one.values for one in found.values()])
        return Lines(layers=found, scale=scale, latest=(_channel(records), False))


def _channel(records: Series) -> str:
    """The channel of the largest output of the layer that has the most kurtosis in the end."""
    layers = [*records.column("layers").values()][-1:]
    every = [one for each in layers if isinstance(each, Mapping) for one in each.values()]
    known = [one for one in every if isinstance(one, Mapping) and not math.isnan(one["kurtosis"])]
    top = max(known, key=lambda one: one["kurtosis"], default=None)
    return f"channel {top['channel']}" if top else ""


COLLAPSED = 0.99
"""Share of the most frequent prediction from which on it is an alarm, if the network is certain.

The entropy over log C is below 1 − ``COLLAPSED`` then; without training, it is close to 1.
"""


class OutputEntropyInstrument(Instrument):
    """Mean entropy of predictions over that of even ones, and the share of the most frequent."""

    kinds = ("OutputEntropy",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        entropy, top = (field_line(records, name) for name in ("entropy", "top_share"))
        collapsed = top.latest >= COLLAPSED and entropy.latest <= 1 - COLLAPSED
        latest = f"top class {100 * top.latest:.0f} %" if math.isfinite(top.latest) else ""
        return Lines(
            (Curve("entropy over log C", entropy, BLUE), Curve("top class", top, ORANGE)),
            latest=(latest, bool(collapsed)),
            shares=True,
            limits=(-0.02, 1.02),
        )


class LogitsInstrument(Instrument):
    """Root mean square and largest absolute value of the logits, the median over layers."""

    kinds = ("OutputEntropy",)
    aspect = "logits"
    label = "logit"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        rms, largest = (
            over_layers(records, history, name, np.nanmedian) for name in ("rms", "largest")
        )
        curves = (Curve("RMS", rms, BLUE), Curve("largest |z|", largest, ORANGE))
        return Lines(curves, scale="log")


class AggregateInstrument(Instrument):
    """The mean of a series over an epoch, or its median, within its spread.

    The band is mean ± std, or else the quartiles or the range. Numbers of many layers are drawn as
    those of single steps are, without bands.
    """

    kinds = ("Aggregate",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        every = dict(_statistics(records))
        # The numbers of layers or parameters, the first of each; without these, all numbers.
        layered = [path for path in every if path[:1] and path[0] in NOUNS]
        first = {path[:2]: every[path] for path in reversed(layered)}
        shown = {path[:2]: first[path[:2]] for path in layered} or every
        if not shown:
            return Lines((Curve("value", line(records)),))
        # The statistics to draw as the line: the first that exists.
        middles = {p: next(o[n] for n in (*MIDDLES, *o) if n in o) for p, o in shown.items()}
        if len(shown) > len(CATEGORICAL):
            layers = {path[1]: one for path, one in middles.items()}
            return Lines(layers=ordered(layers, history))
        curves = [
            Curve(" ".join(path[-1:]) or "value", middles[path], color, spreads=_spread(found))
            for (path, found), color in zip(shown.items(), CATEGORICAL, strict=False)
        ]
        return Lines(tuple(curves))


Statistics = Mapping[str, Line]
Path = tuple[str, ...]
MIDDLES = ("mean", "median", "max", "min", "std", "iqr")


def _statistics(records: Series, path: Path = ()) -> Iterator[tuple[Path, Statistics]]:
    """The statistics of each number in the records, by its place there."""
    if "count" in records.entries:
        yield path, lines(records)
        return
    for name in records.entries:
        yield from _statistics(records.column(name), (*path, name))


def _spread(found: Statistics) -> tuple[tuple[Line, Line], ...]:
    if "mean" in found and "std" in found:
        mean, std = found["mean"], found["std"].values
        return ((Line(mean.steps, mean.values - std), Line(mean.steps, mean.values + std)),)
    for low, high in (("q1", "q3"), ("min", "max")):
        if low in found and high in found:
            return ((found[low], found[high]),)
    return ()


# Series without an instrument ---------------------------------------------------------------

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = 6


class GenericInstrument(Instrument):
    """A series by name: a line for numbers, lines for dicts, a band for arrays.

    Dicts may hold numbers or arrays; of an array in a dict, the root mean square is shown.
    """

    def content(self, history: History) -> Lines:
        name = self.names[0]
        records = history[name]
        if records.entries:
            numbers = lines(records)
            known = {name: one.finite.any() or bool(one.reason) for name, one in numbers.items()}
            sizes = {} if all(known.values()) else rms_lines(records)
            every = {n: one if known[n] else sizes[n] for n, one in numbers.items()}
            drawn = {n: one for n, one in every.items() if one.finite.any() or one.reason}
            shown = ordered(drawn, history)
            if any(name in history.parameters for name in shown) or len(shown) > FEW:
                return Lines(layers=shown)
            colors = categorical_colors(len(shown))
            return Lines(tuple(map(Curve, shown, shown.values(), colors)))
        if records.kinds & {np.ndarray, list}:
            low, q1, middle, q3, high = quantile_lines(records, SHARES)
            curve = Curve("median", middle, spreads=((low, high), (q1, q3)))
            return Lines((curve,), words="median, middle half, and all elements")
        return Lines((Curve(name, line(records)),), words=self.view(history).label)


def drawable(records: Series) -> bool:
    """Whether there is a way to draw a series: numbers, arrays, or dicts of these."""
    values = records.values()
    parts = (one.values() if isinstance(one, Mapping) else (one,) for one in values)
    every = [one for found in parts for one in found]
    return any(isinstance(one, (int, float)) or (is_numeric(one) and len(one)) for one in every)


# Maps of layers × steps -----------------------------------------------------------------------

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
