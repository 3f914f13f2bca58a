"""Batches that have few of the classes each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LABELS
from gradlens.diagnosis.numbers import finite
from gradlens.diagnosis.rule import Rule, Sign, below
from gradlens.history.lines import Floats

SHARE = 0.8
"""The entropy of a batch's labels, over that of batches drawn at random: measured 0.99 and more in
healthy runs, and up to 0.69 in faulty ones, of data that are sorted but for some noise."""
SMALLEST = 8
"""Samples of a batch."""
FEWEST = 10
"""Steps."""
LARGEST = 64
"""The entropy of larger random batches is at least that of a batch of this size."""


def find(evidence: Evidence) -> Iterator[Sign]:
    entropies = evidence.column("label_entropy")
    known = np.isfinite(entropies)
    samples = evidence.typical("samples")
    if known.sum() < FEWEST or not samples >= SMALLEST:
        return
    expected = random_entropy(evidence.labels, int(min(samples, LARGEST)))
    found = float(finite(entropies).mean()) / expected if expected > 0 else math.nan
    if found < SHARE:
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
    needs=(LABELS,),
    find=find,
    advice="Shuffle the training data: DataLoader(..., shuffle=True).",
    explains=(
        "class_imbalance",
        "outlier_sample",
        "corrupt_batch",
        "clipping_always",
        "saturated_units",
        "dead_units",
        "lr_edge",
        "lr_too_high",
        "label_noise",
        "overfitting",
        "labels_random",
    ),
)
