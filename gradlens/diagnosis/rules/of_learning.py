"""Samples that the network mixes or doesn't tell apart, and what is learnt of their labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH, PAST_PLATEAU, STUCK, is_stuck, warms_up
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import (
    CHANCE,
    CODES,
    COVERAGE,
    LOSS,
    OUTPUTS,
    SINGLE_LOSSES,
    VALIDATION,
)
from gradlens.diagnosis.numbers import finite, largest, mean, median, since, smooth
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above, below, beyond
from gradlens.diagnosis.samples import have_losses, rank
from gradlens.history.lines import Floats

MEETING = "samples meet"
"""How a reason begins for which parameters have no per-sample gradients: it is in the network, and
not in the loss, if it says between which layers."""
BETWEEN = "between it and"
UNCERTAIN = (
    "more than one agrees",
    "it can't be followed which sample",
    "in another order than the batch",
)
"""Parts of reasons where it isn't certain which axis counts the samples, or which rows are whose: a
view that mixes them hides even how many there are, or in which order."""


def mixed(evidence: Evidence) -> Iterator[Sign]:
    """Samples that meet on their way to the loss, aside from normalisations over the batch."""
    found = evidence.history.latest("coverage")
    if found is None or found.coupled:
        return
    for reason, names in found.by_reason().items():
        is_meeting = reason.startswith(MEETING)
        if not (is_meeting or any(words in reason for words in UNCERTAIN)):
            continue
        number = above("parameters without per-sample gradients", len(names), 0)
        yield Sign(
            evidence.start_step,
            (number,),
            "very likely" if is_meeting and BETWEEN in reason else "consistent with",
            is_stuck(evidence),
            tuple(names),
            title="" if is_meeting else "It isn't certain which rows belong to which sample",
        )
        return


SAME = 1e-3
"""The standard deviation of the outputs over the samples, or that over the targets' if these have a
smaller one than 1. Networks of the usual initialisations have 0.1 to 1."""
RECORDS = 3
"""Records at the end, at all of which outputs are the same."""
SMALLEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def constant(evidence: Evidence) -> Iterator[Sign]:
    """The same output for every input, at the end of a run that learns nothing.

    Or of one in which the samples' own losses stay at chance, while the rest of the loss falls,
    such as a penalty.
    """
    words = "spread of the directions of the vectors"
    for sign in ends_below(evidence, evidence.column("direction_spread"), ONE_DIRECTION, words):
        yield replace(sign, title=DIRECTION, advice=APART)
    variance = evidence.typical("target_variance")
    spreads = evidence.column("output_std") / (math.sqrt(variance) if 0 < variance < 1 else 1)
    late = median(evidence.at_loss("loss_mean")[evidence.is_late(evidence.loss.steps)])
    learns_nothing = is_stuck(evidence) or late > STUCK * evidence.chance_of_samples
    if evidence.typical("samples") >= SMALLEST and learns_nothing:
        words = "spread of the outputs over the samples"
        for sign in ends_below(evidence, spreads, SAME, words):
            yield replace(sign, certainty="very likely")


ONE_DIRECTION = 0.02
"""How far the directions of a loss's vectors are apart, from 0 to 1."""


def ends_below(evidence: Evidence, values: Floats, limit: float, words: str) -> Iterator[Sign]:
    """A sign if the last records ``[K]`` are all below a limit, in a run that is long enough.

    Its step is the one from which on they are.
    """
    known = np.isfinite(values)
    steps, values = evidence.steps[known], values[known]
    number = below(words, largest(values[-RECORDS:]), limit)
    if len(values) > RECORDS and evidence.length >= LONG_ENOUGH and number.is_beyond:
        yield Sign(int(steps[since(values < limit)]), (number,))


DIRECTION = "The vectors of all samples point in the same direction"
APART = (
    "Keep samples apart: by negative pairs, by a predictor and a target without gradient, or by "
    "terms for variance and covariance. Without these, one direction for all is the best solution."
)

NATS = 0.05
"""What a code says of its sample at most, in nats (of which a bit has 0.7): measured 1 and more in
healthy autoencoders."""


def collapsed(evidence: Evidence) -> Iterator[Sign]:
    """A code that is drawn from nearly the same distribution for each sample."""
    words = "nats that the code says of its sample at most"
    return ends_below(evidence, evidence.column("code_nats"), NATS, words)


# Wrong labels ---------------------------------------------------------------------------------

CERTAIN, FEW, MOST = 0.05, 0.025, 0.3
"""Share of samples whose loss is more than 2 log C: measured at most 0.028 in healthy runs, where
samples are hard, and 0.029 to 0.06 where 5 to 20 % of the labels are wrong. Below the first of
these, it is a notice, unless validation is another sign."""
REMAINS = 0.8
"""The same over that of the quarter before: hard samples become fewer while a network learns, and
wrong labels don't. Otherwise, validation must be a sign."""
MEDIAN, CLEAR = 0.5, 0.35
"""The median sample's loss over that by chance: the network has learnt the others. Above the second
of these, labels may be random by nature, as clicks are (measured 0.45), and it is a notice unless
validation is another sign."""
UNCLEAR = 0.8
"""The same of a network that has learnt less, which wrong labels keep it from: measured 0.57 to 0.7
where 10 and 20 % are wrong. Samples whose loss stays above chance and validation must be signs."""
VALIDATED = 0.8
"""The validation loss over the training loss, both late, where the labels that are validated with
have been checked: measured 0.4 to 0.8 with wrong labels among those that are trained on. It is 1.1
in healthy runs with hard samples in both, and as low as with wrong labels where few are hard."""
AS_HIGH = 0.95
"""The same ratio above which validation has as many such samples: labels are wrong there as well,
or random by nature, or samples are hard. It is a notice (measured 1.06 to 1.09 in healthy runs
where an eighth of the labels are random), as it is without validation, since a network that is too
small has as many."""
PERSISTENT, ENOUGH = 0.033, 0.045
"""Share of samples whose loss is above chance at the latest visit and on average, which is needed
besides: measured at most 0.023 in healthy runs with such a validation loss, and 0.047 and more
where 5 % of the labels are wrong (0.06, 0.09 and 0.18 of 5, 10 and 20 %). Above the second one,
the share above 2 log C isn't needed. Where ids aren't known, it stands in for this one."""
EASY = 40
"""A run that is shorter hasn't learnt what is easy."""
NAMED = 10
"""Samples that are named, where their ids are known: those with the highest losses."""


def contradicting(evidence: Evidence) -> Iterator[Sign]:
    late = evidence.is_late(evidence.steps)
    found = mean(evidence.column("loss_over")[late])
    usual = median(evidence.column("loss_median")[late]) / evidence.chance
    persistent, validated = _persistent(evidence), _validated(evidence)
    is_known = not math.isnan(persistent)
    many = persistent if is_known else found
    is_lower = validated < VALIDATED and PERSISTENT < many <= MOST
    is_enough = is_known and is_lower and many > ENOUGH
    limit = UNCLEAR if is_enough else MEDIAN
    if evidence.length < EASY or not usual < limit or not (is_enough or FEW <= found <= MOST):
        return
    lasts = found >= REMAINS * _before(evidence)
    if not (lasts or is_lower):
        return
    is_certain = found >= CERTAIN and usual < CLEAR and validated <= AS_HIGH
    numbers = [below("loss of the median sample, over that by chance", usual, limit)]
    if found >= FEW:
        least = CERTAIN if is_certain else FEW
        numbers.append(above("share of samples whose loss is above 2 log C", found, least))
    if is_lower:
        name = "share of samples whose loss stays above that by chance"
        numbers += [above(name, many, PERSISTENT)] if is_known else []
        numbers.append(below("validation loss, over the training loss", validated, VALIDATED))
    share = f"About {100 * many:.0f} %" if is_known else f"At least {int(100 * found)} %"
    samples = evidence.history.samples
    worst = rank(samples, NAMED) if samples is not None and have_losses(samples) else ()
    yield Sign(
        evidence.step(late),
        tuple(numbers),
        "consistent with",
        is_certain or is_lower,
        samples=tuple(str(each.id) for each in worst),
        title=f"{share} of the labels contradict what the network has learnt",
    )


def _validated(evidence: Evidence) -> float:
    """The loss of samples that aren't trained on over that of the others; NaN if it isn't known."""
    train, valid = evidence.loss, evidence.valid_loss
    start = train.steps[evidence.is_late(train.steps)][:1].sum()
    means = [mean(each.values[each.steps >= start]) for each in (valid, train)]
    return means[0] / means[1] if means[1] > 0 else math.nan


def _persistent(evidence: Evidence) -> float:
    """The share of samples whose loss stays above chance; NaN where ids aren't known."""
    samples = evidence.history.samples
    if samples is None or not (samples.visits > 1).any():
        return math.nan
    lowest = np.minimum(samples.last_loss, samples.mean_loss)[samples.visits > 1]
    return float((lowest > evidence.chance).mean())


def _before(evidence: Evidence) -> float:
    """The share of samples in the third quarter of the run; 0 if it isn't known."""
    steps = evidence.steps
    quarter = (evidence.length + 3) // 4
    third = ~evidence.is_late(steps) & (steps >= steps[0] + 2 * quarter)
    return float(np.nan_to_num(mean(evidence.column("loss_over")[third])))


# Too much -------------------------------------------------------------------------------------

TIMES, CLEARLY = 1.1, 1.15
"""The latest validation losses over the lowest one: measured at most 1.06 in healthy runs that are
far below it in training. Up to the larger limit, it is a notice."""
RISE, LASTING_RISE = 0.05, 0.025
"""The same rise, over the loss by chance: measured up to 0.06, once 0.18, in healthy runs, and 0.03
to 0.11 in faulty ones. The smaller one is enough if the rise lasts."""
LASTS = 5
"""Validations in the last quarter of the run, all of them above the first limit, of such a rise."""
GAP = 2.0
"""The validation loss over the training loss, each over what it was at the first validation: a loss
that is a sum may be validated as a mean."""
EVALUATIONS = 2
"""Consecutive validations at the end, which must all be high."""


def overfits(evidence: Evidence) -> Iterator[Sign]:
    valid = evidence.valid_loss
    values, steps = valid.values[valid.finite], valid.steps[valid.finite]
    if len(values) <= EVALUATIONS:
        return
    place = int(values.argmin())
    lowest, latest = float(values[place]), float(values[-EVALUATIONS:].min())
    train = evidence.loss
    present = evidence.present_loss
    before = finite(train.values[train.steps <= max(steps[0], train.steps[0])])[-10:]
    gap = float(np.divide(latest * median(before), values[0] * present))  # a loss may be 0
    around = (train.steps >= steps[max(place - 1, 0)]) & (train.steps <= steps[place])
    falls = present < median(train.values[around])
    reference = evidence.chance if np.isfinite(evidence.chance) else values[0]
    late = finite(valid.values[evidence.is_late(valid.steps)])
    lasts = len(late) >= LASTS and bool((late > TIMES * lowest).all())
    rise = (LASTING_RISE if lasts else RISE) * reference
    rises = latest > TIMES * lowest > 0 and latest - lowest > rise
    if rises and place < len(values) - EVALUATIONS and gap > GAP and falls:
        is_alarm = latest > CLEARLY * lowest
        limit = CLEARLY if is_alarm else TIMES
        numbers = (
            above("validation loss, over its minimum", latest / lowest, limit),
            above("validation loss, over the training loss, both over their start", gap, GAP),
        )
        yield Sign(int(steps[place]), numbers, "very likely", is_alarm)


# Nothing --------------------------------------------------------------------------------------

LATE, EVER = 0.97, 0.95
"""The loss over that by chance, at the end and ever: measured at most 0.96 in healthy runs, and
0.98 to 1.01 in faulty ones."""
HIGHEST = 1.3
"""Above this, it isn't the labels that keep the loss high."""
PARTS = 8
"""The loss is looked at in so many parts of the run, since that of single batches varies."""
AS_FIRST, AS_EARLY = 0.78, 0.955
"""Where the loss by chance isn't known: the late loss over the first one, and over that of the
second eighth of the run, the same of the validation loss. Measured at most 0.57 and 0.91 in healthy
runs but one (0.8 and 0.95), and 0.8 to 1 and 0.96 to 1 where 80 % and more of the targets are
random, so that less than a fifth of what can be learnt is learnt."""
FALLS = 0.93
"""Where it is known: the late loss over that in the middle of the run. A loss that still falls, of
a network that began far above chance, is no sign."""


def random(evidence: Evidence) -> Iterator[Sign]:
    is_late = evidence.length >= PAST_PLATEAU and not warms_up(evidence)
    if not is_late or evidence.ends_badly or largest(evidence.column("lr")) == 0:
        return
    is_known = np.isfinite(evidence.chance)
    yield from _by_chance(evidence) if is_known else _by_the_first_loss(evidence)


def _by_the_first_loss(evidence: Evidence) -> Iterator[Sign]:
    """Of a loss whose value by chance isn't known; it must be positive to be compared."""
    course, valid = _course(evidence.loss.values), _course(evidence.valid_loss.values)
    if len(course) < PARTS or not min(evidence.first_loss, *course) > 0:
        return
    late, early = evidence.late_loss / evidence.first_loss, evidence.late_loss / course[1]
    validated = valid[-1] / valid[1] if len(valid) > 1 else math.nan
    if HIGHEST > late > AS_FIRST and early > AS_EARLY and not validated < AS_EARLY:
        numbers = beyond(
            above("late loss, over the first one", late, AS_FIRST),
            above("late loss, over that of the second eighth of the run", early, AS_EARLY),
            above("the same of the validation loss", validated, AS_EARLY),
        )
        step, is_known = evidence.start_step + PAST_PLATEAU - 1, math.isfinite(validated)
        yield Sign(step, numbers, "consistent with", is_known, title=HARDLY)


HARDLY = "The loss hardly falls after the first steps"


def _course(losses: Floats) -> Floats:
    return smooth(losses, -(-len(losses) // PARTS))


def _by_chance(evidence: Evidence) -> Iterator[Sign]:
    """Of a loss that has come down to chance, and no further."""
    course, late = _course(evidence.over_chance), evidence.progress
    still_falls = course[-1] < FALLS * course[len(course) // 2]
    if LATE <= late < HIGHEST and (course > EVER).all() and not still_falls:
        numbers = (
            above("late loss, over that by chance", late, LATE),
            above("lowest loss in any eighth of the run, over that by chance", course.min(), EVER),
        )
        yield Sign(evidence.start_step + PAST_PLATEAU - 1, numbers, "consistent with")


RULES = (
    Rule("samples_mixed", "Samples of the batch meet on their way to the loss",
         needs=(COVERAGE,), find=mixed, others=("labels_random",), explains=NO_PROGRESS,
         advice="Look at permute, view, reshape and transpose behind the layers that are named, "
                "or anywhere if these are all: reshape(n, -1) after a permute mixes samples, and "
                "recurrent layers take [steps, samples, features] unless batch_first=True. Layers "
                "that compare samples on purpose, as in contrastive learning, are right."),
    Rule("posterior_collapse", "The code of the variational autoencoder says nothing of its sample",
         needs=(CODES,), find=collapsed,
         explains=("constant_output", "no_gradient", "vanishing_gradients", "labels_random"),
         sources=("Bowman et al. (2016), arXiv:1511.06349, Sec. 3.1",),
         advice="Give the divergence a smaller weight, or let it grow from 0 (annealing), and "
                "sum reconstruction errors over the elements of a sample, rather than averaging "
                "them; a decoder that sees its targets, as in a text, needs a code least."),
    Rule("constant_output", "The network has the same output for every input",
         needs=(OUTPUTS,), find=constant,
         others=("lr_too_high", "dead_units", "vanishing_gradients"),
         explains=("label_noise", "labels_random"),
         advice="Compare the outputs of each layer for two inputs: where they become the same, "
                "units are dead, inputs are out of scale, or a rate that was too high has left "
                "only the last bias. Start anew with a lower rate."),
    Rule("label_noise", "Some labels contradict what the network has learnt",
         needs=(CHANCE, SINGLE_LOSSES), find=contradicting,
         others=("outlier_sample", "overfitting"),
         advice="Look at the samples with the highest losses, which are named if the context "
                'gets info={"ids": ...}. Their labels are wrong, or by nature random, as clicks '
                "and opinions are, or these samples are hard."),
    Rule("overfitting", "The validation loss rises while the training loss falls",
         needs=(LOSS, VALIDATION), find=overfits, others=("label_noise",),
         advice="Stop at the step of the minimum, which is the step of this finding; or use more "
                "data, augmentation, weight decay or dropout."),
    Rule("labels_random", "Nothing is learnt: the loss stays at that of a guess",
         needs=(LOSS,), find=random, others=("lr_too_low", "vanishing_gradients", "input_constant"),
         explains=("dead_units",),
         sources=("Zhang et al. (2017), arXiv:1611.03530: networks fit random labels",),
         advice="Look at pairs of inputs and labels. Train with ten times the learning rate: if "
                "the loss falls, it was too low. Else train on ten samples: if the network can't "
                "learn them by heart, the fault is in the network or the loss; if it can, labels "
                "and inputs have nothing to do with each other, or the task has a plateau at its "
                "start."),
)  # fmt: skip
