"""The records of a run's file, and what they say besides values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from gradlens.history.coverage import Coverage
from gradlens.history.facts import Rows
from gradlens.history.finding import Finding
from gradlens.history.json_lines import Value
from gradlens.history.plain_data import Between, Count, plain
from gradlens.history.samples import Samples
from gradlens.history.setup import Setup
from gradlens.history.spending import Spending
from gradlens.history.spikes import Spike
from gradlens.history.view import View
from gradlens.messages import GradlensWarning

FORMAT = 1

Shape: TypeAlias = Annotated[tuple[Count, ...], Between(0, 64)]

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


@dataclass(frozen=True)
class Header:
    """What a file's series come from, and the shapes of the network's parameters."""

    sources: Mapping[str, Source]
    parameters: Mapping[str, Shape]


KINDS: Mapping[str, Any] = {
    "note": str,
    "coverage": Coverage,
    "spending": Spending,
    "rewind": Mapping[str, int],
    "spike": Spike,
    "samples": Samples,
    "setup": Setup,
    "facts": Rows,
    "finding": Finding,
}
"""The types of what records say of a step besides values, by their keys.

``"rewind"`` says that training continues from a checkpoint (see ``History.rewind``). A later record
of a spike at the same step replaces an earlier one.
"""


def record(step: int, kind: str, content: Any) -> dict[str, Value]:
    """The record that says something of this kind of a step."""
    return {"step": step, kind: plain(content)}
