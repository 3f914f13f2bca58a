"""Data of the development problems: some of scikit-learn's, and synthetic ones.

Each is a function of a seed, which draws the samples or divides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor

from benchmarks.diagnosis.problem import Split

TRAINED = 0.75
"""Share of the samples that are trained on."""
DRAWN = 2400
"""Samples of synthetic data: 1800 to train on are enough for 150 batches of 32 in few epochs."""


def divided(inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Split:
    """Samples in random order, the first ``TRAINED`` of them to train on."""
    order = torch.randperm(len(inputs), generator=generator)
    trained, kept = order.split(
        [int(TRAINED * len(inputs)), len(inputs) - int(TRAINED * len(inputs))]
    )
    return Split(inputs[trained], targets[trained], inputs[kept], targets[kept])


def standardised(columns: Tensor) -> Tensor:
    """Columns of mean 0 and standard deviation 1; constant ones are 0."""
    spread = columns.std(0)
    return (columns - columns.mean(0)) / torch.where(spread > 0, spread, 1.0)


def table(load: Callable[..., Any], seed: int) -> Split:
    """A table of scikit-learn's with standardised columns, and classes as targets."""
    inputs, targets = load(return_X_y=True)
    columns = standardised(torch.tensor(inputs, dtype=torch.float32))
    return divided(columns, torch.tensor(targets), torch.Generator().manual_seed(seed))


def breast_cancer(seed: int) -> Split:
    """30 columns, and one target of 0 or 1 as a real number for a binary cross-entropy."""
    split = table(datasets.load_breast_cancer, seed)
    targets, valid = (t.float()[:, None] for t in (split.targets, split.valid_targets))
    return Split(split.inputs, targets, split.valid_inputs, valid)


def wine(seed: int) -> Split:
    """13 columns, 3 classes, 178 samples."""
    return table(datasets.load_wine, seed)


def digits(seed: int) -> Split:
    """64 columns, 10 classes, 1797 samples."""
    return table(datasets.load_digits, seed)


def digit_images(seed: int) -> Split:
    """The same digits as images ``[1, 8, 8]`` of mean 0 and standard deviation 1."""
    inputs, targets = datasets.load_digits(return_X_y=True)
    images = torch.tensor(inputs, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    return divided(images, torch.tensor(targets), torch.Generator().manual_seed(seed))


def reconstructed_digits(seed: int) -> Split:
    """Images of digits as rows, which are their own targets."""
    split = digit_images(seed)
    rows, valid = split.inputs.flatten(1), split.valid_inputs.flatten(1)
    return Split(rows, rows, valid, valid)


def diabetes(seed: int) -> Split:
    """10 columns, 442 samples, and a standardised target."""
    inputs, targets = datasets.load_diabetes(return_X_y=True)
    both = standardised(torch.tensor(np.column_stack([inputs, targets]), dtype=torch.float32))
    return divided(both[:, :-1], both[:, -1:], torch.Generator().manual_seed(seed))


def friedman(seed: int) -> Split:
    """The first of Friedman, 1991: 10 columns, 5 of which matter, and a standardised target."""
    inputs, targets = datasets.make_friedman1(DRAWN, noise=0.5, random_state=seed)
    both = standardised(torch.tensor(np.column_stack([inputs, targets]), dtype=torch.float32))
    return divided(both[:, :-1], both[:, -1:], torch.Generator().manual_seed(seed))


def clusters(seed: int, dimensions: int = 20, classes: int = 6, per_class: int = 3) -> Split:
    """Each class has several Gaussian clusters, some of which overlap with another class's."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(classes * per_class, dimensions, generator=generator)
    which = torch.randint(classes * per_class, (DRAWN,), generator=generator)
    inputs = centres[which] + torch.randn(DRAWN, dimensions, generator=generator)
    return divided(standardised(inputs), which % classes, generator)


def spirals(seed: int) -> Split:
    """Three arms in a plane, one class each."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (DRAWN,), generator=generator)
    radius = torch.rand(DRAWN, generator=generator).sqrt()
    angle = 3.0 * radius + arm * 2 * math.pi / 3
    angle = angle + 0.15 * torch.randn(DRAWN, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return divided(standardised(points), arm, generator)


def waves(seed: int, length: int = 24, classes: int = 4) -> Split:
    """Noisy sines ``[length, 1]`` of any phase; the class is the frequency."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(classes, (DRAWN,), generator=generator)
    phase = 2 * math.pi * torch.rand(DRAWN, 1, generator=generator)
    time = torch.arange(length) * (0.25 * (kind[:, None] + 1))
    noise = 0.3 * torch.randn(DRAWN, length, generator=generator)
    return divided((1.3 * (time + phase).sin() + noise)[..., None], kind, generator)


def signals(seed: int) -> Split:
    """The waves as one channel ``[1, length]``."""
    split = waves(seed, length=32, classes=5)
    inputs, valid = (x.transpose(1, 2).contiguous() for x in (split.inputs, split.valid_inputs))
    return Split(inputs, split.targets, valid, split.valid_targets)


def running_sums(seed: int, length: int = 12) -> Split:
    """Sequences ``[length, 2]`` of values and marks; the target is the sum of marked values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(DRAWN, length, generator=generator)
    marks = (torch.rand(DRAWN, length, generator=generator) < 0.4).float()
    targets = standardised((values * marks).sum(1, keepdim=True))
    return divided(torch.stack([values, 2 * marks - 1], 2), targets, generator)


def texts(seed: int, words: int = 200, length: int = 12, classes: int = 5) -> Split:
    """Words drawn by Zipf's law; each class prefers words of its own."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(classes, (DRAWN,), generator=generator)
    frequency = (1 / (1 + torch.arange(words))).repeat(classes, 1)
    owner = torch.arange(words) % classes
    frequency[owner[None, :] == torch.arange(classes)[:, None]] *= 4
    drawn = torch.multinomial(frequency[kind], length, replacement=True, generator=generator)
    return divided(drawn, kind, generator)


def next_words(seed: int, words: int = 24, length: int = 12) -> Split:
    """Sequences of a random Markov chain; the targets are the words that follow."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(words, words, generator=generator)
    chain = [torch.randint(words, (DRAWN,), generator=generator)]
    for _ in range(length):
        following = logits[chain[-1]].softmax(1)
        chain.append(torch.multinomial(following, 1, generator=generator)[:, 0])
    sequences = torch.stack(chain, 1)
    return divided(sequences[:, :-1], sequences[:, 1:].contiguous(), generator)
