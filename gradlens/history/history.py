"""What was recorded: name -> step -> value, in memory and as JSON lines on disk."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, overload

import numpy as np

from gradlens.history.coverage import Coverage, few
from gradlens.history.finding import Finding
from gradlens.history.html import count, in_short, table
from gradlens.history.json_lines import (
    Value,
    encoded,
    from_plain,
    stored_record,
    to_line,
    unmarked,
)
from gradlens.history.lines import durations, frame, line, number_lines
from gradlens.history.records import (
    FORMAT,
    KINDS,
    Header,
    LeftOutWarning,
    Note,
    Samples,
    Source,
    Spending,
)
from gradlens.history.run_file import check_regular, new_file
from gradlens.history.scalars import Scalar, scalars_of
from gradlens.history.series import EXACT, Content, Series, taken_in, value_of
from gradlens.history.setup import Setup
from gradlens.history.spikes import Spike
from gradlens.spelling import near

if TYPE_CHECKING:
    import pandas

MOST_FACTS = {"steps": 8192, "layers": 256}
"""Steps whose facts are kept, at most: of each, they take 200 bytes, and 30 kB of the layers of a
network with 1,000 parameters."""


@dataclass
class History:
    """A run's values by name and step, independent of torch and of the network.

    ``history[name]`` is a dict of a series' values by step, and ``history[step]`` a dict of all
    values of a step by name. A number that could not be computed is a NaN, and an ``Undefined`` if
    its reason is known. A later value for the same name and step replaces the earlier one.

    ``sources`` says what recorded each series, ``parameters`` has the shapes of the network's
    parameters, from input to output, and ``notes`` are messages for the user. ``coverages`` says
    which parameters have per-sample gradients, by each step from which on this has changed.
    ``setups`` are what the run consists of, by each step from which on that has changed.
    ``spending`` is how much of a budget tracking has used. ``facts`` are recorded whatever is
    tracked: dicts of numbers of each step in ``facts["steps"]``, and of such dicts by layer or
    parameter, of some steps, in ``facts["layers"]``. Of long runs, they are those of the latest
    steps, and of fewer and fewer before. ``findings`` are what was found wrong while the run was
    going on. ``spikes`` are the steps at which the loss jumped.
    ``samples`` has what was recorded of single samples by their ids, or is ``None`` without ids. Of
    a file, ``truncated`` says whether the last line was cut off, and ``broken_lines`` has the
    numbers of lines that could not be read, with the reasons.

    The history of a cockpit with a run's file reads arrays from there when they are needed, with an
    ``OSError`` if something else has changed the file.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    truncated: bool = False
    broken_lines: dict[int, str] = field(default_factory=dict)
    coverages: dict[int, Coverage] = field(default_factory=dict)
    spending: Spending | None = None
    facts: dict[str, Series] = field(
        default_factory=lambda: {name: Series(Content()) for name in MOST_FACTS}, repr=False
    )
    setups: dict[int, Setup] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    spikes: dict[int, Spike] = field(default_factory=dict)
    samples: Samples | None = None
    _series: dict[str, Series] = field(default_factory=dict, repr=False)
    content: Content = field(default_factory=Content, repr=False)

    def __post_init__(self) -> None:
        self.add_sources({})

    def __repr__(self) -> str:
        """The number of series and the latest step in one line."""
        latest = max((max(one) for one in self._series.values() if one), default=None)
        end = "no steps" if latest is None else f"latest step {latest}"
        return f"History({count(len(self.names), 'series')}, {end})"

    def _repr_html_(self) -> str:
        """What was found wrong while the run was going on, and the latest values, for notebooks."""
        notes = [f"step {note.step}: {note.text}" for note in self.notes]
        findings = [f"step {each.step}: {each.sentence}" for each in self.findings]
        return table(repr(self), LATEST, self.latest_values(), notes, findings)

    def latest_values(self) -> list[tuple[str, int, int | str, str]]:
        """Of each series its name, the number of values, and the latest step and value in short.

        The latest value of ``Time`` is the time per step, as in figures.
        """
        times = self.of_kind("Time")
        return [_latest(name, one, name in times) for name, one in self._series.items()]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all series, in the order of the quantities."""
        return tuple(self._series)

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        """The steps, ascending."""
        return iter(self.steps)

    def __contains__(self, which: object) -> bool:
        """Whether there is a series of this name, or anything at this step."""
        if isinstance(which, int):
            return any(which in one for one in self._series.values())
        return which in self._series

    @overload
    def __getitem__(self, which: str) -> Series: ...

    @overload
    def __getitem__(self, which: int) -> dict[str, Value]: ...

    @overload
    def __getitem__(self, which: slice) -> History: ...

    def __getitem__(self, which: str | int | slice) -> Series | dict[str, Value] | History:
        """A series by its name, a step's values by its number, or the history of some steps.

        ``history["Loss"]`` are values by step, ``history[100]`` values by name, and
        ``history[100:200]`` is the history of the steps from 100 to 199. A third number in a slice
        leaves out steps: ``history[::10]`` has the first of ten. ``KeyError`` names what there is;
        ``ValueError`` for a slice with a negative number.
        """
        if isinstance(which, slice):
            return self._sliced(which)
        if isinstance(which, str):
            if which not in self._series:
                raise KeyError(f"no series {which!r} in this history{near(which, self._series)}")
            return self._series[which]
        return self._at(operator.index(which))

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Names of the series of quantities of class ``kind`` or of a class derived from it."""
        return tuple(name for name, source in self.sources.items() if kind in source.kinds)

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps for which anything was recorded, ascending."""
        # Most series have the same steps, and need no sorting.
        columns = {found.tobytes(): found for found in (one.steps for one in self._series.values())}
        found = np.unique(np.concatenate([np.zeros(0), *columns.values()]))
        return tuple(found.astype(np.int64).tolist())

    def coverage(self, name: str, step: int) -> Coverage:
        """Which parameters a record is about; all of them unless it has to do with samples."""
        source = self.sources.get(name)
        if source is None or not source.of_samples:
            return Coverage()
        known = [at for at in self.coverages if at <= step]
        return self.coverages[max(known)] if known else Coverage()

    def append(self, step: int, values: Mapping[str, Value]) -> None:
        """Add one step's values by name; ``TypeError`` for what a file can't hold."""
        self.add(step, encoded(values))

    def add(self, step: int, stored: Mapping[str, Any]) -> None:
        """Add a step's values as a file has them; with a ``ValueError``, none of them is added."""
        taken = []
        for key, value in stored.items():
            start = len(self.content.numbers)
            taken.append((unmarked(key), taken_in(value, self.content), start))
        for name, description, start in taken:
            if name not in self._series:
                self._series[name] = Series(self.content)
            self._series[name].append(step, description, start)

    def add_facts(self, step: int, stored: Mapping[str, Any]) -> None:
        """Add facts of a step as a file has them, by the names of their series."""
        for name, most in MOST_FACTS.items():
            if name in stored:
                self.facts[name].add(step, stored[name])
                if len(self.facts[name]) > most:
                    self.facts[name] = self.facts[name].thinned()

    def add_sources(self, sources: Mapping[str, Source]) -> None:
        """Say what records series, which may have no values yet."""
        self.sources |= sources
        for name in self.sources:
            if name not in self._series:
                self._series[name] = Series(self.content)

    def latest(self, kind: str) -> Any:
        """The latest coverage or setup, which holds from then on; ``None`` for other kinds."""
        of_kind: dict[str, Mapping[int, Any]] = {"setup": self.setups, "coverage": self.coverages}
        found = of_kind.get(kind)
        return found[max(found)] if found else None

    @property
    def _by_step(self) -> Mapping[str, dict[int, Any]]:
        """What is said once of a step, by the kinds of records."""
        return {"setup": self.setups, "coverage": self.coverages, "spike": self.spikes}

    def take_in(self, step: int, kind: str, content: Any) -> None:
        """Take in what a record says of a step besides values: see ``records.KINDS``."""
        match kind:
            case "note":
                self.notes.append(Note(step, content))
            case "finding":
                self.findings.append(content)
            case "facts":
                self.add_facts(step, encoded(content))
            case "spending":
                self.spending = content
            case "samples":
                self.samples = content
            case "rewind":
                self.rewind(step, content)
            case _:
                self._by_step[kind][step] = content

    def _at(self, step: int) -> dict[str, Value]:
        found = {name: one[step] for name, one in self._series.items() if step in one}
        if not found:
            steps = self.steps
            known = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
            last = ": the last step is history[history.steps[-1]]" if step < 0 else ""
            raise KeyError(f"nothing was recorded at step {step} (this history has {known}){last}")
        return found

    def _sliced(self, bounds: slice) -> History:
        if min(number or 0 for number in (bounds.start, bounds.stop, bounds.step)) < 0:
            raise ValueError(
                "slices of a history are by the numbers of steps, from 0 on: the last hundred are "
                "history[history.steps[-100]:]"
            )
        first = -math.inf if bounds.start is None else bounds.start
        end = math.inf if bounds.stop is None else bounds.stop
        steps = [step for step in self.steps if first <= step < end][:: bounds.step]
        return replace(
            self,
            notes=[note for note in self.notes if first <= note.step < end],
            **self._between(first, end),
            _series={name: series.only(steps) for name, series in self._series.items()},
        )

    def _between(self, first: float, end: float) -> dict[str, Any]:
        """What isn't said in words or values, of the steps from ``first`` on and before ``end``.

        What holds from a step on holds later, too.
        """
        return {
            "coverages": {at: each for at, each in self.coverages.items() if at < end},
            "setups": {at: each for at, each in self.setups.items() if at < end},
            "facts": {
                name: series.only([at for at in series if first <= at < end])
                for name, series in self.facts.items()
            },
            "findings": [each for each in self.findings if first <= each.step < end],
            "spikes": {at: each for at, each in self.spikes.items() if first <= at < end},
        }

    def scalars(self) -> tuple[Scalar, ...]:
        """All numbers per step of the run, in the order of its series.

        Norms of single parameters become that of the network, estimates lose their error bars, and
        of histograms it is the share of elements that they clip. Series of other dicts and arrays
        are described by their entries or, where these are many, by the extremes; what single
        numbers can't describe is left out.
        """
        return tuple(
            scalar
            for name, series in self._series.items()
            for scalar in scalars_of(name, series, self.sources.get(name), self.parameters)
        )

    def to_dataframe(self, name: str | None = None) -> pandas.DataFrame:
        """The run as a pandas ``DataFrame`` with a row for each step, which needs pandas.

        It has a column for each of ``scalars``, or, with the ``name`` of a series, for each number
        in its values: for each parameter in those of ``GradNorm``, ``eigenvalues/0`` and the like
        for the elements of arrays of one axis, and ``parameters/0.weight/trace`` and the like where
        values are nested. Numbers that don't exist are NaN; other arrays, lists and texts are left
        out. ``ValueError`` if nothing remains.
        """
        if name is None:
            return frame({one.name: one.line for one in self.scalars()}, self.steps)
        columns = number_lines(self[name], elements=True)
        if self[name] and not columns:
            raise ValueError(f"the values of {name!r} are no numbers: read history[{name!r}]")
        return frame({part or name: line for part, line in columns.items()}, [*self[name]])

    def rewind(self, step: int, ends: Mapping[str, int]) -> None:
        """Remove what came after a step, at which the series ended at ``ends``.

        A series without an end had no values.
        """
        self._series = {
            name: one.only([at for at in one if at <= ends.get(name, -math.inf)])
            for name, one in self._series.items()
        }
        for name, found in self._between(-math.inf, step + 1).items():
            setattr(self, name, found)

    def write(self, path: str | Path) -> None:
        """Write everything as a new run file; ``FileExistsError`` if there is one already.

        ``OSError`` if it can't be written as a whole; then no part of it is left.
        """
        new_file(path).close()
        try:
            with Path(path).open("wb") as file:
                file.writelines(self.json_lines())
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise

    def json_lines(self) -> Iterator[bytes]:
        """The lines of a run's file with everything."""
        return (to_line(record).encode() + b"\n" for record in self.records())

    def records(self) -> Iterator[dict[str, Value]]:
        """The records of a run's file with everything, the header first."""
        yield self.header()
        for note in self.notes:
            yield {"step": note.step, "note": note.text}
        for finding in self.findings:
            yield {"step": finding.step, "finding": finding}
        for kind, found in self._by_step.items():
            for step, content in found.items():
                yield {"step": step, kind: content}
        if self.spending is not None:
            yield {"step": self.steps[-1] if self.steps else 0, "spending": self.spending}
        if self.samples is not None:
            yield {"step": self.samples.until, "samples": self.samples}
        for name, series in self.facts.items():
            for step, row in series.items():
                yield {"step": step, "facts": {name: row}}
        for step in self.steps:
            yield {"step": step, "values": self[step]}

    def header(self) -> dict[str, Value]:
        return {"gradlens_run": FORMAT, "sources": self.sources, "parameters": self.parameters}

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a run file, also of a run that is still going on, was killed, or is damaged.

        A last line that was cut off is left out and ``truncated`` is set. Lines that can't be read
        are left out and listed in ``broken_lines``, with a ``LeftOutWarning``. ``ValueError`` if
        the file is no run, or was written in another format.
        """
        return Reading(Path(path), cls()).read().history

    @property
    def damage(self) -> str:
        """Which lines of a file could not be read, in words; empty if all could."""
        if not self.broken_lines:
            return ""
        (number, reason), *others = self.broken_lines.items()
        text = f"line {number} is broken ({reason}) and left out"
        return f"{text}, as well as {few([f'line {n}' for n, _ in others])}" if others else text


LATEST = ("series", "values", "latest step", "latest value")
"""Headings of ``History.latest_values``."""


def _latest(name: str, series: Series, is_time: bool) -> tuple[str, int, int | str, str]:
    if not series:
        return name, 0, "", ""
    step = max(series)
    shown = in_short(series[step])
    if is_time:
        times = durations(line(series)).values
        if not times.size:
            shown = "needs two records"
        elif times[-1] > 0:
            shown = f"{in_short(float(times[-1]))} s/step"
    return name, len(series), step, shown


# Reading a file -------------------------------------------------------------------------------

BEGINNING = b'{"gradlens_run":'
"""The first bytes of every run's file."""

BUFFER = 2**17
"""Bytes that are read from a file at once: lines of some kB take half of the time in these."""


class Reading:
    """What has been read of a run's file, which may still grow.

    ``history`` is what the file had when it was read last.
    """

    def __init__(self, path: Path, history: History) -> None:
        """``history`` is an empty one."""
        self.history = history
        self._path = path
        self._place = 0
        """Where the next line begins."""
        self._lines = 0
        self._last = b""

    def read(self) -> Reading:
        """Read the file from its beginning, as ``read_on``."""
        check_regular(self._path)
        with self._path.open("rb", buffering=BUFFER) as file:
            self.read_on(file)
        return self

    def mend(self) -> str:
        """Make the file end with a whole line; what was cut off, in words.

        A last record that is whole but for its line break is kept.
        """
        with self._path.open("rb+") as file:
            cut = file.seek(0, os.SEEK_END) - self._place
            file.seek(self._place)
            file.truncate()
            file.write(b"\n" if self._lacks_break else b"")
        return f"its last line was cut off after {cut:,} bytes, and is dropped" if cut else ""

    def read_on(self, file: BinaryIO) -> None:
        """Read what has been added to the file.

        A last line that was cut off is read again the next time. ``ValueError`` if the file is no
        run, or was written in another format. A ``LeftOutWarning`` names broken lines.
        """
        self.history.truncated = False
        file.seek(self._place)
        for each in file:
            self._read(each)
        if not self._lines and not self.history.truncated:
            raise ValueError(f"{self._path} is not a gradlens run: it is empty")
        if self.history.damage:
            text = f"{self._path}: {self.history.damage}"
            warnings.warn(text, LeftOutWarning, stacklevel=3)

    @property
    def _lacks_break(self) -> bool:
        """Whether the last line was whole but for its line break."""
        return self._last[-1:] not in (b"\n", b"")

    def is_of(self, file: BinaryIO) -> bool:
        """Whether a file has what was read, at the same place."""
        file.seek(self._place - len(self._last))
        return file.read(len(self._last)) == self._last

    def _read(self, line: bytes) -> None:
        if line == b"\n" and self._lacks_break:
            self._place, self._last = self._place + 1, self._last + line
            return
        if not self._lines and not (line and BEGINNING.startswith(line[: len(BEGINNING)])):
            raise ValueError(f"{self._path} is not a gradlens run: its first line is no header")
        try:
            self._take_in(line.rstrip(b"\n").decode("utf-8"))
        except OtherFormatError as error:
            raise ValueError(f"{self._path}, line {self._lines + 1}: {error}") from error
        except BROKEN as error:
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
        stored = stored_record(line)
        if "gradlens_run" in stored:
            if stored["gradlens_run"] != FORMAT:
                raise OtherFormatError(stored["gradlens_run"])
            header = from_plain(Header, value_of(stored), "the header")
            # A run that was resumed has several, which may differ.
            self.history.parameters = {**self.history.parameters, **header.parameters}
            self.history.add_sources(header.sources)
            return
        kind = next((kind for kind in (*KINDS, "facts") if kind in stored), "values")
        for key in ("step", kind):
            if key not in stored:
                raise ValueError(f"the record has no {key!r}")
        step = from_plain(int, stored["step"], "the record.step")
        if abs(step) > EXACT:  # which no axis could show
            raise ValueError("the record.step is too large")
        if kind in ("values", "facts"):
            add = self.history.add if kind == "values" else self.history.add_facts
            add(step, from_plain(dict, stored[kind], f"the record.{kind}"))
        else:
            content = from_plain(KINDS[kind], value_of(stored[kind]), f"the {kind}")
            self.history.take_in(step, kind, content)


BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What is raised by a line that isn't what it should be."""


class OtherFormatError(ValueError):
    """A run was written in another format than this version's."""

    def __init__(self, found: Any) -> None:
        super().__init__(
            f"the run has format {str(found)[:20]}, and this version reads format {FORMAT}: "
            "read it with the version of gradlens that wrote it"
        )
