"""Batches that have few of the classes each, or inputs that depend on the time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.stats import rankdata

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SAMPLES
from gradlens.diagnosis.numbers import finite, ratio
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, below
from gradlens.history.lines import Floats

SHARE = 0.8
"""The entropy of a batch's labels, over that of batches drawn at random: measured 0.99 and more in
healthy runs, and up to 0.69 in faulty ones, of data that are sorted but for some noise."""
SMALLEST = 8
"""Samples of a batch; of smaller ones, nothing is said."""
FEWEST = 10
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


def find(evidence: Evidence) -> Iterator[Sign]:
    """By labels where these are known, and by inputs otherwise."""
    yield from _of_labels(evidence) if evidence.labels.size else _of_inputs(evidence)


def _of_inputs(evidence: Evidence) -> Iterator[Sign]:
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
            title="Inputs change gradually from batch to batch: the data aren't shuffled",
        )


def rank_ratio(values: Floats) -> float:
    """The sum of squared differences of consecutive ranks, over that of ranks from their mean.

    It is 2 on average for values in random order, with a standard deviation of about 2/√K, and less
    where neighbours are alike (Bartels, 1982, J. Am. Stat. Assoc. 77, 40).
    """
    ranks = rankdata(values)
    spread = np.square(ranks - ranks.mean()).sum()
    return float(np.square(np.diff(ranks)).sum() / spread) if spread > 0 else math.nan


def _of_labels(evidence: Evidence) -> Iterator[Sign]:
    entropies = evidence.column("label_entropy")
    known = np.isfinite(entropies)
    samples = evidence.typical("samples")
    if known.sum() < FEWEST or not samples >= SMALLEST:
        return
    expected = random_entropy(evidence.labels, int(min(samples, LARGEST)))
    found = float(finite(entropies).mean()) / expected if expected > 0 else math.nan
    means = finite(evidence.column("label_mean"))
    if found < SHARE and not (len(means) and rank_ratio(means) > ALTERNATING):
        numbers = (below("entropy of a batch's labels, over that of random ones", found, SHARE),)
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


RULE = Rule(
    fault="data_order",
    title="Batches have few of the classes each: the data aren't shuffled",
    needs=(SAMPLES,),
    find=find,
    advice="Shuffle the training data: DataLoader(..., shuffle=True).",
    explains=("class_imbalance", "overfitting", *INSTABILITY, *NO_PROGRESS),
)
