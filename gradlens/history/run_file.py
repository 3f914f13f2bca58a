"""A run's file, to which a history is written while training runs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from gradlens.history.history import History
from gradlens.history.json_lines import Value, to_line
from gradlens.history.new_file import new_file

BLOCK = 2**16
"""Bytes that are read at once in search of the last line."""

CHANGED = "another program has changed or replaced the file, which is left as it is"


class RunFile:
    """Writes the records of a history to disk as they come.

    Each record is handed to the operating system at once, so that a killed process loses at most
    the line that it was writing. A record that can't be written stays in memory, and is written
    before the next one as soon as that is possible. ``failure`` says why the file can't be written
    at present; it is empty if everything is in the file.

    An existing file is never overwritten: with ``resume`` it is continued (see ``mend``), otherwise
    it is a ``FileExistsError``. A file that is removed while the run goes on is written again as a
    whole; one that another process has put into its place, or has changed, is left alone.
    """

    def __init__(self, path: str | Path, history: History, resume: bool = False) -> None:
        self._file: FileIO | None = None
        self._history = history
        self._waiting: deque[Mapping[str, Value]] = deque()
        self._line = b""
        """The rest of a line that was written in part."""
        self._size = 0
        self._end = b""
        self.path = Path(path)
        self.failure = ""
        if resume and self.path.exists():
            self._file = FileIO(self.path, "a+")
            self._size = self._file.seek(0, os.SEEK_END)
        else:
            self._file = new_file(self.path)

    @property
    def waiting(self) -> int:
        """How many records are not in the file yet."""
        return len(self._waiting) + bool(self._line)

    def add(self, record: Mapping[str, Value]) -> None:
        """Let a record wait until it is written."""
        self._waiting.append(record)

    def write(self) -> None:
        """Write all records that wait, as far as that is possible; see ``failure``."""
        try:
            if self._file is None or not self._is_in_place(self._file):
                self._file = self._reopened()
            self._write_waiting(self._file)
            self.failure = ""
        except OSError as error:
            self.failure = error.strerror or str(error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # as of a disk that reports on closing that it is full
                self._file.close()
        self._file = None

    def _write_waiting(self, file: FileIO) -> None:
        while self._line or self._waiting:
            if not self._line:
                self._line = to_line(self._waiting.popleft()).encode() + b"\n"
                self._end = b""
            count = file.write(self._line)
            if not count:
                raise OSError("the disk is full")
            self._end += self._line[:count]
            self._size += count
            self._line = self._line[count:]

    def _is_in_place(self, file: FileIO) -> bool:
        """Whether the open file is the one at the path still, and nothing was cut off from it."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(file.fileno())) and found.st_size >= self._size

    def _reopened(self) -> FileIO:
        """The file at the path; if it is new or empty, everything is to be written to it."""
        self.close()
        file = FileIO(self.path, "a+")
        if not file.seek(0, os.SEEK_END):
            self._line, self._end, self._size = b"", b"", 0
            self._waiting = deque(self._history.records())
        elif not self._has_the_same_end(file):
            file.close()
            raise OSError(CHANGED)
        return file

    def _has_the_same_end(self, file: FileIO) -> bool:
        """Whether a file is as long as what was written, and ends with the same line."""
        if file.seek(0, os.SEEK_END) != self._size:
            return False
        file.seek(self._size - len(self._end))
        return file.read(len(self._end)) == self._end

    def __del__(self) -> None:
        # Whoever keeps no cockpit has nothing to close it with.
        self.close()


def mend(path: Path, truncated: bool) -> str:
    """Make a file end with a whole line before it is continued; what was cut off, in words.

    ``truncated`` says that the last line is no record. One that is whole but for its line break is
    kept.
    """
    with path.open("rb+") as file:
        last = _last_line(file)
        if not truncated:
            file.write(b"\n" if last else b"")
            return ""
        file.truncate(file.tell() - len(last))
    return f"its last line was cut off after {len(last):,} bytes, and is dropped"


def _last_line(file: BinaryIO) -> bytes:
    """What follows the last line break of a file; the file's position is its end then."""
    start = file.seek(0, os.SEEK_END)
    line = b""
    while start and b"\n" not in line:
        length = min(BLOCK, start)
        start = file.seek(start - length)
        line = file.read(length) + line
    file.seek(0, os.SEEK_END)
    return line[line.rfind(b"\n") + 1 :]
