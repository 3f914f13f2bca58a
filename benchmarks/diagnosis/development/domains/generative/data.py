"""What generative models and autoencoders learn: generated points, and scikit-learn's digits.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from sklearn import datasets
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, random_state, standardised


def moons(n: int) -> Samples:
    """Points ``[2]`` of two half circles, which are their own targets."""
    points, _ = datasets.make_moons(n, noise=0.05, random_state=random_state())
    values = standardised(torch.tensor(points, dtype=torch.float32))
    return values, values


def noised_roll(n: int) -> Samples:
    """Points of a spiral with more or less noise, and how much, ``[3]``; the noise, ``[2]``.

    The amount is the angle of the mixture of both (Nichol and Dhariwal, 2021).
    """
    points, _ = datasets.make_swiss_roll(n, noise=0.1, random_state=random_state())
    plane = standardised(torch.tensor(points[:, [0, 2]], dtype=torch.float32))
    amount, noise = 0.15 + 0.85 * torch.rand(n, 1), torch.randn(n, 2)
    angle = amount * math.pi / 2
    return torch.cat([angle.cos() * plane + angle.sin() * noise, amount], 1), noise


def black_digits(n: int) -> Samples:
    """Handwritten digits ``[1, 8, 8]`` of black and white pixels, which are their own targets."""
    pixels, _ = datasets.load_digits(return_X_y=True)
    images = (torch.tensor(pixels).view(-1, 1, 8, 8) > 7).float()
    chosen = images[torch.randperm(len(images))[:n]]
    return chosen, chosen


def superposed(n: int, features: int = 40, size: int = 20, active: int = 3) -> Samples:
    """Sums ``[size]`` of few of many directions (Elhage et al., 2022), their own targets."""
    directions = F.normalize(torch.randn(features, size), dim=1)
    chosen = torch.rand(n, features).topk(active, 1).indices
    used = F.one_hot(chosen, features).sum(1) * (0.5 + torch.rand(n, features))
    vectors = noisy(2 * used @ directions, 0.05)
    return vectors, vectors
