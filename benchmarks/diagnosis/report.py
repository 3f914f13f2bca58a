"""The tables of an evaluation."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean, median

from scipy.stats import binomtest

from benchmarks.diagnosis.faults.catalogue import NAMES, SYMPTOMS
from benchmarks.diagnosis.measure import Row
from benchmarks.diagnosis.scoring import Score

LEVELS = ("weak", "middle", "strong")
COLUMNS = {
    "named": "is_named",
    "first": "is_first",
    "alike": "is_alike",
    "any alarm": "is_alarmed",
    "layer": "is_layer_right",
    "step": "is_step_right",
    "sample": "is_sample_right",
}


def write(rows: Iterable[Row], path: Path) -> None:
    """One line of a CSV file for each run."""
    scored = [field.name for field in fields(Score)]
    plain = [field.name for field in fields(Row) if field.name != "score"]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*plain, *scored])
        for row in rows:
            known = asdict(row)
            known |= {name: " ".join(known[name]) for name in ("alarms", "notices")}
            values = asdict(row.score) if row.score else dict.fromkeys(scored)
            table.writerow([*(known[name] for name in plain), *values.values()])


def rate(hits: Sequence[bool]) -> str:
    """Hits of how many, as a rate with Wilson's interval of 95 % (1927, J. Am. Stat. Assoc. 22)."""
    if not hits:
        return "none"
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    return f"{sum(hits)} of {len(hits)}: {fmean(hits):.2f} ({low:.2f} to {high:.2f})"


def answers(rows: Iterable[Row], attribute: str) -> list[bool]:
    """What was right where there is an answer."""
    found = (getattr(row.score, attribute) for row in rows if row.score)
    return [each for each in found if each is not None]


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of text."""
    counted = [row for row in rows if not row.left_out]
    faults = [row for row in counted if not row.is_control]
    yield from by_fault(faults)
    yield ""
    yield from totals(faults)
    yield ""
    yield from controls([row for row in rows if row.is_control])
    left_out = Counter(
        f"{row.fault} ({LEVELS[row.level]}): {row.left_out}"
        for row in rows
        if row.left_out and not row.is_control
    )
    if left_out:
        yield f"\n{left_out.total()} faulty runs are left out:"
        yield from (f"  {count} {reason}" for reason, count in sorted(left_out.items()))


def by_fault(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each fault: how often it is named at each strength, and what is right about it."""
    yield f"{'fault':21}" + "".join(f"{name:>9}" for name in (*LEVELS, *COLUMNS)) + "  instead"
    for name in NAMES:
        of_fault = [row for row in rows if row.fault == name]
        if not of_fault:
            continue
        cells = [
            _share(answers((row for row in of_fault if row.level == level), "is_named"))
            for level in range(len(LEVELS))
        ]
        cells += [_share(answers(of_fault, attribute)) for attribute in COLUMNS.values()]
        missed = [row for row in of_fault if row.score and not row.score.is_named]
        instead = Counter((row.alarms or ("nothing",))[0] for row in missed)
        words = ", ".join(f"{count} {each}" for each, count in instead.most_common(3))
        yield f"{name:21}" + "".join(f"{cell:>9}" for cell in cells) + f"  {words}"


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits)}/{len(hits)}" if hits else "-"


def totals(rows: Sequence[Row]) -> Iterator[str]:
    """Rates over all faults, and over facts and symptoms apart."""
    kinds: dict[str, Callable[[Row], bool]] = {
        "all faults": lambda row: True,
        "facts": lambda row: row.fault not in SYMPTOMS,
        "symptoms": lambda row: row.fault in SYMPTOMS,
    }
    for kind, belongs in kinds.items():
        chosen = [row for row in rows if belongs(row)]
        if not chosen:
            continue
        yield kind
        for level, word in enumerate(LEVELS):
            at_level = [row for row in chosen if row.level == level]
            yield f"  named, {word:15} {rate(answers(at_level, 'is_named'))}"
        for column, attribute in COLUMNS.items():
            yield f"  {column:22} {rate(answers(chosen, attribute))}"
        noticed = [row.fault in (*row.alarms, *row.notices) for row in chosen if row.score]
        yield f"  {'named, also by notice':22} {rate(noticed)}"
        names = {row.fault for row in chosen}
        each = [
            fmean(answers((row for row in chosen if row.fault == name), "is_named"))
            for name in names
        ]
        yield f"  {'mean over faults':22} {fmean(each):.2f}"
    live = [(row.alarmed_at, row.steps) for row in rows if row.alarmed_at is not None]
    if live:
        early = [step < 0.1 * steps for step, steps in live]
        yield (
            f"live alarms in {len(live)} of {len(rows)} runs, at step {median(s for s, _ in live)} "
            f"in the median; in the first tenth of the run {rate(early)}"
        )


def controls(rows: Sequence[Row]) -> Iterator[str]:
    """False alarms, and of which fault."""
    counted = [row for row in rows if not row.left_out]
    yield f"false alarms in healthy runs: {rate([bool(row.alarms) for row in counted])}"
    yield f"  notices: {rate([bool(row.notices) for row in counted])}"
    yield f"  left out, for they have not learnt: {len(rows) - len(counted)} of {len(rows)}"
    for row in counted:
        if row.alarms:
            yield f"  {', '.join(row.alarms)}: {row.problem}, {row.way}, seed {row.seed}"
