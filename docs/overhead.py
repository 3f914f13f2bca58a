"""Draws the benchmark's table."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

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
    """Draw what tracking costs."""
    draw_ratios(rows_of("overhead.csv")).savefig(folder / "ratios.png", dpi=150)


def rows_of(name: str) -> list[dict[str, str]]:
    """A table's rows."""
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


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
        ax.invert_yaxis()
        ax.set_xscale("log")
        ax.set_xlim(0.8, max(ratios) * 2)
    for ax in list(axes.flat)[len(problems) :]:
        ax.set_visible(False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(Path())
