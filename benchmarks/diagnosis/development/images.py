"""Images of the development problems: rendered ones, and crops of scikit-learn's two photographs.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform


def around(rows: Tensor, columns: Tensor, spread: float, n: int) -> tuple[Tensor, Tensor]:
    """Radius and angle of each pixel ``[n, side, side]`` around a random centre."""
    down = rows - uniform(-spread, spread, n, 1, 1)
    right = columns - uniform(-spread, spread, n, 1, 1)
    return (down**2 + right**2).sqrt(), torch.atan2(down, right)


def discs_and_squares(n: int, side: int = 24) -> Samples:
    """Grey images ``[1, side, side]`` of a disc and a square of equal brightness.

    The targets are the classes of the pixels: nothing, disc or square.
    """
    rows, columns = pixels(side)
    labels = torch.zeros(n, side, side, dtype=torch.long)
    for label in (1, 2):
        down = (rows - uniform(-0.6, 0.6, n, 1, 1)).abs()
        right = (columns - uniform(-0.6, 0.6, n, 1, 1)).abs()
        distance = (down**2 + right**2).sqrt() if label == 1 else torch.maximum(down, right)
        labels[distance < uniform(0.25, 0.45, n, 1, 1)] = label
    light = uniform(-0.5, 0.5, n, 1, 1) * columns
    return noisy((labels > 0) + light, 0.3)[:, None], labels


def clocks(n: int, side: int = 16) -> Samples:
    """Clocks ``[1, side, side]`` with a short and a long hand; the class is the short one's."""
    rows, columns = pixels(side)
    labels = torch.randint(8, (n,))
    image = torch.zeros(n, side, side)
    long = uniform(0, 2 * math.pi, n, 1, 1)
    short = (labels[:, None, None] + uniform(-0.25, 0.25, n, 1, 1)) * math.pi / 4
    for angle, length in ((long, 0.95), (short, 0.55)):
        along = rows * angle.sin() + columns * angle.cos()
        across = rows * angle.cos() - columns * angle.sin()
        hand = (-((across / 0.12) ** 2)).exp() * (along > 0) * (along < length)
        image = torch.maximum(image, hand)
    return noisy(3 * image - 0.4, 0.2)[:, None], labels


def polygons(n: int, side: int = 16) -> Samples:
    """Triangles, squares, hexagons and stars of one colour on another, ``[3, side, side]``."""
    rows, columns = pixels(side)
    labels = torch.randint(4, (n,))
    corners = torch.tensor([3.0, 4.0, 6.0, 5.0])[labels][:, None, None]
    radius, angle = around(rows, columns, 0.2, n)
    turned = angle + uniform(-0.3, 0.3, n, 1, 1)
    sector = torch.remainder(turned, 2 * math.pi / corners) - math.pi / corners
    straight = (math.pi / corners).cos() / sector.cos()
    star = 0.3 + 0.7 * sector.abs() * corners / math.pi
    outline = torch.where(labels[:, None, None] == 3, star, straight)
    inside = (radius < uniform(0.6, 0.8, n, 1, 1) * outline)[:, None].float()
    colour = torch.rand(n, 3, 1, 1)
    image = inside * colour + (1 - inside) * ((colour + 0.5) % 1)
    return noisy(4 * image - 2, 0.2), labels


@lru_cache
def photographs() -> Tensor:
    """The two photographs at a quarter of their resolution, ``[2, 3, 106, 160]``, standardised."""
    images = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2).float()
    small = F.avg_pool2d(images, 4)
    return (small - small.mean((0, 2, 3), keepdim=True)) / small.std((0, 2, 3), keepdim=True)


def crops(n: int, side: int = 12) -> Samples:
    """Crops ``[3, side, side]`` of the photographs, mirrored at random; the class is which one."""
    images = photographs()
    labels, mirrored = torch.randint(2, (2, n))
    tops, lefts = torch.randint(106 - side, (n,)), torch.randint(160 - side, (n,))
    cut = torch.stack(
        [
            images[label, :, top : top + side, left : left + side]
            for label, top, left in zip(labels, tops, lefts, strict=True)
        ]
    )
    return torch.where(mirrored[:, None, None, None] == 1, cut.flip(3), cut), labels


SEGMENTS = ("1110111", "0010010", "1011101", "1011011", "0111010")
SEGMENTS += ("1101011", "1101111", "1010010", "1111111", "1111011")
"""The segments of each digit that are lit: top, upper two, middle, lower two, bottom."""

PLACES = ((0, 1, 1, 6), (1, 5, 0, 1), (1, 5, 6, 7), (5, 6, 1, 6))
PLACES += ((6, 10, 0, 1), (6, 10, 6, 7), (10, 11, 1, 6))
"""Where the segments are: rows and columns from and to."""


def seven_segments(n: int, side: int = 16) -> Samples:
    """Digits of a display somewhere in ``[1, side, side]``, among spots as bright as they are."""
    digits = torch.zeros(10, 11, 7)
    for digit, segments in zip(digits, SEGMENTS, strict=True):
        for lit, (top, bottom, left, right) in zip(segments, PLACES, strict=True):
            digit[top:bottom, left:right] = float(lit)
    labels = torch.randint(10, (n,))
    images = (torch.rand(n, side, side) < 0.02).float()
    tops, lefts = torch.randint(side - 10, (n,)), torch.randint(side - 6, (n,))
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[top : top + 11, left : left + 7] += digits[label]
    return noisy(3 * images.clamp(max=1) - 0.5, 0.4)[:, None], labels


def glyph_pairs(n: int, side: int = 16, glyphs: int = 12) -> Samples:
    """Pairs of drawings ``[2, 1, side, side]``, and 1 where both are of the same glyph.

    A glyph is a closed curve with three harmonics. Each drawing of it is shifted and turned.
    """
    rows, columns = pixels(side)
    harmonics = torch.randn(glyphs, 6)
    same = torch.rand(n) < 0.5
    first = torch.randint(glyphs, (n,))
    other = torch.where(same, first, (first + torch.randint(1, glyphs, (n,))) % glyphs)
    drawings = []
    for which in (first, other):
        radius, angle = around(rows, columns, 0.1, n)
        angle = angle + uniform(-0.15, 0.15, n, 1, 1)
        waves = torch.stack([wave(k * angle) for k in (1, 2, 3) for wave in (torch.cos, torch.sin)])
        curve = 0.55 + 0.12 * torch.einsum("nk,knrc->nrc", harmonics[which], waves)
        drawings.append((-(((radius - curve) / 0.12) ** 2)).exp())
    pairs = noisy(3 * torch.stack(drawings, 1) - 0.6, 0.3)
    return pairs[:, :, None], same.float()[:, None]


def crosses(n: int, side: int = 16) -> Samples:
    """Images ``[1, side, side]`` of two bars, from 0 to 1, which are their own targets."""
    rows, columns = pixels(side)
    image = torch.zeros(n, side, side)
    for _ in range(2):
        angle = uniform(0, math.pi, n, 1, 1)
        across = rows * angle.cos() - columns * angle.sin() - uniform(-0.4, 0.4, n, 1, 1)
        image = torch.maximum(image, (-((across / 0.2) ** 4)).exp())
    return image[:, None], image[:, None]


def moving_dots(n: int, side: int = 12, frames: int = 4) -> Samples:
    """Frames ``[frames, side, side]`` of dots that move in one of eight directions, or stand.

    In each frame, a part of them is somewhere else.
    """
    labels = torch.randint(9, (n,))
    moves = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    dots = torch.rand(n, side, side) < 0.12
    clips = torch.zeros(n, frames, side, side)
    for clip, seen, label in zip(clips, dots, labels.tolist(), strict=True):
        for t in range(frames):
            clip[t] = seen.roll((t * moves[label][0], t * moves[label][1]), (0, 1))
    elsewhere = (torch.rand(n, frames, side, side) < 0.12).float()
    clips = torch.where(torch.rand(n, frames, side, side) < 0.25, elsewhere, clips)
    return noisy((clips - 0.12) / 0.32, 0.2), labels


def galaxies(n: int, side: int = 20) -> Samples:
    """Tilted galaxies ``[1, side, side]``: elliptic, barred, or with two or three arms."""
    rows, columns = pixels(side)
    labels = torch.randint(4, (n,))
    turn, tilt = uniform(0, 2 * math.pi, n, 1, 1), uniform(0.6, 1.0, n, 1, 1)
    across = rows * turn.cos() - columns * turn.sin()
    along = rows * turn.sin() + columns * turn.cos()
    radius, angle = (along**2 + (across / tilt) ** 2).sqrt(), torch.atan2(across / tilt, along)
    disc = (-3 * radius).exp()
    arms = [
        (0.3 + (m * (angle - 4 * radius)).cos()).clamp(min=0) * (-2 * radius).exp() for m in (2, 3)
    ]
    bar = (-((along / 0.7) ** 4) - (across / 0.15) ** 2).exp()
    kinds = torch.stack([disc, (disc + bar) / 1.5, *(0.4 * disc + a for a in arms)])
    image = kinds[labels, torch.arange(n)] * uniform(0.7, 1.3, n, 1, 1)
    return noisy(4 * image - 0.7, 0.2)[:, None], labels


def coordinates(n: int, side: int = 40) -> Samples:
    """Places ``[2]`` from -1 to 1 in a photograph's crop, and the colours ``[3]`` there."""
    image = photographs()[1, :, 30 : 30 + side, 50 : 50 + side]
    places = torch.randint(side, (n, 2))
    return places / ((side - 1) / 2) - 1, image[:, places[:, 0], places[:, 1]].T.contiguous()
