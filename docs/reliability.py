"""Draws how often findings were true on runs that were new to the rules."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from scipy.stats import binomtest

from gradlens.diagnosis.diagnose import CERTAINTIES
from gradlens.history.finding import Kind, likely
from gradlens.instruments.style import dress, title

UNSEEN = Path(__file__).with_suffix(".csv")
FOUND = re.compile(r"(?P<fault>\w+) \((?P<certainty>[\w ]+), (?P<what>alarm|notice)(?P<after>.*)\)")
COLOURS = dict(zip(CERTAINTIES, ("#0072B2", "#009E73", "#D55E00"), strict=True))


def findings(of: str = "") -> Iterator[tuple[Kind, bool]]:
    """The kind of each finding of a set of questions, and whether it was true."""
    with UNSEEN.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if of in row["set"]]
    for row in rows:
        true = set(re.findall(r"\w+", row["right"].replace("; true:", ""))) - {"or"}
        for one in filter(None, row["end"].split("; ")):
            found = FOUND.fullmatch(one)
            assert found is not None, one
            kind = found["certainty"], found["what"] == "alarm", bool(found["after"])
            yield kind, found["fault"] in true


def counts(of: str = "") -> dict[Kind, tuple[int, int]]:
    """How many findings of each kind were true, of how many."""
    every = [*findings(of)]
    true, found = Counter(kind for kind, is_true in every if is_true), Counter(k for k, _ in every)
    return {kind: (true[kind], found[kind]) for kind in sorted(found)}


def brier(before: dict[Kind, tuple[int, int]], of: str) -> float:
    """The mean square of the probabilities' errors; a guess of 1/2 for all has 0.25."""
    errors = [likely(*before.get(kind, (0, 0))) - is_true for kind, is_true in findings(of)]
    return sum(error**2 for error in errors) / len(errors)


def main(folder: Path) -> None:
    """Draw the rates of the third set over the probabilities from the second one."""
    before, after = counts("second"), counts("third")
    figure = Figure(figsize=(8, 4), facecolor="white")
    ax = figure.subplots()
    dress(ax)
    title(ax, f"share that is true in the third set (Brier score {brier(before, 'third'):.2f})")
    ax.plot([0, 1], [0, 1], color="0.8", linewidth=1, zorder=0)
    for (certainty, is_alarm, follows), (true, found) in after.items():
        x = likely(*before.get((certainty, is_alarm, follows), (0, 0)))
        low, high = binomtest(true, found).proportion_ci(method="wilson")
        colour = COLOURS[certainty]
        ax.plot([x, x], [low, high], color=colour, linewidth=1)
        what = f"{certainty}, {'alarm' if is_alarm else 'notice'}{', follows' if follows else ''}"
        mark, face = "o" if is_alarm else "s", "white" if follows else colour
        label = f"{what}: {true} of {found}"
        ax.plot(x, true / found, mark, color=colour, markerfacecolor=face, label=label)
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set_xlabel("probability, from the second set", fontsize=9)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    figure.tight_layout()
    figure.savefig(folder / "rates.png", dpi=150)


if __name__ == "__main__":
    main(Path())
    print(counts(), brier(counts("second"), "third"))
