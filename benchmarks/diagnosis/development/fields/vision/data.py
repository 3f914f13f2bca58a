"""Rendered images: letters, faces, shapes, figures, fields of vectors, radar pictures and leaves.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform


def strokes(ends: Tensor, side: int, width: float) -> Tensor:
    """Images ``[n, side, side]`` of straight strokes ``[n, strokes, 2, 2]`` from 0 to 1.

    A stroke is given by the row and column of both of its ends.
    """
    places = torch.stack(pixels(side), 2).view(-1, 2)
    first, along = ends[:, :, 0], ends[:, :, 1] - ends[:, :, 0]
    offsets = places - first[:, :, None]
    length = along.square().sum(2, keepdim=True).clamp(min=1e-6)
    shares = ((offsets @ along[..., None])[..., 0] / length).clamp(0, 1)
    distances = (offsets - shares[..., None] * along[:, :, None]).square().sum(3)
    return (-distances / width**2).exp().amax(1).view(-1, side, side)


LETTERS = {
    "A": ((2, 0, 0, 1), (0, 1, 2, 2), (1, 0.5, 1, 1.5)),
    "E": ((0, 0, 2, 0), (0, 0, 0, 2), (1, 0, 1, 2), (2, 0, 2, 2)),
    "F": ((0, 0, 2, 0), (0, 0, 0, 2), (1, 0, 1, 2)),
    "H": ((0, 0, 2, 0), (0, 2, 2, 2), (1, 0, 1, 2)),
    "K": ((0, 0, 2, 0), (1, 0, 0, 2), (1, 0, 2, 2)),
    "L": ((0, 0, 2, 0), (2, 0, 2, 2)),
    "T": ((0, 0, 0, 2), (0, 1, 2, 1)),
    "X": ((0, 0, 2, 2), (0, 2, 2, 0)),
    "Y": ((0, 0, 1, 1), (0, 2, 1, 1), (1, 1, 2, 1)),
    "Z": ((0, 0, 0, 2), (0, 2, 2, 0), (2, 0, 2, 2)),
}
"""Strokes of each letter, from a row and a column to a row and a column, from 0 to 2."""


def letters(n: int, side: int = 16, most: int = 4) -> Samples:
    """Slanted letters ``[1, side, side]`` of different sizes; the classes are one-hot, ``[10]``."""
    padded = [[*lines, *[lines[0]] * (most - len(lines))] for lines in LETTERS.values()]
    drawn = torch.tensor(padded, dtype=torch.float32).view(-1, most, 2, 2) - 1
    labels = torch.randint(len(LETTERS), (n,))
    turn = torch.eye(2) * uniform(0.5, 0.8, n, 1, 2) + noisy(torch.zeros(n, 2, 2), 0.1)
    ends = drawn[labels] @ turn[:, None] + uniform(-0.15, 0.15, n, 1, 1, 2)
    image = strokes(ends, side, 0.14)
    return noisy(3 * image - 0.8, 0.3)[:, None], F.one_hot(labels, len(LETTERS)).float()


def faces(n: int, side: int = 20) -> Samples:
    """Drawn faces ``[1, side, side]`` that smile, frown, are straight, surprised, or wink."""
    rows, columns = pixels(side)
    labels = torch.randint(5, (n,))
    size = uniform(0.75, 0.95, n, 1, 1)
    down = (rows - uniform(-0.1, 0.1, n, 1, 1)) / size
    right = (columns - uniform(-0.1, 0.1, n, 1, 1)) / size

    def line(distance: Tensor, width: float = 0.1) -> Tensor:
        return (-((distance / width) ** 2)).exp()

    head = line((down**2 + (right / uniform(0.8, 1.0, n, 1, 1)) ** 2).sqrt() - 0.95)
    eyes = uniform(0.25, 0.4, n, 1, 1)
    left, open_right = (line(((down + 0.3) ** 2 + (right - s * eyes) ** 2).sqrt()) for s in (-1, 1))
    shut = line(down + 0.3, 0.07) * ((right - eyes).abs() < 0.2)
    is_mouth, low = (right.abs() < 0.45).float(), down - 0.4
    bend = uniform(0.7, 1.5, n, 1, 1)
    curve = right**2 - 0.1
    mouths = torch.stack(
        [
            line(low + bend * curve) * is_mouth,
            line(low - bend * curve) * is_mouth,
            line(low) * is_mouth,
            line((low**2 + right**2).sqrt() - uniform(0.15, 0.22, n, 1, 1)),
            line(low) * is_mouth,
        ]
    )
    mouth = mouths[labels, torch.arange(n)]
    winks = (labels == 4)[:, None, None]
    parts = torch.stack([head, left, torch.where(winks, shut, open_right), mouth])
    return noisy(2.5 * parts.amax(0) - 0.8, 0.3)[:, None], labels


CELLS = 4
"""Cells in a row and in a column of the detector's grid."""


def shapes(n: int, side: int = 24, most: int = 3) -> Samples:
    """Images ``[1, side, side]`` of one to three discs, crosses and rings, in cells of their own.

    The targets ``[5, CELLS, CELLS]`` are, for each cell, whether there is an object, how far its
    centre is from the cell's, as rows and columns, its logarithmic size, and its class.
    """
    rows, columns = pixels(side)
    cells = torch.rand(n, CELLS**2).topk(most, 1).indices
    is_there = torch.arange(most) < torch.randint(1, most + 1, (n, 1))
    offsets, size = uniform(-0.5, 0.5, 2, n, most), uniform(0.15, 0.3, n, most)
    labels = torch.randint(3, (n, most))
    corner = 2 / CELLS
    down = rows - (corner * (cells // CELLS + 0.5 + offsets[0]) - 1)[..., None, None]
    right = columns - (corner * (cells % CELLS + 0.5 + offsets[1]) - 1)[..., None, None]
    down, right = down / size[..., None, None], right / size[..., None, None]
    radius = (down**2 + right**2).sqrt()
    thin = torch.minimum(down.abs(), right.abs())
    kinds = torch.stack(
        [radius - 1, torch.maximum(thin - 0.25, radius - 1.1), radius.sub(0.8).abs()]
    )
    chosen = kinds.gather(0, labels[None, ..., None, None].expand(1, -1, -1, side, side))[0]
    drawn = (-6 * (chosen - torch.where(labels == 2, 0.25, 0.0)[..., None, None])).sigmoid()
    image = (drawn * is_there[..., None, None]).amax(1)
    values = torch.stack([is_there.float(), *offsets, (size / 0.2).log(), labels.float()], 1)
    targets = torch.zeros(n, 5, CELLS**2)
    targets.scatter_(2, cells[:, None].expand(-1, 5, -1), values * is_there[:, None])
    return noisy(2.5 * image - 0.4, 0.25)[:, None], targets.unflatten(2, (CELLS, CELLS))


JOINTS = 5
"""The head, two hands and two feet."""


def figures(n: int, side: int = 16) -> Samples:
    """Stick figures ``[1, side, side]``; a map with a peak for each joint, ``[JOINTS, ...]``."""
    hip = torch.stack([uniform(0.0, 0.2, n), uniform(-0.2, 0.2, n)], 1)
    lean, height = uniform(-0.3, 0.3, n), uniform(0.6, 0.75, n)
    neck = hip - height[:, None] * torch.stack([lean.cos(), lean.sin()], 1) * 0.6
    head = hip - height[:, None] * torch.stack([lean.cos(), lean.sin()], 1)

    def limb(start: Tensor, low: float, high: float, length: float) -> Tensor:
        angle = uniform(low, high, n)
        return start + length * torch.stack([angle.cos(), angle.sin()], 1)

    hands = limb(neck, -2.4, -0.6, 0.55), limb(neck, 0.6, 2.4, 0.55)
    feet = limb(hip, -0.8, -0.15, 0.65), limb(hip, 0.15, 0.8, 0.65)
    lines = [(hip, head), *((neck, hand) for hand in hands), *((hip, foot) for foot in feet)]
    image = strokes(torch.stack([torch.stack(line, 1) for line in lines], 1), side, 0.1)
    spots = torch.stack([head, *hands, *feet], 1)
    maps = strokes(torch.stack([spots, spots], 2).flatten(0, 1)[:, None], side, 0.2)
    return noisy(3 * image - 0.6, 0.3)[:, None], maps.unflatten(0, (n, JOINTS))


def fields(n: int, side: int = 16) -> Samples:
    """Fields of vectors ``[2, side, side]``: a source, sink, whirl either way, saddle or shear."""
    rows, columns = pixels(side)
    labels = torch.randint(6, (n,))
    down = rows - uniform(-0.4, 0.4, n, 1, 1)
    right = columns - uniform(-0.4, 0.4, n, 1, 1)
    fall = (-uniform(0.3, 1.5, n, 1, 1) * (down**2 + right**2)).exp()
    kinds = torch.stack(
        [
            torch.stack(pair, 1)
            for pair in (
                *((down, right), (-down, -right), (right, -down), (-right, down)),
                *((down, -right), (torch.zeros_like(down), down)),
            )
        ]
    )
    field = 2.5 * uniform(0.7, 1.3, n, 1, 1, 1) * fall[:, None] * kinds[labels, torch.arange(n)]
    return noisy(field + uniform(-0.3, 0.3, n, 2, 1, 1), 0.5), labels


def radar(n: int, side: int = 16, past: int = 4, future: int = 2) -> Samples:
    """Pictures ``[past, 1, side, side]`` of clouds that a wind moves, and those that follow."""
    rows, columns = pixels(side)
    start, wind = uniform(-0.9, 0.9, n, 4, 2), uniform(-0.2, 0.2, n, 1, 2)
    size, growth = uniform(0.2, 0.4, n, 4, 1, 1), uniform(-0.05, 0.1, n, 4, 1, 1)
    pictures = []
    for time in range(past + future):
        centre = (start + time * wind)[..., None, None]
        distance = (rows - centre[:, :, 0]) ** 2 + (columns - centre[:, :, 1]) ** 2
        clouds = (1 + time * growth) * (-distance / size**2).exp()
        pictures.append(noisy(2.2 * clouds.sum(1) - 0.9, 0.05))
    frames = torch.stack(pictures, 1)[:, :, None]
    return frames[:, :past], frames[:, past:]


def leaves(n: int, side: int = 24, most: int = 4) -> Samples:
    """Coloured pictures ``[3, side, side]`` of a leaf with one to four lesions.

    The targets are the classes of the pixels: background, leaf or lesion.
    """
    rows, columns = pixels(side)
    turn = uniform(0, math.pi, n, 1, 1)
    along, across = (
        rows * turn.cos() + columns * turn.sin(),
        columns * turn.cos() - rows * turn.sin(),
    )
    length, width = uniform(0.8, 1.0, n, 1, 1), uniform(0.45, 0.7, n, 1, 1)
    is_leaf = (along / length) ** 2 + (across / width) ** 2 < 1
    places = uniform(-0.4, 0.4, 2, n, most, 1, 1)
    distances = (rows - places[0]) ** 2 + (columns - places[1]) ** 2
    is_there = torch.arange(most) < torch.randint(1, most + 1, (n, 1))
    sick = (distances < uniform(0.12, 0.22, n, most, 1, 1) ** 2) & is_there[..., None, None]
    is_lesion = sick.any(1) & is_leaf
    labels = is_leaf.long() + is_lesion.long()
    colours = torch.tensor([[-0.6, -0.5, -0.6], [-0.4, 1.2, -0.2], [1.2, 0.3, -0.3]])
    light = uniform(0.7, 1.3, n, 1, 1, 1) * colours[labels].permute(0, 3, 1, 2)
    return noisy(light + 0.4 * torch.randn(n, 3, 1, 1), 0.5), labels
