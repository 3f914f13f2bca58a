"""What is right about the findings of a run whose fault is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.diagnosis.faults.catalogue import LIKES
from benchmarks.diagnosis.faults.fault import Injected

CLOSE = 1
"""A step is right if it is at most so many steps away."""
PRECISE = 0.5
"""Samples are right if at least this share of those that are named have the fault."""


class Finding(Protocol):
    """What is scored of a finding of ``gradlens.diagnosis``."""

    @property
    def fault(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def is_alarm(self) -> bool: ...
    @property
    def where(self) -> Sequence[str]: ...
    @property
    def samples(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Score:
    """What is right; ``None`` where the fault has no such thing, or was not named."""

    is_named: bool
    is_first: bool
    is_alike: bool
    is_alarmed: bool
    is_layer_right: bool | None = None
    is_step_right: bool | None = None
    is_sample_right: bool | None = None


def score(findings: Sequence[Finding], fault: str, truth: Injected, is_harmful: bool) -> Score:
    """Compare findings, which are ordered by cause, with the truth.

    Notices count only for faults that are to be noticed, which may depend on whether they do harm.
    """
    alarms = [finding for finding in findings if finding.is_alarm]
    may_notice = truth.notice == "always" or (truth.notice == "harmless" and not is_harmful)
    counted = findings if may_notice else alarms
    named = [finding for finding in counted if finding.fault == fault]
    alike = {fault, *LIKES.get(fault, ())}
    known = Score(
        is_named=bool(named),
        is_first=bool(named) and counted[0].fault == fault,
        is_alike=any(finding.fault in alike for finding in counted),
        is_alarmed=bool(alarms),
    )
    if not named:
        return known
    is_close = None if truth.step is None else abs(named[0].step - truth.step) <= CLOSE
    return replace(
        known,
        is_layer_right=_is_there(named[0].where, truth.layers) if truth.layers else None,
        is_step_right=is_close,
        is_sample_right=_are_among(named[0].samples, truth.samples) if truth.samples else None,
    )


def _is_there(where: Sequence[str], layers: frozenset[str]) -> bool:
    """Whether places are named, all of which are layers that have the fault or parts of these."""
    return bool(where) and all(
        any(place == layer or place.startswith(f"{layer}.") for layer in layers)
        or any(layer.startswith(f"{place}.") for layer in layers)
        for place in where
    )


def _are_among(samples: Sequence[str], truth: frozenset[int]) -> bool:
    """Whether enough of the samples that are named, by their ids, have the fault."""
    right = sum(sample in {str(each) for each in truth} for sample in samples)
    return bool(samples) and right >= PRECISE * len(samples)
