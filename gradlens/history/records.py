"""The records of a run's file, and what they say besides values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradlens.history.coverage import Coverage, few, percent
from gradlens.history.finding import Finding
from gradlens.history.setup import Setup
from gradlens.history.spikes import SampleId, Spike
from gradlens.history.view import View
from gradlens.messages import GradlensWarning

FORMAT = 1

OF_SAMPLES = ("row_largest", "bad_row", "loss_largest")
"""Facts of a step that are places of samples in the batch. Beside each, there may be one with the
user's ids, such as ``bad_row_id``."""

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
class Spending:
    """The share of the training time that tracking has taken.

    ``share`` is the budget, and ``taken`` is what tracking has taken. ``step_seconds`` is the time
    of a step without tracking, and ``look_seconds`` what tracking takes at a step with it. All
    three are NaN before they were measured. ``turns`` says at how many steps each quantity was
    tracked. Without a budget, ``share`` is NaN, ``turns`` are unknown, and the others are those of
    the first fifty steps. Where all of these were tracked, the time of a plain step is unknown, and
    tracking has taken from ``taken`` to ``at_most``.
    """

    share: float
    taken: float = math.nan
    step_seconds: float = math.nan
    look_seconds: float = math.nan
    turns: Mapping[str, int] = field(default_factory=dict)
    at_most: float | None = None

    def lines(self) -> Iterator[str]:
        """The share in words, then the cost of a look, and the turns of all quantities."""
        if not math.isnan(self.share):
            if math.isnan(self.taken):
                taken = "an unknown part"
            elif self.taken > 0:
                taken = percent(round(self.taken, 4))
            else:  # turns were no slower than other steps, whose times vary
                taken = "no measurable part"
            words = f"tracking took {taken} of the time, of a budget of {percent(self.share)}"
            later = ": the first turn is paid for by the steps after it"
            yield words + later * (self.taken > self.share)
        elif self.at_most is None:
            yield f"tracking took {percent(round(self.taken, 2))} of the time of the first steps"
        else:
            least, most = (percent(round(each, 2)) for each in (self.taken, self.at_most))
            yield (
                f"tracking took {least} to {most} of the time: every step was tracked, so that no "
                "other one says how long the backward pass takes without it"
            )
        if not math.isnan(self.look_seconds):
            yield f"tracking a step takes {plain_steps(self.look_seconds / self.step_seconds)}"
        groups: dict[int, list[str]] = {}
        for name, count in self.turns.items():
            groups.setdefault(count, []).append(name)
        for count, names in groups.items():
            yield f"{few(names)}: {count or 'no'} step{'' if count == 1 else 's'}"


def plain_steps(times: float) -> str:
    """So many times the time of a plain step, in words."""
    if times < 0.01:
        return "less than 0.01 plain steps"
    return f"{times:,.0f} plain steps" if times >= 10 else f"{times:.2g} plain steps"


MOST_SAMPLES = 100_000
"""No more ids than this are kept."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Losses and gradient norms of single samples ``until`` a step, each of shape ``[K]``.

    ``visits`` counts the losses of a sample, whose mean is ``mean_loss``; ``last_loss`` is the
    latest. ``excess`` is the mean of the losses minus the medians of their batches, so that it
    matters little when a sample came. All three are NaN without losses. ``norm`` is the mean, over
    the tracked steps that it was in, of its ‖gₙ‖ over the root mean square of those of its batch;
    NaN if it was in none. ``label`` is its class, and ``predicted`` the network's answer when it
    came last; -1 where there are no classes.
    ``left_out`` counts further ids, of which nothing is known.
    """

    until: int
    ids: tuple[SampleId, ...]
    visits: np.ndarray
    mean_loss: np.ndarray
    last_loss: np.ndarray
    excess: np.ndarray
    norm: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        """How many there are, in one line."""
        return f"Samples({len(self)}, until step {self.until})"

    def __post_init__(self) -> None:
        if len({*self.ids}) < len(self.ids):
            raise ValueError("the samples have an id twice")
        for name, kind in ARRAYS.items():
            array = getattr(self, name)
            if array.shape != (len(self.ids),) or array.dtype.kind != np.dtype(kind).kind:
                raise ValueError(f"the samples' {name} is no array of {len(self.ids)} {kind}")


ARRAYS = {
    "visits": "int32",
    **dict.fromkeys(("mean_loss", "last_loss", "excess", "norm"), "float32"),
    **dict.fromkeys(("label", "predicted"), "int32"),
}
"""Names and types of the arrays."""


@dataclass(frozen=True)
class Header:
    """What a file's series come from, and the shapes of the network's parameters."""

    sources: Mapping[str, Source]
    parameters: Mapping[str, tuple[int, ...]]


KINDS: Mapping[str, Any] = {
    "note": str,
    "coverage": Coverage,
    "spending": Spending,
    "rewind": Mapping[str, int],
    "spike": Spike,
    "samples": Samples,
    "setup": Setup,
    "finding": Finding,
}
"""The types of what records say of a step besides values, by their keys.

``"rewind"`` says that training continues from a checkpoint (see ``History.rewind``). A later record
of a spike at the same step replaces an earlier one.
"""
