"""A diagnosis as lines of text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gradlens.cli.summary_text import shown
from gradlens.cli.text import as_line, wrapped
from gradlens.history.finding import Finding

INDENT = "    "
NAMES = 8
"""So many layers or samples are named, unless all are asked for."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run of so many steps.

    ``asked`` are the faults that were looked for, and ``unasked`` those that could not be, with
    what they need.
    """

    run: str
    steps: int
    findings: Sequence[Finding]
    asked: Sequence[str]
    unasked: Mapping[str, Sequence[str]]


def as_json(diagnosis: Diagnosis) -> str:
    """One line of strict JSON."""
    found = {
        **asdict(diagnosis),
        "findings": [
            {**asdict(each), "probability": each.probability} for each in diagnosis.findings
        ],
    }
    return as_line(found)


def as_text(diagnosis: Diagnosis, width: int = 80, everything: bool = False) -> str:
    """Lines of at most ``width`` characters, if these are 20 or more.

    ``everything`` says all names, and what each rule that could not be asked needs.
    """
    page = _Page(width, everything)
    alarms = [each for each in diagnosis.findings if each.is_alarm]
    notices = [each for each in diagnosis.findings if not each.is_alarm]
    sections = [page.lines(f"{diagnosis.run}: {_heading(diagnosis, alarms, notices)}")]
    sections += [page.finding(each, diagnosis.findings) for each in alarms]
    if notices:
        sections.append(page.lines("Notices, of what may be intended or harmless:"))
    sections += [page.finding(each, diagnosis.findings) for each in notices]
    sections.append(page.rules(diagnosis))
    return "\n\n".join("\n".join(section) for section in sections if section)


def _heading(diagnosis: Diagnosis, alarms: Sequence[Finding], notices: Sequence[Finding]) -> str:
    steps = "1 step" if diagnosis.steps == 1 else f"{diagnosis.steps} steps"
    if not alarms:
        return f"nothing wrong was found in {steps}"
    causes = [each for each in alarms if not each.explained_by]
    faults = "1 fault" if len(causes) == 1 else f"{len(causes)} faults"
    more = len(alarms) - len(causes)
    follows = "follows" if more == 1 else "follow"
    them = "it" if len(causes) == 1 else "them"
    return f"{faults} in {steps}{f', and {more} that {follows} from {them}' if more else ''}"


@dataclass(frozen=True)
class _Page:
    width: int
    everything: bool

    def lines(self, text: str, indent: str = "", hanging: str = "") -> list[str]:
        return wrapped(text, self.width, indent, hanging)

    def finding(self, finding: Finding, found: Sequence[Finding]) -> list[str]:
        depth = _depth(finding, found)
        indent = INDENT * min(depth, self.width // (4 * len(INDENT)))
        inner = f"{indent}  "
        follows = f", follows from {finding.explained_by}" if finding.explained_by else ""
        first = f"{finding.title} ({finding.fault}: {finding.certainty}{follows})"
        parts = [f"first seen at step {finding.step}"]
        if finding.where:
            parts.append(f"where: {self._names(finding.where)}")
        if finding.samples:
            noun = "sample" if len(finding.samples) == 1 else "samples"
            parts.append(f"{noun} {self._names(finding.samples)}")
        lines = self.lines(first, indent, "  ")
        for part in parts:
            lines += self.lines(part, inner, "  ")
        for one in finding.evidence:
            side = "more than" if one.is_above else "less than"
            text = f"{one.name}: {shown(one.value)} ({side} {shown(one.limit)})"
            lines += self.lines(text, inner, "  ")
        if not finding.explained_by or self.everything:
            lines += self.lines(f"What to do: {finding.advice}", inner, "  ")
            if finding.others and finding.certainty != "fact":
                others = " or ".join(finding.others)
                lines += self.lines(f"What else it may be: {others}", inner, "  ")
        return lines

    def _names(self, names: Sequence[str]) -> str:
        if self.everything or len(names) <= NAMES:
            return ", ".join(names)
        return f"{', '.join(names[:NAMES])} and {len(names) - NAMES} more"

    def rules(self, diagnosis: Diagnosis) -> list[str]:
        asked, unasked = diagnosis.asked, diagnosis.unasked
        lines = []
        if self.everything or not diagnosis.findings:
            lines += self.lines(f"Looked for: {', '.join(asked) or 'nothing'}", "", "  ")
        if not unasked:
            return lines
        if not self.everything:
            return lines + self.lines(
                f"Could not be looked for: {', '.join(unasked)} (--all says what is missing)",
                "",
                "  ",
            )
        lines += self.lines("Could not be looked for:")
        for needs in dict.fromkeys(tuple(each) for each in unasked.values()):
            faults = [fault for fault, each in unasked.items() if tuple(each) == needs]
            verb = "needs" if len(faults) == 1 else "need"
            text = f"{', '.join(faults)} {verb} {'; and '.join(needs)}"
            lines += self.lines(text, "  ", "  ")
        return lines


def _depth(finding: Finding, found: Sequence[Finding]) -> int:
    """How many causes a finding has, one behind the other."""
    depth, fault = 0, finding.explained_by
    while fault and depth < len(found):
        depth += 1
        fault = next((each.explained_by for each in found if each.fault == fault), "")
    return depth
