"""What a cockpit records, in the loggers and progress bars of Lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
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
