"""Reads a run's file, as far as it has been written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, get_args

from gradlens.history.content import Content
from gradlens.history.coverage import COUPLING, Coverage
from gradlens.history.facts import Facts
from gradlens.history.json_lines import Room, record_of, stored_record
from gradlens.history.records import FORMAT, LeftOutWarning, Note, Source
from gradlens.history.samples import SAMPLES, Samples
from gradlens.history.schema import Either, Fields, Is, ListOf, MapOf, OneOf, Whole
from gradlens.history.spending import Spending
from gradlens.history.spikes import SPIKE, Spike
from gradlens.history.view import Group, View, YScale

BEGINNING = b'{"gradlens_run":'
"""The first bytes of every run's file."""

BUFFER = 2**17
"""Bytes that are read from a file at once: lines of some kB take half of the time in these."""

OF_FACTS = {"setup", "facts", "finding"}
"""Keys of the records of facts."""

OTHERS = {"gradlens_run", "note", "coverage", "spending", "rewind", "spike", "samples"} | OF_FACTS
"""Keys of the records that aren't those of a step's values."""


class Readable(Protocol):
    """What the records of a file are read into: see ``History``."""

    sources: dict[str, Source]
    parameters: Mapping[str, tuple[int, ...]]
    notes: list[Note]
    truncated: bool
    broken_lines: dict[int, str]
    coverages: dict[int, Coverage]
    spending: Spending | None
    facts: Facts
    spikes: dict[int, Spike]
    samples: Samples | None
    content: Content

    @property
    def damage(self) -> str: ...

    def add_sources(self, sources: Mapping[str, Source]) -> None: ...

    def add(self, step: int, stored: Mapping[str, Any]) -> None: ...

    def rewind(self, step: int, ends: Mapping[str, int]) -> None: ...


H = TypeVar("H", bound=Readable)


class Reading(Generic[H]):
    """What has been read of a run's file, which may still grow.

    ``history`` is what the file had when it was read last.
    """

    def __init__(self, path: Path, history: H) -> None:
        """``history`` is an empty one."""
        self.history = history
        self._path = path
        self._room = Room(0)
        self._place = 0
        """Where the next line begins."""
        self._lines = 0
        self._last = b""

    def read_on(self, file: BinaryIO) -> None:
        """Read what has been added to the file.

        A last line that was cut off is read again the next time. ``ValueError`` if the file is no
        run, or was written in another format. A ``LeftOutWarning`` names broken lines.
        """
        self._room.grow(file.seek(0, os.SEEK_END))
        self.history.truncated = False
        file.seek(self._place)
        for line in file:
            self._read(line)
        if not self._lines and not self.history.truncated:
            raise ValueError(f"{self._path} is not a gradlens run: it is empty")
        if self.history.damage:
            text = f"{self._path}: {self.history.damage}"
            warnings.warn(text, LeftOutWarning, stacklevel=3)

    def is_of(self, file: BinaryIO) -> bool:
        """Whether a file has what was read, at the same place."""
        file.seek(self._place - len(self._last))
        return file.read(len(self._last)) == self._last

    def _read(self, line: bytes) -> None:
        if line == b"\n" and self._last[-1:] not in (b"\n", b""):
            # The line break of a line that was whole but for it.
            self._place, self._last = self._place + 1, self._last + line
            return
        if not self._lines:
            _check_beginning(line, self._path)
        try:
            self._take_in(line.rstrip(b"\n").decode("utf-8"))
        except OtherFormatError as error:
            raise ValueError(f"{self._path}, line {self._lines + 1}: {error}") from error
        except ValueError as error:
            if not line.endswith(b"\n"):
                self.history.truncated = True
                return
            self.history.broken_lines[self._lines + 1] = str(error)
        else:
            self.history.content.locate(line, self._place)
        self._place, self._last = self._place + len(line), line
        self._lines += 1

    def _take_in(self, line: str) -> None:
        """Add a record; ``ValueError`` if it isn't one."""
        stored = stored_record(line, self._room)
        if "values" in stored or OTHERS.isdisjoint(stored):
            VALUES.check(stored, "the record")
            self.history.add(stored["step"], stored["values"])
        else:
            self._take_in_other(record_of(stored))

    def _take_in_other(self, record: Mapping[str, Any]) -> None:
        history = self.history
        if "gradlens_run" in record:
            if record["gradlens_run"] != FORMAT:
                raise OtherFormatError(record["gradlens_run"])
            HEADER.check(record, "the header")
            # A run that was resumed has several headers, perhaps with other quantities.
            history.add_sources(_sources(record))
            shapes = {name: tuple(shape) for name, shape in record["parameters"].items()}
            history.parameters = {**history.parameters, **shapes}
        elif "note" in record:
            NOTE.check(record, "the record")
            history.notes.append(Note(record["step"], record["note"]))
        elif "rewind" in record:
            REWIND.check(record, "the record")
            history.rewind(record["step"], record["rewind"])
        elif not OF_FACTS.isdisjoint(record):
            history.facts.take_in(record)
        elif "spending" in record:
            SPENDING.check(record, "the record")
            history.spending = Spending.from_plain(record["spending"])
        elif "spike" in record:
            STEPPED.check(record, "the record")
            SPIKE.check(record["spike"], "the spike")
            history.spikes[record["step"]] = Spike.from_plain(record["spike"])
        elif "samples" in record:
            STEPPED.check(record, "the record")
            SAMPLES.check(record["samples"], "the samples")
            history.samples = Samples.from_plain(record["samples"])
        else:
            COVERAGE.check(record, "the record")
            history.coverages[record["step"]] = Coverage.from_plain(record["coverage"])


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
STEPPED = Fields({"step": STEP})
NOTE = Fields({"step": STEP, "note": Is(str)})
REWIND = Fields({"step": STEP, "rewind": MapOf(STEP)})
VALUES = Fields({"step": STEP, "values": Is(dict)})
COVERAGE = Fields(
    {
        "step": STEP,
        "coverage": Fields(
            {
                "missing": MapOf(Is(str)),
                "coupled": ListOf(Is(str)),
                "frozen": ListOf(Is(str)),
                "batchnorm": OneOf(tuple(COUPLING)),
                "samples": Either(Whole(0, 2**53)),
                "known_by": Is(str),
            }
        ),
    }
)

SPENDING = Fields(
    {
        "step": STEP,
        "spending": Fields(
            {
                "share": Is(float),
                "taken": Is(float),
                "step_seconds": Is(float),
                "turns": MapOf(Fields({"count": Whole(0, 2**53), "seconds": Either(Is(float))})),
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
