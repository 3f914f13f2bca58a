"""Finds what is wrong with a run while it goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from gradlens.diagnosis.diagnose import ordered
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.rule import Rule
from gradlens.history.finding import Certainty, Finding
from gradlens.messages import GradlensWarning
from gradlens.observers.observer import Observer, Outcome, Records, StepContext

GROWTH, FEWEST = 1.1, 8
"""A run is diagnosed again when it has 10 % more steps, and at least 8 more: the rules' work per
step stays the same however long it is."""
WAITS: Mapping[Certainty, float] = {"fact": 1.0, "very likely": GROWTH, "consistent with": 1.5}
"""Times as many steps as a run had when something was first found, and is found still, when it is
told: what a run grows out of, such as a late start, isn't."""


class LiveDiagnosis(Observer):
    """Records what is newly found wrong with a run that grows, each layer or parameter once.

    The findings that its history has already count as known.
    """

    work = "diagnosing the run"

    def __init__(self, records: Records, rules: Sequence[Rule]) -> None:
        self._records = records
        self._rules = [*rules]
        self._steps = 0
        self._due = FEWEST
        self._known = {part for each in records.history.findings for part in _parts(each)}
        self._since: dict[str, int] = {}
        """The steps of the run when a fault that is found still was first found."""
        self._spikes = len(records.history.spikes)

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Record what the step has added; a number that isn't finite at once."""
        if context.accumulating or outcome.error is not None:
            return
        self._steps += 1
        spikes = [*self._records.history.spikes.values()][self._spikes :]
        self._spikes += len(spikes)
        if self._steps >= self._due or not all(each.is_finite for each in spikes):
            self._due = max(self._steps + FEWEST, int(GROWTH * self._steps))
            self._record(each for each in self._new() if self._is_settled(each))

    def close(self) -> None:
        """Record what the end of the run has added."""
        self._record(self._new())

    def _record(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._known |= _parts(finding)
            self._records.take_in(finding.step, "finding", finding)

    def _is_settled(self, finding: Finding) -> bool:
        return self._steps >= WAITS[finding.certainty] * self._since[finding.fault]

    def _new(self) -> list[Finding]:
        evidence = Evidence(self._records.history)
        found = [each for rule in [*self._rules] for each in self._findings(rule, evidence)]
        faults = {each.fault for each in found}
        self._since = {fault: self._since.get(fault, self._steps) for fault in faults}
        return [each for each in ordered(found, self._rules) if not self._known >= _parts(each)]

    def _findings(self, rule: Rule, evidence: Evidence) -> tuple[Finding, ...]:
        """What a rule finds; one that fails is left out from then on, and training goes on."""
        try:
            return rule.findings(evidence)
        except Exception as error:
            self._rules.remove(rule)
            text = f"the rule {rule.fault} fails ({type(error).__name__}: {error}) and is left out"
            warnings.warn(text, GradlensWarning, stacklevel=2)
            return ()


def _parts(finding: Finding) -> set[tuple[str, str]]:
    """The fault with each of its layers or parameters."""
    return {(finding.fault, name) for name in finding.where or ("",)}
