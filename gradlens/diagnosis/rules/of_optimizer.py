"""How the optimizer is used: its rate, state, gradients, and options that keep it from learning."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH, SHRUNK, is_stuck, rise, spread, update_ratio
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, OPTIMIZER, RATES, STALE, UPDATES, WEIGHTS
from gradlens.diagnosis.numbers import Truths, first, largest, median, medians, ratio, share, since
from gradlens.diagnosis.rule import (
    INSTABILITY,
    NO_PROGRESS,
    Rule,
    Sign,
    above,
    below,
    beyond,
    mostly,
    shown,
)
from gradlens.diagnosis.rules.unchanged import changes

TINY = 1e-3
"""The learning rate over its maximum: usual schedules come that far down in their last steps."""
MOST = 0.5
"""Share of the run, its steps or its records: what is rarer may be on purpose."""


def decays(evidence: Evidence) -> Iterator[Sign]:
    rates = evidence.column("lr")
    known = np.isfinite(rates)
    rates, steps = rates[known], evidence.steps[known]
    start = since(rates < TINY * rates.max())
    # A rate that is zero at once was set so, and is named by another rule.
    if evidence.length >= LONG_ENOUGH and start < len(rates) and rates[start] > 0:
        share = float(steps[-1] - steps[start]) / float(steps[-1] - steps[0])
        numbers = (
            below("latest learning rate, over the largest", rates[-1] / rates.max(), TINY),
            above("share of the run below that", share, MOST),
        )
        yield from shown(Sign(int(steps[start]), numbers))


WITH_STATE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "SGD")
"""Classes of torch.optim whose state is empty until their first step; SGD's needs a momentum."""
FEWEST = 5
"""Steps after an update; with fewer, nothing is said. A loop may begin some rounds with a new
optimizer on purpose, and a gradient may remain from before training."""
ROUNDS, AROUND, RISES = 3, 3, 1.2
"""Rounds that begin with an empty state, and the median loss of so many steps from there on over
that before: above, the weights are made anew as well."""


def anew(evidence: Evidence) -> Iterator[Sign]:
    if evidence.setup.optimizer not in WITH_STATE:
        return
    if evidence.setup.optimizer == "SGD" and not evidence.option("momentum") > 0:
        return
    if not any(changes(evidence, name) for name in evidence.by_name("weight_rms").values):
        return  # of parameters that had no gradient at its steps, an optimizer has no state
    is_after = np.append(False, evidence.column("updates")[:-1] > 0)
    is_empty = is_after & (evidence.column("stateless") > 0)
    if is_after.sum() >= FEWEST and share(is_empty, is_after) > MOST:
        words = "share of the steps that begin with an empty state"
        yield from mostly(evidence, is_empty, is_after, MOST, words)
    elif is_empty.sum() >= ROUNDS:
        rises = _rises(evidence, is_empty)
        numbers = beyond(
            above("rounds that begin with an empty state", is_empty.sum(), ROUNDS - 1),
            above("loss when the state is empty, over that before", rises, RISES),
        )
        step = evidence.step(is_empty)
        yield Sign(step, numbers, is_alarm=rises > RISES, title=ROUND)


def _rises(evidence: Evidence, holds: Truths) -> float:
    """The loss from some steps on, over that before each of them; the median."""
    losses = evidence.column("loss")
    places = [place for place in np.flatnonzero(holds) if place]
    after = [median(losses[n : n + AROUND]) for n in places]
    return median(ratio(after, [median(losses[n - AROUND : n]) for n in places]))


LOST = 0.8
"""The loss from there on over the first one, where what has been learnt is lost."""
REDRAWN = 0.3
"""How far weights are from one step to the next, over their size, if they are drawn again."""


def overwritten(evidence: Evidence) -> Iterator[Sign]:
    """Weights that something else than the optimizer writes to, so that nothing stays learnt.

    Averages, bounds and perturbations of weights are written as well, of runs that learn, or of
    those that don't for another reason.
    """
    holds, restored = (evidence.column(name) > 0 for name in ("overwritten", "restored"))
    if holds.sum() < ROUNDS:
        return
    rises, after = _rises(evidence, holds), median(evidence.column("loss")[holds])
    falls_back = rises > max(RISES, spread(evidence)) and after > LOST * evidence.first_loss > 0
    is_restored, moved = restored.sum() >= ROUNDS, update_ratio(evidence)
    if not (is_restored or falls_back or is_stuck(evidence)):
        return
    numbers = [above("steps before which weights were written to", holds.sum(), ROUNDS - 1)]
    if is_restored:
        numbers = [above("steps that begin with the first weights", restored.sum(), ROUNDS - 1)]
    elif falls_back:
        numbers.append(above("loss from there on, over that before", rises, RISES))
    yield Sign(
        int(evidence.steps[max(np.flatnonzero(holds)[0] - 1, 0)]),
        tuple(numbers),
        "fact" if is_restored else "very likely" if falls_back else "consistent with",
        is_alarm=is_restored or falls_back or not 0 < moved < REDRAWN,
    )


ROUND = "The optimizer is made anew again and again, and forgets what it has averaged"


def keeps_gradients(evidence: Evidence) -> Iterator[Sign]:
    stale = evidence.column("stale")
    known = np.isfinite(stale)
    known[:1] = False  # there is no step before the first
    if known.sum() >= FEWEST:
        words = "share of steps that begin with the gradients of the last one"
        yield from mostly(evidence, stale > 0, known, MOST, words)


TIMES = 1.0
"""Epsilon over the median of √v: measured at most 1e-3 in healthy runs, and 300 to 7e4 in faulty
ones."""
USUAL = 1e-6
"""Below this, epsilon isn't what is wrong if gradients are even smaller."""
SMALLEST = 2.98e-8
"""Numbers below are 0 in float16, so that Adam divides by zero where a gradient has been 0."""
ZERO_IN_HALF = "Adam's epsilon is 0 in float16"
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
        yield Sign(evidence.start_step, (number,), title=ZERO_IN_HALF, advice=IN_HALF)
    elif epsilon > USUAL and names:
        found = ratio(epsilon, medians(moments.matrix(names)))
        known = np.isfinite(found)
        if share(found > TIMES, known) > MOST:
            number = above("epsilon over the median of the root of v", median(found), TIMES)
            yield Sign(int(moments.steps[known][0]), (number,))


MEMORY = 1.0
"""Steps in which decay shrinks weights to a third, over those of the run: measured 40 and more in
healthy runs, and at most 0.33 in faulty ones."""
LEARNT, LEARNT_WELL = 0.5, 0.25
"""The late loss over that without learning, of a network with normalisation and of one without: a
network that learns in spite of it may be meant to, above all with normalisation, for which the size
of weights is irrelevant."""


COUPLED = ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
"""Classes that add the decay to the gradient before they scale it."""
OUTWEIGHS = 1.0
"""The decay of a weight over its gradient, of such an optimizer: above, it decides the updates."""


def decay_is_high(evidence: Evidence) -> Iterator[Sign]:
    decay, rate = evidence.option("weight_decay"), largest(evidence.column("lr"))
    weights, gradients = evidence.by_name("weight_rms"), evidence.by_name("gradient_rms")
    if not decay > 0 or not rate > 0 or evidence.length < 2 or not evidence.trained:
        return
    sizes = weights.matrix(evidence.trained)
    course = np.exp(np.nan_to_num(np.log(ratio(sizes, sizes[:, :1]))).mean(axis=0))
    momentum = evidence.option("momentum")
    memory = (1 - (momentum if momentum > 0 else 0)) / (rate * decay)
    is_strong = memory < MEMORY * evidence.length
    number = below("steps that decay remembers", memory, MEMORY * evidence.length)
    if evidence.setup.optimizer in COUPLED and np.array_equal(weights.steps, gradients.steps):
        pull = decay * median(ratio(sizes, gradients.matrix(evidence.trained)))
        is_strong = pull > OUTWEIGHS
        number = above("decay of a weight, over its gradient", pull, OUTWEIGHS)
    place = first(course < SHRUNK)
    if is_strong and place is not None and course[-1] < SHRUNK:
        learnt = LEARNT if evidence.is_normalised else LEARNT_WELL
        size = below("size of the weights, over that at the start", course[-1], SHRUNK)
        is_alarm = not evidence.progress < learnt
        yield Sign(int(weights.steps[place]), (number, size), "very likely", is_alarm)


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
    numbers = (
        above("momentum", momentum, HIGHEST),
        above("steps that it averages over", memory, round(1 / (1 - HIGHEST))),
        *beyond(above("loss over that at the start, at three steps", highest, RISEN)),
    )
    is_rare = momentum > RARE or evidence.option("beta1") > HIGHEST
    is_slow = is_rare and memory > OF_RUN * evidence.length
    is_alarm = highest > RISEN or is_stuck(evidence) or is_slow
    yield Sign(evidence.start_step, numbers, is_alarm=is_alarm)


RULES = (
    Rule("lr_decayed", "The schedule has made the learning rate tiny for most of the run",
         needs=(RATES,), find=decays, explains=("no_step", "lr_too_low", "labels_random"),
         advice="Call scheduler.step() once an epoch if the schedule counts epochs. Otherwise "
                "give the schedule the number of steps of the whole run."),
    Rule("weights_overwritten",
         "Weights are written to between the optimizer's steps, and nothing stays learnt",
         needs=(OPTIMIZER, UPDATES), find=overwritten,
         explains=("optimizer_anew", "no_step", *INSTABILITY, *NO_PROGRESS),
         advice="Look for load_state_dict, init functions and copy_ in the loop: the first "
                "weights may be drawn or loaded again, or those of a target network copied the "
                "wrong way. Where each round begins anew on purpose, nothing is wrong."),
    Rule("optimizer_anew", "The optimizer is made anew at each step",
         needs=(OPTIMIZER, UPDATES), find=anew,
         explains=("outlier_sample", "corrupt_batch", "lr_edge", "labels_random"),
         advice="Make the optimizer once, before the loop. A new one has no momentum, and each "
                "of its steps is the first one: Adam's then has the same size for all gradients."),
    Rule("zero_grad_missing", "Gradients of past steps are never set to zero",
         needs=(STALE,), find=keeps_gradients, others=("momentum_high", "lr_edge"),
         explains=(*INSTABILITY, *NO_PROGRESS),
         advice="Call optimizer.zero_grad() before each backward pass. To accumulate "
                "micro-batches on purpose, call the optimizer's step after the last of them only."),
    Rule("adam_epsilon", "Adam's epsilon is larger than the root of its second moments",
         needs=(OPTIMIZER,), find=epsilon_is_large, others=("lr_too_low",),
         explains=("nonfinite_weights", "nonfinite_loss", "lr_too_high", *NO_PROGRESS),
         advice="Use eps=1e-8, which is the default. With a large epsilon, Adam is gradient "
                "descent with a very small learning rate."),
    Rule("weight_decay_high", "Weight decay is so strong that the weights shrink",
         needs=(OPTIMIZER, WEIGHTS), find=decay_is_high, explains=("dead_units", *NO_PROGRESS),
         sources=("Wang and Aitchison (2024), arXiv:2405.13698: decay as a time scale",),
         advice="Divide weight_decay by 10 or more, so that 1/(learning rate x decay) is more "
                "than the number of steps."),
    Rule("momentum_high", "Momentum averages over very many steps",
         needs=(OPTIMIZER, LOSS), find=momentum_is_high, others=("lr_edge", "zero_grad_missing"),
         explains=("overfitting", *INSTABILITY, *NO_PROGRESS),
         advice="Use a momentum of 0.9, or a lower learning rate: with momentum b, steps are "
                "1/(1 - b) times as long."),
)  # fmt: skip
