"""What tracking costs: steps of gradlens and its peers over plain steps, interleaved in one run.

``python -m benchmarks.overhead [PROBLEM ...] [--only WORD ...] [--without WORD ...] [--write]``
prints ratios of each contender's steps to the plain steps beside them, their quartiles, and the
peak memory above a plain step's. ``--write`` makes docs/overhead.csv of it, from which the
documentation's table and figure are drawn. ``--guard`` measures what benchmarks/thresholds.csv has
limits of, and exits with 1 if one of them is exceeded.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.contenders import (
    COCKPIT_PYTHON,
    IDLE,
    TRACKED,
    Contender,
    Paired,
    Setting,
    peer,
    tracked_by_cockpit,
    tracked_by_gradlens,
)
from benchmarks.memory import in_a_process
from benchmarks.peers import PEERS
from benchmarks.problems import NAMED, PROBLEMS, problem_of

DOCS = Path(__file__).parent.parent / "docs"
WARM_UP = 2
INTERVALS = (4, 16, 64)
SECONDS = 6.0
"""Default time of a contender's steps, which ends earlier where there are enough of them."""
PRESETS = ("economy", "business", "full")
"""Those that are measured at several intervals, and compared with cockpit's."""
WEIGHED = (
    "nothing scheduled",
    "squared norms",
    "GradHist1d",
    "GradHist2d",
    *PRESETS,
    "training",
    *PEERS,
)
"""Contenders whose memory is measured, each in a process of its own."""


@dataclass(frozen=True)
class Measurement:
    """Ratios to the plain step: median and quartiles; bytes above the plain step's peak.

    Of the processor's time, the ratio is that of the fastest steps.
    """

    problem: str
    contender: str
    plain_seconds: float
    ratio: float
    low: float
    high: float
    megabytes: float | None


def contenders(problem: str) -> Iterator[tuple[str, Contender, int]]:
    """Name, contender, and the number of steps that belong together."""
    yield from ((name, tracked_by_gradlens(name), 1) for name in IDLE)
    single = [name for name in TRACKED if not name.startswith("first")]
    yield from ((name, tracked_by_gradlens(name), 1) for name in single)
    for interval in INTERVALS:
        for preset in PRESETS:
            contender = tracked_by_gradlens(preset, interval)
            yield f"{preset}, every {interval} steps", contender, interval
    yield from ((name, peer(name), 1) for name in PEERS)
    if COCKPIT_PYTHON.exists():
        for preset in PRESETS:
            yield f"cockpit 1.0.2 {preset}", tracked_by_cockpit(problem, preset), 1


def ratios(
    contender: Contender, setting: Setting, steps: int, together: int, limit: float = SECONDS
) -> tuple[list[float], list[float]]:
    """Seconds of plain steps, and each tracked step's ratio to the plain step beside it."""
    tracked = contender(setting)
    plain = tracked.plain if isinstance(tracked, Paired) else peer("plain")(setting)
    spent = 0.0
    for _ in range(WARM_UP):
        spent += plain() + tracked()
        if spent > limit:
            break
    seconds: list[float] = []
    found: list[float] = []
    spent = 0.0
    while len(found) < steps and (spent < limit or not found):
        # The plain steps surround the others, so that a machine that slows down favours neither.
        pairs = [(plain(), tracked()) for _ in range(together)]
        before, slow = (sum(column) for column in zip(*pairs, strict=True))
        seconds.append(before / together)
        found.append(slow / before)
        spent += before + slow
    return seconds, found


@cache
def peak_memory(
    problem: str, contender: str, batch_size: int, device: str, processes: int = 3
) -> float:
    """Peak bytes of a few steps above what was there before: the median of some processes."""
    return median(_peak_memory(problem, contender, batch_size, device) for _ in range(processes))


def _peak_memory(problem: str, contender: str, batch_size: int, device: str) -> float:
    try:
        found = in_a_process("benchmarks.memory", problem, contender, batch_size, device)
    except RuntimeError:  # of too little memory, for example
        return float("nan")
    return float(found[-1]) if found else float("nan")


def megabytes_above_plain(
    problem: str, contender: str, batch_size: int, device: str, processes: int = 3
) -> float:
    """Peak memory above that of plain steps."""
    names = ("plain", contender)
    plain, tracked = (peak_memory(problem, n, batch_size, device, processes) for n in names)
    return (tracked - plain) / 1e6


def measure(
    problem: str,
    wanted: Callable[[str], bool],
    steps: int,
    device: str,
    batch: int,
    limit: float = SECONDS,
    of_processor: bool = False,
) -> Iterator[Measurement]:
    """All contenders on one problem whose names are wanted."""
    batch_size = batch or problem_of(problem).batch_size
    clock = time.process_time if of_processor else time.perf_counter
    setting = Setting(problem_of(problem), batch_size, torch.device(device), clock)
    plain_memory = peak_memory(problem, "plain", batch_size, device)
    plain = peer("plain")(setting)
    plain_seconds = [plain() for _ in range(WARM_UP + 1)][-1]
    for name, contender, together in contenders(problem):
        if not wanted(name):
            continue
        if together > 1 and together * plain_seconds > limit:
            print(f"  {name:34} takes too long", flush=True)
            continue
        try:
            seconds, found = ratios(contender, setting, steps, together, limit)
        except Exception as error:
            print(f"  {name:34} can't: {type(error).__name__}: {str(error)[:60]}", flush=True)
            continue
        memory = None
        if name in WEIGHED:
            memory = (peak_memory(problem, name, batch_size, device) - plain_memory) / 1e6
        quartiles = quantiles(found, n=4) if len(found) > 1 else [found[0]] * 3
        # Of the processor's time, which caches that others use make longer, the least is the best.
        least = min(r * s for r, s in zip(found, seconds, strict=True)) / min(seconds)
        ratio = least if of_processor and together == 1 else median(found)
        yield Measurement(problem, name, median(seconds), ratio, quartiles[0], quartiles[2], memory)


def limits() -> dict[tuple[str, str], tuple[float, float]]:
    """What ratios and megabytes may be at most, by problem and contender."""
    with (Path(__file__).parent / "thresholds.csv").open() as file:
        rows = csv.DictReader(file)
        return {(r["problem"], r["contender"]): (float(r["ratio"]), float(r["MB"])) for r in rows}


def is_kept(one: Measurement) -> bool:
    """Of ratios, the lower quartile counts, so that a burst of other work does no harm."""
    ratio, megabytes = limits()[one.problem, one.contender]
    return one.low <= ratio and one.megabytes is not None and one.megabytes <= megabytes


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "problems",
        nargs="*",
        metavar="PROBLEM",
        help=f"default: {', '.join(PROBLEMS)}; further ones: {', '.join(NAMED)}",
    )
    parser.add_argument("--only", nargs="+", default=[""], help="words, of which names have one")
    parser.add_argument("--without", nargs="+", default=[], help="words that no name has")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each contender")
    parser.add_argument("--cpu", action="store_true", help="the processor's time, on one thread")
    parser.add_argument("--batch", type=int, default=0, help="default: the problem's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write docs/overhead.csv")
    parser.add_argument("--guard", action="store_true", help="exit with 1 above thresholds.csv")
    options = parser.parse_args()
    known = [*PROBLEMS, *NAMED]
    unknown = set(options.problems) - set(known)
    if unknown:
        parser.error(f"no problem is called {', '.join(unknown)}: choose of {', '.join(known)}")

    def wanted(problem: str, name: str) -> bool:
        if any(word in name for word in options.without):
            return False
        if options.guard and (problem, name) not in limits():
            return False
        return any(word in name for word in options.only)

    warnings.simplefilter("ignore")
    if options.cpu:  # threads that wait for others take its time, too
        torch.set_num_threads(1)
    exceeded: list[str] = []
    usual = dict.fromkeys(problem for problem, _ in limits()) if options.guard else PROBLEMS
    for problem in options.problems or usual:
        print(f"{problem}, batch {options.batch or problem_of(problem).batch_size}")
        found = []
        settings = options.steps, options.device, options.batch, options.seconds, options.cpu
        for one in measure(problem, partial(wanted, problem), *settings):
            found.append(one)
            memory = "" if one.megabytes is None else f"{one.megabytes:8.0f} MB"
            print(
                f"  {one.contender:34} {one.ratio:8.2f} ({one.low:.2f} to {one.high:.2f}) plain "
                f"steps of {1e3 * one.plain_seconds:.1f} ms {memory}",
                flush=True,
            )
        if options.write:
            write(found, options.device)
        if options.guard:  # what couldn't be measured isn't known to be kept
            kept = {one.contender for one in found if is_kept(one)}
            guarded = {name for of, name in limits() if of == problem and wanted(problem, name)}
            exceeded += [f"{problem}, {name}" for name in sorted(guarded - kept)]
    if exceeded:
        sys.exit(f"above benchmarks/thresholds.csv, or unknown: {'; '.join(exceeded)}")


COLUMNS = ("problem", "contender", "ratio", "low", "high", "MB", "plain ms")


def write(measurements: list[Measurement], device: str) -> None:
    """The documentation's table, with earlier rows of others, and a line on the machine."""
    problems, names = [*PROBLEMS, *NAMED], [name for name, _, _ in contenders(next(iter(PROBLEMS)))]
    order = [(problem, name) for problem in problems for name in names]
    merge("overhead.csv", COLUMNS, [row_of(one) for one in measurements], order)
    processor = platform.processor() or platform.machine()
    threads, version = torch.get_num_threads(), torch.__version__
    (DOCS / "overhead-machine.txt").write_text(
        f"Measured with {threads} threads of a {processor} processor and torch {version}, on "
        f"{device}.\n"
    )


def merge(
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    order: Sequence[tuple[str, ...]],
) -> None:
    """Put rows into a table of the documentation, where those of the same first cells are replaced.

    ``order`` is that of the first cells, of which there are as many; others come last.
    """
    path, places = DOCS / name, {cells: place for place, cells in enumerate(order)}
    cells = len(order[0])
    known: list[Sequence[str]] = []
    if path.exists():
        with path.open() as file:
            known = list(csv.reader(file))[1:]
    by_cells = {tuple(row[:cells]): row for row in [*known, *rows]}
    merged = sorted(by_cells, key=lambda first: places.get(first, len(places)))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *(by_cells[first] for first in merged)])


def row_of(one: Measurement) -> list[str]:
    """A measurement in words."""
    numbers = [f"{number:.2f}" for number in (one.ratio, one.low, one.high)]
    memory = "" if one.megabytes is None else str(round(one.megabytes))
    return [one.problem, one.contender, *numbers, memory, f"{1e3 * one.plain_seconds:.1f}"]


if __name__ == "__main__":
    main()
