"""How the cost of tracking grows with the batch, the network, and the number of quantities.

``python -m benchmarks.scaling [WHAT ...] [--steps K] [--device D] [--write]`` prints ratios of
tracked steps to the plain steps beside them and the peak memory above theirs, for the batch size
(of 3c3d), the width and depth of an MLP, the sequence length of a transformer, the number of
quantities, and the numbers of micro-batches and processes (on 3c3d, with 64 samples each). Those of
the latter two are ratios of CPU time. ``--write`` puts it into docs/scaling.csv.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from statistics import median

import torch

from benchmarks import parts
from benchmarks.contenders import COUNTED, Setting, tracked_by_gradlens
from benchmarks.overhead import megabytes_above_plain, merge, ratios
from benchmarks.problems import SCALED, problem_of

QUANTITIES = "number of quantities"
PARTS = {"micro-batches": (1, 4, 16), "processes": (1, 2, 4)}
CONTENDERS = ("squared norms", "economy")


def cases(what: str) -> Iterator[tuple[int, str, str]]:
    """Size, problem and contender."""
    if what == QUANTITIES:
        for count in range(1, len(COUNTED) + 1):
            yield count, "3c3d", f"first {count} quantities"
        return
    for size in PARTS.get(what) or SCALED[what]:
        for contender in CONTENDERS:
            yield size, f"{what} {size}", contender


def main() -> None:
    """Print a table of ratios."""
    known = (*SCALED, QUANTITIES, *PARTS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(known))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write docs/scaling.csv")
    options = parser.parse_args()
    unknown = set(options.what) - set(known)
    if unknown:
        parser.error(f"{', '.join(unknown)} doesn't grow: choose of {', '.join(known)}")
    warnings.simplefilter("ignore")
    order = [first_cells(what, size, name) for what in known for size, _, name in cases(what)]
    for what in options.what or known:
        print(what)
        rows = []
        for size, problem, contender in cases(what):
            rows.append(measured(what, size, problem, contender, options.steps, options.device))
            print("  {:>6} {:22} {:>8} {:>6} MB".format(*rows[-1][1:]), flush=True)
        if options.write:
            merge("scaling.csv", COLUMNS, rows, order)


COLUMNS = ("what", "size", "contender", "ratio", "MB")


def measured(
    what: str, size: int, problem: str, contender: str, steps: int, device: str
) -> list[str]:
    """A row of the table."""
    if what in PARTS:
        return measured_parts(what, size, contender)
    n = problem_of(problem).batch_size
    setting = Setting(problem_of(problem), n, torch.device(device))
    _, found = ratios(tracked_by_gradlens(contender), setting, steps, together=1)
    megabytes = megabytes_above_plain(problem, contender, n, device, processes=1)
    return [*first_cells(what, size, contender), f"{median(found):.2f}", f"{megabytes:.0f}"]


def measured_parts(what: str, count: int, contender: str) -> list[str]:
    """A row of the table, for a batch in parts."""
    (seconds, peak, sent), plain = (parts.cost(what, count, n) for n in (contender, "plain"))
    if what == "processes":
        print(f"  {sent / 1e6:.1f} MB sent or passed on by each process at a step")
    megabytes = (peak - plain[1]) / 1e6
    return [*first_cells(what, count, contender), f"{seconds / plain[0]:.2f}", f"{megabytes:.0f}"]


def first_cells(what: str, size: int, contender: str) -> tuple[str, str, str]:
    """Those that tell rows apart."""
    return what, str(size), "quantities" if what == QUANTITIES else contender


if __name__ == "__main__":
    main()
