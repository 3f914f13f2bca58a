"""The latest numbers of a run, for training loops that show them themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, final

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink


@final
class LatestNumbers(Sink):
    """Keeps the latest number of each name until they are taken.

    ``only`` names the series that are kept, without their prefix; all of them without it.
    """

    def __init__(self, only: Collection[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._only = None if only is None else {f"{self.prefix}/{name}" for name in only}
        self._latest: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """The numbers since the last call, by name."""
        found, self._latest = self._latest, {}
        return found

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        kept = scalars.keys() if self._only is None else self._only & scalars.keys()
        self._latest |= {name: scalars[name] for name in kept}

    def note(self, step: int, text: str) -> None:
        """It is no number."""

    def close(self) -> None:
        """What wasn't taken is left."""
