"""Draws the benchmark's table."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from gradlens.instruments.style import dress, title

HERE = Path(__file__).parent
OURS, THEIRS = "#0072B2", "#D55E00"
SHOWN = {
    "economy": OURS,
    "business": OURS,
    "full": OURS,
    "cockpit 1.0.2 economy": THEIRS,
    "cockpit 1.0.2 business": THEIRS,
    "cockpit 1.0.2 full": THEIRS,
    "squared norms": OURS,
    "BackPACK BatchL2Grad": THEIRS,
    "opacus ghost norms": THEIRS,
    "opacus GradSampleModule": THEIRS,
    "torch.func vmap": THEIRS,
    "loop over samples": THEIRS,
}


def main(folder: Path) -> None:
    """Draw what tracking costs, and how that grows, and write a table of the presets."""
    with (folder / "presets.csv").open("w", newline="") as file:
        csv.writer(file).writerows(presets(rows_of("overhead.csv")))
    draw_ratios(rows_of("overhead.csv")).savefig(folder / "ratios.png", dpi=150)
    draw_scaling(rows_of("scaling.csv")).savefig(folder / "scaling.png", dpi=150)


def rows_of(name: str) -> list[dict[str, str]]:
    """A table's rows."""
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


PRESETS = ("economy", "business", "full")
SHARE = 0.05
"""Of the time that tracking takes in the last column of the table of presets."""


def presets(rows: list[dict[str, str]]) -> Iterator[list[str]]:
    """A tracked step over a plain one, by network and preset, the shortest plain steps first."""
    yield [
        "network",
        "a plain step takes",
        *PRESETS,
        f"economy takes {100 * SHARE:g} % of the time",
    ]
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["problem"], {})[row["contender"]] = row
    complete = [(name, each) for name, each in found.items() if {*PRESETS} <= {*each}]
    for name, each in sorted(complete, key=lambda pair: float(pair[1]["economy"]["plain ms"])):
        ratios = [float(each[preset]["ratio"]) for preset in PRESETS]
        every = math.ceil((ratios[0] - 1) * (1 - SHARE) / SHARE)
        plain = float(each["economy"]["plain ms"])
        yield [
            name,
            f"{plain:.2g} ms",
            *(f"{r:.2g} plain steps" for r in ratios),
            f"every {every} steps",
        ]


FEWEST_BARS = 9
"""Places for bars in a panel, at least."""


def draw_ratios(rows: list[dict[str, str]]) -> Figure:
    """Bars of ratios to the plain step, a panel for each problem."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    figure = Figure(figsize=(10, 0.6 + 2.6 * -(-len(problems) // 2)), facecolor="white")
    axes = figure.subplots(-(-len(problems) // 2), 2, squeeze=False)
    for ax, problem in zip(axes.flat, problems, strict=False):
        found = {row["contender"]: row for row in rows if row["problem"] == problem}
        names = [name for name in SHOWN if name in found]
        dress(ax)
        title(ax, problem)
        ratios = [float(found[name]["ratio"]) for name in names]
        places = range(len(names))
        ax.barh(places, ratios, color=[SHOWN[name] for name in names], height=0.7)
        for place, ratio in zip(places, ratios, strict=True):
            ax.text(ratio * 1.06, place, f"{ratio:.3g}", va="center", fontsize=7)
        ax.set_yticks(places, names, fontsize=7)
        # The few bars of a problem are as thick as the many of another one.
        ax.set_ylim(max(len(names), FEWEST_BARS) - 0.4, -0.6)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlim(0.8, max(ratios) * 2)
    for ax in list(axes.flat)[len(problems) :]:
        ax.set_visible(False)
    figure.tight_layout()
    return figure


COLOURS = {"squared norms": "#009E73", "economy": OURS, "quantities": OURS}


def draw_scaling(rows: list[dict[str, str]]) -> Figure:
    """Ratios to the plain step, and memory above its peak, by what grows."""
    axes_of = list(dict.fromkeys(row["what"] for row in rows))
    figure = Figure(figsize=(10, 0.4 + 1.9 * len(axes_of)), facecolor="white")
    axes = figure.subplots(len(axes_of), 2, squeeze=False)
    for (left, right), what in zip(axes, axes_of, strict=True):
        chosen = [row for row in rows if row["what"] == what]
        draw_growth(left, chosen, "ratio", "plain steps")
        draw_growth(right, chosen, "MB", "MB above a plain step")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    return figure


def draw_growth(ax: Axes, rows: list[dict[str, str]], column: str, label: str) -> None:
    """A line for each contender."""
    dress(ax)
    what = rows[0]["what"]
    title(ax, f"{what}: {label}")
    for contender in dict.fromkeys(row["contender"] for row in rows):
        chosen = [row for row in rows if row["contender"] == contender]
        sizes = [int(row["size"]) for row in chosen]
        values = [max(float(row[column]), 0.0) for row in chosen]
        colour = COLOURS[contender]
        ax.plot(sizes, values, "o-", color=colour, markersize=3, linewidth=1, label=contender)
    if max(sizes) >= 8 * min(sizes):
        ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(bottom=0)


if __name__ == "__main__":
    main(Path())
