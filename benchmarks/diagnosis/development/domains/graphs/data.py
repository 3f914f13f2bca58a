"""Graphs, bodies that interact, and sets of points.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, standardised, uniform


def molecules(n: int, atoms: int = 10, elements: int = 4) -> Samples:
    """Trees of atoms with one more bond, ``[atoms, atoms + elements]``; a boiling point, ``[1]``.

    The inputs are the adjacency and each atom's element. Each element contributes to the target,
    and so does each bond between two of the third.
    """
    samples, later = torch.arange(n), torch.arange(1, atoms)
    parents = (torch.rand(n, atoms - 1) * later).long()
    bonds = torch.zeros(n, atoms, atoms)
    bonds[:, 1:] = F.one_hot(parents, atoms).float()
    ends = torch.rand(n, atoms).topk(2, 1).indices
    bonds[samples, ends[:, 0], ends[:, 1]] = 1
    bonds = torch.maximum(bonds, bonds.transpose(1, 2))
    kinds = F.one_hot(torch.randint(elements, (n, atoms)), elements).float()
    polar = kinds[..., 2:3]
    between = (polar.transpose(1, 2) @ bonds @ polar)[:, 0] / 2
    own = kinds.sum(1) @ torch.tensor([[1.0], [0.3], [-0.5], [-1.0]])
    return torch.cat([bonds, kinds], 2), standardised(noisy(own + 1.5 * between, 0.2))


def bodies(n: int, count: int = 5) -> Samples:
    """Mass, place and velocity of bodies, ``[count, 5]``; their accelerations, ``[count, 2]``.

    They attract each other and are slowed down.
    """
    mass, place = uniform(0.5, 2, n, count, 1), torch.randn(n, count, 2)
    velocity = torch.randn(n, count, 2)
    apart = place[:, None] - place[:, :, None]
    attraction = apart * mass[:, None] / (1 + apart.square().sum(3, keepdim=True))
    acceleration = attraction.sum(2) - 0.3 * velocity
    return torch.cat([mass - 1.25, place, velocity], 2), noisy(acceleration, 0.05) / 1.5


def constellations(n: int, points: int = 24, most: int = 4) -> Samples:
    """Points ``[points, 2]`` around one to four centres; class 0 has one centre."""
    labels = torch.randint(most, (n,))
    turn = torch.randperm(most)[None] + uniform(0, 4, n, 1)
    angle = 2 * torch.pi * noisy(turn, 0.05) / most
    centres = uniform(1.0, 1.6, n, 1, 1) * torch.stack([angle.cos(), angle.sin()], 2)
    which = (torch.rand(n, points) * (labels[:, None] + 1)).long()
    around = centres.gather(1, which[..., None].expand(-1, -1, 2))
    return noisy(around, 0.2), labels
