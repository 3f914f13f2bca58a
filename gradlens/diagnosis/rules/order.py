"""The order of samples: the same ones again and again, or those that are alike in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.stats import rankdata

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS, SAMPLES
from gradlens.diagnosis.numbers import finite, largest, mean, median, ratio, share
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below
from gradlens.history.lines import Floats

SHARE, OFTEN = 0.5, 0.85
"""Share of the pairs of consecutive steps that have the same batch. Up to the second, some steps
with each batch are on purpose, as those of a policy with each of its rollouts: a notice."""
GAP = 1.5
"""The late validation loss over that of training. Where all steps have the same batch, it may be
the whole data set, and it is a notice unless this is a sign of harm."""
FEWEST = 8
"""Pairs of consecutive steps; with fewer, nothing is said."""


def repeated(evidence: Evidence) -> Iterator[Sign]:
    sums = evidence.column("checksum")
    known = np.isfinite(sums[1:]) & np.isfinite(sums[:-1]) & (np.diff(evidence.steps) == 1)
    same = known & (sums[1:] == sums[:-1])
    found, valid = share(same, known), evidence.valid_loss
    if known.sum() >= FEWEST and found > SHARE:
        numbers = (above("share of steps with the batch of the step before", found, SHARE),)
        has_gap = median(valid.values[evidence.is_late(valid.steps)]) > GAP * evidence.late_loss
        does_harm = OFTEN < found < 1 or has_gap
        step = int(evidence.steps[1:][same][0])
        yield Sign(step, numbers, is_alarm=does_harm, advice="" if does_harm else WHOLE)


WHOLE = (
    "If it is the whole data set, nothing is wrong; otherwise, make the loader's iterator once for "
    "each epoch, since next(iter(loader)) restarts it."
)

DISTINCT = 0.5
"""Share of a batch's rows that differ: measured 1 in healthy runs, and at most 0.08 in faulty
ones."""
FEW_STATES, FEWEST_STEPS = 1.0, 4
"""The different sizes of the batches' median rows, over the distinct rows of a batch: where there
are no more, batches have the same few rows, as of a small space of states or a small data set, and
these are all that there are. With fewer different sizes than the second, nothing is said."""
SMALLEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def duplicated(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    shares = np.where(samples >= SMALLEST, ratio(evidence.column("distinct_rows"), samples), np.nan)
    found = median(shares)
    sizes = np.unique(evidence.column("row_rms_median"))
    few = FEW_STATES * largest(evidence.column("distinct_rows"))
    if found < DISTINCT and np.isfinite(sizes).sum() > max(few, FEWEST_STEPS):
        numbers = (below("share of a batch's samples that differ", found, DISTINCT),)
        yield Sign(int(evidence.steps[shares < DISTINCT][0]), numbers)


ENTROPY = 0.8
"""The entropy of a batch's labels, over that of batches drawn at random: measured 0.99 and more in
healthy runs, and up to 0.69 in faulty ones, of data that are sorted but for some noise."""
FEWEST_SAMPLES = 8
"""Samples of a batch; of smaller ones, nothing is said."""
FEWEST_BATCHES = 10
"""Steps; with fewer, nothing is said."""
LARGEST = 64
"""The entropy of larger random batches is at least that of a batch of this size."""
RANK_RATIO, CERTAIN = 1.3, 4.0
"""Bartels's rank ratio of the batches' mean inputs, and how many standard deviations it is below 2,
which is its mean where batches are random, whatever they are drawn from: measured 1.55 and more
in healthy runs, and 0.1 to 1.2 in half of the faulty ones."""
ALTERNATING = 3.0
"""The same ratio of the batches' mean labels, of batches that alternate on purpose, as those of
real and generated samples do: 4 where each is followed by one of the other kind."""
BATCHES = 40
"""Distinct batches; with fewer, nothing is said of the inputs."""


def unshuffled(evidence: Evidence) -> Iterator[Sign]:
    """By labels where these are known, and by inputs otherwise."""
    yield from _by_labels(evidence) if evidence.labels.size else _by_inputs(evidence)


def _by_inputs(evidence: Evidence) -> Iterator[Sign]:
    sums = evidence.column("checksum")
    batches = np.unique(sums, return_index=True)[1]
    places = np.sort(batches[np.isfinite(sums[batches])])
    if len(places) < BATCHES:
        return
    means = evidence.column("input_mean"), ratio(sums, evidence.column("samples"))
    found = min(rank_ratio(each[places]) for each in means)
    limit = min(RANK_RATIO, 2 - CERTAIN * 2 / math.sqrt(len(places)))
    if found < limit:
        # Of one pass, it isn't known: inputs may be made by what is trained, or by a curriculum.
        is_alarm = len(places) < len(sums[np.isfinite(sums)])
        yield Sign(
            int(evidence.steps[places[0]]),
            (below("rank ratio of the batches' mean inputs", found, limit),),
            "consistent with",
            is_alarm,
            title="Inputs change gradually from batch to batch",
            advice="" if is_alarm else ONE_PASS,
        )


ONE_PASS = (
    "Shuffle the training data: DataLoader(..., shuffle=True). Of a buffer that is filled while "
    "training, a curriculum, or inputs that are made by what is trained, nothing is wrong."
)


def rank_ratio(values: Floats) -> float:
    """The sum of squared differences of consecutive ranks, over that of ranks from their mean.

    It is 2 on average for values in random order, with a standard deviation of about 2/√K, and less
    where neighbours are alike (Bartels, 1982, J. Am. Stat. Assoc. 77, 40).
    """
    ranks = rankdata(values)
    spread = np.square(ranks - ranks.mean()).sum()
    return float(np.square(np.diff(ranks)).sum() / spread) if spread > 0 else math.nan


def _by_labels(evidence: Evidence) -> Iterator[Sign]:
    entropies = evidence.column("label_entropy")
    known = np.isfinite(entropies)
    samples = evidence.typical("samples")
    if known.sum() < FEWEST_BATCHES or not samples >= FEWEST_SAMPLES:
        return
    expected = random_entropy(evidence.labels, int(min(samples, LARGEST)))
    found = mean(entropies) / expected if expected > 0 else math.nan
    means = finite(evidence.column("label_mean"))
    if len({*means[len(means) // 2 :]}) == 1:  # all labels are of one class, in whatever order
        return
    if found < ENTROPY and not (len(means) and rank_ratio(means) > ALTERNATING):
        numbers = (below("entropy of a batch's labels, over that of random ones", found, ENTROPY),)
        yield Sign(int(evidence.steps[known][0]), numbers)


def random_entropy(counts: Floats, size: int) -> float:
    """The expected entropy of the labels of a random batch, in nats, given all labels' counts."""
    shares = counts / counts.sum()
    shares = shares[(shares > 0) & (shares < 1)]
    drawn = np.arange(1, size)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])
    ways = factorials[size] - factorials[drawn] - factorials[size - drawn]
    logs = ways + np.outer(np.log(shares), drawn) + np.outer(np.log1p(-shares), size - drawn)
    part = drawn / size
    return float((np.exp(logs) * (-part * np.log(part))).sum())


RULES = (
    Rule("batch_repeated", "Every step has the same batch",
         needs=(INPUTS,), find=repeated,
         explains=("class_imbalance", "data_order", "overfitting", "label_noise"),
         advice="Make the loader's iterator once for each epoch: next(iter(loader)) restarts it. "
                "If you train on one batch on purpose, as a test or because it is the whole data "
                "set, nothing is wrong."),
    Rule("samples_duplicated", "Batches have the same samples several times",
         needs=(INPUTS,), find=duplicated, explains=("overfitting",),
         advice="Look at the sampler and the dataset: indices may be repeated."),
    Rule("data_order", "Batches have few of the classes each: the data aren't shuffled",
         needs=(SAMPLES,), find=unshuffled,
         explains=("class_imbalance", "overfitting", *INSTABILITY, *NO_PROGRESS),
         advice="Shuffle the training data: DataLoader(..., shuffle=True)."),
)  # fmt: skip
