"""Reads a run's file, as far as it has been written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gradlens.history.json_lines import stored_record, value_of
from gradlens.history.plain_data import from_plain
from gradlens.history.records import FORMAT, KINDS, Header, LeftOutWarning

if TYPE_CHECKING:
    from gradlens.history.history import History

BEGINNING = b'{"gradlens_run":'
"""The first bytes of every run's file."""

BUFFER = 2**17
"""Bytes that are read from a file at once: lines of some kB take half of the time in these."""


class Reading:
    """What has been read of a run's file, which may still grow.

    ``history`` is what the file had when it was read last.
    """

    def __init__(self, path: Path, history: History) -> None:
        """``history`` is an empty one."""
        self.history = history
        self._path = path
        self._place = 0
        """Where the next line begins."""
        self._lines = 0
        self._last = b""

    def read_on(self, file: BinaryIO) -> None:
        """Read what has been added to the file.

        A last line that was cut off is read again the next time. ``ValueError`` if the file is no
        run, or was written in another format. A ``LeftOutWarning`` names broken lines.
        """
        self.history.truncated = False
        file.seek(self._place)
        for line in file:
            self._read(line)
        if not self._lines and not self.history.truncated:
            raise ValueError(f"{self._path} is not a gradlens run: it is empty")
        if self.history.damage:
            text = f"{self._path}: {self.history.damage}"
            warnings.warn(text, LeftOutWarning, stacklevel=3)

    def is_of(self, file: BinaryIO) -> bool:
        """Whether a file has what was read, at the same place."""
        file.seek(self._place - len(self._last))
        return file.read(len(self._last)) == self._last

    def _read(self, line: bytes) -> None:
        if line == b"\n" and self._last[-1:] not in (b"\n", b""):
            # The line break of a line that was whole but for it.
            self._place, self._last = self._place + 1, self._last + line
            return
        if not self._lines:
            _check_beginning(line, self._path)
        try:
            self._take_in(line.rstrip(b"\n").decode("utf-8"))
        except OtherFormatError as error:
            raise ValueError(f"{self._path}, line {self._lines + 1}: {error}") from error
        except ValueError as error:
            if not line.endswith(b"\n"):
                self.history.truncated = True
                return
            self.history.broken_lines[self._lines + 1] = str(error)
        else:
            self.history.content.locate(line, self._place)
        self._place, self._last = self._place + len(line), line
        self._lines += 1

    def _take_in(self, line: str) -> None:
        """Add a record; ``ValueError`` if it isn't one."""
        stored = stored_record(line)
        if "gradlens_run" in stored:
            if stored["gradlens_run"] != FORMAT:
                raise OtherFormatError(stored["gradlens_run"])
            self.history.add_header(from_plain(Header, value_of(stored), "the header"))
            return
        kind = next((kind for kind in KINDS if kind in stored), "values")
        for key in ("step", kind):
            if key not in stored:
                raise ValueError(f"the record has no {key!r}")
        step = from_plain(int, stored["step"], "the record.step")
        if kind == "values":
            self.history.add(step, from_plain(dict, stored["values"], "the record.values"))
        else:
            content = from_plain(KINDS[kind], value_of(stored[kind]), f"the {kind}")
            self.history.take_in(step, kind, content)


class OtherFormatError(ValueError):
    """A run was written in another format than this version's."""

    def __init__(self, found: Any) -> None:
        super().__init__(
            f"the run has format {str(found)[:20]}, and this version reads format {FORMAT}: "
            "read it with the version of gradlens that wrote it"
        )


def _check_beginning(line: bytes, path: Path) -> None:
    """``ValueError`` if a file's first line isn't that of a run, or of the beginning of one."""
    if line and BEGINNING.startswith(line[: len(BEGINNING)]):
        return
    raise ValueError(f"{path} is not a gradlens run: its first line is no header")
