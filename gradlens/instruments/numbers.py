"""Instruments of plain numbers: a line for each series, on one value axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, final

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, durations, field_line, line, network_line
from gradlens.history.view import GROUPS_OF_LOGGED
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, any_finite, readout
from gradlens.instruments.scales import log_if_wide, number_label, value_scale
from gradlens.instruments.series import in_force, smooth
from gradlens.instruments.style import MUTED, categorical_colors


class _NumbersInstrument(Instrument):
    """A line for each series of numbers; subclasses are data.

    The value axis is logarithmic if the view wants that or the values need it. ``labels`` are short
    names of kinds and of logged series. A single line has ``words`` below its title. Of several
    lines, the last has its latest value beside the title if ``shows_last``. If ``spiky``, single
    values may be out of the range of the axis.
    """

    together = True
    labels: ClassVar[Mapping[str, str]] = {}
    words: ClassVar[str] = ""
    shows_last: ClassVar[bool] = False
    spiky: ClassVar[bool] = False

    @final
    def title_of_logged(self, name: str) -> str:
        return f"{self.title}: {self.labels[name]}" if name in self.labels else self.title

    @final
    def content(self, history: History) -> Lines:
        kinds = [self.kind(history, name) or name for name in self.names]
        labels = short_labels(self.names, kinds, self.labels)
        found = [network_line(history[name]) for name in self.names]
        colors = categorical_colors(len(found))
        shows_last = self.shows_last and len(found) > 1
        return Lines(
            tuple(map(Curve, labels, found, colors)),
            scale=value_scale(self.view(history).yscale, [one.values for one in found]),
            latest=readout(found[-1], labels[-1]) if shows_last else None,
            words=self.words.format(label=labels[0]),
            spiky=self.spiky,
        )


def short_labels(
    names: Sequence[str], kinds: Sequence[str], short: Mapping[str, str]
) -> tuple[str, ...]:
    """The ``short`` names of series by their kinds; their own names if two are of one kind."""
    if len(set(kinds)) < len(kinds):
        return tuple(names)
    return tuple(short.get(kind, name) for name, kind in zip(names, kinds, strict=True))


class LossInstrument(_NumbersInstrument):
    """The mini-batch loss; logarithmic once it has fallen far."""

    kinds = ("Loss",)
    words: ClassVar[str] = "of the mini-batch"


class LossesInstrument(_NumbersInstrument):
    """Losses of the training, validation and test data."""

    logged = ("train_loss", "valid_loss", "test_loss")
    labels: ClassVar[Mapping[str, str]] = {n: n.removesuffix("_loss") for n in logged}
    home = GROUPS_OF_LOGGED["train_loss"]
    title = "Losses"
    label = "loss"
    shows_last: ClassVar[bool] = True


class AccuracyInstrument(_NumbersInstrument):
    """Accuracies on the training, validation and test data."""

    logged = ("train_accuracy", "valid_accuracy", "test_accuracy")
    labels: ClassVar[Mapping[str, str]] = {n: n.removesuffix("_accuracy") for n in logged}
    home = GROUPS_OF_LOGGED["train_accuracy"]
    title = "Accuracy"
    label = "accuracy"
    shows_last: ClassVar[bool] = True


class LearningRateInstrument(_NumbersInstrument):
    """The learning rate."""

    logged = ("learning_rate",)
    home = GROUPS_OF_LOGGED["learning_rate"]
    title = "Learning rate"
    label = "η"


class MeanGSNRInstrument(_NumbersInstrument):
    """Mean gradient signal-to-noise ratio."""

    kinds = ("MeanGSNR",)
    words: ClassVar[str] = "squared mean over variance"


class TICInstrument(_NumbersInstrument):
    """Takeuchi's information criterion, from the diagonals and from the traces of its matrices."""

    kinds = ("TICDiag", "TICTrace")
    labels: ClassVar[Mapping[str, str]] = {"TICDiag": "diagonal", "TICTrace": "trace"}
    title = "TIC"
    spiky: ClassVar[bool] = True
    words: ClassVar[str] = "Takeuchi's information criterion, {label}"


UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class TimeInstrument(Instrument):
    """Mean time per step between two records, from time stamps in seconds."""

    together = True
    kinds = ("Time",)
    label = "time"

    def content(self, history: History) -> Lines:
        stamps = {name: line(history[name]) for name in self.names}
        seconds = {name: durations(one) for name, one in stamps.items()}
        if any_finite(list(stamps.values())) and not any_finite(list(seconds.values())):
            seconds = {
                n: Line(one.steps, one.values, "needs two records") for n, one in seconds.items()
            }
        known = np.concatenate([one.values[one.finite] for one in seconds.values()])
        middle = float(np.median(known)) if known.size else float("nan")
        factor, unit = next((u for u in UNITS if not middle < u[0]), UNITS[-1])
        found = [Line(one.steps, one.values / factor, one.reason) for one in seconds.values()]
        latest = f"{number_label(middle / factor)} {unit}" if np.isfinite(middle) else ""
        colors = categorical_colors(len(found))
        return Lines(
            tuple(map(partial(Curve, unit=unit), seconds, found, colors)),
            scale=log_if_wide([one.values for one in found], 10),
            latest=(latest, False),
            words=f"in {unit}, median on the right" if latest else "",
        )


IN_USE = "batch_size"


class BatchSizeInstrument(Instrument):
    """The batch size that CABS suggests, and the one in use if the training loop has logged it."""

    together = True
    kinds = ("CABS",)
    logged = (IN_USE,)
    home = GROUPS_OF_LOGGED[IN_USE]
    title = "Batch size"
    label = "samples"

    def content(self, history: History) -> Lines:
        suggested = {name: line(history[name]) for name in self.names if name != IN_USE}
        steps = [one.steps for one in suggested.values()] or [line(history[IN_USE]).steps]
        used = in_force(IN_USE, np.unique(np.concatenate(steps)), history)
        colors = categorical_colors(len(suggested))
        in_samples = partial(Curve, unit="samples")
        curves = [*map(in_samples, suggested, suggested.values(), colors)]
        if used.steps.size:
            curves.append(in_samples("in use", used, MUTED))
        return Lines(
            tuple(curves),
            scale="log",
            latest=readout(curves[0].line),
            words="suggested by CABS" if suggested else "in use",
        )


class EarlyStoppingInstrument(Instrument):
    """The evidence-based stopping criterion; the range in which to stop, above zero, is tinted.

    Single steps at which a few elements have almost no variance are far below the others. They are
    outside the range of the axis.
    """

    kinds = ("EarlyStopping",)

    def content(self, history: History) -> Lines:
        found = line(history[self.names[0]])
        text, alarm = readout(found)
        return Lines(
            (Curve("criterion", found),),
            latest=(text, alarm or found.latest > 0),
            words="above 0 the gradient is noise: stop",
            spiky=True,
            room=(0.0, 0.1),
            danger=Line(found.steps, np.zeros_like(found.steps)),
        )


class GroupGradientsInstrument(Instrument):
    """Cosines between the gradients of each two groups of samples.

    A single pair has the band of its confidence interval; those of several would hide each other.
    """

    kinds = ("GroupGradients",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]].column("pairs")
        pairs = {name: records.column(name) for name in records.entries}
        found = {name: field_line(each, "value") for name, each in pairs.items()}
        shown = Lines(limits=(-1.05, 1.05), levels=(0.0,))
        if len(found) > 1:
            return replace(shown, layers=found)
        name, one = next(iter(pairs.items()), ("cosine", records))
        value, low, high = (field_line(one, entry) for entry in ("value", "low", "high"))
        return replace(shown, curves=(Curve(name, value, spreads=((low, high),)),))


class GradNoiseScaleInstrument(Instrument):
    """Gradient noise scale with the band of its confidence interval.

    Single estimates may be far too large, even infinite. They are above the range of the axis.
    """

    kinds = ("GradNoiseScale",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        value, low, high = (field_line(records, name) for name in ("value", "low", "high"))
        middle = smooth(value, bridge=True)
        many = middle is not value
        return Lines(
            (Curve("noise scale", value, spreads=((low, high),), unit="samples"),),
            latest=readout(middle),
            words="in samples, median on the right" if many else "samples",
            spiky=True,
        )
