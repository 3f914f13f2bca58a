"""Tables: plants, shoppers, machines, purchases, hotels, loans, shares, listeners, alloys, drivers.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, standardised, uniform


def plants(n: int, features: int = 12) -> Samples:
    """Measurements ``[12]`` of plants, the first of which says which others matter; a class.

    Each of two kinds of soil has an own pair of measurements by which three species differ.
    """
    rows = torch.randn(n, features)
    soil = (rows[:, 0] > 0).long()
    first = rows.gather(1, (1 + 2 * soil)[:, None])[:, 0]
    second = rows.gather(1, (2 + 2 * soil)[:, None])[:, 0]
    angle = torch.atan2(first, second) + math.pi
    return rows, (3 * angle / (2 * math.pi)).long().clamp(max=2)


ARTICLES, SEEN = 30, 8
"""How many articles a shop has, and how many each shopper has looked at."""


def shoppers(n: int) -> Samples:
    """An article and those that a shopper saw before, ``[1 + SEEN]``; whether it's bought.

    It is bought if it is like some of those that were seen.
    """
    vectors = F.normalize(torch.randn(ARTICLES, 4), dim=1)
    seen = torch.randint(ARTICLES, (n, SEEN))
    offered = torch.randint(ARTICLES, (n,))
    alike = (vectors[seen] @ vectors[offered][..., None])[..., 0]
    nearest = alike.topk(2, 1).values.mean(1)
    bought = (40 * (nearest - nearest.median())).sigmoid() > torch.rand(n)
    return torch.cat([offered[:, None], seen], 1), bought.float()[:, None]


def machines(n: int) -> Samples:
    """Eight properties of a machine; how long it ran and whether it broke then, ``[2]``.

    Times are Weibull distributed; some machines ran on when they were last looked at.
    """
    rows = torch.randn(n, 8)
    scale = 3 * (0.5 * rows[:, 0] - 0.4 * rows[:, 1] + 0.4 * rows[:, 2] * rows[:, 3]).exp()
    shape = torch.where(rows[:, 4] > 0, 6.0, 3.5)
    broke = scale * (-torch.rand(n).clamp(1e-4, 0.9999).log()) ** (1 / shape)
    looked = uniform(1.5, 24, n)
    times = torch.minimum(broke, looked).clamp(min=0.05)
    return rows, torch.stack([times, (broke <= looked).float()], 1)


def purchases(n: int) -> Samples:
    """Ten properties of a visitor; what is spent, which often is nothing, ``[1]``."""
    rows = torch.randn(n, 10)
    logit = 2.5 * rows[:, 0] + 2 * rows[:, 1] * rows[:, 2] + 0.5
    amount = (0.6 * rows[:, 3] - 0.5 * rows[:, 4] + 0.4 * rows[:, 5].sin()).exp()
    amount = amount * (0.5 * torch.randn(n)).exp()
    return rows, (amount * (torch.rand(n) < logit.sigmoid()))[:, None]


HOTELS, ABOUT = 8, 6
"""Hotels in each list, and the properties of each."""


def hotels(n: int) -> Samples:
    """Lists ``[HOTELS, ABOUT]``; the share of guests who took each, by a choice among eight."""
    rows = torch.randn(n, HOTELS, ABOUT)
    cheap = -rows[..., 0] + 0.5 * rows[..., 1]
    merit = 1.5 * cheap + 1.2 * (rows[..., 2] * rows[..., 3]) + rows[..., 4].abs()
    return rows, noisy(1.5 * merit, 0.2).softmax(1)


def drivers(n: int) -> Samples:
    """Twelve habits of a driver; next year's cost and use of fuel, ``[2]``.

    What counts depends on where the driver mostly drives: town, country or motorway.
    """
    rows = torch.randn(n, 12)
    place = rows[:, :3].argmax(1)
    slopes = torch.randn(2, 3, 9) / 2
    linear = (slopes[:, place] * rows[:, 3:]).sum(2)
    bent = linear + 0.6 * torch.stack([linear[0].sin(), linear[1].cos()])
    return rows, noisy(bent.T, 0.05) / 1.6


def shares(n: int) -> Samples:
    """Seven numbers of a district; the share of households with a garden, ``[1]``, as counted."""
    rows = uniform(-1.7, 1.7, n, 7)
    logit = 1.8 * rows[:, 0] + 1.2 * (2 * rows[:, 1]).sin() - rows[:, 2] * rows[:, 3]
    mean, size = logit.sigmoid(), 40.0
    drawn = torch.distributions.Beta(size * mean + 0.2, size * (1 - mean) + 0.2).sample()
    return rows, drawn.clamp(0.005, 0.995)[:, None]


LISTENERS, SONGS = 50, 60


def plays(n: int) -> Samples:
    """A listener, a song that was played and one that was skipped, ``[3]``; the first is liked.

    No listener has the same two songs twice.
    """
    tastes, songs = torch.randn(LISTENERS, 4), torch.randn(SONGS, 4)
    merit = tastes @ songs.T + 0.7 * torch.randn(SONGS)
    pairs = torch.combinations(torch.arange(SONGS))
    chosen = torch.randperm(LISTENERS * len(pairs))[:n]
    listener, pair = chosen // len(pairs), pairs[chosen % len(pairs)]
    first, second = merit[listener[:, None], pair].unbind(1)
    is_first = (3 * (first - second)).sigmoid() > torch.rand(n)
    ordered = torch.where(is_first[:, None], pair, pair.flip(1))
    return torch.cat([listener[:, None], ordered], 1), torch.ones(n, 1)


def alloys(n: int) -> Samples:
    """Five shares and temperatures; the strength of an alloy, from a formula, ``[1]``."""
    rows = uniform(-1.7, 1.7, n, 5)
    first, second, third, heat, _ = rows.unbind(1)
    strength = (2 * first).sin() + second.square() * 0.7 + (third * heat).tanh() + heat
    return rows, noisy(standardised(strength), 0.05)[:, None]


def loans(n: int) -> Samples:
    """Eight numbers of who wants a loan; whether it's paid back, by a sum of a curve for each."""
    rows = torch.randn(n, 8)
    curves = [
        *((2 * rows[:, 0]).tanh() * 2, rows[:, 1].square(), -(rows[:, 2].abs())),
        *((2 * rows[:, 3]).sin() * 1.5, -1.2 * rows[:, 4]),
    ]
    logit = 2.5 * (torch.stack(curves).sum(0) - 0.2)
    return rows, (logit.sigmoid() > torch.rand(n)).float()[:, None]
