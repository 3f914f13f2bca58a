"""Files of runs: written while training goes on, never in the place of another program's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import chain, count
from pathlib import Path

from gradlens.messages import GradlensWarning


class RunFile:
    """Writes lines to disk as they come.

    Each line is handed to the operating system at once, so that a killed process loses at most the
    one that it was writing. What can't be written waits in memory, and is written before the next
    line if that is possible then. ``failure`` says why something waits; it is empty if nothing
    does. ``end`` is the length of the file with all lines.

    An existing file is never overwritten: with ``resume`` it is continued, once its last line is
    whole, otherwise it is a ``FileExistsError``. It stays open as long as its arrays may be read,
    which are then found whatever has become of its path.
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
            try:  # at the interpreter's end, contextlib is gone
                self._file.close()
            except OSError:  # as of a disk that reports on closing that it is full
                return


def check_regular(path: Path) -> None:
    """``OSError`` for a pipe, a device or a folder, whose reading may never end."""
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory: choose another path, such as {path / 'run.jsonl'}"
        )
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is a pipe or device, and no file: choose another path")


def new_file(path: str | Path) -> FileIO:
    """A new file, whose folders are made; ``FileExistsError`` if there is one.

    ``OSError`` if there can't be one.
    """
    path = Path(path)
    check_regular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that nothing is left behind in a process that is killed.
        return FileIO(path, "x")
    except OSError as error:
        if path.exists():
            raise FileExistsError(
                f"{path} exists and is kept: choose another path, remove the file, or continue "
                "that run with Cockpit(..., resume=True)"
            ) from error
        raise type(error)(
            error.errno,
            f"the run can't be written ({error.strerror}); choose another path",
            str(path),
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` once that has succeeded.

    A reader of ``path`` gets the old file or the new one, never a part. Folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, where renaming is atomic; the suffix says which format is written.
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class OwnFiles:
    """Writes files again and again, in the place of its own earlier ones alone."""

    def __init__(self) -> None:
        self._places: dict[Path, Path] = {}
        """Where each path's file is."""

    def write(self, path: str | Path, lines: Iterable[bytes]) -> Path:
        """Write a file at ``path``, and return where it is.

        Where there was a file before the first call, that one is kept: the new one is beside it,
        with a number behind its name, and a ``GradlensWarning`` says so. ``OSError`` if it can't be
        written; an earlier file is kept then.
        """
        wanted = Path(path).absolute()
        numbered = (wanted.with_stem(f"{wanted.stem}-{number}") for number in count(2))
        free = (place for place in chain([wanted], numbered) if not place.exists())
        chosen = self._places.get(wanted) or next(free)
        if chosen != wanted and wanted not in self._places:
            text = f"{path} is another run's file and is kept: this run is written to {chosen}"
            warnings.warn(text, GradlensWarning, stacklevel=3)
        with replacing(chosen) as partial, partial.open("wb") as file:
            file.writelines(lines)
        self._places[wanted] = chosen
        return chosen
