"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink

if TYPE_CHECKING:
    import wandb

MOST_BINS = 512
"""Of a histogram of W&B's."""


@final
class WandB(Sink):
    """Logs to a run of Weights & Biases, by default the one that ``wandb.init`` has begun.

    The charts have ``gradlens/step`` as their step, since W&B drops what is logged for an earlier
    step than the latest. A row is left open for what the training loop logs next, so that gradlens
    doesn't add rows to a run whose loop logs at every step. Neighbouring bins of histograms with
    more than 512 are joined. ``options`` are those of ``Sink``. ``ImportError`` without wandb, and
    ``ValueError`` if there is no run.
    """

    def __init__(self, run: wandb.Run | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._wandb = wandb_library()
        found = self._wandb.run if run is None else run
        if found is None:
            raise ValueError("there is no run of W&B: call wandb.init() first, or pass a run")
        self._run = found
        self._step_name = f"{self.prefix}/step"
        self._run.define_metric(self._step_name, hidden=True)
        self._run.define_metric(f"{self.prefix}/*", step_metric=self._step_name)
        self._open: tuple[int, int] | None = None
        """The step of the open row, and W&B's number of the row."""

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        bins = {name: self._histogram(each) for name, each in histograms.items()}
        self._log(step, {**scalars, **bins})

    def note(self, step: int, text: str) -> None:
        self._log(step, {f"{self.prefix}/note": text})

    def close(self) -> None:
        """Nothing is left: the open row is written when the run is finished."""

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._open is not None and self._open[0] != step and self._open[1] == self._run.step:
            self._run.log({}, commit=True)  # nothing else has ended the row of another step
        self._run.log({**values, self._step_name: step}, commit=False)
        self._open = step, self._run.step

    def _histogram(self, histogram: Histogram) -> Any:
        (edges,), counts = histogram.edges, histogram.counts
        joined = np.arange(0, counts.size, -(-counts.size // MOST_BINS))
        bins = np.add.reduceat(counts, joined), np.append(edges[joined], edges[-1])
        return self._wandb.Histogram(np_histogram=bins)


def wandb_library() -> Any:
    """The module; ``ImportError`` without it."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError("W&B's library is missing: pip install 'gradlens[wandb]'") from error
    return wandb
