"""Weights that don't change: without an optimizer's step, or without a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import STEPS_OF_WEIGHTS
from gradlens.diagnosis.numbers import Truths, largest, median, share, since
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above, beyond

FEWEST = 10
"""Steps without a change; more than micro-batches usually have."""
SHARE = 0.1
"""Share of the run that has no change at its end."""
RARELY = 1 / 16
"""Steps of the optimizer for each backward pass, of a run that learns nothing."""
RARE = "The optimizer makes few steps, each after many backward passes"
INDENT = (
    "Call optimizer.step() in the loop over batches, after each backward pass; or accumulate the "
    "gradients of fewer batches."
)


def no_step(evidence: Evidence) -> Iterator[Sign]:
    """All weights are what they were, although they have gradients; or nearly always so."""
    updates = evidence.column("updates")
    made = share(updates > 0, np.isfinite(updates))
    if 0 < made < RARELY and is_stuck(evidence):
        number = above("backward passes for each step of the optimizer", 1 / made, 1 / RARELY)
        yield Sign(int(evidence.steps[0]), (number,), "very likely", title=RARE, advice=INDENT)
        return
    steps = evidence.by_name("weight_rms").steps
    names = tuple(evidence.by_name("weight_rms").values)
    start = int(steps[since(np.asarray(still(evidence, names).all(axis=0)))])
    length = int(steps[-1]) - start
    is_without = bool(names) and all(_without_gradient(evidence, name) for name in names)
    if length < max(FEWEST, SHARE * evidence.length) or is_without:
        yield from _held_back(evidence, names)
        return
    rates, updates = (each[evidence.steps >= start] for each in (evidence.column("lr"), updates))
    numbers = (
        above("steps in a row that change no weight", length, FEWEST - 1),
        *beyond(above("steps of the optimizer in this time", np.nansum(updates), 0)),
    )
    title, advice = (STEPS, TINY) if len(numbers) > 1 else ("", "")
    if rates.size and (rates == 0).all():
        title, advice = NO_RATE, SET_RATE
    yield Sign(start, numbers, title=title, advice=advice)


def _held_back(evidence: Evidence, names: Sequence[str]) -> Iterator[Sign]:
    """Weights that the optimizer has, and that don't change although they have a gradient."""
    steps = evidence.by_name("weight_rms").steps
    held = {name for group in evidence.setup.groups for name in group.parameters}
    held -= {*evidence.setup.missed}
    sizes = {n: median(evidence.by_name("gradient_rms").values.get(n, ())) for n in names}
    least = VANISHED * largest([*sizes.values()])
    where = tuple(n for n in _idle(evidence, names) if n in held and sizes[n] > least)
    if where and len(steps) >= RECORDS and steps[-1] - steps[0] >= FEWEST:
        number = above("parameters with a gradient that never change", len(where), 0)
        is_alarm = is_stuck(evidence)
        yield Sign(int(steps[0]), (number,), "fact", is_alarm, where, title=HELD, advice=GROUP)


VANISHED = 1e-3
"""A gradient over the largest one, below which updates may be lost since they are so small."""
HELD = "Parameters have a gradient and are in the optimizer, but never change"
GROUP = (
    "Look at the learning rate of their parameter group, which may be 0, and for what undoes "
    "their updates. If they are to stay what they are, requires_grad_(False) saves time."
)


def no_gradient(evidence: Evidence) -> Iterator[Sign]:
    """Weights that the optimizer has, and that neither have a gradient nor ever change."""
    steps = evidence.by_name("weight_rms").steps
    if len(steps) < RECORDS or steps[-1] - steps[0] < FEWEST:
        return
    yield from unused(evidence)
    if evidence.is_out_of_reach:
        yield Sign(int(steps[0]), (), "consistent with", is_alarm=False, title=RAISED)
    held = {*evidence.by_name("weight_rms").values} - {*evidence.setup.missed}
    names = tuple(name for name in evidence.history.parameters if name in held)
    where = tuple(n for n in _idle(evidence, names) if _without_gradient(evidence, n))
    if not where:
        return
    is_all = len(where) == len(names)
    # What comes behind others may be left out on purpose, as a pretrained network's old head.
    is_in_front = where[:1] == names[:1]
    is_used = bool({*where} & {*evidence.setup.order})
    gradients = evidence.by_name("gradient_rms").values
    is_zero = any(np.isfinite(gradients.get(name, np.nan)).any() for name in where)
    number = above("parameters without a gradient that never change", len(where), 0)
    is_alarm = is_all or is_in_front or (is_used and is_stuck(evidence))
    if not (is_alarm or evidence.length >= LONG_ENOUGH):  # some margins are left late
        return
    yield Sign(
        int(steps[0]),
        (number,),
        is_alarm=is_alarm,
        where=() if is_all else where,
        title=ZERO if is_zero else INDEPENDENT if is_all else "",
        advice=LOST if is_zero else DETACHED if is_all else "",
    )


RECORDS = 3
"""Records of the parameters; with fewer, nothing is said."""


def unused(evidence: Evidence) -> Iterator[Sign]:
    """Outputs that the loss doesn't depend on: the same elements of the last bias have no gradient.

    Behind an activation, such units may be dead.
    """
    name = evidence.setup.order[-1] if evidence.setup.order else ""
    shares = evidence.by_name("zero_gradients").values.get(name, np.zeros(0))
    is_last = name.endswith("bias") and name.rpartition(".")[0] not in evidence.setup.activations
    if is_last and len(shares) > RECORDS and 0 < shares[0] < 1 and (shares == shares[0]).all():
        number = above("share of the outputs without a gradient", shares[0], 0)
        is_alarm = is_stuck(evidence)
        yield Sign(int(evidence.steps[0]), (number,), "fact", is_alarm, (name,), title=UNUSED)


UNUSED = "The loss doesn't depend on some of the network's outputs"
RAISED = "The loss rises further than the weights can have raised it: a term may have no gradient"


def _idle(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    """Those that are still what they were at the first record."""
    return compress(names, np.asarray(still(evidence, names).all(axis=1)))


def still(evidence: Evidence, names: Sequence[str]) -> Truths:
    """Whether parameters are what they were at the record before ``[M, K - 1]``.

    Neither has the update at that record changed any element, nor is its size another one.
    """
    sizes = evidence.by_name("weight_rms").matrix(tuple(names))
    updates = evidence.by_name("update_rms").matrix(tuple(names))
    if updates.shape != sizes.shape:
        updates = np.full(sizes.shape, np.nan)
    is_same = (sizes[:, 1:] == sizes[:, :-1]) & ~(updates[:, :-1] > 0)
    return np.asarray(is_same & ~np.isnan(sizes[:, 1:]))


def changes(evidence: Evidence, name: str) -> bool:
    """Whether a parameter has been seen to change."""
    sizes = evidence.by_name("weight_rms").values.get(name, np.zeros(0))
    updates = evidence.by_name("update_rms").values.get(name, np.zeros(0))
    known = sizes[~np.isnan(sizes)]
    return bool((known[1:] != known[:-1]).any() or (updates > 0).any())


def _without_gradient(evidence: Evidence, name: str) -> bool:
    found = evidence.by_name("gradient_rms").values.get(name, np.zeros(0))
    return not (found != 0)[~np.isnan(found)].any()


NO_RATE = "The learning rate is zero"
SET_RATE = "Set the learning rate, or look at the schedule that has set it to zero."
STEPS = "No weight changes, although the optimizer steps"
TINY = (
    "The optimizer has other parameters than the model, its updates are lost since they are "
    "smaller than the weights' precision, as in bfloat16, or something else undoes them."
)
INDEPENDENT = "The loss doesn't depend on any parameter"
ZERO = "Parameters have a gradient that is exactly zero, and never change"
LOST = (
    "See what these layers compute: the loss depends on it, but something behind them multiplies "
    "it by zero or is flat there, such as a mask, units that are dead, the softmax of one number, "
    "or a clamp. The last bias cancels where a loss compares outputs with each other alone."
)
DETACHED = (
    "Compute the loss from the model's outputs themselves: detach(), item(), numpy(), "
    "torch.tensor(...), argmax and no_grad() cut the graph, so that backward reaches no parameter."
)

RULES = (
    Rule("no_step", "No weight changes: the optimizer makes no step",
         needs=(STEPS_OF_WEIGHTS,), find=no_step,
         explains=("symmetric_init", "dead_units", "lr_too_high", *NO_PROGRESS),
         advice="Call optimizer.step() after backward, on the optimizer that has the model's "
                "parameters. A GradScaler skips steps as long as gradients are not finite."),
    Rule("no_gradient", "Parameters have no gradient and never change",
         needs=(STEPS_OF_WEIGHTS,), find=no_gradient, explains=("lr_too_high", *NO_PROGRESS),
         advice="See whether forward uses these layers, and whether something cuts the graph "
                "behind them, such as detach(), item() or no_grad(). Of layers that are left out "
                "on purpose, nothing is wrong."),
)  # fmt: skip
