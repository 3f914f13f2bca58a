"""What a diagnosis says is wrong with a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gradlens.history.coverage import few, layers
from gradlens.history.schema import Fields, Is, ListOf, OneOf, Whole

Certainty = Literal["fact", "very likely", "consistent with"]
"""How certain a finding is: it was read off the run, it has one likely cause, or it has several."""


@dataclass(frozen=True)
class Measured:
    """A number that shows a fault, and the ``limit`` that it is compared with.

    ``is_above`` says that the fault is on the far side of the limit, rather than below it.
    """

    name: str
    value: float
    limit: float
    is_above: bool = True


@dataclass(frozen=True)
class Finding:
    """A fault of a run.

    ``where`` are the layers or parameters, and ``samples`` are the samples' indices in their batch,
    or the user's names of them. ``step`` is the first one at which the fault can be seen.
    ``is_alarm`` is false for what may be intended or harmless. ``others`` are faults that look the
    same. ``explained_by`` is the fault that has caused this one; it is empty if there is none.
    """

    fault: str
    title: str
    step: int
    certainty: Certainty
    is_alarm: bool = True
    where: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    evidence: tuple[Measured, ...] = ()
    advice: str = ""
    others: tuple[str, ...] = ()
    explained_by: str = ""

    @property
    def headline(self) -> str:
        """What was found, where, and how certain it is."""
        noun = "sample" if len(self.samples) == 1 else "samples"
        samples = f"{noun} {few(self.samples)}" if self.samples else ""
        are_numbers = bool(self.where) and all(name.isdigit() for name in self.where)
        places = layers(self.where) if are_numbers else few(self.where)
        words = filter(None, (places, samples, self.certainty))
        return f"{self.title} ({'; '.join(words)})"

    @property
    def sentence(self) -> str:
        """What was found, where, and what to do."""
        return f"{self.headline}. {self.advice}".strip()

    def plain(self) -> dict[str, Any]:
        """For a file."""
        found = asdict(self)
        for name in ("where", "samples", "evidence", "others"):
            found[name] = [*found[name]]
        return found

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Finding:
        """The inverse of ``plain``; ``ValueError`` if it has another form."""
        FINDING.check(found, "the finding")
        evidence = tuple(
            Measured(each["name"], each["value"], each["limit"], each["is_above"])
            for each in found["evidence"]
        )
        lists = {name: tuple(found[name]) for name in ("where", "samples", "others")}
        known: dict[str, Any] = {name: found[name] for name in FINDING.fields}
        return cls(**known | lists | {"evidence": evidence})


MOST_NAMES = 100_000
"""A finding names at most so many layers or samples."""

FINDING = Fields(
    {
        "fault": Is(str),
        "title": Is(str),
        "step": Whole(-(2**53), 2**53),
        "certainty": OneOf(get_args(Certainty)),
        "is_alarm": Is(bool),
        "where": ListOf(Is(str), MOST_NAMES),
        "samples": ListOf(Is(str), MOST_NAMES),
        "evidence": ListOf(
            Fields({"name": Is(str), "value": Is(float), "limit": Is(float), "is_above": Is(bool)})
        ),
        "advice": Is(str),
        "others": ListOf(Is(str)),
        "explained_by": Is(str),
    }
)
