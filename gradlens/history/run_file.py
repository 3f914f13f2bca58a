"""A run's file, to which lines are written while training runs."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from gradlens.history.new_file import new_file

BLOCK = 2**16
"""Bytes that are read at once in search of the last line."""


class RunFile:
    """Writes lines to disk as they come.

    Each line is handed to the operating system at once, so that a killed process loses at most the
    one that it was writing. A line that can't be written waits in memory, and is written before the
    next one if that is possible then. ``failure`` says why lines are waiting; it is empty if none
    is. ``end`` is the length of the file with all of them.

    An existing file is never overwritten: with ``resume`` it is continued (see ``mend``), otherwise
    it is a ``FileExistsError``. One that another program removes, replaces or cuts off meanwhile is
    left as it is.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self.path = Path(path)
        self.failure = ""
        if not (resume and self.path.exists()):
            new_file(self.path).close()
        self._file = FileIO(self.path, "a+")
        self.end = self._size = self._file.seek(0, os.SEEK_END)

    @property
    def waiting(self) -> int:
        """How many lines are not in the file yet, or only in part."""
        return len(self._waiting)

    def write(self, line: bytes = b"") -> None:
        """Write the lines that wait and then this one, as far as that is possible."""
        if line:
            self._waiting.append(line)
            self.end += len(line)
        try:
            while self._waiting:
                self._write()
            self.failure = ""
        except OSError as error:
            self.failure = error.strerror or str(error)

    def read(self, start: int, length: int) -> bytes:
        """A piece of the file; ``OSError`` if it can't be read."""
        if self._file is not None:
            return _piece(self._file, start, length)
        with FileIO(self.path) as file:
            return _piece(file, start, length)

    def close(self) -> None:
        """Close the file; what it has can still be read."""
        if self._file is not None:
            with suppress(OSError):  # as of a disk that reports on closing that it is full
                self._file.close()
        self._file = None

    def _write(self) -> None:
        if self._file is None:
            raise OSError("it has been closed")
        found = self.path.stat()
        is_own = os.path.samestat(found, os.fstat(self._file.fileno()))
        if not is_own or found.st_size < self._size:
            raise OSError("another program has changed or replaced it, and it is left as it is")
        count = self._file.write(self._waiting[0])
        if not count:
            raise OSError("the disk is full")
        self._size += count
        rest = self._waiting.popleft()[count:]
        if rest:
            self._waiting.appendleft(rest)

    def __del__(self) -> None:
        # Whoever keeps no cockpit has nothing to close it with.
        self.close()


def _piece(file: FileIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


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
