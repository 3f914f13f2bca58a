"""Options of the optimizer that keep it from learning: epsilon, decay and momentum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_stuck, rise
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, OPTIMIZER, WEIGHTS
from gradlens.diagnosis.numbers import first, largest, median, medians, ratio, share
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below

TIMES = 1.0
"""Epsilon over the median of √v: measured at most 1e-3 in healthy runs, and 300 to 7e4 in faulty
ones."""
USUAL = 1e-6
"""Below this, epsilon isn't what is wrong if gradients are even smaller."""
SHARE = 0.5
"""Share of the recorded steps."""
SMALLEST = 2.98e-8
"""Numbers below are 0 in float16, so that Adam divides by zero where a gradient has been 0."""
IN_HALF = (
    "Keep the weights in float32 and use torch.autocast, or use eps=1e-4: in float16, numbers "
    "below 3e-8 are 0, and Adam divides 0 by 0."
)


def epsilon_is_large(evidence: Evidence) -> Iterator[Sign]:
    if not evidence.loss.steps.size:
        return
    epsilon = evidence.option("eps")
    moments = evidence.by_name("root_second_moment")
    names = tuple(name for name in evidence.trained if name in moments.values)
    if epsilon < SMALLEST and "float16" in evidence.setup.dtypes:
        number = below("epsilon, which is 0 in float16", epsilon, SMALLEST)
        step = int(evidence.loss.steps[0])
        yield Sign(step, (number,), title="Adam's epsilon is 0 in float16", advice=IN_HALF)
        return
    if not epsilon > USUAL or not names:
        return
    typical = medians(moments.matrix(names))
    found = ratio(np.full(len(typical), epsilon), typical)
    known = np.isfinite(found)
    if share(found > TIMES, known) > SHARE:
        numbers = (above("epsilon over the median of the root of v", median(found), TIMES),)
        yield Sign(int(moments.steps[known][0]), numbers)


SHRUNK = 0.7
"""The geometric mean of the weights' sizes over those at the start: measured 1 and more in healthy
runs, and at most 0.56 in faulty ones."""
MEMORY = 1.0
"""Steps in which decay shrinks weights to a third, over those of the run: measured 40 and more in
healthy runs, and at most 0.33 in faulty ones."""
LEARNT, LEARNT_WELL = 0.5, 0.25
"""The late loss over that without learning, of a network with normalisation and of one without: a
network that learns in spite of it may be meant to, above all with normalisation, for which the size
of weights is irrelevant."""


def decay_is_high(evidence: Evidence) -> Iterator[Sign]:
    decay, rate = evidence.option("weight_decay"), largest(evidence.column("lr"))
    if not decay > 0 or not rate > 0:
        return
    momentum = evidence.option("momentum")
    memory = (1 - (momentum if momentum > 0 else 0)) / (rate * decay)
    weights = evidence.by_name("weight_rms")
    if evidence.length < 2 or not len(weights.steps) or not evidence.trained:
        return
    sizes = weights.matrix(evidence.trained)
    course = np.exp(np.nan_to_num(np.log(ratio(sizes, sizes[:, :1]))).mean(axis=0))
    if memory < MEMORY * evidence.length and course[-1] < SHRUNK:
        learnt = LEARNT if evidence.is_normalised else LEARNT_WELL
        place = first(course < SHRUNK)
        assert place is not None
        yield Sign(
            int(weights.steps[place]),
            (
                below("steps that decay remembers", memory, MEMORY * evidence.length),
                below("size of the weights, over that at the start", course[-1], SHRUNK),
            ),
            "very likely",
            is_alarm=not evidence.progress < learnt,
        )


HIGHEST = 0.98
"""A momentum above the usual 0.9 and 0.95; 0.99 is used with large batches and long runs."""
RARE, OF_RUN = 0.99, 0.25
"""A momentum above the first, or an Adam's β₁ above the usual one, is hardly ever intended. It is
an alarm by itself if gradients are averaged over more than the second's share of the steps."""
RISEN = 1.3
"""The loss over that at the start, after the first steps: measured at most 1.3 in healthy runs."""


def momentum_is_high(evidence: Evidence) -> Iterator[Sign]:
    momentum = largest([evidence.option("momentum"), evidence.option("beta1")])
    if not momentum > HIGHEST:
        return
    memory = round(1 / max(1 - momentum, 1e-6))
    highest = rise(evidence)
    numbers = [
        above("momentum", momentum, HIGHEST),
        above("steps that it averages over", memory, round(1 / (1 - HIGHEST))),
    ]
    if highest > RISEN:
        numbers.append(above("loss over that at the start, at three steps", highest, RISEN))
    is_rare = momentum > RARE or evidence.option("beta1") > HIGHEST
    is_slow = is_rare and memory > OF_RUN * evidence.length
    is_alarm = highest > RISEN or is_stuck(evidence) or is_slow
    yield Sign(int(evidence.loss.steps[0]), tuple(numbers), is_alarm=is_alarm)


RULES = (
    Rule(
        fault="adam_epsilon",
        title="Adam's epsilon is larger than the root of its second moments",
        needs=(OPTIMIZER,),
        find=epsilon_is_large,
        advice="Use eps=1e-8, which is the default. With a large epsilon, Adam is gradient descent "
        "with a very small learning rate.",
        others=("lr_too_low",),
        explains=("nonfinite_weights", "nonfinite_loss", "lr_too_high", *NO_PROGRESS),
    ),
    Rule(
        fault="weight_decay_high",
        title="Weight decay is so strong that the weights shrink",
        needs=(OPTIMIZER, WEIGHTS),
        find=decay_is_high,
        advice="Divide weight_decay by 10 or more, so that 1/(learning rate x decay) is more than "
        "the number of steps.",
        explains=("dead_units", *NO_PROGRESS),
        sources=("Wang and Aitchison (2024), arXiv:2405.13698: decay as a time scale",),
    ),
    Rule(
        fault="momentum_high",
        title="Momentum averages over very many steps",
        needs=(OPTIMIZER, LOSS),
        find=momentum_is_high,
        advice="Use a momentum of 0.9, or a lower learning rate: with momentum b, steps are "
        "1/(1 - b) times as long.",
        others=("lr_edge", "zero_grad_missing"),
        explains=("overfitting", *INSTABILITY, *NO_PROGRESS),
    ),
)
