"""Runs the questions or healthy loops with gradlens, and says what was named.

``python -m benchmarks.questions`` runs the questions and their twins, with ``--healthy`` the
healthy loops. ``--check`` runs them without gradlens: does each mistake harm, and its twin train?
"""

from __future__ import annotations

import argparse
import csv
import json
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradlens

# The modules add their questions and loops.
from . import (  # noqa: F401
    in_data,
    in_loops,
    in_losses,
    in_models,
    loops,
)
from .training import LOOPS, QUESTIONS, Question, Watch


class Gradlens(Watch):
    """A cockpit as a user leaves it on, with the file of its run in a folder."""

    def __init__(self, folder: Path, live: bool) -> None:
        self.path, self.live = folder / "run.jsonl", live
        self.cockpit: gradlens.Cockpit | None = None

    def follow(self, model: nn.Module) -> None:
        self.cockpit = gradlens.Cockpit(model, "economy", run=self.path, diagnose=self.live)

    def step(self, step: int, loss: Tensor, optimizer: Optimizer) -> AbstractContextManager[object]:
        assert self.cockpit is not None
        return self.cockpit(step, loss=loss, optimizer=optimizer)

    def log(self, step: int, **numbers: float) -> None:
        assert self.cockpit is not None
        self.cockpit.log(step, **numbers)

    def found(self) -> tuple[list[Said], list[Said]]:
        """What was found at the end, and while training ran."""
        assert self.cockpit is not None
        self.cockpit.close()
        end = [
            Said(f.fault, str(f.certainty), f.is_alarm, f.explained_by or "")
            for f in gradlens.diagnose(str(self.path))
        ]
        lines = map(json.loads, self.path.read_text().splitlines())
        live = [
            Said(f["fault"], f["certainty"], f["is_alarm"], "")
            for f in (line["finding"] for line in lines if "finding" in line)
        ]
        return end, live


@dataclass(frozen=True)
class Said:
    """One finding."""

    fault: str
    certainty: str
    is_alarm: bool
    explained_by: str

    def __str__(self) -> str:
        kind = "alarm" if self.is_alarm else "notice"
        after = f" after {self.explained_by}" if self.explained_by else ""
        return f"{self.fault} ({self.certainty}, {kind}{after})"


@dataclass(frozen=True)
class Row:
    """What one run said."""

    name: str
    form: str
    seed: int
    result: float
    right: str
    verdict: str
    end: str
    live: str
    live_alarm: bool


def judge(question: Question, form: str, said: list[Said]) -> str:
    """One word for what was said of a run.

    ``first``: the cause was named first; ``named``: after something else; ``wrong``: it wasn't, and
    an alarm is neither the cause nor true; ``silent``: it wasn't, and no alarm is untrue. A healthy
    run has an ``alarm`` or is ``quiet``.
    """
    if form != "faulty":
        return "alarm" if any(s.is_alarm for s in said) else "quiet"
    if said and said[0].fault in question.right:
        return "first"
    if any(s.fault in question.right for s in said):
        return "named"
    if any(s.is_alarm and s.fault not in question.true for s in said):
        return "wrong"
    return "silent"


def run(question: Question, form: str, seed: int, live: bool) -> Row:
    """One run with gradlens."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder:
        watch = Gradlens(Path(folder), live)
        result = train(question, form != "faulty", watch, seed)
        end, during = watch.found()
    true = "; true: " + ", ".join(question.true) if question.true else ""
    return Row(
        name=question.name,
        form=form,
        seed=seed,
        result=result,
        right=" or ".join(question.right) + true if form == "faulty" else "",
        verdict=judge(question, form, end),
        end="; ".join(map(str, end)),
        live="; ".join(map(str, during)),
        live_alarm=any(s.is_alarm for s in during),
    )


def train(question: Question, fixed: bool, watch: Watch, seed: int) -> float:
    """One training, from the same random numbers with and without gradlens."""
    torch.manual_seed(seed)
    return question.train(fixed, watch)


def check(questions: list[Question], seeds: list[int]) -> int:
    """Whether each mistake does harm, and all else trains. Returns how often that isn't so."""
    failed = 0
    for question in questions:
        for seed in seeds:
            begin = time.process_time()
            faulty = float("nan")
            if question in QUESTIONS:
                faulty = train(question, False, Watch(), seed)
            fixed = train(question, True, Watch(), seed)
            good = question.hurts(faulty, fixed)
            failed += not good
            print(
                f"{'' if good else 'FAILS ':6}{question.name:30}{question.limit:8.2f}{faulty:12.3g}"
                f"{fixed:10.3g}{time.process_time() - begin:7.1f} s",
                flush=True,
            )
    return failed


def share(name: str, rows: list[Row], is_so: Callable[[Row], bool]) -> None:
    """Prints how many of the rows are so."""
    count = sum(map(is_so, rows))
    print(f"{name:32}{count:5} of {len(rows):4}  {count / len(rows):6.1%}")


def report(rows: list[Row], live: bool) -> None:
    """Prints the shares."""
    faulty = [r for r in rows if r.form == "faulty"]
    nameable = [r for r in faulty if r.right and not r.right.startswith(";")]
    healthy = [r for r in rows if r.form != "faulty"]
    for title, group in (("questions", faulty), ("questions that a rule may name", nameable)):
        if group:
            print(f"\n{title}")
            share("named first", group, lambda r: r.verdict == "first")
            share("named at all", group, lambda r: r.verdict in ("first", "named"))
            share("nothing untrue, but not named", group, lambda r: r.verdict == "silent")
            share("wrong alarm", group, lambda r: r.verdict == "wrong")
    if healthy:
        print("\nhealthy runs" if not faulty else "\nrepaired twins")
        share("alarm at the end", healthy, lambda r: r.verdict == "alarm")
        if live:
            share("alarm while training runs", healthy, lambda r: r.live_alarm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="those whose module or name has this")
    parser.add_argument("--healthy", action="store_true", help="the healthy loops")
    parser.add_argument("--live", action="store_true", help="diagnose while training runs, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--write", type=Path, help="a CSV file for the rows")
    parser.add_argument("--check", action="store_true", help="without gradlens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [
        q
        for q in (LOOPS if options.healthy else QUESTIONS)
        if options.only in f"{q.train.__module__}.{q.name}"
    ]
    if options.check:
        raise SystemExit(check(chosen, options.seeds) > 0)
    forms = ["healthy"] if options.healthy else ["faulty", "fixed"]
    tasks = [(q.name, form, seed) for q in chosen for seed in options.seeds for form in forms]
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
        results: Iterable[Row] = pool.map(partial(run_by_name, live=options.live), tasks)
        rows = []
        for row in results:
            print(f"{row.verdict:7}{row.name:30}{row.form:8}{row.result:9.3g}  {row.right}")
            for when, said in (("end", row.end), ("live", row.live)):
                if said:
                    print(f"  {when:5}{said}", flush=True)
            rows.append(row)
    report(rows, options.live)
    if options.write:
        with options.write.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(map(asdict, rows))


def run_by_name(task: tuple[str, str, int], live: bool) -> Row:
    """One run, in a process of its own."""
    name, form, seed = task
    return run(next(q for q in QUESTIONS + LOOPS if q.name == name), form, seed, live)


if __name__ == "__main__":
    main()
