"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink, library

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@final
class TensorBoard(Sink):
    """Writes to TensorBoard: scalars, histograms with the bins that were recorded, notes as text.

    ``writer`` is a ``SummaryWriter``, or the folder for one that is made, which ``close`` closes.
    ``options`` are those of ``Sink``. ``ImportError`` without tensorboard.
    """

    def __init__(self, writer: SummaryWriter | str | Path, **options: Any) -> None:
        super().__init__(**options)
        self._is_own = isinstance(writer, (str, Path))
        self._writer: SummaryWriter = (
            library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(writer))
            if isinstance(writer, (str, Path))
            else writer
        )

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        for name, histogram in histograms.items():
            self._writer.add_histogram_raw(name, **_fields(histogram), global_step=step)

    def note(self, step: int, text: str) -> None:
        self._writer.add_text(f"{self.prefix}/notes", text, step)

    def close(self) -> None:
        if self._is_own:
            self._writer.close()
        else:
            self._writer.flush()


def _fields(histogram: Histogram) -> dict[str, Any]:
    """A histogram in TensorBoard's form, whose sums are those of the bins' centres."""
    (edges,), counts = histogram.edges, histogram.counts
    centres = (edges[:-1] + edges[1:]) / 2
    low, high = histogram.occupied(0)
    return {
        "min": low,
        "max": high,
        "num": float(counts.sum()),
        "sum": float(counts @ centres),
        "sum_squares": float(counts @ np.square(centres)),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }
