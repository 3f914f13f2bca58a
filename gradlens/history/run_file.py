"""A run's file, to which a history is written while training runs."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO

from gradlens.history.history import Archive, History
from gradlens.history.json_lines import Value, to_line
from gradlens.history.new_file import new_file
from gradlens.history.reading import Reading
from gradlens.history.records import LeftOutWarning
from gradlens.history.series import Series

BLOCK = 2**16
"""Bytes that are read at once in search of the last line."""

KEPT = 1000
"""For so many records, what was read stays in memory, in case that it is asked for again."""

CHANGED = "another program has changed or replaced the file, which is left as it is"


class RunFile(Archive):
    """Writes the records of a history to disk as they come.

    Each record is handed to the operating system at once, so that a killed process loses at most
    the line that it was writing. A record that can't be written stays in memory, and is written
    before the next one as soon as that is possible. ``failure`` says why the file can't be written
    at present; it is empty if everything is in the file.

    An existing file is never overwritten: with ``resume`` it is continued (see ``mend``), otherwise
    it is a ``FileExistsError``. A file that is removed while the run goes on is written again as a
    whole; one that another process has put into its place, or has changed, is left alone.
    ``has_lost`` says that another process has erased what had been written, and that no more than
    the history has in memory could be written again.
    """

    def __init__(self, path: str | Path, history: History, resume: bool = False) -> None:
        self._file: FileIO | None = None
        self._history = history
        self._waiting: deque[Mapping[str, Value]] = deque()
        self._line = b""
        """The rest of a line that was written in part."""
        self._size = 0
        self._end = b""
        self._reading: Reading[History] | None = None
        self._unread = 0
        """Records since the reading was asked for."""
        self.path = Path(path)
        self.failure = ""
        self.has_lost = False
        if not (resume and self.path.exists()):
            new_file(self.path).close()
        self._file = FileIO(self.path, "a+")
        self._size = self._file.seek(0, os.SEEK_END)

    @property
    def waiting(self) -> int:
        """How many records are not in the file yet."""
        return len(self._waiting) + bool(self._line)

    def add(self, record: Mapping[str, Value]) -> None:
        """Let a record wait until it is written."""
        self._waiting.append(record)
        self._unread += 1
        if self._unread > KEPT:
            self._reading = None

    def write(self) -> None:
        """Write all records that wait, as far as that is possible; see ``failure``."""
        try:
            if self.failure or self._file is None or not self._is_in_place(self._file):
                self._reopen()
            assert self._file is not None
            self._write_waiting(self._file)
            self.failure = ""
        except OSError as error:
            self.failure = error.strerror or str(error)

    def series(self) -> Mapping[str, Series]:
        """What is in the file, also if it has been removed; ``OSError`` if it can't be read.

        What was read is kept for the next ``KEPT`` records, and then only what was added is read.
        """
        self._unread = 0
        if self._file is not None:
            return self._read(self._file)
        with FileIO(self.path) as file:
            if not self._has_content(file):
                raise OSError(f"{self.path} has been changed, and steps that it had can't be read")
            return self._read(file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # as of a disk that reports on closing that it is full
                self._file.close()
        self._file = None

    def _read(self, raw: FileIO) -> Mapping[str, Series]:
        file = BufferedReader(raw)
        try:
            if self._reading is None or not self._reading.is_of(file):
                self._reading = Reading(self.path, History())
            with warnings.catch_warnings():
                # A note has named them when the run was resumed.
                warnings.simplefilter("ignore", LeftOutWarning)
                self._reading.read_on(file)
        finally:
            file.detach()
        return self._reading.history.stored

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

    def _reopen(self) -> None:
        """Go on with the file at the path; if it is new or empty, write everything to it."""
        file = FileIO(self.path, "a+")
        try:
            if not file.seek(0, os.SEEK_END):
                self._restore(file)
            elif not self._has_the_same_end(file):
                raise OSError(CHANGED)
        except OSError:
            file.close()
            raise
        self.close()
        self._file = file

    def _restore(self, file: FileIO) -> None:
        """Write to an empty file what was written before, of which the old file may be left."""
        if self._file is None or not self._has_content(self._file):
            self._line, self._end, self._size = b"", b"", 0
            self._waiting = deque(self._history.records())
            self.has_lost = self._history.is_in_part
            return
        try:
            for start in range(0, self._size, BLOCK):
                self._file.seek(start)
                _write_all(file, self._file.read(min(BLOCK, self._size - start)))
        except OSError:
            file.truncate(0)
            raise

    def _has_the_same_end(self, file: FileIO) -> bool:
        """Whether a file is as long as what was written, and ends with the same line."""
        return file.seek(0, os.SEEK_END) == self._size and self._has_content(file)

    def _has_content(self, file: FileIO) -> bool:
        """Whether a file has the last line that was written at its place."""
        if file.seek(0, os.SEEK_END) < self._size:
            return False
        file.seek(self._size - len(self._end))
        return file.read(len(self._end)) == self._end

    def __del__(self) -> None:
        # Whoever keeps no cockpit has nothing to close it with.
        self.close()


def _write_all(file: FileIO, content: bytes) -> None:
    while content:
        count = file.write(content)
        if not count:
            raise OSError("the disk is full")
        content = content[count:]


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
