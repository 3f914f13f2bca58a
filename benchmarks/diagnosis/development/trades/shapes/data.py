"""Graphs, trees and clouds of points.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch

from benchmarks.diagnosis.draws import Samples, noisy, standardised, uniform

PEOPLE, TRAITS, ASKED = 14, 3, 6
"""People of each graph, their traits, and the pairs that are asked for."""


def friends(n: int) -> Samples:
    """Who knows whom, ``[PEOPLE, PEOPLE]``, traits ``[PEOPLE, TRAITS]``, and pairs, in one row.

    The targets ``[ASKED]`` are whether these pairs know each other, which the graph doesn't show.
    Most people of the same of three circles know each other, and few others do.
    """
    circle = torch.randint(3, (n, PEOPLE))
    together = circle[:, :, None] == circle[:, None, :]
    chance = torch.where(together, 0.92, 0.04)
    knows = (torch.rand(n, PEOPLE, PEOPLE) < chance).float().triu(1)
    knows = knows + knows.transpose(1, 2)
    pairs = torch.rand(n, ASKED, PEOPLE).topk(2, 2).indices
    rows = torch.arange(n)[:, None]
    first, second = pairs.unbind(2)
    targets = knows[rows, first, second]
    shown = knows.clone()
    shown[rows, first, second] = 0
    shown[rows, second, first] = 0
    traits = noisy(torch.eye(TRAITS)[circle], 0.5)
    return torch.cat([shown.flatten(1), traits.flatten(1), pairs.flatten(1).float()], 1), targets


LEAVES, KINDS = 8, 3
"""Leaves of each tree, and what joins two branches: the larger, the smaller, or the mean."""


def formulas(n: int) -> Samples:
    """Trees of numbers ``[LEAVES]`` and of what joins them, ``[LEAVES - 1]``; the value, ``[1]``.

    The lowest joints come first, and the root is the last.
    """
    values = level = torch.randn(n, LEAVES)
    kinds = torch.randint(KINDS, (n, LEAVES - 1))
    start = 0
    while level.shape[1] > 1:
        left, right = level.unflatten(1, (-1, 2)).unbind(2)
        joined = torch.stack([torch.maximum(left, right), torch.minimum(left, right)])
        joined = torch.cat([joined, (left + right)[None] / 2])
        chosen = kinds[None, :, start : start + left.shape[1]]
        level = joined.gather(0, chosen)[0]
        start += left.shape[1]
    return torch.cat([values, kinds.float()], 1), level / 0.6


SEEN, WHOLE = 24, 40


def vases(n: int) -> Samples:
    """Points ``[SEEN, 3]`` of one side of a vase; points of all of it, ``[WHOLE, 3]``."""
    turn, share = uniform(0, 2 * math.pi, n, SEEN + WHOLE), torch.rand(n, SEEN + WHOLE)
    turn[:, :SEEN] = turn[:, :SEEN] / 2
    low, middle, top = (uniform(0.3, 1.1, n, 1) for _ in range(3))
    radius = low * (1 - share) ** 2 + 2 * middle * share * (1 - share) + top * share**2
    height = uniform(0.7, 1.3, n, 1) * (2 * share - 1)
    points = torch.stack([radius * turn.cos(), radius * turn.sin(), height], 2)
    points = noisy(1.5 * points, 0.02)
    return points[:, :SEEN], points[:, SEEN:]


ATOMS = 6


def charges(n: int) -> Samples:
    """Places and charges of six particles, ``[ATOMS, 4]``; the force on each, ``[ATOMS, 3]``."""
    places, charge = torch.randn(n, ATOMS, 3), 2.0 * torch.randint(2, (n, ATOMS)) - 1
    apart = places[:, :, None] - places[:, None]
    squared = apart.square().sum(3) + 1
    strength = charge[:, :, None] * charge[:, None] / squared**1.5
    forces = (strength[..., None] * apart).sum(2)
    return torch.cat([places, charge[..., None]], 2), standardised(forces.flatten(0, 1)).view(
        n, ATOMS, 3
    )
