"""Sensors, machines, markets and sleep as series.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch

from benchmarks.diagnosis.draws import Samples, noisy, uniform


def movements(n: int, length: int = 48) -> Samples:
    """Three axes of an accelerometer, ``[3, length]``: walking, running, stairs, waving or a fall.

    Each is worn a little differently.
    """
    labels = torch.randint(5, (n,))
    time = torch.linspace(0, 1, length)
    pace, phase = uniform(0.9, 1.1, n, 1), uniform(0, 2 * math.pi, n, 1)
    angle = 2 * math.pi * pace * time + phase / 5
    fall = uniform(0.3, 0.7, n, 1)
    jolt = (-(((time - fall) / 0.05) ** 2)).exp()
    still = torch.zeros_like(angle)
    axes = torch.stack(
        [
            torch.stack([(3 * angle).sin(), 0.6 * (6 * angle).cos(), still], 1),
            torch.stack([1.3 * (5 * angle).sin(), (10 * angle).cos(), still], 1),
            torch.stack([(3 * angle).sin(), 0.6 * (6 * angle).cos(), 0.8 * (3 * angle).cos()], 1),
            torch.stack([still, (4 * angle).sin(), (4 * angle).cos()], 1),
            torch.stack([2.5 * jolt, -2 * jolt, (time > fall).float()], 1),
        ]
    )
    worn = noisy(torch.eye(3).repeat(n, 1, 1), 0.2)
    return noisy(worn @ axes[labels, torch.arange(n)], 0.5), labels


def returns(n: int, length: int = 24) -> Samples:
    """A factor and a market's returns, ``[length, 2]``; the return of the next day, ``[1]``.

    Returns follow the factor of the day before, and vary more where they lately have.
    """
    loud = uniform(0.2, 0.9, n)
    factor, values, last = torch.randn(n, length + 1), [], torch.zeros(n)
    for day in range(length + 1):
        loud = 0.1 + 0.75 * loud + 0.1 * last.abs()
        before = factor[:, day - 1] if day else torch.zeros(n)
        last = 0.8 * before + 0.4 * last + 0.5 * loud * torch.randn(n)
        values.append(last)
    market = torch.stack(values, 1)
    return torch.stack([factor[:, :-1], market[:, :-1]], 2), market[:, -1:]


def tides(n: int, past: int = 48, future: int = 12) -> Samples:
    """Two gauges of the water's height, ``[past, 2]``; both of them later, ``[future, 2]``.

    Each height is a sum of tides of a few periods, which are the same at both gauges.
    """
    periods = torch.tensor([12.4, 25.8, 6.2])
    time = torch.arange(past + future)[:, None] / periods * 2 * math.pi
    phase, size = uniform(0, 2 * math.pi, n, 1, 3, 1), uniform(0.3, 1, n, 1, 3, 1)
    late, share = uniform(0.2, 0.9, n, 1, 3, 1), uniform(0.6, 1.2, n, 1, 3, 1)
    angle = time[None, ..., None] + phase
    heights = torch.cat([size * angle.sin(), size * share * (angle - late).sin()], 3).sum(2)
    level = uniform(-0.5, 0.5, n, 1, 2)
    heights = noisy(heights + level, 0.1)
    return heights[:, :past], heights[:, past:]


def traffic(n: int, past: int = 32, future: int = 8) -> Samples:
    """Cars on a road in each quarter of an hour, ``[past]``; those to come, ``[future]``.

    There is a wave of eight steps, a trend, and weather that changes slowly.
    """
    time = torch.arange(past + future)
    phase = uniform(0, 2 * math.pi, n, 1)
    wave = uniform(0.4, 1.0, n, 1) * (2 * math.pi * time / 8 + phase).sin()
    trend = uniform(-0.03, 0.03, n, 1) * (time - past)
    weather = (0.06 * torch.randn(n, past + future)).cumsum(1)
    series = noisy(wave + trend + weather, 0.1)
    return series[:, :past], series[:, past:]


def commands(n: int, bands: int = 12, frames: int = 16) -> Samples:
    """Spectra ``[1, bands, frames]`` of spoken commands; which of six it is.

    A command is two glides of a formant, which are said at different heights and speeds.
    """
    glides = torch.tensor([[2, 8, 8], [8, 2, 2], [2, 8, 2], [8, 2, 8], [5, 5, 9], [5, 5, 1.0]])
    labels = torch.randint(len(glides), (n,))
    middle, start = uniform(0.4, 0.6, n, 1), uniform(0, 3, n, 1)
    time = ((torch.arange(frames) - start) / uniform(9, 12, n, 1)).clamp(0, 1)
    first, second, third = (glides[labels] + torch.randn(n, 1) * 0.8).split(1, 1)
    rising = (time / middle).clamp(max=1)
    falling = ((time - middle) / (1 - middle)).clamp(min=0)
    height = first + (second - first) * rising + (third - second) * falling
    is_said = ((time > 0) & (time < 1)).float()[:, None]
    distance = torch.arange(bands)[:, None] - height[:, None]
    spectra = is_said * (-((distance / 1.2) ** 2)).exp()
    return noisy(2 * spectra - 0.3, 0.9)[:, None], labels


STAGES = 4


def nights(n: int, length: int = 30) -> Samples:
    """What is measured of a sleeper, ``[length, 5]``; the stage of sleep at each time.

    Stages follow each other in turn, and each lasts some time; single measurements say little.
    """
    changes = (torch.rand(n, length) < 0.2).long()
    stages = (torch.randint(STAGES, (n, 1)) + changes.cumsum(1)) % STAGES
    usual = torch.tensor(
        [
            *([1.2, 0, 0, 1, 0], [0, 1.2, 0, -1, 0]),
            *([-1.2, 0, 1, 0, 0.5], [0, -1.2, -1, 0, -0.5]),
        ]
    )
    person = 0.3 * torch.randn(n, 1, 5)
    return noisy(usual[stages] + person, 0.7), stages


def pumps(n: int, length: int = 20) -> Samples:
    """Pressure and flow of a pump in one of three states, ``[length, 2]``; both next, ``[2]``.

    Each state has an own linear law by which they go on, and all of them turn at its pace.
    """
    pace, fade = torch.tensor([0.35, 0.8, 1.4]), torch.tensor([1.0, 1.0, 1.0])
    state = torch.randint(3, (n,))
    angle, size = pace[state], fade[state]
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(n, 2, 2)
    law = size[:, None, None] * turn
    values = [torch.randn(n, 2)]
    while len(values) < length + 1:
        values.append(noisy((law @ values[-1][..., None])[..., 0], 0.06))
    series = torch.stack(values, 1)
    return series[:, :-1], series[:, -1]


def vibrations(n: int, length: int = 64) -> Samples:
    """Vibrations ``[1, length]`` of healthy bearings, which are their own targets."""
    time = torch.linspace(0, 1, length)
    pace, phase = uniform(3, 5, n, 1), uniform(0, 2 * math.pi, n, 3)
    total = torch.zeros(n, length)
    for harmonic, size in ((1, 1.0), (2, 0.5), (3, 0.3)):
        angle = 2 * math.pi * harmonic * pace * time + phase[:, harmonic - 1 : harmonic]
        total = total + size * angle.sin()
    signal = noisy(total * uniform(0.8, 1.4, n, 1), 0.1)[:, None]
    return signal, signal
