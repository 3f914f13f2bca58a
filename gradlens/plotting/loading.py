"""Recorded runs, whatever has written them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from gradlens.compat.cockpit_log import read_cockpit_log
from gradlens.history.history import BEGINNING, BUFFER, History, Reading
from gradlens.history.run_file import check_regular

LOOKED_AT = 512
"""Bytes that say what a file is."""


@runtime_checkable
class HasHistory(Protocol):
    """Whatever records a history, such as a live cockpit."""

    @property
    def history(self) -> History:
        """What has been recorded so far."""
        ...


Run: TypeAlias = History | HasHistory | str | PathLike[str]
"""A run, the cockpit that tracks it, or the path of its file."""


def history_of(run: object) -> History:
    """The history of a ``Run``; ``TypeError`` for other objects, and else as ``load_run``."""
    if isinstance(run, (str, PathLike)):
        return load_run(Path(run))
    found = run.history if isinstance(run, HasHistory) else run
    if isinstance(found, History):
        return found
    raise TypeError(
        f"a {type(run).__name__} is no run: pass a cockpit, a History, or the path of a run's file"
    )


def load_run(path: str | Path) -> History:
    """The history in a file: a gradlens run, or a log of cockpit-for-pytorch 1.0.2.

    The extension ``.jsonl`` (or ``.json``, for cockpit's logs) may be left out of ``path``.
    ``ValueError`` for a directory, an empty file, and anything else that isn't a run.
    """
    return GrowingRun(path).read()


class GrowingRun:
    """A run's file, which may not be there yet and may grow, and what ``look`` has read of it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._reading: Reading | None = None
        self._read_size = self._broken_size = 0
        self.history = History()

    def read(self) -> History:
        """The history in the file by now, as ``load_run``; reads what was added since last time."""
        path = self._path
        named = (path, Path(f"{path}.jsonl"), Path(f"{path}.json"))
        file = next((one for one in named if one.is_file()), path)
        if file.is_dir():
            names = sorted(o.name for o in file.iterdir() if o.suffix in (".jsonl", ".json"))
            more = f" (or another of {len(names)})" if len(names) > 1 else ""
            in_it = f"pass a file in it, such as {file / names[0]}{more}" if names else ""
            advice = in_it or "pass the file that the run was written to"
            raise ValueError(f"{file} is a directory, not a run: {advice}")
        check_regular(file)
        with file.open("rb", buffering=BUFFER) as stream:
            beginning = stream.read(LOOKED_AT)
            if beginning.startswith(BEGINNING):
                if self._reading is None or not self._reading.is_of(stream):
                    self._reading = Reading(file, History())
                self._reading.read_on(stream)
                return self._reading.history
        if not beginning:
            raise ValueError(
                f"{file} is empty: nothing was recorded (cockpit leaves an empty log if one value "
                "is a NaN)"
            )
        if not beginning.lstrip().startswith(b"{"):
            raise ValueError(
                f"{file} is not a gradlens run, and no log of cockpit's either: both begin with a "
                "brace"
            )
        return read_cockpit_log(file)

    def look(self) -> str | None:
        """Read what is new; ``None`` if nothing is, and otherwise what is awaited, if anything.

        ``ValueError`` if the file is no run and doesn't change.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if not size:
            return f"waiting for {self._path}"
        if size == self._read_size:
            return None
        try:
            self.history = self.read()
        except ValueError:
            # It may be in the midst of being written, but then it grows.
            if size == self._broken_size:
                raise
            self._broken_size = size
            return None
        self._read_size = size
        return "" if self.history.steps else f"waiting for the first step of {self._path}"
