"""What a cockpit records: the history, its file on disk, notes and statistics."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from gradlens.cockpit.aggregation import Aggregation
from gradlens.cockpit.values import PUSHED, pushable, recordable
from gradlens.history.coverage import Coverage
from gradlens.history.history import History, Reading
from gradlens.history.json_lines import Encoded, encoded, line_of, to_line
from gradlens.history.records import LeftOutWarning, Source
from gradlens.history.run_file import RunFile, check_regular
from gradlens.history.undefined import Undefined
from gradlens.messages import GradlensWarning, log
from gradlens.numerics.unavailable import first_line
from gradlens.quantities.quantity import Quantity, class_names
from gradlens.sinks.publisher import Publisher
from gradlens.sinks.sink import Sink
from gradlens.stateful import State


class Run:
    """A history, and a file to which each entry is written as it comes.

    ``path`` is that of the file. An existing one is continued with ``resume``, and otherwise is a
    ``FileExistsError``. Only one process ``writes``. Arrays that are in the file aren't kept in
    memory. The process that writes passes each record on to ``sinks``. ``how_to_pass`` is said
    behind "to the context".
    """

    def __init__(
        self,
        aggregation: Aggregation,
        parameters: Mapping[str, nn.Parameter],
        path: str | Path | None,
        resume: bool,
        writes: bool,
        sinks: Sequence[Sink] = (),
        how_to_pass: str = "",
    ) -> None:
        self.has_begun = self.has_recorded = False
        self._is_closed = False
        self._how_to_pass = f"{CONTEXT} ({how_to_pass})" if how_to_pass else CONTEXT
        self._aggregation = aggregation
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.history = History({**aggregation.sources}, shapes)
        self._publisher = Publisher(sinks, self._report) if writes and sinks else None
        dropped = self._resume(Path(path), writes) if path is not None and resume else ""
        self.is_continued = bool(self.history.steps)
        """Whether the file had values from an earlier program."""
        self._step = self.history.steps[-1] if self.history.steps else 0
        self._file = RunFile(path, resume) if path is not None and writes else None
        if self._file is not None:
            self.history.content.leave(self._file)
        self._write(self.history.header())
        if dropped:
            self.note(self._step, f"{path} is continued: {dropped}")

    def _resume(self, path: Path, writes: bool) -> str:
        """Take in what a file has; what could not be read, in words."""
        check_regular(path)
        if not path.exists() or not path.stat().st_size:
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LeftOutWarning)  # a note says it
            reading = Reading(path, History()).read()
        past = reading.history
        self.history = replace(
            past,
            sources=past.sources | self.history.sources,
            parameters=self.history.parameters,
            truncated=False,
            broken_lines={},
            spending=None,
        )
        cut = reading.mend() if writes else ""
        return "; ".join(filter(None, [cut, past.damage]))

    def begin_step(self, global_step: int) -> bool:
        """A step's context is entered; whether that of a later one was before."""
        goes_back = self.has_begun and global_step < self._step
        self.has_begun = True
        self._step = global_step
        return goes_back

    def has_values(self, global_step: int) -> bool:
        """Whether a quantity has a value at the step already."""
        return any(global_step in self.history[name] for name in self._aggregation.sources)

    def record(self, global_step: int, values: Mapping[str, Any]) -> None:
        """Record values, and statistics that are complete with them."""
        self.has_recorded = True
        if self._aggregation.has_aggregates:
            values = self._aggregation.take_in(global_step, values)
        self._append(global_step, values)

    def record_evaluation(
        self, global_step: int, evaluation: str, quantity: Quantity, value: Any
    ) -> None:
        """Record a quantity's value in an evaluation, under the names of both."""
        name = f"{quantity.name} ({evaluation})"
        view = replace(quantity.view, title=f"{quantity.view.title} ({evaluation})")
        self._add_source(name, Source(class_names(quantity), view))
        self.record(global_step, {name: recordable(quantity, global_step, value)})

    def note(self, global_step: int, text: str) -> None:
        """Note a text once, whatever its numbers: as a warning, in the history and in the file."""
        text = self._said(text)
        words = without_numbers(text)
        if any(without_numbers(note.text) == words for note in self.history.notes):
            return
        self.take_in(global_step, "note", text)

    def note_now(self, text: str) -> None:
        """Note a text at the present step."""
        self.note(self._step, text)

    def say(self, text: str) -> None:
        """Tell the user something that isn't recorded, since it follows from what is."""
        if self._publisher is not None:
            self._publisher.note(self._step, text)
        log(f"gradlens, step {self._step}: {text}")

    def take_in(self, global_step: int, kind: str, content: Any) -> None:
        """Record what is known of a step besides values (``records.KINDS``), unless it was before.

        The user is told of what concerns them.
        """
        content = self._placed(content)
        if content == self.history.latest(kind):
            return
        if kind == "facts":
            content = Encoded(encoded(content))  # for history and file
        self.history.take_in(global_step, kind, content)
        self._write({"step": global_step, kind: content})
        if kind == "coverage":
            for text in content.notes(self.history.parameters):
                self.note(global_step, text)
        if kind in ("note", "finding"):
            text = content if kind == "note" else content.sentence
            if self._publisher is not None:
                self._publisher.note(global_step, text)
            warnings.warn(f"gradlens, step {global_step}: {text}", GradlensWarning, _users_level())

    def log(self, global_step: int, values: Mapping[str, Any]) -> None:
        """Record values of the training loop; ``ValueError`` for names that others have."""
        for name in values:
            self._check_name(name, "log", "logged")
        self.record(global_step, values)

    def push(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics of the training loop to their statistics; all of them or none."""
        values = {name: pushable(name, value) for name, value in metrics.items()}
        for name in values:
            self._check_name(name, "push", "pushed")
            is_resumed = self.is_continued and not self.has_begun
            is_known = name in self.history and self._step in self.history[name]
            if is_resumed and is_known and not self._aggregation.has_recorded(self._step, name):
                raise ValueError(
                    f"push({name}=...): the run that is resumed has a record of it under its last "
                    "step, which is kept: push it after the next step"
                )
        self._aggregation.push(self._step, values)

    def end_epoch(self) -> None:
        """Record the statistics over an epoch."""
        self._append_statistics(self._aggregation.end_epoch(self._step))

    def close(self) -> None:
        """Record the statistics that remain, and close the file."""
        self._append_statistics(self._aggregation.end_epoch(self._step, and_windows=True))
        if self._publisher is not None:
            self._publisher.close()
        self._is_closed = True
        self._write_line()
        file, self._file = self._file, None
        if file is not None and file.failure:
            self.note(self._step, LACKING.format(file=file))
        elif file is not None and not file.path.exists():
            self.note(self._step, GONE.format(path=file.path))

    def state_dict(self) -> State:
        """Where the series end, so that a run that is continued can be taken back to here."""
        return {
            "step": self._step,
            "has_begun": self.has_begun,
            "ends": self._ends(),
            "aggregation": self._aggregation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; what was recorded after it is taken out of the history."""
        self._step, self.has_begun = state["step"], state["has_begun"]
        self._aggregation.load_state_dict(state["aggregation"])
        ends = state["ends"]
        late = [name for name, end in self._ends().items() if end > ends.get(name, -math.inf)]
        others = (*self.history.facts["steps"], *self.history.spikes)
        if late or any(step > self._step for step in others):
            self.take_in(self._step, "rewind", ends)

    def _ends(self) -> dict[str, int]:
        """The last step of each series that has values."""
        series = {name: self.history[name] for name in self.history.names}
        return {name: next(reversed(one)) for name, one in series.items() if one}

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._write_line(f"{to_line(content)}\n".encode())

    def _write_line(self, line: bytes = b"") -> None:
        """Write a line, and those that wait; note that this fails from now on, or works again."""
        file = self._file
        if file is None:
            return
        before = file.failure
        file.write(line)
        if bool(before) != bool(file.failure):
            text = FAILED if file.failure else AGAIN
            self.take_in(self._step, "note", text.format(file=file, step=self._step))

    def _append(self, global_step: int, values: Mapping[str, Any]) -> None:
        if not values:
            return
        values = self._placed(values)
        if self._is_closed:
            self.note(global_step, CLOSED)
        stored, content = encoded(values), self.history.content
        self.history.add(global_step, stored)
        if self._file is not None:
            line = f"{line_of({'step': global_step, 'values': stored})}\n".encode()
            content.locate(line, self._file.end)
            self._write_line(line)
        if self._file is not None and not self._file.failure:
            content.leave(self._file)
        if self._publisher is not None:
            sources, parameters = self.history.sources, self.history.parameters
            self._publisher.record(global_step, values, sources, parameters)

    def _placed(self, content: Any) -> Any:
        """The same, with reasons for users who give what to pass to a framework's callback."""
        if self._how_to_pass == CONTEXT:
            return content
        if isinstance(content, Undefined):
            return Undefined(self._said(content.reason))
        if isinstance(content, Encoded):
            return Encoded(self._placed(content.content))
        if isinstance(content, Coverage):
            missing = {name: self._said(reason) for name, reason in content.missing.items()}
            return replace(content, missing=missing)
        if isinstance(content, dict):
            return {
                name: self._said(each) if name == "$undefined" else self._placed(each)
                for name, each in content.items()
            }
        return content

    def _said(self, text: str) -> str:
        """A text, which says once how to pass something."""
        return text if self._how_to_pass in text else text.replace(CONTEXT, self._how_to_pass, 1)

    def _report(self, what: str, error: Exception) -> None:
        """Note that something between records and sinks has failed."""
        self.note(self._step, LEFT_OUT.format(what=what, reason=first_line(error)))

    def _append_statistics(self, values: Mapping[str, Any]) -> None:
        for name in values:
            self._add_source(name, PUSHED)
        self._append(self._step, values)

    def _add_source(self, name: str, source: Source) -> None:
        if name not in self.history.sources:
            self.history.add_sources({name: source})
            self._write(self.history.header())

    def _check_name(self, name: str, function: str, prefix: str) -> None:
        """``ValueError`` if a series of this name comes from another function, or a quantity."""
        owner = "log" if name in self.history else function
        if name in {*self.history.sources, *(q.name for q in self._aggregation.quantities)}:
            owner = "a quantity"
        if self._aggregation.has_pushed(name) or self.history.sources.get(name) == PUSHED:
            owner = "push"
        if owner != function:
            raise ValueError(
                f"{function}({name}=...): there is a series {name!r} of {owner}, which is kept: "
                f"give this one another name, such as {prefix}_{name}"
            )


@lru_cache(1024)
def without_numbers(text: str) -> str:
    """A text without the numbers in it, such as that of rows, but with those in names."""
    return re.sub(r"(?<![\w.])\d+(?![\w.])", "", text)


CONTEXT = "to the context"
FAILED = (
    "{file.path} can't be written from step {step} on ({file.failure}). Training goes on and "
    "nothing is lost: records are kept in memory, and are written as soon as that is possible "
    "again. cockpit.history.write(path) saves everything elsewhere"
)
AGAIN = "{file.path} can be written again from step {step} on, and lacks nothing"
LACKING = (
    "{file.path} lacks the last records, since it can't be written "
    "({file.failure}): save everything elsewhere by cockpit.history.write(path)"
)
GONE = (
    "{path} was moved or removed while training went on: what isn't where it was moved to can be "
    "saved by cockpit.history.write(path)"
)
LEFT_OUT = (
    "{what} failed, and is left out from now on: {reason}. Training and what else is recorded "
    "aren't affected"
)

_NOT_USERS = (str(Path(__file__).parents[1]), contextlib.__file__)
"""Files that a warning isn't attributed to: those of gradlens, and that of generator contexts."""


def _users_level() -> int:
    """The ``stacklevel`` at which the caller's warning is attributed to the user's code."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame, level = frame.f_back, level + 1
    return level


CLOSED = (
    "the cockpit has been closed: values are kept in memory, but aren't written to the run's file "
    "or passed on to sinks any more, and layers have no hooks. Close it after the last step, or go "
    "on with another one, Cockpit(..., run=..., resume=True)"
)
