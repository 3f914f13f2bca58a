"""Size of a report, time to build it, and time until its first screen is drawn.

``python -m benchmarks.report`` writes ``docs/report.csv``; arguments are files of further runs. It
needs Chromium and an otherwise idle machine. Each time is the least of ``REPEATS``.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gradlens.cli.demo import demo
from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.view import Group, View
from gradlens.plotting.loading import load_run
from gradlens.report.page import page, write
from tests.report.browser import Tab, chromium

REPEATS = 3
TABLE = Path(__file__).parent.parent / "docs" / "report.csv"
GROUPS: tuple[Group, ...] = ("performance", "step size", "gradients", "curvature", "noise")


def random_walks(steps: int, series: int) -> History:
    """A run of as many series with a number at every step."""
    noise = np.random.default_rng(0).standard_normal((steps, series))
    values = np.exp(np.cumsum(noise, axis=0) / 40)
    history = History(
        {
            f"S{n}": Source((), View(f"Series {n}", GROUPS[n % 5], "log" if n % 2 else "linear"))
            for n in range(series)
        }
    )
    for step, row in enumerate(values.tolist()):
        history.append(step, {f"S{n}": value for n, value in enumerate(row)})
    return history


def measured(name: str, run: Path, tab: Tab, folder: Path) -> dict[str, str]:
    """One row of the table."""
    out = folder / "report.html"
    reading, building, drawing = [], [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        history = load_run(run)
        read = time.perf_counter()
        write(page({"run": history}, name), out)
        built = time.perf_counter()
        tab.open(out.as_uri())
        reading.append(read - start)
        building.append(built - read)
        drawing.append(tab.value("Number(document.documentElement.dataset.drawn)") / 1000)
    times = {"read": reading, "build": building, "drawn": drawing}
    seconds = {f"{what} s": f"{min(found):.2f}" for what, found in times.items()}
    return {"run": name, "MB": f"{out.stat().st_size / 1e6:.2f}"} | seconds


def main(own: Mapping[str, Path]) -> None:
    """Measure, print and write the table."""
    with tempfile.TemporaryDirectory() as temporary, chromium() as tab:
        folder = Path(temporary)
        runs = {"full preset, 300 steps": demo(folder / "demo").run}
        for steps in (300, 10_000):
            path = folder / f"{steps}.jsonl"
            random_walks(steps, 60).write(path)
            runs[f"60 series, {steps:,} steps"] = path
        rows = [measured(name, run, tab, folder) for name, run in {**runs, **own}.items()]
    for row in rows:
        print(" | ".join(row.values()))
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main({name: Path(name) for name in sys.argv[1:]})
