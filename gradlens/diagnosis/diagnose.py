"""What is wrong with a run, ordered by cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import RULES
from gradlens.history.finding import Certainty, Finding
from gradlens.plotting.loading import Run, history_of

CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)


def diagnose(run: Run, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """What is wrong with a run: each finding is followed by those that it explains.

    What is certain comes first. Rules that lack what they need find nothing; see ``unasked``.
    ``rules`` may hold rules of your own, as in ``[*RULES, mine]``. ``OSError`` and ``ValueError``
    are those of ``load_run``.
    """
    return findings(Evidence(history_of(run)), rules)


def unasked(run: Run, rules: Sequence[Rule] = RULES) -> dict[str, tuple[str, ...]]:
    """The faults whose rules lack something, and what that is, in words that follow "needs"."""
    return lacking(Evidence(history_of(run)), rules)


def lacking(evidence: Evidence, rules: Sequence[Rule] = RULES) -> dict[str, tuple[str, ...]]:
    """The faults that can't be looked for, with what that needs."""
    found = {rule.fault: rule.lacks(evidence) for rule in rules}
    return {fault: words for fault, words in found.items() if words}


def findings(evidence: Evidence, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """What the rules find, ordered by cause."""
    return ordered([found for rule in rules for found in rule.findings(evidence)], rules)


def ordered(found: Sequence[Finding], rules: Sequence[Rule]) -> list[Finding]:
    """Findings, which are in the order of their rules, so that each follows its cause."""
    explains = {rule.fault: {*rule.explains} for rule in rules}
    causes = [_cause(place, found, explains) for place in range(len(found))]
    roots = [place for place, cause in enumerate(causes) if cause is None]
    roots.sort(key=lambda place: _rank(found[place]))
    names = ["" if cause is None else found[cause].fault for cause in causes]
    return [replace(found[at], explained_by=names[at]) for at in _trees(roots, causes)]


def _rank(finding: Finding) -> tuple[bool, int]:
    """Alarms come first, and of these what is certain."""
    return not finding.is_alarm, CERTAINTIES.index(finding.certainty)


def _cause(place: int, found: Sequence[Finding], explains: Mapping[str, set[str]]) -> int | None:
    """The place of the first finding that explains another one; ``None`` if there is none.

    A cause can be seen before what it causes, or at the same step by an earlier rule. A notice is
    no cause of an alarm.
    """
    finding = found[place]
    causes = (
        at
        for at, each in enumerate(found)
        if finding.fault in explains[each.fault]
        and (each.step, at) < (finding.step, place)
        and (each.is_alarm or not finding.is_alarm)
    )
    return next(causes, None)


def _trees(places: Iterable[int], causes: Sequence[int | None]) -> Iterator[int]:
    """Places, each followed by the places of what it causes."""
    for place in places:
        yield place
        yield from _trees([at for at, cause in enumerate(causes) if cause == place], causes)
