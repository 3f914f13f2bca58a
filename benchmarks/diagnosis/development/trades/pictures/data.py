"""Rendered images: road signs, tiles, coins, gauges, dice, curves, noisy waves and skins.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform


def road_signs(n: int, side: int = 16) -> Samples:
    """Signs ``[3, side, side]``: discs, triangles or diamonds, with a bar or an arrow, six classes.

    Their colours and places differ.
    """
    rows, columns = pixels(side)
    labels = torch.randint(6, (n,))
    size = uniform(0.7, 0.95, n, 1, 1)
    down = (rows - uniform(-0.15, 0.15, n, 1, 1)) / size
    right = (columns - uniform(-0.15, 0.15, n, 1, 1)) / size
    outlines = torch.stack(
        [
            (down**2 + right**2).sqrt(),
            torch.maximum(1.2 * down + 0.3, 1.7 * right.abs() - 0.9 * down),
            down.abs() + right.abs(),
        ]
    )
    outline = outlines[labels % 3, torch.arange(n)]
    inside = (8 * (1 - outline)).sigmoid()
    bar = (down.abs() < 0.15) & (right.abs() < 0.5)
    post = (right.abs() < 0.15) & (down.abs() < 0.5)
    sign = torch.where((labels < 3)[:, None, None], bar, post).float() * inside
    paint, ground = torch.rand(2, n, 3, 1, 1).unbind(0)
    image = torch.where(inside[:, None] > 0.5, 0.4 * paint + 0.6, 0.6 * ground)
    image = image * (1 - sign[:, None])
    return noisy(3 * image - 1.5, 0.7), labels


def tiles(n: int, side: int = 16) -> Samples:
    """Tiled floors ``[1, side, side]``: checks, bricks, diamonds, waves or stripes."""
    rows, columns = pixels(side)
    labels = torch.randint(5, (n,))
    pace = uniform(4, 6, n, 1, 1) * math.pi / 2
    down = pace * rows + uniform(0, 2 * math.pi, n, 1, 1)
    right = pace * columns + uniform(0, 2 * math.pi, n, 1, 1)
    shifted = right + math.pi / 2 * down.sin().sign()
    floors = torch.stack(
        [
            down.sin() * right.sin() * 1.4,
            torch.minimum(down.sin().abs(), shifted.sin().abs()) * 3 - 1,
            (down + right).sin() + (down - right).sin(),
            (down + 1.5 * right.sin()).sin(),
            (down + right).sin(),
        ]
    )
    return noisy(1.3 * floors[labels, torch.arange(n)], 0.35)[:, None], labels


def coins(n: int, side: int = 20, most: int = 4) -> Samples:
    """Coins ``[1, side, side]`` that shade into their edge, on dark cloth; where they are."""
    rows, columns = pixels(side)
    size = uniform(0.2, 0.4, n, most, 1, 1)
    down, right = uniform(-0.8, 0.8, 2, n, most, 1, 1)
    distance = ((rows - down) ** 2 + (columns - right) ** 2).sqrt() / size
    is_coin = (distance < 1).float()
    shade = (is_coin * (1 - 0.5 * distance**4)).amax(1)
    cloth = 0.3 * (8 * columns + uniform(0, 6, n, 1, 1)).sin() * (8 * rows).sin()
    image = torch.where(shade > 0, shade, cloth)
    return noisy(2 * image - 0.7, 0.3)[:, None], is_coin.amax(1)[:, None]


def gauges(n: int, side: int = 16) -> Samples:
    """Bright needles ``[1, side, side]`` with a thin and a thick end; where these are."""
    rows, columns = pixels(side)
    centre, angle = uniform(-0.25, 0.25, n, 2), uniform(0, 2 * math.pi, n)
    reach = uniform(0.4, 0.6, n, 1) * torch.stack([angle.sin(), angle.cos()], 1)
    ends = torch.stack([centre + reach, centre - reach], 1)
    share = torch.linspace(0, 1, 12)[:, None]
    places = ends[:, None, 0] * (1 - share) + ends[:, None, 1] * share
    width = 0.07 + 0.17 * share
    squared = (rows - places[..., :1, None]) ** 2 + (columns - places[..., 1:, None]) ** 2
    image = (-squared / width[..., None] ** 2).exp().amax(1)
    return noisy(3 * image - 0.5, 0.2)[:, None], ends


PIPS = (
    *((4,), (0, 8), (0, 4, 8), (0, 2, 6, 8), (0, 2, 4, 6, 8)),
    (0, 2, 3, 5, 6, 8),
)
"""On which of nine places each face of a die has pips."""


def dice(n: int, side: int = 16) -> Samples:
    """Turned faces of dice ``[1, side, side]``; the class is the number of pips minus one."""
    rows, columns = pixels(side)
    has_pip = torch.zeros(6, 9)
    for face, places in zip(has_pip, PIPS, strict=True):
        face[list(places)] = 1
    labels = torch.randint(6, (n,))
    turn, size = uniform(0, math.pi / 2, n, 1, 1), uniform(0.42, 0.5, n, 1, 1)
    grid = torch.arange(9)
    down, right = (grid // 3 - 1) * size, (grid % 3 - 1) * size
    middle = uniform(-0.15, 0.15, 2, n, 1, 1)
    y = down * turn.cos() - right * turn.sin() + middle[0]
    x = down * turn.sin() + right * turn.cos() + middle[1]
    squared = (rows - y[:, 0, :, None, None]) ** 2 + (columns - x[:, 0, :, None, None]) ** 2
    image = ((-squared / 0.15**2).exp() * has_pip[labels][..., None, None]).amax(1)
    return noisy(2.5 * image - 0.6, 0.2)[:, None], labels


WRITERS = 12


def signatures(n: int, side: int = 16, points: int = 40) -> Samples:
    """Two signatures of a writer and one of another, ``[3, 1, side, side]``; the first writer.

    A signature is a closed curve of a few waves, which differ a little each time.
    """
    rows, columns = pixels(side)
    hands = torch.randn(WRITERS, 2, 6)
    writer = torch.randint(WRITERS, (n,))
    other = (writer + torch.randint(1, WRITERS, (n,))) % WRITERS
    waves = noisy(hands[torch.stack([writer, writer, other], 1)], 0.15)
    time = torch.linspace(0, 2 * math.pi, points)
    angles = torch.arange(1, 4)[:, None] * time
    places = 0.3 * waves @ torch.cat([angles.sin(), angles.cos()])
    down, right = places.clamp(-0.9, 0.9).unbind(2)
    squared = (rows - down[..., None, None]) ** 2 + (columns - right[..., None, None]) ** 2
    image = (-squared.amin(2) / 0.1**2).exp()
    return noisy(2 * image - 0.5, 0.2)[:, :, None], writer


def noisy_waves(n: int, side: int = 16) -> Samples:
    """Sums of a few plane waves ``[1, side, side]`` under noise, which is the target."""
    rows, columns = pixels(side)
    down, right = uniform(-6, 6, 2, n, 3, 1, 1)
    phase, size = uniform(0, 2 * math.pi, n, 3, 1, 1), uniform(0.3, 1, n, 3, 1, 1)
    clean = (size * (down * rows + right * columns + phase).sin()).sum(1)[:, None]
    noise = 0.6 * torch.randn_like(clean)
    return clean + noise, noise


def skins(n: int, side: int = 20) -> Samples:
    """Spotted skins ``[1, side, side]`` and imitations; 1 for a skin and -1 for an imitation.

    An imitation has spots of the same size and contrast, but all of them point the same way.
    """
    is_real = torch.rand(n) < 0.5
    spots = F.interpolate(torch.randn(n, 1, 9, 9), (side, side), mode="bicubic")
    streaks = F.interpolate(torch.randn(n, 1, 18, 5), (side, side), mode="bicubic")
    chosen = torch.where(is_real[:, None, None, None], spots, streaks)
    return noisy(1.3 * (3 * chosen).tanh(), 0.3), _signs(is_real)


def _signs(flags: Tensor) -> Tensor:
    """1 where true and -1 where false, ``[n, 1, 1, 1]``."""
    return (2.0 * flags - 1)[:, None, None, None]
