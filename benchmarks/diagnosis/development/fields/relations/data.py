"""Graphs, clouds of points, and binary patterns.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch

from benchmarks.diagnosis.draws import Samples, noisy, uniform


def traders(n: int, nodes: int = 12) -> Samples:
    """Who hears whom, ``[nodes, nodes]``, and each one's renown and price, ``[nodes, 2]``.

    The targets ``[nodes, 1]`` are the prices that they come to, as means over those whom they
    hear and themselves, in which the renowned ones count more.
    """
    hears = ((torch.rand(n, nodes, nodes) < 0.3) | torch.eye(nodes, dtype=torch.bool)).float()
    renown, price = torch.randn(2, n, nodes).unbind(0)
    weights = (2 * renown[:, None] + hears.log()).softmax(2)
    agreed = (weights @ price[..., None]) / 0.8
    return torch.cat([hears, torch.stack([renown, price], 2)], 2), noisy(agreed, 0.05)


def lamps(n: int, points: int = 36) -> Samples:
    """Points ``[points, 3]`` of tilted lamps; base, pole or shade as the class of each."""
    labels = torch.randint(3, (n, points))
    turn, share = uniform(0, 2 * math.pi, n, points), torch.rand(n, points)
    wide, thick, top = (
        uniform(low, high, n, 1) for low, high in ((0.5, 0.9), (0.6, 1.0), (0.5, 0.9))
    )
    radius = torch.stack(
        [wide * share.sqrt(), torch.full_like(share, 0.05), thick * (1 - 0.6 * share)]
    )
    height = torch.stack(
        [torch.full_like(share, -1.2), -1.2 + (top + 1.2) * share, top + 0.7 * share]
    )
    chosen = labels[None]
    radius, height = radius.gather(0, chosen)[0], height.gather(0, chosen)[0]
    x, y = radius * turn.cos(), radius * turn.sin()
    tilt = uniform(-0.6, 0.6, n, 1)
    tilted = [x * tilt.cos() - height * tilt.sin(), y, x * tilt.sin() + height * tilt.cos()]
    return noisy(1.4 * torch.stack(tilted, 2), 0.04), labels


def patterns(n: int, size: int = 64, prototypes: int = 8) -> Samples:
    """Patterns ``[size]`` of zeros and ones, which are their own targets.

    Each is one of a few prototypes, in which one number in twelve has changed.
    """
    known = torch.randint(2, (prototypes, size))
    chosen = known[torch.randint(prototypes, (n,))]
    changed = (chosen + (torch.rand(n, size) < 1 / 12)) % 2
    return changed.float(), changed.float()
