"""A diagnosis, spikes of the loss, and samples worth a look, as text and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from gradlens.cli.summary_text import shown
from gradlens.cli.text import aligned, as_line, in_short, printable, wrapped
from gradlens.diagnosis.autopsy import autopsy
from gradlens.diagnosis.samples import Ranked, have_losses
from gradlens.history.finding import Finding
from gradlens.history.html import count
from gradlens.history.records import Samples
from gradlens.history.spikes import NEVER, Spike, Suspect
from gradlens.instruments.scales import number_label

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
    steps = count(diagnosis.steps, "step")
    if not alarms:
        return f"nothing wrong was found in {steps}"
    causes = [each for each in alarms if not each.explained_by]
    faults = count(len(causes), "fault")
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


# Spikes of the loss ---------------------------------------------------------------------------

LAYERS = 8
"""So many layers are shown, those with the largest ratios."""
LISTED = 40
"""So many of the latest spikes are listed."""


def spikes_text(spikes: Mapping[int, Spike], name: str) -> str:
    """A list of all spikes, and the largest in full."""
    if not spikes:
        return f"{name}: {NONE}"
    steps = count(len(spikes), "step")
    lines = [f"{name}: the loss has jumped, or wasn't finite, at {steps}", ""]
    if len(spikes) > LISTED:
        lines.append(f"The latest {LISTED}:")
    rows: list[tuple[str, ...]] = [("step", "loss", "before", "back", "most likely")]
    rows += [_row(step, spikes[step]) for step in sorted(spikes)[-LISTED:]]
    numbers = aligned([row[:-1] for row in rows])
    lines += [f"{each}  {row[-1]}" for each, row in zip(numbers, rows, strict=True)]
    most = largest(spikes)
    return _joined([*lines, "", *_whole(most, spikes[most])])


def spike_text(spikes: Mapping[int, Spike], step: int, name: str) -> str:
    return _joined([f"{name}:", *_whole(step, spikes[step])])


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(map(printable, lines))


def spikes_json(spikes: Mapping[int, Spike], name: str) -> str:
    """All spikes with what they most likely come from, as one line of strict JSON."""
    found = [
        {"step": step, **asdict(spike), "conclusion": autopsy(spike)}
        for step, spike in sorted(spikes.items())
    ]
    return as_line({"run": name, "spikes": found})


def largest(spikes: Mapping[int, Spike]) -> int:
    """The step of the first spike that isn't finite, or otherwise of the highest one."""
    broken = [step for step in sorted(spikes) if not spikes[step].is_finite]
    return broken[0] if broken else max(spikes, key=lambda step: spikes[step].jump)


def _row(step: int, spike: Spike) -> tuple[str, ...]:
    found = autopsy(spike)
    about = ", ".join(map(str, found.samples[:3])) or found.where
    words = f"{CAUSES[found.cause]}{f' ({about})' if about else ''}, {found.certainty}"
    back = "?" if spike.back is None else "not" if spike.back == NEVER else f"after {spike.back}"
    return str(step), number_label(spike.loss), _number(spike.median), back, words


def _whole(step: int, spike: Spike) -> Iterator[str]:
    found = autopsy(spike)
    yield f"Step {step}{f', micro-batch {spike.part}' if spike.part else ''}: {_height(spike)}"
    yield f"{found.certainty.capitalize()}: {found.text}"
    if spike.suspects:
        yield ""
        yield from _table(spike)
        yield from _positions(spike.suspects[0])
    ratios = sorted(spike.ratios.items(), key=lambda each: -each[1])[:LAYERS]
    if ratios:
        words = ", ".join(f"{name} {_number(ratio)}" for name, ratio in ratios)
        yield ""
        yield f"Squared gradient norms over those of the last tracked steps: {words}"
    elif spike.layers:
        yield ""
        yield "Squared gradient norms can't be compared: no tracked step before had some."
    elif spike.is_finite and spike.without_norms:
        yield ""
        yield f"Gradient norms are unknown: {spike.without_norms}."
    if not math.isnan(spike.rate):
        has_changed = not math.isnan(spike.rate_before) and spike.rate != spike.rate_before
        before = f", and {_number(spike.rate_before)} before" if has_changed else ""
        yield f"Learning rate: {_number(spike.rate)}{before}"
    if not math.isnan(spike.sharpness):
        yield (
            f"Largest eigenvalue of the Hessian at step {spike.sharpness_step}: "
            f"{_number(spike.sharpness)}; stable below {_number(spike.threshold)}"
        )


def _height(spike: Spike) -> str:
    loss = f"the loss was {number_label(spike.loss)}"
    if not math.isnan(spike.median):
        loss += f", and the median before it {_number(spike.median)}"
    if spike.is_finite and spike.deviation:
        loss += f" ({_number(spike.jump / spike.deviation)} median absolute deviations lower)"
    if spike.back is None:
        return f"{loss}. Whether it was back isn't known."
    if spike.back == NEVER:
        return f"{loss}. It was not back."
    if spike.back == 0:
        return f"{loss}. It was back in the next micro-batch."
    return f"{loss}. It was back after {count(spike.back, 'step')}."


def _table(spike: Spike) -> Iterator[str]:
    yield from aligned(
        [
            ("sample", "index", "share of squared norms", "loss", "share of loss",
             "input over median", "target over median"),
            *(
                (
                    "" if each.id is None else in_short(str(each.id)),
                    str(each.index),
                    _percent(each.share),
                    _number(each.loss),
                    _percent(each.loss_share),
                    _number(each.input_ratio),
                    _number(each.target_ratio),
                )
                for each in spike.suspects
            ),
        ]
    )  # fmt: skip


def _positions(worst: Suspect) -> Iterator[str]:
    """The labels of the first sample with the largest losses, such as words."""
    if worst.positions:
        words = (f"{p.index} (label {p.target}) {_percent(p.share)}" for p in worst.positions)
        name = in_short(str(worst.name))
        yield ""
        yield f"Largest shares of the loss of sample {name}, by position: {', '.join(words)}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else number_label(value)


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.1%}"


CAUSES: Mapping[str, str] = {
    "input": "NaN in the input",
    "target": "NaN in the target",
    "weights": "NaN in the weights",
    "forward": "NaN from the forward pass",
    "backward": "NaN from the backward pass",
    "sample": "a sample",
    "batch": "the batch",
    "rate": "the learning rate",
    "unknown": "unknown",
}
NONE = (
    "the loss has not jumped at any step. (It is read where loss=... is passed to the context, on "
    "the CPU, or with Cockpit(..., autopsy=True).)"
)


# Samples ------------------------------------------------------------------------------------

HEADINGS = ("sample", "score", "visits", "mean loss", "last loss", "norm", "label", "network says")


def samples_text(samples: Samples, ranked: Sequence[Ranked], name: str) -> str:
    """A table of the samples that were ranked highest."""
    lines = aligned([HEADINGS, *map(_ranked_row, ranked)])
    left_out = f", besides {samples.left_out} without room" if samples.left_out else ""
    head = f"{name}: {len(samples)} samples until step {samples.until}{left_out}"
    return "\n".join([head, "", *lines, "", _legend(samples, ranked)])


def samples_json(samples: Samples, ranked: Sequence[Ranked], name: str) -> str:
    """The same as one line of strict JSON."""
    counts = {"step": samples.until, "samples": len(samples), "left_out": samples.left_out}
    return as_line({"run": name, **counts, "ranked": [*ranked]})


def _ranked_row(ranked: Ranked) -> tuple[str, ...]:
    numbers = (ranked.mean_loss, ranked.last_loss, ranked.norm)
    said = ranked.predicted if ranked.is_contradicted else None
    return (
        in_short(str(ranked.id)),
        _finite(ranked.score),
        str(ranked.visits),
        *map(_finite, numbers),
        "" if ranked.label is None else str(ranked.label),
        "" if said is None else str(said),
    )


def _finite(value: float) -> str:
    return number_label(value) if math.isfinite(value) else ""


def _legend(samples: Samples, ranked: Sequence[Ranked]) -> str:
    """What the columns are."""
    has_norms = any(not math.isnan(each.norm) for each in ranked)
    score = OF_LOSSES if have_losses(samples) else OF_NORMS
    return textwrap.fill(" ".join([score, *([NORM] if has_norms else []), LOOK]), WIDTH)


WIDTH = 90
OF_LOSSES = (
    "The score is how far the mean of a sample's losses, above the medians of their batches, is "
    "from that of the median sample, in robust standard deviations."
)
OF_NORMS = (
    "No losses of single samples are known: the score is how far a sample's norm is from that of "
    "the median sample, in robust standard deviations."
)
NORM = "The norm is that of its gradient over the root mean square of its batch."
LOOK = "Mislabelled, ambiguous and hard samples all have high scores: look at them."
