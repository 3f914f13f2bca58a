"""Records what is newly found wrong with a run while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradlens.diagnosis.live import LiveDiagnosis
from gradlens.diagnosis.rule import Rule
from gradlens.history.finding import Finding
from gradlens.observers.observer import Observer, Outcome, Records, StepContext


class Diagnosing(Observer):
    """Diagnoses a run after each step, and at its end."""

    work = "diagnosing the run"

    def __init__(self, records: Records, rules: Sequence[Rule]) -> None:
        self._records = records
        self._diagnosis = LiveDiagnosis(records.history, rules)

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Record what the step has added."""
        if not context.accumulating and outcome.error is None:
            self._record(self._diagnosis.after_step())

    def close(self) -> None:
        """Record what the end of the run has added."""
        self._record(self._diagnosis.now())

    def _record(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._records.take_in(finding.step, "finding", finding)
