"""A table in a file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink


@final
class CSV(Sink):
    """Writes numbers to a new file with the columns ``step``, ``name`` and ``value``.

    Each number is a line, which is on disk at once: what a run records isn't known at its start.
    ``pandas.read_csv(path).pivot_table("value", "step", "name")`` has a column for each name.
    Histograms and notes are left out. ``append`` continues an existing file, which is a
    ``FileExistsError`` otherwise. ``options`` are those of ``Sink``.
    """

    def __init__(self, path: str | Path, append: bool = False, **options: Any) -> None:
        super().__init__(**options)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            mode = "a" if append else "x"
            self._file = Path(path).open(mode, encoding="utf-8", newline="")  # noqa: SIM115
        except FileExistsError as error:
            raise FileExistsError(
                f"{path} exists and is kept: choose another path (or continue it by append=True)"
            ) from error
        self._lines = csv.writer(self._file, lineterminator="\n")
        if not self._file.tell():
            self._lines.writerow(("step", "name", "value"))

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self._lines.writerows((step, name, value) for name, value in scalars.items())
        self._file.flush()

    def note(self, step: int, text: str) -> None:
        """A table of numbers has no place for it."""

    def close(self) -> None:
        self._file.close()
