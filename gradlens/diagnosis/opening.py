"""What the first steps of a run tell, in four lines."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from gradlens.diagnosis.diagnose import diagnose
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, OPTIMIZER, VALIDATION
from gradlens.diagnosis.rules import RULES
from gradlens.history.coverage import Coverage, CoverageTable, few, layers, percent
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.html import count

DEAR = 0.1
"""Share of the time from which on a cheaper way to track is recommended."""
CHEAP = 0.05
"""Share of the time that tracking takes in that way: less than runs differ from day to day."""

MOST = 4
"""So many things are said of what is covered."""

SHOWN_BY: Mapping[str, str] = {
    **dict.fromkeys(
        ("lr_too_high", "lr_edge", "update_large"), "RelativeUpdate(10), HessMaxEV(20)"
    ),
    **dict.fromkeys(("lr_too_low", "lr_decayed"), "RelativeUpdate(10), Alpha(10)"),
    **dict.fromkeys(("batch_too_small", "batch_of_one"), "GradNoiseScale(10)"),
    "dead_units": "DeadNeurons(10)",
    "saturated_units": "OutputActivation(10)",
    **dict.fromkeys(
        ("vanishing_gradients", "exploding_gradients", "symmetric_init"),
        "GradNorm(10), OutputNorm(10)",
    ),
    "clipping_always": "ClippedGradNorm()",
    **dict.fromkeys(("adam_epsilon", "second_moment_old"), "OptimizerState(10)"),
    **dict.fromkeys(
        ("attention_logits", "entropy_collapse"), "AttentionLogits(10), AttentionEntropy(10)"
    ),
    "activation_outlier": "ActivationOutliers(10)",
}
"""The quantities that show more of a fault, as they are written in a program."""

SINGLE = ("outlier_sample", "corrupt_batch", "label_noise", "labels_random", "samples_duplicated")
"""Faults of single samples, which are known by name where these have ids."""


def opening(history: History, findings: Sequence[Finding] | None = None) -> tuple[str, ...]:
    """Four lines: what tracking costs, what it covers, what was found, and what to add.

    ``findings`` are those of ``diagnose``, which is called without them. Of a run without facts,
    there is nothing to say.
    """
    if not history.facts["steps"]:
        return ()
    found = diagnose(history) if findings is None else findings
    evidence = Evidence(history)
    return (
        f"cost: {_cost(history)}",
        f"covered: {_covered(history)}",
        f"found: {_found(evidence, found)}",
        f"next: {next(_advice(evidence, found))}",
    )


def _cost(history: History) -> str:
    unknown = "what tracking takes isn't known yet"
    return unknown if history.spending is None else next(history.spending.lines())


def _covered(history: History) -> str:
    coverage: Coverage | None = history.latest("coverage")
    if coverage is None:
        return "the facts of each step, and no per-sample gradients, since nothing needs them"
    parts = [CoverageTable(coverage, history.parameters).short()[0]]
    known = sorted(each.samples for each in history.coverages.values() if each.samples is not None)
    if known:
        parts.append(f"N = {known[0]}{f' to {known[-1]}' if known[-1] > known[0] else ''}")
    if coverage.coupled:
        parts.append(f"samples are coupled in {layers(coverage.coupled)}")
    parts += [f"none of {few(names)}: {why}" for why, names in coverage.by_reason().items()]
    return "; ".join(parts[:MOST]) + ("; and others" if len(parts) > MOST else "")


def _found(evidence: Evidence, findings: Sequence[Finding]) -> str:
    main = [each for each in findings if not each.explained_by]
    if not main:
        asked = sum(not rule.lacks(evidence) for rule in RULES)
        steps = count(evidence.seen, "step")
        return f"nothing wrong in {steps}, of {asked} faults that were looked for"
    first = main[0]
    more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    notice = "" if first.is_alarm else "as a notice, "
    return f"{notice}step {first.step}: {first.headline}{more} (gradlens.diagnose says what to do)"


def _advice(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[str]:
    """What to do first, then what is less urgent; never nothing."""
    history = evidence.history
    for need in (LOSS, OPTIMIZER):
        if not need.is_met(evidence):
            faults = sum(need.words in rule.lacks(evidence) for rule in RULES)
            yield f"pass {need.words.replace(', which is passed', '')}; {faults} faults need it"
    tracked = {source.kind for source in history.sources.values()}
    yield from _more_of(history, tracked, [each for each in findings if each.is_alarm])
    yield from _cheaper(history)
    yield from _more_of(history, tracked, findings)
    if not any(tracked):
        yield 'track "economy": step lengths, and how noisy the gradients are'
    if not VALIDATION.is_met(evidence):
        yield "log the validation loss by cockpit.log(step, valid_loss=...): it shows overfitting"
    yield "nothing is missing; gradlens.CockpitPlotter().plot(cockpit) draws what there is"


def _more_of(
    history: History, tracked: Collection[str], findings: Sequence[Finding]
) -> Iterator[str]:
    """What shows more of what was found."""
    for finding in findings:
        if finding.fault in SINGLE and history.samples is None:
            yield 'pass info={"ids": ids} to the context, and gradlens samples names the samples'
        shown = SHOWN_BY.get(finding.fault, "")
        lacking = [each for each in shown.split(", ") if each and each.split("(")[0] not in tracked]
        if lacking:
            yield f"track {' and '.join(lacking)} to see more of {finding.fault}"


def _cheaper(history: History) -> Iterator[str]:
    """A way to track for a smaller share of the time, where it is large and no budget is set."""
    spending = history.spending
    if spending is None or not math.isnan(spending.share):
        return
    if (spending.at_most or spending.taken) > DEAR:
        number = ""
        if spending.step_seconds > 0 and math.isfinite(spending.look_seconds):
            every = spending.look_seconds / spending.step_seconds * (1 - CHEAP) / CHEAP
            number = f", or track every {max(2, math.ceil(every))} steps"
        yield f"for {percent(CHEAP)} of the time, pass budget={CHEAP} to the cockpit{number}"
