"""Fields, fruit, animals and soils.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy, pixels, standardised, uniform

STAGES = 5
"""Stages of ripeness."""
CATTLE = 16
"""Animals whose muzzles are known."""
WEEKS = 16
"""Weeks of a season."""


def weeds(n: int, side: int = 16, most: int = 4) -> Samples:
    """Pictures ``[3, side, side]`` of rows of a crop; soil, crop or weed for each pixel."""
    rows, columns = pixels(side)
    across = columns + 0.3 * uniform(-1, 1, n, 1, 1) * rows + uniform(-0.3, 0.3, n, 1, 1)
    crop = (2 * math.pi * across / uniform(0.7, 0.9, n, 1, 1)).cos() > 0.55
    place = uniform(-0.9, 0.9, n, most, 2, 1, 1)
    distance = torch.hypot(rows - place[:, :, 0], columns - place[:, :, 1])
    is_there = torch.rand(n, most, 1, 1) < 0.7
    weed = ((distance < uniform(0.15, 0.28, n, most, 1, 1)) & is_there).any(1) & ~crop
    classes = crop.long() + 2 * weed.long()
    colours = torch.tensor([[0.6, -0.8, -0.2], [-0.9, 1.0, 0.1], [-0.1, 0.9, -0.9]])
    pictures = 1.2 * colours[classes].permute(0, 3, 1, 2) + 0.3 * torch.randn(n, 1, 1, 1)
    return noisy(pictures, 0.7), classes


def fruit(n: int, side: int = 12) -> Samples:
    """Pictures ``[3, side, side]`` of a fruit, green to red with spots; its stage of ripeness."""
    stages = torch.randint(STAGES, (n,))
    ripe = noisy((stages + 0.0)[:, None, None] / (STAGES - 1), 0.05)
    rows, columns = pixels(side)
    down = rows - uniform(-0.2, 0.2, n, 1, 1)
    right = columns - uniform(-0.2, 0.2, n, 1, 1)
    radius = torch.hypot(down, right) / uniform(0.6, 0.85, n, 1, 1)
    is_fruit = (radius < 1).float()
    shade = uniform(0.7, 1.1, n, 1, 1) * (1 - 0.4 * radius.square()).clamp(min=0) * is_fruit
    spots = (torch.rand(n, side, side) < 0.25 * ripe).float()
    bright = shade * (1 - 0.6 * spots)
    colours = torch.stack([ripe * bright, (1 - 0.8 * ripe) * bright, 0.2 * bright], 1)
    return noisy(3.5 * colours - 0.6, 0.25), stages


def cows(n: int, length: int = 40) -> Samples:
    """Two axes of a collar, ``[2, length]``; whether a cow grazes, ruminates, walks or lies.

    Who ruminates pauses now and then.
    """
    labels = torch.randint(4, (n,))
    time = torch.arange(length) + uniform(0, 20, n, 1)
    pace = uniform(0.9, 1.1, n, 1)
    wander = 0.4 * torch.randn(n, length).cumsum(1)
    chewing = (2 * math.pi * pace * time / 4).sin()
    pauses = (time % 20 > 5).float()
    quiet = torch.zeros(n, length)
    head_down = torch.full((n, length), -0.9)
    kinds = torch.stack(
        [
            torch.stack([head_down, 0.9 * (2 * math.pi * pace * time / 7 + wander).sin()], 1),
            torch.stack([quiet + 0.4, 0.9 * chewing * pauses], 1),
            torch.stack([(2 * math.pi * pace * time / 10).sin(), 0.5 * chewing], 1),
            torch.stack([quiet + 0.4, 0.2 * wander.sin()], 1),
        ]
    )
    return noisy(1.4 * kinds[labels, torch.arange(n)], 0.5), labels


def muzzles(n: int, side: int = 12) -> Samples:
    """Prints ``[1, side, side]`` of muzzles, moved, lit and pressed differently; whose it is."""
    coarse = fixed(10, CATTLE, 1, 5, 5)
    prints = F.interpolate(coarse, (side + 2, side + 2), mode="bicubic", align_corners=True)
    labels = torch.randint(CATTLE, (n,))
    corners = torch.randint(3, (n, 2))
    rows = corners[:, :1] + torch.arange(side)
    columns = corners[:, 1:] + torch.arange(side)
    seen = prints[labels, 0][torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None]]
    pressed = seen * uniform(0.8, 1.4, n, 1, 1) + uniform(-0.3, 0.3, n, 1, 1)
    return noisy(pressed, 0.5)[:, None], labels


def harvests(n: int) -> Samples:
    """Rain and warmth of each week and five numbers of the soil, ``[2 * WEEKS + 5]``; the yield.

    Rain counts in the weeks of growth, as far as the soil doesn't keep water by itself; heat in
    the weeks of blossom does harm.
    """
    rain, warmth, soil = torch.randn(n, WEEKS), torch.randn(n, WEEKS), torch.randn(n, 5)
    week = torch.arange(WEEKS)
    growth = (-(((week - 6) / 3.0) ** 2)).exp()
    blossom = (-(((week - 11) / 1.5) ** 2)).exp()
    water = (rain * growth).sum(1) / growth.square().sum().sqrt()
    heat = ((warmth - 0.3).clamp(min=0) * blossom).sum(1)
    keeps = soil[:, 0].sigmoid()
    grown = 1.4 * (1 - keeps) * water - 0.8 * heat + soil[:, 1] - 0.4 * soil[:, 2].square()
    columns = torch.cat([rain, warmth, soil], 1)
    return columns, standardised(noisy(grown, 0.15)[:, None])


def soils(n: int, days: int = 12) -> Samples:
    """Rain, warmth and a reading of the soil, ``[days, 4]``; its moisture each day, ``[days]``.

    Sand drains fast, loam keeps water, and clay swells when it is wet; a number of each field
    says which it is.
    """
    kind = torch.randint(3, (n,))
    reading = noisy((kind - 1.0)[:, None], 0.08).expand(n, days)
    rain, warmth = torch.randn(n, days), torch.randn(n, days)
    before = torch.randn(n, days)
    after = torch.stack(
        [
            0.2 * before + 1.4 * rain.clamp(min=0) - 0.2 * warmth - 0.8,
            0.9 * before + 0.5 * rain - 0.4 * warmth,
            0.6 * before + 0.9 * (before * 0.8).tanh() * rain + 0.8,
        ]
    )
    moisture = after[kind, torch.arange(n)]
    return torch.stack([1.4 * reading, rain, warmth, before], 2), noisy(moisture, 0.1)


def hives(n: int, bands: int = 16, frames: int = 20) -> Samples:
    """Spectrograms ``[1, bands, frames]`` of bees that forage, fan, quack or toot before a swarm.

    Foraging is a steady hum, fanning a wider one; quacks are short and quick, and toots long.
    """
    labels = torch.randint(4, (n,))
    band, time = torch.arange(bands)[:, None], torch.arange(frames) + uniform(0, 10, n, 1, 1)
    height = uniform(4, 9, n, 1, 1)
    hum = (-(((band - height) / 1.2) ** 2)).exp()
    wide = 0.8 * (-(((band - height - 1) / 3.0) ** 2)).exp()
    quack = ((time % 4) < 1.6).float()
    toot = ((time % 10) < 5).float()
    kinds = torch.stack(
        [hum.expand(n, bands, frames), wide.expand(n, bands, frames), hum * quack, hum * toot]
    )
    return noisy(2.4 * kinds[labels, torch.arange(n)] - 0.5, 0.8)[:, None], labels
