"""Files that are whole or not there at all, and never take the place of another program's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import chain, count
from pathlib import Path

from gradlens.messages import GradlensWarning


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
