"""The problems that rules are developed with. Rates are measured with others, which are new.

Each function of data draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, Muon, RMSprop

from benchmarks.diagnosis.training import (
    Samples,
    Training,
    by_sample,
    cosine,
    noisy,
    pixels,
    standardised,
    trained,
    uniform,
    warmed_up_cosine,
    warmed_up_linear,
)

# fmt: off
from benchmarks.diagnosis.networks import (  # isort: skip
    Apply, Beside, Block, Causal, Convex, Encoder, Memory, Mixture, Placed, SelfAttention, Tied,
    Variational, bn1, bn2, conv, feeding, groups, last, leaky, mean, mlp, pooled, stack,
    swish_gated, transformer, turned,
)
# fmt: on

# Rows.


def number(scores: Tensor) -> Tensor:
    """Scores ``[n, k]`` of mean 0 and standard deviation 1, and some noise."""
    return noisy(scores, 0.1)


def rare(scores: Tensor) -> Tensor:
    """Whether the first score is large, which one in seven is."""
    return (noisy(scores[:, 0], 0.1) > 1.05).long()


def sign(scores: Tensor) -> Tensor:
    """1 or -1, the first of which is more likely with larger scores."""
    return 2 * (torch.rand_like(scores) < (4 * scores).sigmoid()).float() - 1


def table(n: int, wanted: Callable[[Tensor], Tensor] = number, inputs: int = 10) -> Samples:
    """Normal numbers ``[inputs]``, and what is wanted of a smooth function of them."""
    x = torch.randn(n, inputs)
    hidden = (x @ torch.randn(inputs, 8) * 1.5 / math.sqrt(inputs) + torch.randn(8)).tanh()
    scores = hidden @ torch.randn(8, 1) + x @ torch.randn(inputs, 1) / math.sqrt(inputs)
    return x, wanted(standardised(scores))


def clusters(n: int, inputs: int = 20, classes: int = 6) -> Samples:
    """Each class has three Gaussian clusters, some of which overlap with another class's."""
    centres = 1.2 * torch.randn(3 * classes, inputs)
    which = torch.randint(3 * classes, (n,))
    return standardised(noisy(centres[which], 1.0)), which % classes


def spirals(n: int) -> Samples:
    """Three arms in a plane, one class each."""
    arm, radius = torch.randint(3, (n,)), torch.rand(n).sqrt()
    angle = noisy(3.0 * radius + arm * 2 * math.pi / 3, 0.15)
    return standardised(torch.stack([radius * angle.cos(), radius * angle.sin()], 1)), arm


def loaded(n: int, load: str) -> Samples:
    """Some rows of a table of scikit-learn's; one binary target is a column of real numbers."""
    inputs, targets = getattr(datasets, f"load_{load}")(return_X_y=True)
    chosen = torch.randperm(len(inputs))[:n]
    columns = torch.tensor(inputs, dtype=torch.float32)
    columns = (columns - columns.mean(0)) / columns.std(0).clamp(min=1e-6)
    wanted = torch.tensor(targets)
    if load == "diabetes":
        wanted = ((wanted - wanted.mean()) / wanted.std()).float()[:, None]
    if load == "breast_cancer":
        wanted = wanted.float()[:, None]
    return columns[chosen], wanted[chosen]


# Images.


def digits(n: int, itself: bool = False) -> Samples:
    """Digits ``[1, 8, 8]`` and their classes, or their pixels ``[64]`` as inputs and targets."""
    inputs, classes = datasets.load_digits(return_X_y=True)
    images = torch.tensor(inputs, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    chosen = torch.randperm(len(images))[:n]
    rows = images[chosen].flatten(1)
    return (rows, rows) if itself else (images[chosen], torch.tensor(classes)[chosen])


def drawn(n: int, side: int = 16) -> Samples:
    """Discs, rings, squares, crosses and bars ``[1, side, side]``, and which of them it is."""
    rows, columns = pixels(side)
    which, place = torch.randint(5, (n,)), uniform(-0.35, 0.35, n, 2, 1, 1)
    size = uniform(0.35, 0.55, n, 1, 1)
    torch.rand(n)  # which keeps the numbers that follow as they were
    down, right = rows - place[:, 0], columns - place[:, 1]
    radius, square = (down**2 + right**2).sqrt(), torch.maximum(down.abs(), right.abs())
    bar = torch.maximum(down.abs() / 1.2, 2.5 * right.abs())
    cross = torch.minimum(bar, torch.maximum(right.abs() / 1.2, 2.5 * down.abs()))
    ring = 2 * (radius - 0.75 * size).abs() + size / 2
    distances = torch.stack([radius, ring, square, cross, bar], 1)
    chosen = distances[torch.arange(n), which]
    return ((size - chosen) / 0.08).sigmoid()[:, None], which


def shapes(n: int) -> Samples:
    """Noisy images of shapes, and their classes."""
    clean, which = drawn(n)
    return noisy((3 * clean - 0.6) * uniform(0.7, 1.3, n, 1, 1, 1), 0.3), which


def clean_shapes(n: int) -> Samples:
    """Images of shapes as inputs and targets."""
    clean, _ = drawn(n)
    return clean, clean


# Series.


def wave(n: int, length: int) -> Samples:
    """Noisy waves ``[length]`` of any phase, of one of four shapes and paces; which one it is."""
    which, phase = torch.randint(4, (n,)), uniform(0, 2 * math.pi, n, 1)
    pace = 0.25 * (which[:, None] + 1) * uniform(0.95, 1.05, n, 1)
    turns = pace * torch.arange(length + 9) + phase  # nine more, as the seeds' numbers are
    series = noisy(1.3 * turns.sin() + 0.3 * (which[:, None] % 2) * (2 * turns).sin(), 0.4)
    return series[:, :length], which


def waves(n: int, length: int = 32) -> Samples:
    """Waves as one channel, and their kinds."""
    series, which = wave(n, length)
    return series[:, None], which


def marked_waves(n: int) -> Samples:
    """Waves ``[2, 12]`` and marks, and the sum at these."""
    series, _ = wave(n, 12)
    marks = (torch.rand(n, 12) < 0.3).float()
    total = standardised((series * marks).sum(1, keepdim=True))
    return torch.stack([series, 2 * marks - 1], 1), total


def events(n: int, length: int = 48) -> Samples:
    """Recordings ``[1, length]`` in which events of four kinds happen at any time, or don't."""
    happens = (torch.rand(n, 4) < 0.45).float()
    away = torch.arange(length) - uniform(4, length - 8, n, 4, 1)
    torch.randint(4, (n, 3))  # which keeps the numbers that follow as they were
    kinds = [
        3 * (-((away / 1.5) ** 2)).exp(),
        2 * (away > 0) * (-away.clamp(min=0) / 6).exp(),
        -2 * (-((away / 3) ** 2)).exp(),
        2 * (-((away / 5) ** 2)).exp() * (2.2 * away).cos(),
    ]
    signal = torch.stack([each[:, k] for k, each in enumerate(kinds)], 1) * happens[..., None]
    return noisy(signal.sum(1, keepdim=True), 0.15), happens


# Text.


def texts(n: int, words: int = 40, length: int = 12, classes: int = 5) -> Samples:
    """Words drawn by Zipf's law; each class prefers words of its own."""
    which = torch.randint(classes, (n,))
    frequency = (1 / (2 + torch.arange(words))).repeat(classes, 1)
    frequency[torch.arange(words) % classes == torch.arange(classes)[:, None]] *= 5
    return torch.multinomial(frequency[which], length, replacement=True), which


def chains(n: int, words: int = 16, length: int = 12) -> Samples:
    """Words that each depend on the one before, and those that follow."""
    law = (2.5 * torch.randn(words, words)).softmax(1)
    torch.randint(1, (n,))  # which keeps the numbers that follow as they were
    found = [torch.randint(words, (n,))]
    for _ in range(length):
        found.append(torch.multinomial(law[found[-1]], 1)[:, 0])
    text = torch.stack(found, 1)
    return text[:, :-1], text[:, 1:].contiguous()


def hidden_words(n: int, words: int = 10, length: int = 12) -> Samples:
    """Words, some of which are hidden by another one; the hidden ones, and -100 for others."""
    text, _ = chains(n, words, length)
    hidden = torch.rand(n, length) < 0.2
    hidden[torch.arange(n), torch.randint(length, (n,))] = True
    return text.masked_fill(hidden, words), text.masked_fill(~hidden, -100)


def sorted_numbers(n: int, count: int = 6, largest: int = 8) -> Samples:
    """Numbers, a separator, and the numbers in order; the targets are the next ones, else -100."""
    numbers = torch.randint(largest, (n, count))
    ordered, separator = numbers.sort(1).values, torch.full((n, 1), largest)
    tokens = torch.cat([numbers, separator, ordered], 1)
    targets = tokens[:, 1:].clone()
    targets[:, :count] = -100
    return tokens[:, :-1], targets


# Losses.


@by_sample
def evidence_bound(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits of pixels, and the codes' means and logarithmic variances behind them."""
    size = targets[0].numel()
    mean, variance = outputs[:, size:].chunk(2, 1)
    pixels = F.binary_cross_entropy_with_logits(
        outputs[:, :size], targets.flatten(1), reduction="none"
    )
    return pixels.sum(1) + ((mean**2 + variance.exp() - 1 - variance) / 2).sum(1)


def weighted_classes(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in which the second of two classes has a larger weight than the first."""
    return F.cross_entropy(outputs, targets, outputs.new_tensor([1.0, 6.0]), reduction=reduction)


@by_sample
def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Pairs of a class should be near, and others far from each other (Hadsell et al., 2006)."""
    is_same = (targets[:, None] == targets).float() - torch.eye(len(targets))
    is_other = (targets[:, None] != targets).float()
    squared = (outputs[:, None] - outputs).square().sum(2)
    far = (1 - (squared + 1e-6).sqrt()).clamp(min=0).square() * is_other
    return squared * is_same / is_same.mean().clamp(min=1e-6) + far / is_other.mean()


ce, bce, mse = F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss
leaky2 = partial(nn.LeakyReLU, 0.2)

# fmt: off
BASICS: tuple[Training, ...] = (
    trained("MLP", lambda: mlp(64, 48, 32, 10),
            partial(loaded, load="digits"), 1400, ce, SGD, 0.1, 32, 150),
    trained("CNN", lambda: stack(conv(1, 12, 24, pool=2), nn.Flatten(), mlp(96, 32, 10)),
            digits, 1400, ce, SGD, 0.03, 32, 150, momentum=0.9),
    trained("ResNet", lambda: stack(conv(1, 10, norm=bn2), Block(10), nn.MaxPool2d(2), Block(10),
                                    pooled(side=2), nn.Linear(40, 10)),
            digits, 1400, ce, SGD, 0.02, 32, 150, momentum=0.9, nesterov=True),
    trained("BatchNorm CNN", lambda: stack(conv(1, 10, norm=bn2, pool=2), conv(10, 16, norm=bn2),
                                           pooled(side=2), nn.Linear(64, 10)),
            digits, 1400, ce, Adam, 5e-3, 32, 120),
    trained("BatchNorm signals", lambda: stack(conv(1, 8, 12, size=5, stride=2, dims=1, norm=bn1),
                                               nn.Flatten(), nn.Linear(96, 4)),
            waves, 1800, ce, SGD, 0.05, 32, 150, momentum=0.9),
    trained("encoder", lambda: stack(nn.Embedding(40, 24), Placed(12, 24),
                                     Encoder(24, 3, dropout=0.0), mean(1), nn.Linear(24, 5)),
            texts, 1800, ce, AdamW, 2e-3, 32, 200),
    trained("language model",
            lambda: stack(nn.Embedding(16, 24), Placed(12, 24),
                          transformer(24, partial(Causal, heads=2)), nn.Linear(24, 16), turned()),
            chains, 1800, ce, Adam, 4e-3, 32, 150),
    trained("LSTM", lambda: stack(turned(), Memory(nn.LSTM, 1, 24), last(), nn.Linear(24, 4)),
            partial(waves, length=24), 1800, ce, Adam, 4e-3, 32, 200),
    trained("GRU", lambda: stack(turned(), Memory(nn.GRU, 2, 20), last(), nn.Linear(20, 1)),
            marked_waves, 1800, mse, RMSprop, 2e-3, 32, 200),
    trained("regression", lambda: mlp(10, 32, 32, 1), table, 1800, mse, SGD, 0.05, 32, 150),
    trained("small regression", lambda: mlp(10, 16, 1, activation=nn.ELU),
            partial(loaded, load="diabetes"), 350, mse, SGD, 0.02, 16, 100),
    trained("tanh", lambda: mlp(13, 20, 20, 3, activation=nn.Tanh),
            partial(loaded, load="wine"), 140, ce, SGD, 0.3, 16, 100),
    trained("sigmoid", lambda: mlp(30, 24, 16, 1, activation=nn.Sigmoid),
            partial(loaded, load="breast_cancer"), 426, bce, RMSprop, 5e-3, 24, 100),
    trained("GELU and LayerNorm", lambda: mlp(20, 48, 48, 6, activation=nn.GELU, norm=nn.LayerNorm),
            clusters, 1800, ce, AdamW, 2e-3, 32, 150, weight_decay=0.01),
    trained("mixture", lambda: Mixture(20, 4, lambda: mlp(20, 16, 6)),
            clusters, 1800, ce, Adam, 1e-2, 32, 150),
    trained("mixture of regressions", lambda: Mixture(10, 6, lambda: mlp(10, 12, 1)),
            table, 1800, mse, SGD, 0.05, 32, 150, momentum=0.9),
    trained("autoencoder", lambda: mlp(64, 32, 12, 32, 64, activation=nn.Tanh),
            partial(digits, itself=True), 1400, mse, Adam, 5e-3, 32, 150),
    trained("words", lambda: stack(nn.Embedding(40, 16), mean(1), nn.Linear(16, 5)),
            texts, 1800, ce, Adagrad, 0.1, 32, 200),
    trained("deep tanh", lambda: mlp(2, 24, 24, 24, 24, 3, activation=nn.Tanh),
            spirals, 1800, ce, SGD, 0.05, 32, 250, momentum=0.9),
    trained("signals", lambda: stack(conv(1, 12, size=5, dims=1, norm=groups, pool=2),
                                     conv(12, 16, size=5, dims=1, norm=groups), pooled(1, 2),
                                     nn.Linear(32, 4)),
            waves, 1800, ce, SGD, 0.1, 24, 200),
)
"""Small networks, most of which are plain stacks of layers, at a constant learning rate."""

TRAININGS: tuple[Training, ...] = (
    *BASICS,
    trained("without biases", lambda: mlp(20, 48, 48, 6, activation=nn.CELU, bias=False),
            clusters, 6000, ce, Muon, 5e-3, 64, 150, cosine, weight_decay=0.05, nesterov=True),
    trained("critic", lambda: mlp(6, 48, 48, 48, 1, activation=leaky2, wrap=spectral_norm),
            partial(table, wanted=sign, inputs=6), 4000, F.soft_margin_loss,
            Adam, 1e-2, 128, 250, betas=(0.5, 0.999)),
    trained("free energies", lambda: Convex(4, 24),
            partial(table, inputs=4), 5000, mse, Adam, 4e-2, 64, 180, cosine),
    trained("rare frauds", lambda: stack(Beside(mlp(10, 32, 16), nn.Identity()), nn.Linear(26, 2)),
            partial(table, wanted=rare), 12000, weighted_classes,
            Adamax, 1e-2, 256, 200),
    trained("metric learning",
            lambda: stack(mlp(20, 48, 48, 12, activation=nn.SiLU, norm=bn1), Apply(F.normalize)),
            clusters, 3000, contrastive,
            SGD, 0.1, 48, 200, cosine, momentum=0.9, weight_decay=1e-4),
    trained("vision transformer",
            lambda: stack(nn.Conv2d(1, 32, 4, 4), nn.Flatten(2), turned(), Placed(16, 32, tokens=1),
                          Encoder(32, 4, dropout=0.1, activation="gelu", norm_first=True),
                          Apply(lambda x: x[:, 0]), nn.LayerNorm(32), nn.Linear(32, 5)),
            shapes, 2000, partial(ce, label_smoothing=0.1),
            AdamW, 3e-3, 32, 200, warmed_up_cosine, clip=1.0, weight_decay=0.05),
    trained("variational autoencoder",
            lambda: Variational(stack(conv(1, 12, 24, stride=2, activation=leaky2), nn.Flatten(),
                                      nn.Linear(384, 12)),
                                stack(nn.Linear(6, 384), leaky2(), nn.Unflatten(1, (24, 4, 4)),
                                      nn.ConvTranspose2d(24, 12, 4, 2, 1), leaky2(),
                                      nn.ConvTranspose2d(12, 1, 4, 2, 1), nn.Flatten())),
            clean_shapes, 1500, evidence_bound,
            Adam, 3e-3, 32, 220),
    trained("event detector", lambda: stack(conv(1, 12, 24, size=7, stride=2, dims=1,
                                                 activation=leaky, wrap=weight_norm),
                                            pooled(1, most=True), weight_norm(nn.Linear(24, 4))),
            events, 1500, bce, SGD, 0.1, 32, 200, warmed_up_cosine, momentum=0.9),
    trained("Llama", lambda: Tied(9, 32, transformer(32, partial(Causal, heads=4), swish_gated,
                                                     nn.RMSNorm)),
            sorted_numbers, 4000, ce,
            AdamW, 5e-3, 32, 200, warmed_up_cosine, clip=1.0, betas=(0.9, 0.95), weight_decay=0.1),
    trained("masked melodies",
            lambda: stack(nn.Embedding(11, 32), Placed(12, 32, size=0.5),
                          transformer(32, partial(SelfAttention, heads=4),
                                      lambda w: Mixture(w, 3, lambda: feeding(w)),
                                      first=False), nn.Linear(32, 10), turned()),
            hidden_words, 6000, ce,
            AdamW, 8e-3, 32, 200, warmed_up_linear, clip=1.0, betas=(0.9, 0.98), weight_decay=0.01),
)
"""With those that have something of their own: how weights are made, what is trained on, a loss
that compares samples or is a sum over pixels, a schedule, experts or attention inside.
"""
