"""Files that are whole or not there at all, and never take the place of another program's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import count
from pathlib import Path
from typing import TypeAlias

from gradlens.messages import GradlensWarning

_Stamp: TypeAlias = tuple[int, int, int, int]
"""Device, number, time and size of a file, which differ if anything else has written it."""


def new_file(path: str | Path) -> FileIO:
    """A new file, whose folders are made; ``FileExistsError`` if there is one.

    ``OSError`` if there can't be one.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory: choose another path, such as {path / 'run.jsonl'}"
        )
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
        self._written: dict[Path, _Stamp] = {}

    def write(self, path: str | Path, lines: Iterable[bytes]) -> Path:
        """Write a file at ``path``, and return where it is.

        Where another program, or an earlier run, has left a file, that one is kept: the new one is
        beside it, with a number behind its name, and a ``GradlensWarning`` says so. ``OSError`` if
        it can't be written; an earlier file is kept then.
        """
        wanted = Path(path).absolute()
        chosen = next(place for place in _places(wanted) if self._takes(place))
        if chosen != wanted:
            text = f"{path} is another run's file and is kept: this run is written to {chosen}"
            warnings.warn(text, GradlensWarning, stacklevel=3)
        try:
            with replacing(chosen) as partial, partial.open("wb") as file:
                file.writelines(lines)
        except BaseException:
            if not chosen.stat().st_size:  # made a moment ago
                chosen.unlink()
            raise
        self._written[chosen] = _stamp(chosen)
        return chosen

    def _takes(self, path: Path) -> bool:
        """Whether the file at a path is ours; if there is none, an empty one is made."""
        try:
            new_file(path).close()
        except (FileExistsError, IsADirectoryError):
            return path in self._written and self._written[path] == _stamp(path)
        self._written[path] = _stamp(path)
        return True


def _places(path: Path) -> Iterator[Path]:
    """The path itself, and those with a number behind the name, from 2 on."""
    yield path
    yield from (path.with_stem(f"{path.stem}-{number}") for number in count(2))


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
