"""Instruments of plain numbers: a line for each series, on one value axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

from gradlens.history.history import History
from gradlens.history.lines import network_line
from gradlens.history.view import GROUPS_OF_LOGGED, Group
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout
from gradlens.instruments.scales import Scale, log_if_wide
from gradlens.instruments.style import categorical_colors


class _NumbersInstrument(Instrument):
    """A line for each series of numbers; subclasses are data.

    ``scale`` is that of the value axis, by default logarithmic if the values need it. ``labels``
    are short names of kinds and of logged series. A single line has ``words`` below its title. Of
    several lines, the last has its latest value beside the title if ``shows_last``. If ``spiky``,
    single values may be out of the range of the axis.
    """

    scale: ClassVar[Scale | None] = None
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
        text, alarm = readout(found[-1])
        return Lines(
            tuple(map(Curve, labels, found, colors)),
            scale=self.scale or log_if_wide([one.values for one in found]),
            latest=(f"{labels[-1]} {text}", alarm) if self.shows_last and len(found) > 1 else None,
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

    kinds: ClassVar[tuple[str, ...]] = ("Loss",)
    title: ClassVar[str] = "Loss"
    words: ClassVar[str] = "of the mini-batch"


class LossesInstrument(_NumbersInstrument):
    """Losses of the training, validation and test data."""

    logged: ClassVar[tuple[str, ...]] = ("train_loss", "valid_loss", "test_loss")
    labels: ClassVar[Mapping[str, str]] = {n: n.removesuffix("_loss") for n in logged}
    home: ClassVar[Group] = GROUPS_OF_LOGGED["train_loss"]
    title: ClassVar[str] = "Losses"
    label: ClassVar[str] = "loss"
    shows_last: ClassVar[bool] = True


class AccuracyInstrument(_NumbersInstrument):
    """Accuracies on the training, validation and test data."""

    logged: ClassVar[tuple[str, ...]] = ("train_accuracy", "valid_accuracy", "test_accuracy")
    labels: ClassVar[Mapping[str, str]] = {n: n.removesuffix("_accuracy") for n in logged}
    home: ClassVar[Group] = GROUPS_OF_LOGGED["train_accuracy"]
    title: ClassVar[str] = "Accuracy"
    label: ClassVar[str] = "accuracy"
    shows_last: ClassVar[bool] = True


class LearningRateInstrument(_NumbersInstrument):
    """The learning rate."""

    logged: ClassVar[tuple[str, ...]] = ("learning_rate",)
    home: ClassVar[Group] = GROUPS_OF_LOGGED["learning_rate"]
    title: ClassVar[str] = "Learning rate"
    label: ClassVar[str] = "η"


class MeanGSNRInstrument(_NumbersInstrument):
    """Mean gradient signal-to-noise ratio."""

    kinds: ClassVar[tuple[str, ...]] = ("MeanGSNR",)
    title: ClassVar[str] = "Mean GSNR"
    scale: ClassVar[Scale | None] = "log"
    words: ClassVar[str] = "squared mean over variance"


class TICInstrument(_NumbersInstrument):
    """Takeuchi's information criterion, from the diagonals and from the traces of its matrices."""

    kinds: ClassVar[tuple[str, ...]] = ("TICDiag", "TICTrace")
    labels: ClassVar[Mapping[str, str]] = {"TICDiag": "diagonal", "TICTrace": "trace"}
    title: ClassVar[str] = "TIC"
    spiky: ClassVar[bool] = True
    words: ClassVar[str] = "Takeuchi's information criterion, {label}"
