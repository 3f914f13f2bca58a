"""What a cockpit records, in the loggers and progress bars of Lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, final

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from gradlens.history.histograms import Histogram
from gradlens.sinks import Sink, TensorBoard, WandB


def sink_of(logger: Logger, **options: Any) -> Sink:
    """The sink that writes to a logger; ``options`` are those of ``Sink``.

    TensorBoard and W&B get histograms and notes, other loggers numbers alone.
    """
    if isinstance(logger, TensorBoardLogger):
        return TensorBoard(logger.experiment, **options)
    if isinstance(logger, WandbLogger):
        return WandB(logger.experiment, **options)
    return LoggedNumbers(logger, **options)


@final
class LoggedNumbers(Sink):
    """Passes numbers on to a logger, each with its own step."""

    def __init__(self, logger: Logger, **options: Any) -> None:
        super().__init__(**options)
        self._logger = logger

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        if scalars:
            self._logger.log_metrics(dict(scalars), step)

    def note(self, step: int, text: str) -> None:
        """Loggers have no place for it."""

    def close(self) -> None:
        self._logger.save()


@final
class LatestNumbers(Sink):
    """Keeps the latest numbers of some ``names``, without their prefix, until they are taken."""

    def __init__(self, names: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._names = {f"{self.prefix}/{name}" for name in names}
        self._latest: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """The numbers since the last call, by name."""
        found, self._latest = self._latest, {}
        return found

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self._latest |= {name: scalars[name] for name in self._names & scalars.keys()}

    def note(self, step: int, text: str) -> None:
        """It is no number."""

    def close(self) -> None:
        """What wasn't taken is left."""
