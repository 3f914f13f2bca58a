"""What is wrong with a run, and which of it a figure shows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from gradlens.diagnosis.diagnose import diagnose
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.records import LeftOutWarning

MOST = 5
"""So many findings are shown in a figure and in a summary."""


def findings_of(history: History) -> tuple[Finding, ...]:
    """What is wrong with a run, ordered by cause.

    If the run can't be diagnosed, nothing, with a ``LeftOutWarning``: the values of a run may be
    anything.
    """
    try:
        # Of numbers that are too large to be compared, nothing follows.
        with np.errstate(all="ignore"):
            return tuple(diagnose(history))
    except Exception as error:
        text = f"the run can't be diagnosed ({type(error).__name__}: {error})"
        warnings.warn(text, LeftOutWarning, stacklevel=2)
        return ()


def main_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The first of those that no other one explains; alarms come before notices."""
    return tuple(finding for finding in findings if not finding.explained_by)[:MOST]


def others(findings: Sequence[Finding], run: str = "RUN") -> str:
    """How many findings there are besides the main ones, and how to see them."""
    main = main_findings(findings)
    rest = [finding for finding in findings if finding not in main]
    if not rest:
        return ""
    follow = "that follows" if len(rest) == 1 else "that follow"
    word = follow if all(finding.explained_by for finding in rest) else "more"
    return f"and {len(rest)} {word}: gradlens diagnose {run}"
