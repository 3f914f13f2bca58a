"""Diagnosis while a run is going on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from gradlens.diagnosis.diagnose import ordered
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import RULES
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.messages import GradlensWarning

GROWTH, FEWEST = 1.1, 8
"""A run is diagnosed again when it has 10 % more steps, and at least 8 more: the rules' work per
step stays the same however long it is."""


class LiveDiagnosis:
    """Finds what is wrong with a run that grows, each fault of a layer or parameter once.

    Of ``history``, the findings that it has count as known.
    """

    def __init__(self, history: History, rules: Sequence[Rule] = RULES) -> None:
        self._history = history
        self._rules = [*rules]
        self._steps = 0
        self._due = FEWEST
        self._known = {part for each in history.facts.findings for part in _parts(each)}

    def after_step(self) -> list[Finding]:
        """Called after each step; what is new, mostly nothing."""
        self._steps += 1
        if self._steps < self._due:
            return []
        self._due = max(self._steps + FEWEST, int(GROWTH * self._steps))
        return self.now()

    def now(self) -> list[Finding]:
        """What is new, as at the end of a run."""
        evidence = Evidence(self._history)
        found = [each for rule in [*self._rules] for each in self._findings(rule, evidence)]
        new = [each for each in ordered(found, self._rules) if not self._known >= _parts(each)]
        for finding in new:
            self._known |= _parts(finding)
        return new

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
