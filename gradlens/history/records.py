"""The records of a run's file, and what they say besides values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradlens.history.coverage import Coverage
from gradlens.history.json_lines import Value
from gradlens.history.samples import Samples
from gradlens.history.spending import Spending
from gradlens.history.spikes import Spike
from gradlens.history.view import View
from gradlens.messages import GradlensWarning

FORMAT = 1

NOUNS = {"parameters": "parameter", "layers": "layer"}
"""Entries of a value with the numbers of each parameter or layer."""


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


class LeftOutWarning(GradlensWarning):
    """A part of a run could not be read or drawn; the rest was."""


@dataclass(frozen=True)
class Note:
    """A message for the user about a step."""

    step: int
    text: str


def step_record(step: int, values: Mapping[str, Value]) -> dict[str, Value]:
    """The record of one step's values."""
    return {"step": step, "values": values}


def coverage_record(step: int, coverage: Coverage) -> dict[str, Value]:
    """The record of the per-sample gradients that there are from a step on."""
    return {"step": step, "coverage": coverage.plain()}


def spending_record(step: int, spending: Spending) -> dict[str, Value]:
    """The record of what tracking has taken of the time until a step."""
    return {"step": step, "spending": spending.plain()}


def spike_record(step: int, spike: Spike) -> dict[str, Value]:
    """The record of a step whose loss has jumped; a later one of the same step replaces it."""
    return {"step": step, "spike": spike.plain()}


def samples_record(step: int, samples: Samples) -> dict[str, Value]:
    """The record of what is known of single samples until a step."""
    return {"step": step, "samples": samples.plain()}


def rewind_record(step: int, ends: Mapping[str, int]) -> dict[str, Value]:
    """The record that training continues from a checkpoint of a step: see ``History.rewind``."""
    return {"step": step, "rewind": dict(ends)}


def note_record(note: Note) -> dict[str, Value]:
    """The record of a note."""
    return {"step": note.step, "note": note.text}
