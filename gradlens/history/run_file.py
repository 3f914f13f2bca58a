"""A run's file, to which lines are written while training runs."""

from __future__ import annotations

import os
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
    one that it was writing. What can't be written waits in memory, and is written before the next
    line if that is possible then. ``failure`` says why something waits; it is empty if nothing
    does. ``end`` is the length of the file with all lines.

    An existing file is never overwritten: with ``resume`` it is continued (see ``mend``), otherwise
    it is a ``FileExistsError``. It stays open as long as its arrays may be read, which are then
    found whatever has become of its path.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self.path = Path(path)
        self.failure = ""
        if not (resume and self.path.exists()):
            new_file(self.path).close()
        self._file = FileIO(self.path, "a+")
        self._waiting = bytearray()
        self.end = self._file.seek(0, os.SEEK_END)

    def write(self, line: bytes = b"") -> None:
        """Write what waits and then this line, as far as that is possible."""
        self._waiting += line
        self.end += len(line)
        try:
            while self._waiting:
                self._write()
            self.failure = ""
        except OSError as error:
            self.failure = error.strerror or str(error)

    def _write(self) -> None:
        count = self._file.write(self._waiting)
        if not count:
            raise OSError("the disk is full")
        del self._waiting[:count]

    def read(self, start: int, length: int) -> bytes:
        """A piece of the file; ``OSError`` if it can't be read."""
        self._file.seek(start)
        return self._file.read(length)

    def __del__(self) -> None:
        if "_file" in vars(self):  # which there isn't if it couldn't be opened
            with suppress(OSError):  # as of a disk that reports on closing that it is full
                self._file.close()


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
