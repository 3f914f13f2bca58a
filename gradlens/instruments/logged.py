"""What the training loop itself says of a run: losses, accuracies, the learning rate."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.view import Group
from gradlens.instruments.drawing import Artists, curves, readout
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide
from gradlens.instruments.series import line
from gradlens.instruments.style import categorical_colors, title


class _LoggedInstrument(Instrument):
    home: ClassVar[Group] = "performance"

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        lines = {_label(name): line(history[name]) for name in self.names}
        last = list(lines.values())[-1]
        label = f"{list(lines)[-1]} " if len(lines) > 1 else ""
        text, alarm = readout(last)
        title(ax, self.title, label + text, alarm)
        scale = log_if_wide([one.values for one in lines.values()])
        return curves(ax, axis, lines, categorical_colors(len(lines)), scale)


class LossesInstrument(_LoggedInstrument):
    """Losses of the training, validation and test data."""

    logged: ClassVar[tuple[str, ...]] = ("train_loss", "valid_loss", "test_loss")
    title: ClassVar[str] = "Losses"


class AccuracyInstrument(_LoggedInstrument):
    """Accuracies on the training, validation and test data."""

    logged: ClassVar[tuple[str, ...]] = ("train_accuracy", "valid_accuracy", "test_accuracy")
    title: ClassVar[str] = "Accuracy"


class LearningRateInstrument(_LoggedInstrument):
    """The learning rate."""

    logged: ClassVar[tuple[str, ...]] = ("learning_rate",)
    title: ClassVar[str] = "Learning rate"


def _label(name: str) -> str:
    return name.removesuffix("_loss").removesuffix("_accuracy")
