"""Some labels contradict what the network has learnt from the others."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import CHANCE, SINGLE_LOSSES
from gradlens.diagnosis.numbers import finite, median
from gradlens.diagnosis.rule import Rule, Sign, above, below
from gradlens.diagnosis.samples import have_losses, scores

CERTAIN, FEWEST, MOST = 0.05, 0.025, 0.3
"""Share of samples whose loss is more than 2 log C: measured at most 0.028 in healthy runs, where
samples are hard, and 0.029 to 0.06 where 5 to 20 % of the labels are wrong. Below the first of
these, it is a notice, unless validation is another sign."""
LASTS = 0.8
"""The same over that of the quarter before: hard samples become fewer while a network learns, and
wrong labels don't. Otherwise, it is a notice."""
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
STEPS = 40
"""A run that is shorter hasn't learnt what is easy."""
NAMED = 10
"""Samples that are named, where their ids are known: those with the highest losses."""


def find(evidence: Evidence) -> Iterator[Sign]:
    late = evidence.is_late(evidence.steps)
    over = finite(evidence.column("loss_over")[late])
    usual = median(evidence.column("loss_median")[late]) / evidence.chance
    found = float(over.mean()) if over.size else math.nan
    persistent, validated = _persistent(evidence), _validated(evidence)
    is_known = not math.isnan(persistent)
    many = persistent if is_known else found
    is_lower = validated < VALIDATED and PERSISTENT < many <= MOST
    is_enough = is_known and is_lower and many > ENOUGH
    limit = UNCLEAR if is_enough else MEDIAN
    if evidence.length < STEPS or not usual < limit or not (is_enough or FEWEST <= found <= MOST):
        return
    lasts = found >= LASTS * _before(evidence)
    is_certain = found >= CERTAIN and lasts and usual < CLEAR and validated <= AS_HIGH
    numbers = [below("loss of the median sample, over that by chance", usual, limit)]
    if found >= FEWEST:
        least = CERTAIN if is_certain else FEWEST
        numbers.append(above("share of samples whose loss is above 2 log C", found, least))
    if is_lower:
        if is_known:
            name = "share of samples whose loss stays above that by chance"
            numbers.append(above(name, many, PERSISTENT))
        numbers.append(below("validation loss, over the training loss", validated, VALIDATED))
    share = f"About {100 * many:.0f} %" if is_known else f"At least {int(100 * found)} %"
    yield Sign(
        int(evidence.steps[late][0]),
        tuple(numbers),
        "consistent with",
        is_certain or is_lower,
        samples=_worst(evidence),
        title=f"{share} of the labels contradict what the network has learnt",
    )


def _validated(evidence: Evidence) -> float:
    """The loss of samples that aren't trained on over that of the others; NaN if it isn't known."""
    train, valid = evidence.loss, evidence.valid_loss
    start = train.steps[evidence.is_late(train.steps)][:1].sum()
    means = [finite(each.values[each.steps >= start]) for each in (valid, train)]
    return means[0].mean() / means[1].mean() if means[0].size and means[1].size else math.nan


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
    shares = finite(evidence.column("loss_over")[third])
    return float(shares.mean()) if shares.size else 0.0


def _worst(evidence: Evidence) -> tuple[str, ...]:
    """The ids of the samples whose losses are the furthest above those of their batches."""
    samples = evidence.history.samples
    if samples is None or not have_losses(samples):
        return ()
    order = np.argsort(-scores(samples), kind="stable")[:NAMED]
    return tuple(str(samples.ids[place]) for place in order)


RULE = Rule(
    fault="label_noise",
    title="Some labels contradict what the network has learnt",
    needs=(CHANCE, SINGLE_LOSSES),
    find=find,
    advice="Look at the samples with the highest losses, which are named if the context gets "
    'info={"ids": ...}. Their labels are wrong, or by nature random, as clicks and opinions are, '
    "or these samples are hard.",
    others=("outlier_sample", "overfitting"),
)
