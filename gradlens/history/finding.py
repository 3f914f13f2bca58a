"""What a diagnosis says is wrong with a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradlens.history.coverage import few, layers

Certainty = Literal["fact", "very likely", "consistent with"]
"""How certain a finding is: it was read off the run, it has one likely cause, or it has several."""

Kind: TypeAlias = tuple[Certainty, bool, bool]
"""The certainty of a finding, whether it is an alarm, and whether another finding explains it."""

TRUE: Mapping[Kind, tuple[int, int]] = {
    ("fact", True, False): (33, 37),
    ("fact", True, True): (3, 5),
    ("fact", False, False): (6, 16),
    ("very likely", True, False): (14, 17),
    ("very likely", True, True): (22, 25),
    ("very likely", False, False): (0, 1),
    ("consistent with", True, False): (3, 5),
    ("consistent with", True, True): (15, 15),
    ("consistent with", False, False): (2, 6),
    ("consistent with", False, True): (1, 3),
}
"""How many findings of each kind were true, of how many, in runs that were new to the rules: as
many with one mistake each as without, which ``docs/reliability.py`` counts."""


def likely(true: int, found: int) -> float:
    """The probability of what was true so many times, by Laplace's rule of succession."""
    return (true + 1) / (found + 2)


@dataclass(frozen=True)
class Measured:
    """A number that shows a fault, and the ``limit`` that it is compared with.

    ``is_above`` says that the fault is on the far side of the limit, rather than below it.
    """

    name: str
    value: float
    limit: float
    is_above: bool = True

    @property
    def is_beyond(self) -> bool:
        """Whether it shows the fault."""
        return self.value > self.limit if self.is_above else self.value < self.limit


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
    def probability(self) -> float:
        """How likely it is that it is true, by what was true in other runs of findings like it."""
        kind = self.certainty, self.is_alarm, bool(self.explained_by)
        return likely(*TRUE.get(kind, (0, 0)))

    @property
    def sentence(self) -> str:
        """What was found, where, and what to do, which may be to mend its cause."""
        if self.explained_by:
            return f"{self.headline}. This follows from {self.explained_by}."
        return f"{self.headline}. {self.advice}".strip()
