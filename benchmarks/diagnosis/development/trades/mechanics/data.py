"""Equations of physics, codes, densities and control.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.diagnosis.draws import Samples, noisy, uniform

POINTS = 32


def heat(n: int, orders: int = 6) -> Samples:
    """Temperatures along a ring, ``[1, POINTS]``; those some time later, when it also has turned.

    Waves fade the faster the shorter they are, and the ring is heated where it's cold.
    """
    order = torch.arange(1, orders + 1)
    angle = 2 * math.pi * order[:, None] * torch.arange(POINTS) / POINTS
    waves = torch.randn(2, n, orders) / order.sqrt()
    before = waves[0] @ angle.sin() + waves[1] @ angle.cos()
    fade = (-0.04 * order**2).exp()
    later_angle = angle - 0.6 * order[:, None]
    later = (fade * waves[0]) @ later_angle.sin() + (fade * waves[1]) @ later_angle.cos()
    return (before / 1.5)[:, None], (later / 1.5 + 0.3 * (-later).clamp(min=0))[:, None]


def wells(n: int, steps: int = 10) -> Samples:
    """Place and momentum ``[2]`` in a double well; both some time later."""
    place, momentum = uniform(-1.6, 1.6, n), uniform(-1, 1, n)
    start = torch.stack([place, momentum], 1)
    for _ in range(steps):
        momentum = momentum - 0.05 * (place**3 - place)
        place = place + 0.1 * momentum
        momentum = momentum - 0.05 * (place**3 - place)
    return start, noisy(torch.stack([place, momentum], 1), 0.01)


def spectra(n: int, size: int = 40, lines: int = 3) -> Samples:
    """Spectra ``[size]`` with three lines of one of a few widths, which are their own targets."""
    place, width = uniform(0, 1, n, lines, 1), uniform(0.05, 0.12, n, 1, 1)
    height = uniform(0.5, 1.5, n, lines, 1)
    distance = (torch.linspace(0, 1, size) - place) / width
    spectrum = noisy(1.5 * (height * (-(distance**2)).exp()).sum(1) - 0.8, 0.05)
    return spectrum, spectrum


def bananas(n: int) -> Samples:
    """Points ``[2]`` near a parabola, or of a normal distribution; which of both it is, ``[1]``."""
    is_near = torch.rand(n) < 0.5
    across = uniform(-1.7, 1.7, n)
    near = torch.stack([across, noisy(across**2 - 1, 0.15)], 1)
    points = torch.where(is_near[:, None], near, 1.6 * torch.randn(n, 2))
    return points, is_near.float()[:, None]


def flights(n: int) -> Samples:
    """Height, speed, tilt, turning and wind of a drone, ``[6]``; what its pilot does, ``[2]``.

    The pilot keeps height and tilt, and brakes close to the ground.
    """
    rows = uniform(-1.7, 1.7, n, 6)
    height, climb, tilt, turning, wind, goal = rows.unbind(1)
    thrust = 0.4 * (goal - height) - 0.3 * climb + 0.5 * (-3 * (height + 1)).sigmoid()
    roll = 0.4 * tilt + 0.2 * turning - 0.3 * wind * (1 + 0.4 * climb)
    return rows, noisy(torch.stack([thrust, -roll], 1).tanh(), 0.1)


MEASURED, SIZE = 24, 32


def sparse_codes(n: int, active: int = 2) -> Samples:
    """Sums ``[MEASURED]`` of two of the columns of a matrix; how much of each, ``[SIZE]``."""
    columns = torch.nn.functional.normalize(torch.randn(MEASURED, SIZE), dim=0)
    places = torch.rand(n, SIZE).topk(active, 1).indices
    sizes = uniform(0.7, 1.5, n, active) * (2.0 * torch.randint(2, (n, active)) - 1)
    codes = torch.zeros(n, SIZE).scatter(1, places, sizes)
    return noisy(2 * codes @ columns.T, 0.05), codes


AHEAD = 5


def predators(n: int) -> Samples:
    """Logarithmic numbers of prey and predators, ``[2]``; both at later times, ``[AHEAD, 2]``."""
    state = 0.8 * torch.randn(n, 2)
    start, later = state, list[Tensor]()
    for _ in range(AHEAD):
        for _ in range(10):
            change = torch.stack([1 - state[:, 1].exp(), state[:, 0].exp() - 1], 1)
            middle = state + 0.02 * change
            change = torch.stack([1 - middle[:, 1].exp(), middle[:, 0].exp() - 1], 1)
            state = (state + 0.04 * change).clamp(-4, 4)
        later.append(state)
    return start / 0.8, noisy(torch.stack(later, 1), 0.02)
