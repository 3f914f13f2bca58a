"""What was recorded: name -> step -> value, in memory and as JSON lines on disk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gradlens.history.coverage import Coverage
from gradlens.history.json_lines import Value, from_line, to_line
from gradlens.history.view import View

FORMAT = 1


@dataclass(frozen=True)
class Source:
    """What recorded a series, and how it is shown.

    ``kinds`` are the names of the quantity's class and of the quantities that it derives from, the
    most specific first. They are plain names, so that a run can be read where the classes don't
    exist. ``of_samples``: its values are computed from per-sample gradients.
    """

    kinds: tuple[str, ...] = ()
    view: View = field(default_factory=lambda: View(""))
    of_samples: bool = False

    @property
    def kind(self) -> str:
        """Name of the quantity's own class; empty if there is none."""
        return self.kinds[0] if self.kinds else ""


@dataclass(frozen=True)
class Note:
    """A message for the user about a step."""

    step: int
    text: str


@dataclass
class History:
    """A run's values by name and step, independent of torch and of the network.

    ``sources`` gives what recorded each series, by its name; ``parameters`` gives the shapes of the
    network's parameters, from input to output; ``notes`` are messages for the user. ``coverages``
    gives the per-sample gradients that exist, by each step from which on that has changed. A number
    that could not be computed is a NaN, and an ``Undefined`` if its reason is known. A later value
    for the same name and step replaces the earlier one.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    truncated: bool = False
    coverages: dict[int, Coverage] = field(default_factory=dict)
    _values: dict[str, dict[int, Value]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in self.sources:
            self._values.setdefault(name, {})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all series, in the order of the quantities."""
        return tuple(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Mapping[int, Value]:
        """Values of one series by step; ``KeyError`` lists the names that exist."""
        if name not in self._values:
            known = ", ".join(self._values) or "none"
            raise KeyError(f"no series {name!r} in this history (it has: {known})")
        return MappingProxyType(self._values[name])

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Names of the series of quantities of class ``kind`` or of a class derived from it."""
        return tuple(name for name, source in self.sources.items() if kind in source.kinds)

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps for which anything was recorded, ascending."""
        return tuple(sorted({step for series in self._values.values() for step in series}))

    def coverage(self, name: str, step: int) -> Coverage:
        """Which parameters a record is about; all of them unless it has to do with samples."""
        source = self.sources.get(name)
        if source is None or not source.of_samples:
            return Coverage()
        known = [at for at in self.coverages if at <= step]
        return self.coverages[max(known)] if known else Coverage()

    def append(self, step: int, values: Mapping[str, Value]) -> None:
        """Add one step's values by name."""
        for name, value in values.items():
            self._values.setdefault(name, {})[step] = value

    def write(self, path: str | Path) -> None:
        """Write everything as a new run file; ``FileExistsError`` if there is one already."""
        with RunFile(path, self) as file:
            for note in self.notes:
                file.write_note(note)
            for step, coverage in self.coverages.items():
                file.write_coverage(step, coverage)
            for step in self.steps:
                values = {n: series[step] for n, series in self._values.items() if step in series}
                file.write_step(step, values)

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a run file, also of a run that is still going on or was killed.

        A last line that was cut off is left out and ``truncated`` is set. ``ValueError`` if the
        file is not a run, or if one of its other lines is broken.
        """
        lines = Path(path).read_bytes().split(b"\n")
        header, *records = lines[:-1] if len(lines) > 1 else lines
        history = _from_header(header, path, truncated=bool(lines[-1]) and len(lines) > 1)
        for number, line in enumerate(records, start=2):
            try:
                _take_in(history, from_line(line.decode("utf-8")))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is broken ({error}); everything before it can be "
                    f"read after removing the rest"
                ) from error
        return history


def _header(history: History) -> dict[str, Value]:
    sources: dict[str, Value] = {
        name: {
            "kinds": list(source.kinds),
            "view": asdict(source.view),
            "of_samples": source.of_samples,
        }
        for name, source in history.sources.items()
    }
    parameters = {name: list(shape) for name, shape in history.parameters.items()}
    return {"gradlens_run": FORMAT, "sources": sources, "parameters": parameters}


def _from_header(line: bytes, path: str | Path, truncated: bool) -> History:
    try:
        header = from_line(line.decode("utf-8"))
        found = header["gradlens_run"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a gradlens run: its first line is no header") from error
    if found != FORMAT:
        raise ValueError(
            f"{path} has run format {found!r}, this version reads format {FORMAT}: "
            "read it with the version of gradlens that wrote it"
        )
    sources = _sources(header)
    parameters = {name: tuple(shape) for name, shape in header["parameters"].items()}
    return History(sources, parameters, truncated=truncated)


def _sources(header: Mapping[str, Any]) -> dict[str, Source]:
    return {
        name: Source(tuple(found["kinds"]), View(**found["view"]), found["of_samples"])
        for name, found in header["sources"].items()
    }


def _take_in(history: History, record: Mapping[str, Any]) -> None:
    if "gradlens_run" in record:  # of a run that was resumed, perhaps with other quantities
        history.sources |= _sources(record)
    elif "note" in record:
        history.notes.append(Note(record["step"], record["note"]))
    elif "coverage" in record:
        history.coverages[record["step"]] = Coverage.from_plain(record["coverage"])
    else:
        history.append(record["step"], record["values"])


class RunFile:
    """Writes a history to disk line by line while training runs.

    Each record is handed to the operating system at once, so that a killed process loses at most
    the line that it was writing. An existing file is never overwritten: with ``resume`` it is
    continued, otherwise it is a ``FileExistsError``. Folders are made.
    """

    def __init__(self, path: str | Path, history: History, resume: bool = False) -> None:
        self._file: FileIO | None = None
        self.path = Path(path)
        if resume and self.path.exists():
            _cut_off_partial_line(self.path)
            self._file = FileIO(self.path, "a")
            self._write(_header(history))
            return
        if self.path.is_dir():
            raise IsADirectoryError(
                f"{path} is a directory: choose another path, such as {self.path / 'run.jsonl'}"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "x")
        except FileExistsError as error:
            raise FileExistsError(
                f"{path} exists and is kept: choose another path, remove the file, or continue "
                "that run with Cockpit(..., resume=True)"
            ) from error
        except OSError as error:
            raise type(error)(
                error.errno,
                f"the run can't be written ({error.strerror}); choose another path",
                str(path),
            ) from error
        self._write(_header(history))

    def write_step(self, step: int, values: Mapping[str, Value]) -> None:
        """Append one step's values."""
        self._write({"step": step, "values": values})

    def write_sources(self, history: History) -> None:
        """Append what the series come from, as far as it is known by now."""
        self._write(_header(history))

    def write_coverage(self, step: int, coverage: Coverage) -> None:
        """Append which per-sample gradients there are from a step on."""
        self._write({"step": step, "coverage": coverage.plain()})

    def write_note(self, note: Note) -> None:
        """Append a note."""
        self._write({"step": note.step, "note": note.text})

    def _write(self, record: Mapping[str, Value]) -> None:
        if self._file is None:
            return
        line = to_line(record).encode() + b"\n"
        try:
            # Unbuffered, so that nothing is left behind in a process that is killed.
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError as error:
            self._file = None
            warnings.warn(
                f"{self.path} can't be written any more ({error}); recording goes on in memory: "
                "save it with cockpit.history.write(path)",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        # Whoever keeps no cockpit has nothing to close it with.
        self.close()

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_off_partial_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if not whole:
        path.write_bytes(content + b"\n")  # a header alone
    elif whole < len(content):
        path.write_bytes(content[:whole])
