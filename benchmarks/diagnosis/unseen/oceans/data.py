"""Eddies, waves, layers, plankton and drifting floats.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch

from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform


def eddies(n: int, side: int = 16) -> Samples:
    """Currents ``[2, side, side]``; where water turns left, right or not, ``[side, side]``."""
    rows, columns = pixels(side)
    current = torch.zeros(n, 2, side, side)
    kind = torch.zeros(n, side, side, dtype=torch.long)
    for sign, label in ((1.0, 1), (-1.0, 2)):
        row, column = uniform(-0.7, 0.7, n, 1, 1), uniform(-0.7, 0.7, n, 1, 1)
        size = uniform(0.2, 0.4, n, 1, 1)
        south, east = rows - row, columns - column
        away = (south.square() + east.square()) / size.square()
        turning = 2 * sign * (-away / 2).exp() / size
        current = current + torch.stack([-turning * south, turning * east], 1)
        kind[away < 1.5] = label
    steady = 0.3 * torch.randn(n, 2, 1, 1)
    return noisy(current + steady, 0.1) / 0.5, kind


def buoys(n: int, length: int = 64) -> Samples:
    """How a buoy rises and tilts, ``[3, length]``; sine and cosine of where waves go, ``[2]``.

    A second, weaker swell comes from elsewhere.
    """
    time = torch.arange(length)
    moved = torch.zeros(n, 3, length)
    main = uniform(-math.pi, math.pi, n, 1)
    for strength, direction in ((1.0, main), (0.35, uniform(-math.pi, math.pi, n, 1))):
        period = uniform(6, 16, n, 1)
        phase = 2 * math.pi * (time / period + torch.rand(n, 1))
        tilts = [direction.sin() * phase.cos(), direction.cos() * phase.cos()]
        moved = moved + strength * torch.stack([phase.sin(), *tilts], 1)
    return noisy(moved, 0.2) / 0.65, torch.cat([main.sin(), main.cos()], 1)


def layers(n: int, depths: int = 40) -> Samples:
    """Temperature and salt by depth, ``[2, depths]``; how deep water is mixed, ``[1]``."""
    depth = torch.linspace(0, 1, depths)
    mixed, sharp = uniform(0.15, 0.75, n, 1), uniform(0.02, 0.08, n, 1)
    below = ((depth - mixed) / sharp).sigmoid()
    warm, salt = uniform(0.7, 1.5, n, 1), uniform(-0.8, 0.8, n, 1)
    temperature = -warm * below - 0.3 * depth + uniform(-0.3, 0.3, n, 1)
    salinity = salt * below + uniform(-0.3, 0.3, n, 1)
    profile = torch.stack([(temperature + 0.65) / 0.6, salinity / 0.4], 1)
    return noisy(profile, 0.15), (mixed - 0.45) / 0.173


def plankton(n: int, side: int = 16) -> Samples:
    """Pictures ``[1, side, side]`` of rings, chains, rods, stars and blobs; which of them it is."""
    rows, columns = pixels(side)
    kind = torch.randint(5, (n,))
    row, column = uniform(-0.25, 0.25, n, 1, 1), uniform(-0.25, 0.25, n, 1, 1)
    angle, size = uniform(0, math.pi, n, 1, 1), uniform(0.45, 0.65, n, 1, 1)
    south, east = rows - row, columns - column
    along = angle.cos() * south + angle.sin() * east
    across = angle.cos() * east - angle.sin() * south
    radius = (along.square() + across.square()).sqrt()
    around = torch.atan2(across, along)
    inside = (along.abs() < 1.3 * size) * 1.0
    line = (-0.5 * (across / 0.1).square()).exp() * inside
    pictures = torch.stack(
        [
            (-0.5 * ((radius - size) / 0.1).square()).exp(),
            (-0.5 * (across / 0.17).square()).exp() * inside * (along * 9).sin().square(),
            line,
            (-0.5 * (radius * (2 * around).sin() / 0.1).square()).exp() * (radius < 1.2 * size),
            (-0.5 * (radius / (0.6 * size)).square()).exp(),
        ],
        1,
    )
    seen = pictures[torch.arange(n), kind] * uniform(0.7, 1.3, n, 1, 1)
    return noisy((seen - 0.15) / 0.3, 0.4)[:, None], kind


def floats(n: int, length: int = 24, later: int = 6) -> Samples:
    """Where a float drifts, ``[length, 2]``, from its last place; where it is later, ``[2]``.

    It follows a steady current and turns with an eddy.
    """
    time = torch.arange(-length + 1, later + 1)
    speed, heading = uniform(0.02, 0.08, n, 1), uniform(0, 2 * math.pi, n, 1)
    turn, start = uniform(-0.35, 0.35, n, 1), uniform(0, 2 * math.pi, n, 1)
    radius = uniform(0.2, 0.6, n, 1)
    phase = start + turn * time
    east = speed * heading.cos() * time + radius * (phase.cos() - start.cos())
    north = speed * heading.sin() * time + radius * (phase.sin() - start.sin())
    path = torch.stack([east, north], 2)
    return noisy(path[:, :length], 0.02) / 0.7, path[:, -1] / 0.5
