"""What was recorded: name -> step -> value, in memory and as JSON lines on disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from gradlens.history.coverage import COUPLING, Coverage, few
from gradlens.history.json_lines import Room, Value, from_line, to_line
from gradlens.history.new_file import new_file
from gradlens.history.schema import Anything, Either, Fields, Is, ListOf, MapOf, OneOf, Whole
from gradlens.history.view import Group, View, YScale

FORMAT = 1

BEGINNING = b'{"gradlens_run":'
"""The first bytes of every run's file."""


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


class LeftOutWarning(UserWarning):
    """A part of a run could not be read or drawn; the rest was."""


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
    for the same name and step replaces the earlier one. Of a file, ``truncated`` says that its last
    line was cut off, and ``broken_lines`` gives the numbers of lines that could not be read, with
    the reasons.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    truncated: bool = False
    broken_lines: dict[int, str] = field(default_factory=dict)
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

    def rewind(self, step: int, ends: Mapping[str, int]) -> bool:
        """Remove what came after a step, at which the series ended at ``ends``; whether any did.

        A series without an end had no values.
        """
        late = {
            n: [at for at in v if n not in ends or at > ends[n]] for n, v in self._values.items()
        }
        for name, steps in late.items():
            for at in steps:
                del self._values[name][at]
        self.coverages = {at: each for at, each in self.coverages.items() if at <= step}
        return any(late.values())

    def write(self, path: str | Path) -> None:
        """Write everything as a new run file; ``FileExistsError`` if there is one already.

        ``OSError`` if it can't be written as a whole; then no part of it is left.
        """
        new_file(path).close()
        try:
            with Path(path).open("wb") as file:
                file.writelines(to_line(record).encode() + b"\n" for record in self.records())
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise

    def records(self) -> Iterator[dict[str, Value]]:
        """The records of a run's file that holds everything, the header first."""
        yield self.header()
        yield from map(note_record, self.notes)
        for step, coverage in self.coverages.items():
            yield coverage_record(step, coverage)
        for step in self.steps:
            values = {n: series[step] for n, series in self._values.items() if step in series}
            yield step_record(step, values)

    def header(self) -> dict[str, Value]:
        """The record that says what the series come from, as far as it is known by now."""
        sources = {name: asdict(source) for name, source in self.sources.items()}
        parameters = {name: list(shape) for name, shape in self.parameters.items()}
        return {"gradlens_run": FORMAT, "sources": sources, "parameters": parameters}

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a run file, also of a run that is still going on, was killed, or is damaged.

        A last line that was cut off is left out and ``truncated`` is set. Lines that can't be read
        are left out and listed in ``broken_lines``, with a ``LeftOutWarning``. ``ValueError`` if
        the file is no run, or was written in another format.
        """
        history, path, number = cls(), Path(path), 0
        with path.open("rb") as file:
            room = Room(path.stat().st_size)
            for number, line in enumerate(file, start=1):
                if number == 1:
                    _check_beginning(line, path)
                try:
                    history._take_in(from_line(line.rstrip(b"\n").decode("utf-8"), room))
                except OtherFormatError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
                except ValueError as error:
                    if line.endswith(b"\n"):
                        history.broken_lines[number] = str(error)
                    else:
                        history.truncated = True
        if not number:
            raise ValueError(f"{path} is not a gradlens run: it is empty")
        if history.damage:
            warnings.warn(f"{path}: {history.damage}", LeftOutWarning, stacklevel=2)
        return history

    @property
    def damage(self) -> str:
        """Which lines of a file could not be read, in words; empty if all could."""
        if not self.broken_lines:
            return ""
        (number, reason), *others = self.broken_lines.items()
        text = f"line {number} is broken ({reason}) and left out"
        return f"{text}, as well as {few([f'line {n}' for n, _ in others])}" if others else text

    def _take_in(self, record: Mapping[str, Any]) -> None:
        """Add a record; ``ValueError`` if it isn't one."""
        if "gradlens_run" in record:
            if record["gradlens_run"] != FORMAT:
                raise OtherFormatError(record["gradlens_run"])
            HEADER.check(record, "the header")
            # A run that was resumed has several headers, perhaps with other quantities.
            self.sources |= _sources(record)
            shapes = {name: tuple(shape) for name, shape in record["parameters"].items()}
            self.parameters = {**self.parameters, **shapes}
            for name in self.sources:
                self._values.setdefault(name, {})
        elif "note" in record:
            NOTE.check(record, "the record")
            self.notes.append(Note(record["step"], record["note"]))
        elif "rewind" in record:
            REWIND.check(record, "the record")
            self.rewind(record["step"], record["rewind"])
        elif "coverage" in record:
            COVERAGE.check(record, "the record")
            self.coverages[record["step"]] = Coverage.from_plain(record["coverage"])
        else:
            VALUES.check(record, "the record")
            self.append(record["step"], record["values"])


# Records of a file --------------------------------------------------------------------------

STEP = Whole(-(2**53), 2**53)
"""A global step, which a step axis must be able to show: such numbers are exact as floats."""

HEADER = Fields(
    {
        "sources": MapOf(
            Fields(
                {
                    "kinds": ListOf(Is(str), 100),
                    "view": Fields(
                        {
                            "title": Is(str),
                            "group": OneOf(get_args(Group)),
                            "yscale": OneOf(get_args(YScale)),
                            "label": Is(str),
                        }
                    ),
                    "of_samples": Is(bool),
                }
            )
        ),
        "parameters": MapOf(ListOf(Whole(0, 2**53), 64)),
    }
)
NOTE = Fields({"step": STEP, "note": Is(str)})
REWIND = Fields({"step": STEP, "rewind": MapOf(STEP)})
VALUES = Fields({"step": STEP, "values": MapOf(Anything())})
COVERAGE = Fields(
    {
        "step": STEP,
        "coverage": Fields(
            {
                "missing": MapOf(Is(str)),
                "coupled": ListOf(Is(str)),
                "batchnorm": OneOf(tuple(COUPLING)),
                "samples": Either(Whole(0, 2**53)),
                "known_by": Is(str),
                "frozen": ListOf(Is(str)),
            }
        ),
    }
)


class OtherFormatError(ValueError):
    """A run was written in another format than this version's."""

    def __init__(self, found: Any) -> None:
        super().__init__(
            f"the run has format {str(found)[:20]}, and this version reads format {FORMAT}: "
            "read it with the version of gradlens that wrote it"
        )


def step_record(step: int, values: Mapping[str, Value]) -> dict[str, Value]:
    """The record of one step's values."""
    return {"step": step, "values": values}


def coverage_record(step: int, coverage: Coverage) -> dict[str, Value]:
    """The record of the per-sample gradients that there are from a step on."""
    return {"step": step, "coverage": coverage.plain()}


def rewind_record(step: int, ends: Mapping[str, int]) -> dict[str, Value]:
    """The record that training continues from a checkpoint of a step: see ``History.rewind``."""
    return {"step": step, "rewind": dict(ends)}


def note_record(note: Note) -> dict[str, Value]:
    """The record of a note."""
    return {"step": note.step, "note": note.text}


def _check_beginning(line: bytes, path: Path) -> None:
    """``ValueError`` if a file's first line isn't that of a run, or of the beginning of one."""
    if line and BEGINNING.startswith(line[: len(BEGINNING)]):
        return
    raise ValueError(f"{path} is not a gradlens run: its first line is no header")


def _sources(header: Mapping[str, Any]) -> dict[str, Source]:
    names = [each.name for each in fields(View)]
    return {
        name: Source(
            tuple(found["kinds"]),
            View(**{key: found["view"][key] for key in names}),
            found["of_samples"],
        )
        for name, found in header["sources"].items()
    }
