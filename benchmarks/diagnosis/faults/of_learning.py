"""Faults of the learning rate, of the labels, and of how much data there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.diagnosis.faults.fault import (
    Fault,
    Injected,
    can_contradict,
    diverges,
    overfits,
    stalls,
    swings,
)
from benchmarks.diagnosis.faults.of_the_batch import labels_of
from benchmarks.diagnosis.loop import train
from benchmarks.diagnosis.training import Split, Training

DOUBLINGS = 12
"""A rate that is 4096 times the problem's own and doesn't diverge never does."""
FINER = tuple(2 ** (-third / 3) for third in range(1, 8))
"""Times a rate that diverges: the rates down to a fifth of it that may do harm without that."""


@cache
def diverging_rate(training: Training, seed: int) -> float | None:
    """The first of the usual rate times 2, 4, 8, ... that diverges; ``None`` if none does."""
    healthy = train(training, seed)
    rates = (training.rate * 2**doubling for doubling in range(1, DOUBLINGS + 1))
    return next((r for r in rates if diverges(train(at_rate(training, r), seed), healthy)), None)


@cache
def edge_rates(training: Training, seed: int) -> tuple[float, ...]:
    """The rates that do harm and don't diverge, in descending order."""
    highest = diverging_rate(training, seed)
    if highest is None:
        return ()
    healthy = train(training, seed)
    rates = (highest * factor for factor in FINER)
    return tuple(r for r in rates if swings(train(at_rate(training, r), seed), healthy))


def at_rate(training: Training, rate: float) -> Training:
    """The training with another learning rate."""
    return replace(training, rate=rate)


def lr_too_high(training: Training, strength: float, seed: int) -> Injected | None:
    rate = diverging_rate(training, seed)
    return None if rate is None else Injected(at_rate(training, strength * rate))


def lr_edge(training: Training, strength: float, seed: int) -> Injected | None:
    rates = edge_rates(training, seed)
    if not rates:
        return None
    return Injected(at_rate(training, rates[round((1 - strength) * (len(rates) - 1))]))


def lr_too_low(training: Training, strength: float, seed: int) -> Injected:
    return Injected(replace(training, rate=training.rate / strength))


def permuted(targets: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of the targets change places."""
    chosen = torch.randperm(len(targets), generator=generator)[: int(share * len(targets))]
    changed = targets.clone()
    changed[chosen] = targets[chosen[torch.randperm(len(chosen), generator=generator)]]
    return changed


def with_random_targets(data: Callable[[int], Split], share: float, seed: int) -> Split:
    """A share of all targets belong to other samples."""
    split, generator = data(seed), torch.Generator().manual_seed(seed)
    targets = permuted(split.targets, share, generator)
    return replace(
        split, targets=targets, valid_targets=permuted(split.valid_targets, share, generator)
    )


def labels_random(training: Training, strength: float, seed: int) -> Injected:
    data = partial(with_random_targets, training.data, strength)
    return Injected(replace(training, data=data))


def wrong_samples(split: Split, share: float, seed: int) -> Tensor:
    """The samples whose labels are wrong."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(split.targets), generator=generator)
    return order[: math.ceil(share * len(order))]


def with_noise(data: Callable[[int], Split], share: float, seed: int) -> Split:
    """A share of the labels that are trained on are replaced by another class."""
    split, generator = data(seed), torch.Generator().manual_seed(seed)
    wrong, targets = wrong_samples(split, share, seed), split.targets.clone()
    classes = int(targets.max()) + 1
    shift = torch.randint(1, classes, targets[wrong].shape, generator=generator)
    targets[wrong] = ((targets[wrong] + shift) % classes).to(targets.dtype)
    return replace(split, targets=targets)


def label_noise(training: Training, strength: float, seed: int) -> Injected | None:
    split = training.data(seed)
    if labels_of(split) is None:
        return None
    samples = frozenset(wrong_samples(split, strength, seed).tolist())
    data = partial(with_noise, training.data, strength)
    return Injected(replace(training, data=data), samples=samples)


def first_samples(data: Callable[[int], Split], count: int, seed: int) -> Split:
    """Only some of the samples are trained on."""
    split = data(seed)
    return replace(split, inputs=split.inputs[:count], targets=split.targets[:count])


FEWEST = 16
"""Samples that are searched for, of which a quarter still makes two batches."""


def with_few_samples(training: Training, count: int) -> Training:
    """Twice the steps on some of the samples."""
    return replace(
        training,
        data=partial(first_samples, training.data, count),
        batch_size=min(training.batch_size, count // 2),
        steps=2 * training.steps,
    )


@cache
def overfitted_samples(training: Training, seed: int) -> int | None:
    """The largest of all samples over 1, 2, 4, ... that are overfitted; ``None`` if none is."""
    healthy, count = train(training, seed), len(training.data(seed).inputs)
    while count >= FEWEST:
        if overfits(train(with_few_samples(training, count), seed), healthy):
            return count
        count //= 2
    return None


def overfitting(training: Training, strength: float, seed: int) -> Injected | None:
    most = overfitted_samples(training, seed)
    return None if most is None else Injected(with_few_samples(training, round(most / strength)))


# fmt: off
OF_LEARNING = (
    Fault("lr_too_high", "times a rate that diverges", (1, 4, 30), lr_too_high, diverges),
    Fault("lr_edge", "place between harm and divergence", (0.0, 0.5, 1.0), lr_edge, swings),
    Fault("lr_too_low", "1 over factor", (1e2, 1e3, 1e4), lr_too_low, stalls),
    Fault("labels_random", "share of targets", (0.8, 0.95, 1.0), labels_random, stalls),
    Fault("label_noise", "share of labels", (0.05, 0.1, 0.2), label_noise, can_contradict),
    Fault("overfitting", "most samples that are overfitted over", (1, 2, 4), overfitting, overfits),
)
