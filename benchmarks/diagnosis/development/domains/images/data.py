"""Images: rendered ones, and scikit-learn's digits in pairs.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, standardised, uniform


def grid(side: int) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, ``[side, side]`` each, from 0 to 1."""
    axis = torch.linspace(0, 1, side)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    return rows, columns


def smooth_fields(n: int, side: int, coarse: int) -> Tensor:
    """Random fields ``[n, 1, side, side]`` interpolated from ``coarse`` times as many numbers."""
    return F.interpolate(torch.randn(n, 1, coarse, coarse), (side, side), mode="bicubic")


def fabrics(n: int, side: int = 16) -> Samples:
    """Coloured patches ``[3, side, side]``: striped, plaid, checked, ringed or cloudy."""
    rows, columns = grid(side)
    labels = torch.randint(5, (n,))
    turn, wave = uniform(0, math.pi, n, 1, 1), uniform(14, 24, n, 1, 1)
    along = wave * (rows * turn.cos() + columns * turn.sin()) + uniform(0, 6, n, 1, 1)
    across = wave * (columns * turn.cos() - rows * turn.sin()) + uniform(0, 6, n, 1, 1)
    down, right = rows - uniform(0.2, 0.8, n, 1, 1), columns - uniform(0.2, 0.8, n, 1, 1)
    radius = (down**2 + right**2).sqrt()
    kinds = torch.stack(
        [
            1.4 * along.sin(),
            along.sin() + across.sin(),
            2 * along.sin() * across.sin(),
            1.4 * (1.5 * wave * radius).sin(),
            smooth_fields(n, side, 5)[:, 0],
        ]
    )
    pattern = kinds[labels, torch.arange(n)][:, None]
    return noisy(pattern * uniform(0.3, 1.2, n, 3, 1, 1) + uniform(-1, 1, n, 3, 1, 1), 0.3), labels


PIECES = ("1111/0000", "1100/1100", "1110/0100", "0110/1100", "1100/0110", "1000/1110", "0010/1110")
"""Rows of the seven pieces that consist of four squares."""


def pieces(n: int, side: int = 12) -> Samples:
    """A piece, turned, twice as large and anywhere, in ``[1, side, side]``; the class says which.

    Single pixels of the background are as bright.
    """
    drawn = torch.tensor([[[int(x) for x in row] for row in p.split("/")] for p in PIECES])
    large = drawn.repeat_interleave(2, 1).repeat_interleave(2, 2).float()
    labels, turns = torch.randint(7, (n,)), torch.randint(4, (n,))
    images = (torch.rand(n, side, side) < 0.05).float()
    for image, label, turn in zip(images, labels, turns.tolist(), strict=True):
        piece = large[label].rot90(turn)
        height, width = piece.shape
        top, left = (int(torch.randint(side - size + 1, ())) for size in (height, width))
        image[top : top + height, left : left + width] += piece
    return noisy(2.5 * images.clamp(max=1) - 0.5, 0.3)[:, None], labels


def cells(n: int, side: int = 16, most: int = 6) -> Samples:
    """Images ``[1, side, side]`` of up to ``most`` round cells; how many there are, ``[1]``."""
    rows, columns = grid(side)
    places, radii = torch.rand(2, n, most, 1, 1), uniform(0.06, 0.09, n, most, 1, 1)
    distances = (rows - places[0]) ** 2 + (columns - places[1]) ** 2
    counts = torch.randint(1, most + 1, (n, 1))
    is_there = torch.arange(most) < counts
    images = ((-distances / radii**2).exp() * is_there[..., None, None]).sum(1)
    return noisy(3 * images - 0.5, 0.2)[:, None], standardised(counts.float())


def roads(n: int, side: int = 20) -> Samples:
    """Aerial photographs ``[1, side, side]`` of a bent road; which pixels are of it, as 0 and 1."""
    rows, columns = grid(side)
    bend, wave = uniform(0.05, 0.25, n, 1, 1), uniform(2, 6, n, 1, 1)
    middle = uniform(0.3, 0.7, n, 1, 1) + bend * (wave * rows + uniform(0, 6, n, 1, 1)).sin()
    road = ((columns - middle).abs() < uniform(0.06, 0.12, n, 1, 1)).float()[:, None]
    turned = torch.where(torch.rand(n, 1, 1, 1) < 0.5, road, road.transpose(2, 3))
    return noisy(smooth_fields(n, side, 5) + 1.5 * turned - 0.3, 0.3), turned


def landscapes(n: int, side: int = 16) -> Samples:
    """Fields ``[1, side / 2, side / 2]`` with a sharp coast, and these at twice the resolution."""
    rows, columns = grid(side)
    turn = uniform(0, 2 * math.pi, n, 1, 1)
    height = (rows - 0.5) * turn.cos() + (columns - 0.5) * turn.sin() + uniform(-0.2, 0.2, n, 1, 1)
    fine = smooth_fields(n, side, 4) + 1.5 * torch.sign(height)[:, None]
    return noisy(F.avg_pool2d(fine, 2), 0.05), fine


def bar_charts(n: int, side: int = 16, bars: int = 4) -> Samples:
    """Charts ``[1, side, side]`` with four bars, the highest of which is the class."""
    heights = torch.stack([torch.randperm(side - 3)[:bars] for _ in range(n)]) + 2
    height_there = heights.repeat_interleave(side // bars, 1)[:, None]
    is_bar = torch.arange(side)[:, None] >= side - height_there
    is_gap = torch.arange(side) % (side // bars) == 0
    images = (is_bar & ~is_gap).float() * uniform(0.5, 1.5, n, 1, 1)
    return noisy(2 * images - 0.6, 0.3)[:, None], heights.argmax(1)


def digit_pairs(n: int) -> Samples:
    """Two handwritten digits ``[2, 1, 8, 8]``, and their sum."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 6 - 0.8
    chosen = torch.randint(len(images), (n, 2))
    return images[chosen], torch.tensor(digits)[chosen].sum(1)


def oscillograms(n: int, side: int = 16, views: int = 2) -> Samples:
    """Two noisy views ``[2, 1, side, side]`` of one Lissajous curve, which are shifted and scaled.

    The targets are the curve's phases, which a loss that compares views has no use for.
    """
    axis = torch.linspace(0, 1, side)
    phases = uniform(0, 2 * math.pi, n, 2)
    frequencies = torch.randint(1, 4, (2, n, 1))
    time = torch.linspace(0, 2 * math.pi, 60)
    down = 0.35 * (frequencies[0] * time + phases[:, :1]).sin()
    right = 0.35 * (frequencies[1] * time + phases[:, 1:]).sin()
    size, shift = uniform(0.8, 1.1, n, views, 1), uniform(0.42, 0.58, 2, n, views, 1)
    rows, columns = (
        (-(((axis - (size * curve[:, None] + s)[..., None]) / 0.05) ** 2)).exp()
        for curve, s in zip((down, right), shift, strict=True)
    )
    images = (rows.transpose(2, 3) @ columns).tanh()
    return noisy(3 * images - 0.8, 0.3)[:, :, None], phases
