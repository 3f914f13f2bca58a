"""Which faults diagnosis names, and how often it alarms in healthy runs.

``python -m benchmarks.diagnosis [--unseen] [--only FAULT ...] [--seeds 0 1] [--networks 1]
[--controls 100] [--live] [--jobs 1] [--write runs.csv]`` injects each fault into so many
networks at three strengths and prints a table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.diagnosis import controls
from benchmarks.diagnosis.faults.catalogue import FAULTS, NAMES
from benchmarks.diagnosis.measure import Options, Row, Task, Which, done, trainings
from benchmarks.diagnosis.report import report, write


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unseen", action="store_true", help="networks that rules weren't made on")
    parser.add_argument("--only", nargs="+", default=[*NAMES], metavar="FAULT", choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--networks", type=int, default=1, help="of each way to have a fault")
    parser.add_argument("--controls", type=int, default=0, help="healthy runs of each seed")
    parser.add_argument("--live", action="store_true", help="diagnose while runs go on, too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", type=Path, metavar="CSV", help="a line for each run")
    options = parser.parse_args()
    which: Which = "unseen" if options.unseen else "development"
    if not trainings(which):
        parser.error("no problems are unseen: benchmarks/diagnosis/unseen says how to add some")
    tasks = []
    for seed in options.seeds:
        chosen = Options(which, seed, options.live)
        tasks += [
            Task(chosen, options.networks, fault=number)
            for number, fault in enumerate(FAULTS)
            if fault.name in options.only
        ]
        pairs = controls.pairs(trainings(which), options.controls)
        tasks += [Task(chosen, way=way, problem=name) for way, name in pairs]
    started, rows = time.perf_counter(), list[Row]()
    for found in done(tasks, options.jobs):
        rows += found
        if options.write:
            write(rows, options.write)
    print(*report(rows), sep="\n")
    seconds = time.perf_counter() - started
    print(f"\n{len(rows)} runs on {which} networks in {seconds:.0f} s")


if __name__ == "__main__":
    main()
