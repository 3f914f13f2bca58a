"""What a rule is: it finds the signs of one fault in what was recorded of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import Need
from gradlens.diagnosis.numbers import Truths, share
from gradlens.history.finding import Certainty, Finding, Measured


@dataclass(frozen=True)
class Sign:
    """That a run has a fault: the entries of a finding that differ between runs.

    ``title`` and ``advice`` are those of the rule if they are empty.
    """

    step: int
    numbers: tuple[Measured, ...] = ()
    certainty: Certainty = "fact"
    is_alarm: bool = True
    where: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    title: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """A fault, and how it is found.

    ``find`` is called if all ``needs`` are met. ``advice`` says what to do, ``others`` are faults
    that look the same, and ``explains`` are faults that this one may cause. ``sources`` say where
    the limits come from.
    """

    fault: str
    title: str
    find: Callable[[Evidence], Iterable[Sign]]
    advice: str
    needs: tuple[Need, ...] = ()
    others: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def lacks(self, evidence: Evidence) -> tuple[str, ...]:
        """What was not recorded and is needed."""
        return tuple(need.words for need in self.needs if not need.is_met(evidence))

    def findings(self, evidence: Evidence) -> tuple[Finding, ...]:
        """What it finds; nothing if something is lacking."""
        with np.errstate(all="ignore"):  # numbers that aren't finite are compared as they are
            if self.lacks(evidence):
                return ()
            return tuple(
                Finding(
                    self.fault,
                    sign.title or self.title,
                    int(sign.step),
                    sign.certainty,
                    bool(sign.is_alarm),
                    sign.where,
                    sign.samples,
                    sign.numbers,
                    sign.advice or self.advice,
                    self.others,
                )
                for sign in self.find(evidence)
            )


INSTABILITY = ("nonfinite_loss", "nonfinite_gradient", "nonfinite_weights", "clipping_always",
               "saturated_units", "dead_units", "outlier_sample", "corrupt_batch",
               "attention_logits", "entropy_collapse", "lr_too_high")  # fmt: skip
"""What shows where steps are too large for a network."""
NO_PROGRESS = ("vanishing_gradients", "lr_edge", "lr_too_low", "label_noise", "constant_output",
               "labels_random")  # fmt: skip
"""What shows where a network learns little."""


def shown(sign: Sign) -> Iterator[Sign]:
    """The sign, if all of its numbers are beyond their limits."""
    if all(each.is_beyond for each in sign.numbers):
        yield sign


def beyond(*numbers: Measured) -> tuple[Measured, ...]:
    """Those that are beyond their limits."""
    return tuple(each for each in numbers if each.is_beyond)


def mostly(
    evidence: Evidence, holds: Truths, known: Truths, limit: float, words: str
) -> Iterator[Sign]:
    """A sign if something holds at more than a share of the steps ``[K]`` where it is known."""
    number = above(words, share(holds, known), limit)
    return shown(Sign(evidence.step(known & holds), (number,)))


def above(name: str, value: float, limit: float) -> Measured:
    """A number that shows a fault because it is above its limit."""
    return Measured(name, float(value), float(limit))


def below(name: str, value: float, limit: float) -> Measured:
    """A number that shows a fault because it is below its limit."""
    return Measured(name, float(value), float(limit), is_above=False)
