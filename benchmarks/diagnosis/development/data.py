"""Data of the development problems: a few families of inputs, of which different things are wanted.

Each function draws ``n`` samples with torch's global random numbers. What is asked of them is
``wanted``, a function of scores that the inputs have, or a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from sklearn import datasets
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, pixels, standardised, uniform

Wanted: TypeAlias = Callable[[Tensor], Tensor]

# What is wanted of scores ``[n, k]`` of mean 0 and standard deviation 1.


def number(scores: Tensor) -> Tensor:
    """The scores, and some noise."""
    return noisy(scores, 0.1)


def heavy(scores: Tensor) -> Tensor:
    """The scores, and noise with a few large numbers."""
    return scores + 0.1 * torch.distributions.StudentT(3.0).sample(scores.shape)


def wide(scores: Tensor) -> Tensor:
    """The first score, and more noise where the second one is large."""
    return scores[:, :1] + 0.3 * (0.7 * scores[:, 1:]).exp() * torch.randn(len(scores), 1)


def kind(scores: Tensor) -> Tensor:
    """The place of the largest score."""
    return noisy(scores, 0.1).argmax(1)


def rare(scores: Tensor) -> Tensor:
    """Whether the first score is large, which one in seven is."""
    return (noisy(scores[:, 0], 0.1) > 1.05).long()


def chance(scores: Tensor) -> Tensor:
    """Whether something happens, which is more likely with larger scores."""
    return (torch.rand_like(scores) < (4 * scores).sigmoid()).float()


def sign(scores: Tensor) -> Tensor:
    """1 or -1."""
    return 2 * chance(scores) - 1


def grade(scores: Tensor) -> Tensor:
    """One of five grades."""
    return torch.bucketize(noisy(scores[:, 0], 0.1), torch.tensor([-1.0, -0.3, 0.3, 1.0]))


def count(scores: Tensor) -> Tensor:
    """How often something happens."""
    return torch.poisson((scores - 1).exp())


def both(scores: Tensor) -> Tensor:
    """Whether something happens, and a number."""
    return torch.cat([chance(scores[:, :1]), number(scores[:, 1:])], 1)


# Rows.


def scored(x: Tensor, outputs: int) -> Tensor:
    """A smooth function of the last axis of inputs, which is random and the same for all rows."""
    size = x.shape[-1]
    hidden = (x @ torch.randn(size, 8) * 1.5 / math.sqrt(size) + torch.randn(8)).tanh()
    scores = hidden @ torch.randn(8, outputs) + x @ torch.randn(size, outputs) / math.sqrt(size)
    flat = scores.flatten(0, -2)
    return ((flat - flat.mean(0)) / flat.std(0)).view_as(scores)


def table(n: int, wanted: Wanted = number, inputs: int = 10, outputs: int = 1) -> Samples:
    """Normal numbers ``[inputs]``."""
    x = torch.randn(n, inputs)
    return x, wanted(scored(x, outputs))


def lists(n: int, wanted: Wanted = number, items: int = 6, inputs: int = 6) -> Samples:
    """Several things ``[items, inputs]``, with a score for each."""
    x = torch.randn(n, items, inputs)
    return x, wanted(scored(x, 1)[..., 0])


def regimes(n: int, wanted: Wanted = number, inputs: int = 8, outputs: int = 1) -> Samples:
    """What the scores are depends on the signs of two columns."""
    x = torch.randn(n, inputs)
    which = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    laws = [x @ torch.randn(inputs, outputs) / math.sqrt(inputs) for _ in range(4)]
    return x, wanted(standardised(torch.stack(laws)[which, torch.arange(n)]))


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


def digits(n: int, wanted: str = "class") -> Samples:
    """Digits ``[1, 8, 8]``; their classes, their pixels, or the sum of two of them ``[2, ...]``."""
    inputs, classes = datasets.load_digits(return_X_y=True)
    images = torch.tensor(inputs, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    if wanted == "sum":
        pairs = torch.randint(len(images), (n, 2))
        return images[pairs], torch.tensor(classes)[pairs].sum(1)
    chosen = torch.randperm(len(images))[:n]
    rows = images[chosen].flatten(1)
    return (rows, rows) if wanted == "itself" else (images[chosen], torch.tensor(classes)[chosen])


# Codes.


def tastes(n: int, wanted: Wanted, counts: tuple[int, ...] = (50, 30), numbers: int = 0) -> Samples:
    """Codes, the pairs of which go with each other more or less, and numbers behind them."""
    tables = [torch.randn(size, 3) for size in counts]
    codes = [torch.randint(size, (n,)) for size in counts]
    vectors = torch.stack([each[code] for each, code in zip(tables, codes, strict=True)], 1)
    scores = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
    others = torch.randn(n, numbers)
    scores = standardised(
        scores + 4 * vectors[..., 0].sum(1, keepdim=True) + 3 * others.sum(1, True)
    )
    columns = torch.stack(codes, 1)
    return (torch.cat([columns.float(), others], 1) if numbers else columns), wanted(scores)


# Images.

KINDS = 5
"""Of shapes."""


def drawn(which: Tensor, down: Tensor, right: Tensor, size: Tensor) -> Tensor:
    """Discs, rings, squares, crosses and bars, by distances from their centres."""
    radius, square = (down**2 + right**2).sqrt(), torch.maximum(down.abs(), right.abs())
    bar = torch.maximum(down.abs() / 1.2, 2.5 * right.abs())
    cross = torch.minimum(bar, torch.maximum(right.abs() / 1.2, 2.5 * down.abs()))
    ring = 2 * (radius - 0.75 * size).abs() + size / 2
    distances = torch.stack([radius, ring, square, cross, bar], 1)
    chosen = distances[torch.arange(len(which)), which]
    return ((size - chosen) / 0.08).sigmoid()


def shapes(
    n: int, wanted: str = "class", side: int = 16, colours: int = 1, most: int = 1
) -> Samples:
    """Images ``[colours, side, side]`` of up to ``most`` shapes.

    Wanted is the ``class``, ``any`` classes, their ``count``, the ``place``, a ``mask`` of what is
    there, the ``classes`` of pixels, the ``clean`` image, or the image ``itself``.
    """
    rows, columns = pixels(side)
    image, pixel_classes = torch.zeros(n, side, side), torch.zeros(n, side, side, dtype=torch.long)
    there, which, place = torch.zeros(n, KINDS), torch.zeros(n).long(), torch.zeros(n, 2, 1, 1)
    total = torch.zeros(n, 1)
    spread = 0.35 if most == 1 else 0.6
    for turn in range(most):
        which, place = torch.randint(KINDS, (n,)), uniform(-spread, spread, n, 2, 1, 1)
        size = uniform(0.35, 0.55, n, 1, 1) / math.sqrt(most)
        used = (torch.rand(n) < (1.0 if turn == 0 else 0.6)).float()
        shape = drawn(which, rows - place[:, 0], columns - place[:, 1], size) * used[:, None, None]
        image = torch.maximum(image, shape)
        pixel_classes = torch.where(shape > 0.5, 1 + (which % 2)[:, None, None], pixel_classes)
        there[torch.arange(n), which] = torch.maximum(there[torch.arange(n), which], used)
        total += used[:, None]
    clean = image[:, None]
    seen = noisy((3 * clean - 0.6) * uniform(0.7, 1.3, n, colours, 1, 1), 0.3)
    targets = {
        "class": which,
        "any": there,
        "count": total - 1.5,
        "place": 2 * place[..., 0, 0],
        "mask": (clean > 0.5).float(),
        "classes": pixel_classes,
        "clean": 2 * clean,
        "itself": clean,
    }
    return (clean, clean) if wanted == "itself" else (seen, targets[wanted])


def fabrics(n: int, wanted: Wanted = kind, side: int = 12, classes: int = 5) -> Samples:
    """Coloured stripes ``[3, side, side]`` of several widths and directions."""
    rows, columns = pixels(side)
    which = torch.randint(classes, (n,))
    angle = (math.pi / classes * which + uniform(-0.15, 0.15, n))[:, None, None]
    waves = (angle.cos() * rows + angle.sin() * columns) * uniform(5, 9, n, 1, 1)
    stripes = (waves + uniform(0, 6, n, 1, 1)).sin()[:, None] * uniform(0.5, 1.5, n, 3, 1, 1)
    return noisy(stripes, 1.0), wanted(4.0 * F.one_hot(which, classes))


def views(n: int, side: int = 12) -> Samples:
    """Two shapes ``[2, 1, side, side]``, and whether they are of the same kind."""
    rows, columns = pixels(side)
    first = torch.randint(KINDS, (n,))
    other = (first + torch.randint(1, KINDS, (n,))) % KINDS
    same = torch.rand(n) < 0.5
    seen = []
    for which in (first, torch.where(same, first, other)):
        down, right = (at - uniform(-0.2, 0.2, n, 1, 1) for at in (rows, columns))
        seen.append(drawn(which, down, right, uniform(0.4, 0.6, n, 1, 1)))
    return noisy(3 * torch.stack(seen, 1)[:, :, None] - 1, 0.3), same.float()[:, None]


# Series.


def waves(n: int, wanted: str = "class", length: int = 32, channels: int = 1) -> Samples:
    """Noisy waves ``[channels, length]`` of any phase, of one of four shapes and paces.

    Wanted is the ``class``, the series' ``next`` values, what comes ``later``, its ``sum`` at some
    marked times, or the ``pace``.
    """
    which, phase = torch.randint(4, (n,)), uniform(0, 2 * math.pi, n, 1)
    pace = 0.25 * (which[:, None] + 1) * uniform(0.95, 1.05, n, 1)
    turns = pace * torch.arange(length + 9) + phase
    series = noisy(1.3 * turns.sin() + 0.3 * (which[:, None] % 2) * (2 * turns).sin(), 0.4)
    seen = series[:, :length]
    if wanted == "sum":
        marks = (torch.rand(n, length) < 0.3).float()
        total = standardised((seen * marks).sum(1, keepdim=True))
        return torch.stack([seen, 2 * marks - 1], 1), total
    shifted = torch.stack([seen.roll(2 * each, 1) for each in range(channels)], 1)
    targets = {
        "class": which,
        "next": series[:, None, 1 : length + 1],
        "later": series[:, length : length + 8],
        "pace": (4 * pace - 2.5),
        "itself": shifted,
    }
    return shifted, targets[wanted]


def events(n: int, wanted: str = "any", length: int = 48) -> Samples:
    """Recordings ``[1, length]`` in which events of four kinds happen or not, at any time.

    Wanted are those that happen at ``any`` time, the class of ``each`` time, or the ``clean``
    series.
    """
    happens = (torch.rand(n, 4) < 0.45).float()
    moments = uniform(4, length - 8, n, 4, 1)
    torch.randint(4, (n, 3))  # which keeps the numbers that follow as they were
    away = torch.arange(length) - moments
    after = (away > 0).float()
    kinds = [
        3 * (-((away / 1.5) ** 2)).exp(),
        2 * after * (-away.clamp(min=0) / 6).exp(),
        -2 * (-((away / 3) ** 2)).exp(),
        2 * (-((away / 5) ** 2)).exp() * (2.2 * away).cos(),
    ]
    signal = torch.stack([each[:, k] for k, each in enumerate(kinds)], 1) * happens[..., None]
    clean = signal.sum(1, keepdim=True)
    loudest = torch.cat([torch.full((n, 1, length), 0.3), signal.abs()], 1).argmax(1)
    return noisy(clean, 0.15), {"any": happens, "each": loudest, "clean": clean}[wanted]


def forecasts(n: int, past: int = 32, future: int = 8) -> Samples:
    """Series ``[past]`` with a season and a trend, and what comes later, ``[future]``."""
    time = torch.arange(past + future)
    season = uniform(0.5, 1.5, n, 1) * (2 * math.pi * time / 8 + uniform(0, 6, n, 1)).sin()
    series = season + uniform(-0.05, 0.05, n, 1) * (time - past / 2) + uniform(-0.5, 0.5, n, 1)
    return noisy(series[:, :past], 0.1), noisy(series[:, past:], 0.1)


def pendulum(n: int, times: int = 8) -> Samples:
    """Angle and speed of a damped pendulum, ``[2]``, and those at later times, ``[times, 2]``."""
    angle, speed = uniform(-2.0, 2.0, n), uniform(-2, 2, n)
    path = [torch.stack([angle, speed], 1)]
    for _ in range(20 * times):
        speed = speed - 0.01 * (4 * angle.sin() + 0.3 * speed)
        angle = angle + 0.01 * speed
        path.append(torch.stack([angle, speed], 1))
    return path[0], noisy(torch.stack(path[20::20], 1), 0.02)


# Text.


def texts(n: int, words: int = 40, length: int = 12, classes: int = 5) -> Samples:
    """Words drawn by Zipf's law; each class prefers words of its own."""
    which = torch.randint(classes, (n,))
    frequency = (1 / (2 + torch.arange(words))).repeat(classes, 1)
    frequency[torch.arange(words) % classes == torch.arange(classes)[:, None]] *= 5
    return torch.multinomial(frequency[which], length, replacement=True), which


def chains(
    n: int, wanted: str = "next", words: int = 16, length: int = 12, kinds: int = 4
) -> Samples:
    """Words that each depend on the one before, by one of several laws.

    Wanted are the ``next`` words, the ``class``, which is the law, the ``tags`` that words stand
    for, or those that are ``hidden``, with -100 for others.
    """
    laws = (2.5 * torch.randn(1 if wanted == "next" else kinds, words, words)).softmax(2)
    which = torch.randint(len(laws), (n,))
    found = [torch.randint(words, (n,))]
    for _ in range(length):
        found.append(torch.multinomial(laws[which, found[-1]], 1)[:, 0])
    text = torch.stack(found, 1)
    if wanted == "hidden":
        hidden = torch.rand(n, length) < 0.2
        hidden[torch.arange(n), torch.randint(length, (n,))] = True
        text = text[:, :length]
        return text.masked_fill(hidden, words), text.masked_fill(~hidden, -100)
    if wanted == "tags":
        tags = text[:, 1:] % 4
        noise = torch.randint(words, (n, length))
        return torch.where(torch.rand(n, length) < 0.15, noise, text[:, 1:]), tags
    return text[:, :-1], text[:, 1:].contiguous() if wanted == "next" else which


def sorted_numbers(n: int, count: int = 6, largest: int = 8) -> Samples:
    """Numbers, a separator, and the numbers in order; the targets are the next ones, else -100."""
    numbers = torch.randint(largest, (n, count))
    ordered, separator = numbers.sort(1).values, torch.full((n, 1), largest)
    tokens = torch.cat([numbers, separator, ordered], 1)
    targets = tokens[:, 1:].clone()
    targets[:, :count] = -100
    return tokens[:, :-1], targets


# Sets and graphs.


def solids(n: int, points: int = 32) -> Samples:
    """Points ``[points, 3]`` of a ball, a cube, a cylinder or a cone, and which it is."""
    which = torch.randint(4, (n,))
    ball = F.normalize(torch.randn(n, points, 3), dim=2)
    u, v = uniform(0, 2 * math.pi, n, points), uniform(-1, 1, n, points)
    cube = 0.8 * ball / ball.abs().amax(2, keepdim=True)
    tubes = [torch.stack([w * u.cos(), w * u.sin(), v], 2) for w in (0.8, (1 - v) / 2)]
    kinds = torch.stack([ball, cube, *tubes])
    return noisy(kinds[which, torch.arange(n)] * uniform(0.9, 1.1, n, 1, 3), 0.03), which


def distinct(n: int, size: int = 10, values: int = 16) -> Samples:
    """Sets of values, and how many distinct ones there are."""
    part = torch.randint(2, values + 1, (n, 1))
    tokens = (torch.rand(n, size) * part).long()
    return tokens, F.one_hot(tokens, values).amax(1).sum(1, keepdim=True).float() / 2 - 2


def communities(n: int, nodes: int = 12) -> Samples:
    """Graphs ``[nodes, nodes + 4]``: edges, and features of nodes; in which community each is."""
    labels = torch.randint(2, (n, nodes))
    together = labels[:, :, None] == labels[:, None, :]
    upper = (torch.rand(n, nodes, nodes) < torch.where(together, 0.6, 0.1)).float().triu(1)
    edges = upper + upper.transpose(1, 2)
    features = torch.randn(n, nodes, 4)
    features[..., 0] += 1.2 * (2 * labels - 1)
    return torch.cat([edges + torch.eye(nodes), features], 2), labels
