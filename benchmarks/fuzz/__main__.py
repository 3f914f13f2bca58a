"""Run many random training loops, each with gradlens and without, and print what was wrong.

``python -m benchmarks.fuzz --cases 10000 --seed 0 [--jobs 2]``. Each problem is printed with the
seeds of the loops that have it, and with the simplest recipe that has it, too.
``--seed`` is that of the first case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.fuzz.examine import examine, kind_of, simplest
from benchmarks.fuzz.recipe import recipe_of

CHUNK = 250
"""Cases of a process: memory is freed with it."""

Found = dict[int, list[str] | None]
"""Problems by seed; ``None`` for loops that can't be compared."""


def main() -> None:
    """Print what was found, by kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--simplify", action="store_true", help="simplify one case of each kind")
    parser.add_argument("--lines", action="store_true", help="print a line of JSON for each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.cases)
    if options.lines:
        for seed in seeds:
            print(json.dumps([seed, examine(recipe_of(seed))]), flush=True)
        return
    started = time.perf_counter()
    found = examined(seeds, options.jobs)
    failing = {seed: problems for seed, problems in found.items() if problems}
    report(failing, options.simplify)
    seconds = time.perf_counter() - started
    print(f"{len(found)} loops from seed {options.seed} in {seconds:.0f} s, {len(failing)} wrong")
    incomparable = [seed for seed, problems in found.items() if problems is None]
    print(f"{len(incomparable)} not comparable: they differ from themselves {incomparable or ''}")
    raise SystemExit(bool(failing))


def examined(seeds: range, jobs: int) -> Found:
    """The problems of each case, found in processes that may crash."""
    starts = range(seeds.start, seeds.stop, CHUNK)
    chunks = [range(start, min(start + CHUNK, seeds.stop)) for start in starts]
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda chunk: [*in_processes(chunk)], chunks)
        return dict(case for cases in found for case in cases)


def in_processes(seeds: range) -> Iterator[tuple[int, list[str] | None]]:
    """Where a process ends too early, another one goes on behind the case that it was at."""
    following = seeds.start
    while following < seeds.stop:
        count = seeds.stop - following
        command = [sys.executable, "-m", "benchmarks.fuzz", "--lines"]
        command += ["--seed", str(following), "--cases", str(count)]
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    seed, problems = json.loads(line)
                    yield seed, problems
                    following = seed + 1
            errors.seek(0)
            last = (errors.read().splitlines() or [""])[-1]
        if following < seeds.stop:
            yield following, [f"the process ended: {last} ({process.returncode})"]
            following += 1


def report(failing: dict[int, list[str]], simplify: bool) -> None:
    """Failing seeds by their first problem."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for seed, problems in failing.items():
        kinds[kind_of(problems[0])].append(seed)
    for kind, seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(seeds)} loops ({', '.join(map(str, seeds[:12]))}): {kind}")
        print(f"  {failing[seeds[0]][0]}")
        if simplify:
            recipe = simplest(recipe_of(seeds[0]))
            print(f"  for example {recipe}")
            print(*(f"    {problem}" for problem in (examine(recipe) or [])[:3]), sep="\n")


if __name__ == "__main__":
    main()
