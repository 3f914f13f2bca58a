"""Run problems with faults and healthy controls, and compare the findings with the truth."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.diagnosis import development
from benchmarks.diagnosis.controls import CONTROLS, has_learnt
from benchmarks.diagnosis.faults.catalogue import FAULTS
from benchmarks.diagnosis.faults.fault import Fault, hurts
from benchmarks.diagnosis.loop import Outcome, train
from benchmarks.diagnosis.scoring import Finding, Score, score
from benchmarks.diagnosis.training import Training
from gradlens.diagnosis.diagnose import diagnose

Which: TypeAlias = Literal["development", "unseen"]


@dataclass(frozen=True)
class Row:
    """A run and what was found. ``left_out`` says why it doesn't count, or is empty.

    ``level`` is 0 to 2 for weak to strong, and -1 for a control. ``alarms`` and ``notices`` are
    the names of the findings in their order. ``alarmed_at`` is the step of the first live alarm.
    """

    fault: str
    way: str
    level: int
    strength: float
    problem: str
    seed: int
    steps: int
    left_out: str = ""
    is_harmful: bool = False
    score: Score | None = None
    alarms: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    alarmed_at: int | None = None

    @property
    def is_control(self) -> bool:
        """Whether any alarm is false."""
        return self.level < 0


@dataclass(frozen=True)
class Options:
    """Which problems, whether findings are asked for while the run goes on, and its seed."""

    which: Which
    seed: int
    is_live: bool = False


@cache
def trainings(which: Which) -> tuple[Training, ...]:
    """How problems are usually trained; those that rules have never seen are imported here only."""
    if which == "development":
        return development.TRAININGS
    found: tuple[Training, ...] = import_module("benchmarks.diagnosis.unseen").TRAININGS
    return found


def usual(which: Which, name: str) -> Training:
    """The usual training of a problem."""
    return next(training for training in trainings(which) if training.name == name)


@cache
def healthy(which: Which, name: str, seed: int) -> Outcome:
    """The outcome of a problem as it is."""
    return train(usual(which, name), seed)


def tracked(training: Training, options: Options) -> tuple[Outcome, list[Finding]]:
    """The outcome of a run under a cockpit, and its findings."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        outcome = train(training, options.seed, path, options.is_live)
        return outcome, diagnose(path)


def said(outcome: Outcome, findings: Iterable[Finding]) -> dict[str, Any]:
    """What a row has of findings: the faults of alarms and notices, and the first live alarm."""
    alarms, notices = (
        tuple(each.fault for each in findings if each.is_alarm == are_alarms)
        for are_alarms in (True, False)
    )
    return {"alarms": alarms, "notices": notices, "alarmed_at": outcome.alarmed}


# Faults.


def fitting(fault: Fault, which: Which, seed: int) -> Iterator[Training]:
    """Trainings that the fault can be injected into; others come first with another seed."""
    known, first = trainings(which), 5 * FAULTS.index(fault) + 7 * seed
    for place in range(len(known)):
        training = known[(first + place) % len(known)]
        if fault.name not in training.unfit and _fits(fault, training, seed):
            yield training


def _fits(fault: Fault, training: Training, seed: int) -> bool:
    return fault.apply(training, fault.strengths[-1], seed) is not None


def fault_rows(number: int, networks: int, options: Options) -> list[Row]:
    """A fault on some networks, at all of its strengths."""
    fault = FAULTS[number]
    chosen = islice(fitting(fault, options.which, options.seed), networks)
    return [
        _fault_row(fault, level, training, options)
        for training in chosen
        for level in range(len(fault.strengths))
    ]


def _fault_row(fault: Fault, level: int, training: Training, options: Options) -> Row:
    strength = fault.strengths[level]
    row = partial(Row, fault.name, fault.way, level, strength, training.name, options.seed)
    injected = fault.apply(training, strength, options.seed)
    if injected is None:
        return row(training.steps, "can't be injected at this strength")
    steps = injected.training.steps
    reference = healthy(options.which, training.name, options.seed)
    outcome, findings = tracked(injected.training, options)
    if not fault.present(outcome, reference):
        return row(steps, "absent")
    is_harmful = hurts(outcome, reference)
    scored = score(findings, fault.name, injected, is_harmful)
    return row(steps, is_harmful=is_harmful, score=scored, **said(outcome, findings))


# Controls.


def control_row(way: str, name: str, options: Options) -> Row | None:
    """A control on a problem, or nothing where it isn't possible."""
    control = next(control for control in CONTROLS if control.way == way)
    training = control.apply(usual(options.which, name), options.seed)
    if training is None:
        return None
    row = partial(Row, "", way, -1, 0.0, name, options.seed, training.steps)
    outcome, findings = tracked(training, options)
    return row(**said(outcome, findings)) if has_learnt(outcome) else row("has not learnt")


# All of them.


@dataclass(frozen=True)
class Task:
    """A fault by its number, or a control's way on a problem."""

    options: Options
    networks: int = 1
    fault: int = -1
    way: str = ""
    problem: str = ""

    def __call__(self) -> list[Row]:
        torch.set_num_threads(1)
        if self.fault >= 0:
            return fault_rows(self.fault, self.networks, self.options)
        row = control_row(self.way, self.problem, self.options)
        return [] if row is None else [row]


def done(tasks: Sequence[Task], jobs: int) -> Iterator[list[Row]]:
    """The rows of each task, in order."""
    if jobs == 1:
        yield from (task() for task in tasks)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(_run, tasks)


def _run(task: Task) -> list[Row]:
    return task()
