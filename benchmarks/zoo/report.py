"""Tables of what the zoo has shown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.zoo.check import Row

COLUMNS = (
    *("name", "kind", "mode", "N", "found", "known by", "coverage", "deviation"),
    *("verdict", "reasons"),
)

CUT = 150
"""Characters of a reason."""

SHOWN = 4
"""Reasons of a row."""


def verdict(row: Row) -> str:
    """One or two words on a row."""
    if row.error:
        return "exception"
    if row.is_wrong:
        return "WRONG"
    if row.obstacle:
        return "samples meet"
    if row.coverage == 100:
        return "right"
    return "in part" if row.coverage > 0 else "nothing covered"


def cells(row: Row) -> list[str]:
    """A line of the table of all columns."""
    return [
        *(row.network.name, row.network.kind, row.mode, str(row.network.samples)),
        "/".join(dict.fromkeys(map(str, row.found))),
        " / ".join(dict.fromkeys(filter(None, row.witnesses))),
        f"{int(row.coverage * 10) / 10:.1f}",
        f"{row.deviation:.0e}",
        verdict(row),
        "; ".join(reasons(row)),
    ]


def reasons(row: Row) -> list[str]:
    """Exceptions, obstacles, coupled layers, the worst parameter, and what is missing why."""
    found = [text for text in (row.error, row.obstacle) if text]
    if row.is_wrong:
        found.append(f"worst at {row.worst}")
    if row.coupled:
        found.append(f"coupled: {', '.join(row.coupled)[:CUT]}")
    missing = row.reasons.most_common()
    found += [f"{count} × {reason[:CUT]}" for reason, count in missing[:SHOWN]]
    if len(missing) > SHOWN:
        found.append(f"{len(missing) - SHOWN} more reasons")
    return found


def line(row: Row) -> str:
    """A row of the printed table, with its reasons below."""
    name, kind, mode, n, found, known, coverage, deviation, word, _ = cells(row)
    first = (
        f"{name[:44]:44} {kind[:22]:22} {mode:5} N={found:5} of {n} {known[:28]:28} "
        f"{coverage:>5} % {deviation:>6} {word}"
    )
    shown = [] if word == "right" else reasons(row)
    return "\n".join([first, *(f"      {reason}" for reason in shown)])


def summary(rows: Sequence[Row], missing: Sequence[tuple[str, str]]) -> str:
    """How many networks there are and what became of them; a network has a row for each mode."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.network.name, []).append(row)
    meet = [name for name, own in by_name.items() if any(row.obstacle for row in own)]
    declared = [n for n, own in by_name.items() if own[0].network.meet and n not in meet]
    own = [name for name in by_name if name not in meet and name not in declared]
    full = [name for name in own if all(row.is_full for row in by_name[name])]
    wrong = [name for name in by_name if any(row.is_wrong for row in by_name[name])]
    fails = [name for name in by_name if any(row.error for row in by_name[name])]
    without = [n for n in own if any(row.coverage == 0 for row in by_name[n]) and n not in fails]
    lines = [
        f"{len(by_name)} networks, {len(rows)} rows",
        f"{len(full)} of {len(own)} whose samples don't meet are fully covered and right",
        f"{len(wrong)} are wrong{listed(wrong)}",
        f"{len(fails)} have an exception{listed(fails)}",
        f"{len(without)} are without any coverage{listed(without)}",
        f"{len(meet) + len(declared)} have samples that meet{listed([*meet, *declared])}",
        f"{len(missing)} not built",
    ]
    return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in missing)])


def listed(names: Iterable[str]) -> str:
    """The names behind a colon, if there are any."""
    joined = ", ".join(names)
    return f": {joined}" if joined else ""


def write(path: Path, rows: Iterable[Row], missing: Iterable[tuple[str, str]]) -> None:
    """Put the rows into a CSV file, in place of those that it has of the same networks.

    What isn't built has its reason and nothing else.
    """
    new = [cells(row) for row in rows]
    new += [[name, *[""] * (len(COLUMNS) - 3), "not built", reason] for name, reason in missing]
    names = {row[0] for row in new}
    old = list(csv.reader(path.read_text().splitlines()))[1:] if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([row for row in old if row[0] not in names] + new)
