"""Files that never take the place of another one."""

from __future__ import annotations

from io import FileIO
from pathlib import Path


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
