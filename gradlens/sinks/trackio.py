"""trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink, library

if TYPE_CHECKING:
    from trackio.run import Run


@final
class Trackio(Sink):
    """Logs to a run of trackio, which ``trackio.init`` returns.

    ``options`` are those of ``Sink``. ``ImportError`` without trackio.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        super().__init__(**options)
        self._run = run
        self._histogram = library("trackio", "trackio").Histogram

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        bins = {
            name: self._histogram(np_histogram=(each.counts, each.edges[0]))
            for name, each in histograms.items()
        }
        self._run.log({**scalars, **bins}, step=step)

    def note(self, step: int, text: str) -> None:
        self._run.log({f"{self.prefix}/note": text}, step=step)

    def close(self) -> None:
        """Nothing is left: the run is finished by whoever has begun it."""
