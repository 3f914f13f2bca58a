"""Whether a training script does the same with and without tracking, and what tracking costs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from gradlens.cli.text import wrapped
from gradlens.history.coverage import CoverageTable, few
from gradlens.history.history import History
from gradlens.history.html import count
from gradlens.history.undefined import Undefined

REPEATS = 3
"""Further plain runs, up to the first difference: a script whose own runs differ half of the time
is told from tracking that changes it in seven of eight cases, and one that always does in all."""

Start: TypeAlias = Callable[[Sequence[str]], int]
"""Runs ``python -m`` with these arguments, and returns the exit code."""


@dataclass(frozen=True)
class Verdict:
    """What was found of a script.

    ``compared`` optimizer steps are bit for bit the same, or ``difference`` says what isn't.
    ``seconds`` are those between the first optimizer step and the last one, with tracking and
    without it; ``None`` where that is no comparison. ``tracked`` says of each cockpit what it has
    recorded, and ``coverage`` which share of the trainable parameters has per-sample gradients.
    """

    script: str
    compared: int
    difference: str
    seconds: tuple[float, float] | None
    coverage: Sequence[float | None]
    tracked: Sequence[str]


def process(command: Sequence[str]) -> int:
    """Run ``python -m`` in a process of its own, whose output goes to stderr."""
    environment = {"PYTHONHASHSEED": "0", **os.environ}  # of the order of sets
    call = [sys.executable, "-m", *command]
    return subprocess.run(call, env=environment, stdout=2, check=False).returncode


def verify(
    script: Path, arguments: Sequence[str] = (), steps: int = 0, start: Start = process
) -> Verdict:
    """Run a script with tracking and without it, and compare all that its optimizers do.

    At each optimizer step, these are the gradients before it, and the parameters, the buffers and
    the states of the random generators after it. ``steps`` ends the runs after so many of them.
    ``ValueError`` says why nothing can be certified, and what helps.
    """
    if not script.is_file():
        raise ValueError(f"{script}: there is no such script")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        call = _Call(script, arguments, folder, start)
        tracked = call.run("tracked", steps)
        call.check(tracked)
        files = (folder / "tracked" / f"history{n}.jsonl" for n in range(tracked.cockpits))
        histories = [History.load(each) for each in files]
        if not any(history.steps for history in histories):
            raise call.refused(NOTHING_TRACKED, steps=count(tracked.count, "optimizer step"))
        # What comes after the training may need what was recorded, and doesn't run.
        plain = call.run("plain", tracked.count)
        if plain.failure:
            raise call.refused(FAILS_PLAIN, failure=plain.failure)
        same, difference = _compared(tracked, plain)
        upto = min(same + 1, plain.count)
        for number in range(REPEATS if difference else 0):
            again = call.run(f"plain {number}", upto)
            if again.count != upto or _compared(again, plain)[0] < upto:
                raise call.refused(DIFFERS_ALONE, step=upto)
    covered = [history.latest("coverage") for history in histories]
    tables = [
        None if one is None else CoverageTable(one, history.parameters)
        for one, history in zip(covered, histories, strict=True)
    ]
    pairs = zip(histories, tables, strict=True)
    return Verdict(
        str(script),
        same,
        difference,
        (tracked.seconds, plain.seconds) if same > 1 and not difference else None,
        [None if table is None else table.share for table in tables],
        [line for history, table in pairs for line in _recorded(history, table)],
    )


@dataclass(frozen=True)
class _Trace:
    """What a run has written down of ``count`` optimizer steps, by so many ``cockpits``."""

    path: Path
    count: int
    seconds: float
    failure: str
    cockpits: int

    def steps(self) -> Iterator[dict[str, Any]]:
        """Bits by what they are of, step by step."""
        keys: list[str] = []
        for line in _lines(self.path):
            if isinstance(line, list) and isinstance(line[0], str):
                keys = line
            elif isinstance(line, list):
                yield dict(zip(keys, line[1:], strict=True))


def _lines(path: Path) -> Iterator[Any]:
    """What is in a file; half a line is what a process that was killed has left."""
    with path.open() if path.exists() else open(os.devnull) as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


@dataclass(frozen=True)
class _Call:
    """How a script is called."""

    script: Path
    arguments: Sequence[str]
    folder: Path
    start: Start

    def run(self, name: str, steps: int) -> _Trace:
        """Run it with the tracking that the name begins with, and read what was written down."""
        folder, kind = self.folder / name, name.split()[0]
        folder.mkdir()
        print(f"gradlens: {self.script}, {KINDS[kind]}", file=sys.stderr, flush=True)
        given = [str(folder), kind, str(steps), str(self.script), *self.arguments]
        code = self.start(["gradlens.cli.observed_script", *given])
        times, end = list[float](), dict[str, Any]()
        for line in _lines(folder / "trace.jsonl"):
            if isinstance(line, dict):
                end = line
            elif not isinstance(line[0], str):
                times.append(line[0])
        killed = f"its process ended by {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        return _Trace(
            folder / "trace.jsonl",
            len(times),
            times[-1] - times[0] if times else 0.0,
            end.get("failure", killed),
            end.get("cockpits", 0),
        )

    def check(self, tracked: _Trace) -> None:
        """``ValueError`` for a run that says nothing of tracking."""
        if tracked.failure:
            plain = self.run("plain", tracked.count + 1)
            text = FAILS if plain.failure else FAILS_TRACKED
            where = f"after optimizer step {tracked.count}" if tracked.count else "before any step"
            if tracked.count:
                text += LEAVE_OUT
            elif plain.failure:
                text += RUN_ALONE if self.arguments else NEEDS_ARGUMENTS
            raise self.refused(
                text, where=where, failure=tracked.failure, steps=tracked.count, script=self.script
            )
        if not tracked.cockpits:
            raise self.refused(NO_COCKPIT)
        if not tracked.count:
            raise self.refused(NO_STEPS)

    def refused(self, text: str, **known: Any) -> ValueError:
        return ValueError(f"{self.script}: {text.format(**known)}")


def _compared(one: _Trace, other: _Trace) -> tuple[int, str]:
    """How many steps are the same, and what differs in the first one that isn't."""
    for number, (here, there) in enumerate(zip_longest(one.steps(), other.steps())):
        if here is None:  # the other one was only ended later
            break
        if there is None:
            return number, ENDED.format(one=one.count, other=other.count)
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            return number, f"{few(names)}, at optimizer step {number + 1} of {one.count}"
    return one.count, ""


def _recorded(history: History, table: CoverageTable | None) -> Iterator[str]:
    yield f"tracked at {count(len(history.steps), 'step')}: {', '.join(history.names)}"
    yield from [NO_COVERAGE] if table is None else map(str.strip, table.short())
    for name in history.names:
        latest = history[name][next(reversed(history[name]))]
        if isinstance(latest, Undefined):
            yield f"{name} has no value in the end: {latest.reason}"


def as_text(verdict: Verdict, width: int) -> str:
    same = SAME.format(script=verdict.script, steps=count(verdict.compared, "optimizer step"))
    text = f"{verdict.script} {DIFFERENT} {verdict.difference}" if verdict.difference else same
    lines = [*verdict.tracked]
    if verdict.seconds is not None:
        tracked, plain = verdict.seconds
        each = 1000 * (tracked - plain) / (verdict.compared - 1)
        ratio = tracked / plain
        lines.append(COST.format(ratio=ratio, each=each, tracked=tracked, plain=plain))
    body = (part for line in lines for part in wrapped(line, width, "  ", "  "))
    return "\n".join([*wrapped(text, width), *body])


KINDS = {"tracked": "with tracking", "plain": "without tracking"}

SAME = (
    "{script} is bit-identical with and without tracking: gradients, parameters, buffers and "
    "random numbers are the same at {steps}"
)
DIFFERENT = (
    "is NOT bit-identical with and without tracking, and the same whenever it runs without. What "
    "differs first:"
)
ENDED = "the end, after {one} optimizer steps with tracking, and {other} without"
COST = (
    "cost: {ratio:.2f} times the time, by {each:.3g} ms a step ({tracked:.3g} s with tracking, "
    "{plain:.3g} s without, from the first optimizer step to the last)"
)
NO_COVERAGE = "no quantity has needed per-sample gradients"

FAILS = "the script fails {where} with and without tracking ({failure}), so nothing is certified. "
FAILS_TRACKED = (
    "the script fails {where} with tracking ({failure}), and not without: correct what it passes "
    "to gradlens, or how it reads what was recorded. "
)
NEEDS_ARGUMENTS = "If it needs arguments, pass them behind it: gradlens verify {script} --epochs 1"
RUN_ALONE = "Run it by itself first: python {script}"
LEAVE_OUT = "--steps {steps} certifies what comes before that"
FAILS_PLAIN = (
    "the script fails without tracking ({failure}), and not with it, so nothing is certified: let "
    "training not depend on what the cockpit has recorded, which is nothing then"
)
DIFFERS_ALONE = (
    "the script isn't the same twice without tracking, at optimizer step {step}, so nothing is "
    "certified: set the seeds of its own generators, let it not depend on time or on files that "
    "it writes, and call torch.use_deterministic_algorithms(True)"
)
NO_COCKPIT = (
    "the script has made no gradlens.Cockpit in the process that runs it, so there is no tracking "
    "to compare: make one there, and train inside its contexts"
)
NO_STEPS = (
    "no step of a torch.optim.Optimizer was seen in the process that runs the script, so there is "
    "nothing to compare: let such an optimizer update the parameters, and don't compile its step"
)
NOTHING_TRACKED = (
    "nothing was tracked in {steps}: call backward inside `with cockpit(step, loss=loss):`, and "
    "train for steps of the quantities' schedules"
)
