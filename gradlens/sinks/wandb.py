"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink, library

if TYPE_CHECKING:
    import wandb

MOST_BINS = 512
"""Of a histogram of W&B's."""


@final
class WandB(Sink):
    """Logs to a run of Weights & Biases, by default the one that ``wandb.init`` has begun.

    The charts have ``gradlens/step`` as their step, since W&B drops what is logged for an earlier
    step than the latest. The records of a step are one row, which is logged when the next step is
    recorded, when the cockpit is closed, or at the end of the program if W&B's run still goes on.
    Neighbouring bins of histograms with more than 512 are joined. ``options`` are those of
    ``Sink``. ``ImportError`` without wandb, and ``ValueError`` if there is no run.
    """

    def __init__(self, run: wandb.Run | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._wandb = library("wandb", "wandb")
        found = self._wandb.run if run is None else run
        if found is None:
            raise ValueError("there is no run of W&B: call wandb.init() first, or pass a run")
        self._run = found
        self._step_name = f"{self.prefix}/step"
        self._run.define_metric(self._step_name, hidden=True)
        self._run.define_metric(f"{self.prefix}/*", step_metric=self._step_name)
        self._row: dict[str, Any] = {}
        """What was recorded of the latest step."""

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        bins = {name: self._histogram(each) for name, each in histograms.items()}
        self._add(step, {**scalars, **bins})

    def note(self, step: int, text: str) -> None:
        self._add(step, {f"{self.prefix}/note": text})

    def close(self) -> None:
        if self._row:
            # What the training loop logs next may be about the same step.
            self._run.log(self._row, commit=False)

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        if self._row and self._row[self._step_name] != step:
            self._run.log({**self._row})
            self._row.clear()
        self._row |= {**values, self._step_name: step}

    def _histogram(self, histogram: Histogram) -> Any:
        (edges,), counts = histogram.edges, histogram.counts
        joined = np.arange(0, counts.size, -(-counts.size // MOST_BINS))
        bins = np.add.reduceat(counts, joined), np.append(edges[joined], edges[-1])
        return self._wandb.Histogram(np_histogram=bins)
