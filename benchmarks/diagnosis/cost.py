"""What facts and live diagnosis cost: ratios to the plain steps beside them in the same run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.problems import PROBLEMS, Problem
from gradlens import Cockpit

MEASURED = ("3c3d", "MLP")
WARM_UP = 3
STEPS = 40
CONTENDERS: dict[str, dict[str, Any]] = {
    "nothing": {"facts": False},
    "facts": {},
    "facts and diagnose=True": {"diagnose": True},
}
"""Arguments of a cockpit without quantities."""


def steps_of(problem: Problem, options: dict[str, Any] | None) -> Callable[[], float]:
    """Seconds of a training step, under a cockpit with these options if there are any."""
    torch.manual_seed(0)
    model: nn.Module = problem.build()
    inputs, labels = problem.batch(problem.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    cockpit = None if options is None else Cockpit(model, [], **options)
    number = 0

    def step() -> float:
        nonlocal number
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        if cockpit is None:
            loss.backward()
        else:
            with cockpit(number, loss=loss, optimizer=optimizer):
                loss.backward()
        optimizer.step()
        number += 1
        return time.perf_counter() - started

    return step


def ratios(problem: Problem, options: dict[str, Any]) -> list[float]:
    """Each tracked step over the mean of the plain steps before and after it."""
    plain, tracked = steps_of(problem, None), steps_of(problem, options)
    for _ in range(WARM_UP):
        plain(), tracked()
    found, before = [], plain()
    for _ in range(STEPS):
        seconds, after = tracked(), plain()
        found.append(2 * seconds / (before + after))
        before = after
    return found


def report() -> Iterator[str]:
    """A line for each problem and contender: median and quartiles."""
    warnings.simplefilter("ignore")
    for name in MEASURED:
        for contender, options in CONTENDERS.items():
            try:
                found = ratios(PROBLEMS[name], options)
            except TypeError as error:
                yield f"{name:6} {contender:25} can't be had: {error}"
                continue
            low, _, high = quantiles(found, n=4)
            yield f"{name:6} {contender:25} {median(found):.3f} ({low:.3f} to {high:.3f})"
