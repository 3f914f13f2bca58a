"""Whether tracking has become dearer than benchmarks/thresholds.csv allows.

``python -m benchmarks.guard [PROBLEM ...] [--steps K] [--device D]`` measures each of its rows, or
those of some problems, and exits with 1 if one is exceeded, or is unknown since even two steps take
too long. Run it on an idle machine: of the ratios of single steps it takes the lower quartile, so
that a burst of other work does no harm.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from pathlib import Path
from statistics import quantiles

import torch

from benchmarks.contenders import Setting, named
from benchmarks.overhead import megabytes_above_plain, ratios
from benchmarks.problems import problem_of

THRESHOLDS = Path(__file__).parent / "thresholds.csv"


def main() -> None:
    """Print each row with what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="default: all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with THRESHOLDS.open() as file:
        rows = list(csv.DictReader(file))
    known = list(dict.fromkeys(row["problem"] for row in rows))
    if unknown := [name for name in options.problems if name not in known]:
        parser.error(f"there are no thresholds for {', '.join(unknown)}: {', '.join(known)}")
    rows = [row for row in rows if row["problem"] in (options.problems or known)]
    exceeded = [row for row in rows if not holds(row, options.steps, options.device)]
    sys.exit(1 if exceeded else 0)


def holds(row: dict[str, str], steps: int, device: str) -> bool:
    """Whether both numbers of a row are kept."""
    problem, contender = row["problem"], row["contender"]
    n = problem_of(problem).batch_size
    setting = Setting(problem_of(problem), n, torch.device(device))
    _, found = ratios(named(contender), setting, steps, together=1)
    if len(found) < 2:
        print(f"UNKNOWN  {problem:20} {contender:20} one step took too long: {found}", flush=True)
        return False
    ratio = quantiles(found, n=4)[0]
    megabytes = megabytes_above_plain(problem, contender, n, device)
    kept = ratio <= float(row["ratio"]) and megabytes <= float(row["MB"])
    print(
        f"{'kept    ' if kept else 'EXCEEDED'} {problem:20} {contender:20} "
        f"{ratio:6.2f} of {row['ratio']}, {megabytes:5.0f} of {row['MB']} MB",
        flush=True,
    )
    return kept


if __name__ == "__main__":
    main()
