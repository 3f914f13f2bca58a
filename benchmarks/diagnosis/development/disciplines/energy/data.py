"""Wind, sun, batteries, appliances and the grid.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.diagnosis.draws import Samples, noisy, uniform

BUSES = 12
"""Places of the grid."""


def lines() -> Tensor:
    """How well each pair of buses is connected, ``[BUSES, BUSES]``: a ring with three chords."""
    strengths = torch.zeros(BUSES, BUSES)
    ring = [(bus, (bus + 1) % BUSES) for bus in range(BUSES)]
    for first, second in (*ring, (0, 6), (2, 9), (4, 11)):
        strengths[first, second] = strengths[second, first] = 1.0
    return strengths


def wind_farms(n: int, past: int = 32, future: int = 8, farms: int = 6) -> Samples:
    """Wind at farms, ``[past, farms]``, and that to come, ``[future, farms]``.

    The same weather reaches each farm two times after the one before it.
    """
    delay = 2 * torch.arange(farms - 1, -1, -1)
    time = torch.arange(past + future)[:, None] + delay
    period, phase = uniform(12, 40, n, 1, 1, 3), uniform(0, 2 * math.pi, n, 1, 1, 3)
    waves = (2 * math.pi * time[..., None] / period + phase).sin()
    weather = (waves * uniform(0.3, 0.9, n, 1, 1, 3)).sum(3)
    wind = noisy(weather * uniform(0.8, 1.2, n, 1, farms), 0.15)
    return wind[:, :past], wind[:, past:]


def batteries(n: int, cycles: int = 8, points: int = 24) -> Samples:
    """Voltages ``[cycles, points]`` of discharges, and for how long the battery lasts, ``[1]``.

    The voltage falls where the battery is empty, which is earlier the more it has aged.
    """
    fade, resistance = uniform(0.005, 0.04, n, 1, 1), uniform(0.1, 0.4, n, 1, 1)
    cycle = torch.arange(cycles)[:, None]
    drawn = torch.linspace(0, 1, points)
    capacity = 0.95 - fade * cycle + uniform(-0.02, 0.02, n, 1, 1)
    voltage = 1 - resistance * drawn - ((drawn - capacity) / 0.05).sigmoid()
    lasts = (0.3 / fade[:, 0]).log() - resistance[:, 0]
    return noisy((voltage - 0.7) / 0.3, 0.1), (lasts - 2.5) / 0.55


def appliances(n: int, length: int = 64) -> Samples:
    """The power of a house, ``[1, length]``; which of four appliances run in the middle, ``[4]``.

    A fridge hums fast, a kettle is strong and short, a washer turns back and forth,
    and an oven switches itself on and off.
    """
    time = torch.arange(length)
    middle = length / 2
    is_on = (torch.rand(n, 4) < 0.4).float()
    phase = uniform(0, 2 * math.pi, n, 4, 1)
    last = torch.tensor([12.0, 6.0, 10.0, 14.0])[:, None]
    centre = middle + uniform(-0.6, 0.6, n, 4, 1) * last
    elsewhere = centre + last * 2 * torch.where(torch.rand(n, 4, 1) < 0.5, -1.0, 1.0)
    place = torch.where(is_on[..., None] > 0, centre, elsewhere)
    runs = ((time - place).abs() < last).float()
    shapes = torch.stack(
        [
            0.6 + 0.5 * (2 * math.pi * time / 3 + phase[:, 0]).sin(),
            2.5 * torch.ones(n, length),
            0.8 + 0.8 * (2 * math.pi * time / 8 + phase[:, 2]).sin(),
            1.4 * ((2 * math.pi * time / 16 + phase[:, 3]).sin() > 0).float(),
        ],
        1,
    )
    running = (runs[:, :, length // 2] > 0).float()
    return noisy((runs * shapes).sum(1, keepdim=True) - 1.4, 0.08), running


def power_flows(n: int) -> Samples:
    """What buses feed in, ``[BUSES]``, and the angles of their voltages, ``[BUSES]``.

    A line carries its strength times the sine of the angles' difference.
    """
    angles = torch.randn(n, BUSES)
    angles = 0.6 * (angles - angles.mean(1, keepdim=True))
    differences = angles[:, :, None] - angles[:, None]
    fed_in = (lines() * differences.sin()).sum(2)
    return noisy(fed_in, 0.02), angles / 0.6


def turbines(n: int) -> Samples:
    """Wind, its direction, density, turbulence and pitch, ``[5]``; a turbine's power, ``[1]``.

    It stands still in weak wind, follows its cube, is held at its limit, and stops in a storm.
    """
    wind, direction = uniform(-1.7, 1.7, n), torch.randn(n)
    density, turbulence, pitch = torch.randn(n), torch.randn(n), torch.randn(n)
    into_it = (0.6 * direction).cos() * (1 + 0.1 * density)
    speed = wind + 1.7
    rising = 3 * ((speed - 0.6) / 1.4).clamp(0, 1).pow(2) * into_it
    held = torch.where(speed > 2, 3 * into_it - 0.5 * pitch, rising)
    power = torch.where(speed > 2.9, -0.3 * turbulence, held)
    return torch.stack([wind, direction, density, turbulence, pitch], 1), noisy(power, 0.1)[:, None]


def sunshine(n: int) -> Samples:
    """Time of day and year, clouds, haze, heat and dust, ``[8]``; a roof's power, ``[1]``.

    It varies most under broken clouds.
    """
    hour, season = uniform(-1, 1, n), uniform(0, 2 * math.pi, n)
    clouds, haze, heat, dust = torch.rand(n), torch.randn(n), torch.randn(n), torch.randn(n)
    height = (0.5 * math.pi * hour).cos() * (1 + 0.4 * season.cos())
    shaded = 1 - 0.75 * clouds
    power = 3 * height * shaded * (1 - 0.08 * haze - 0.05 * heat - 0.05 * dust)
    spread = 0.1 + 1.2 * clouds * (1 - clouds) * height
    columns = [
        *(2 * hour, hour.square() * 3 - 1, season.cos(), season.sin()),
        *(4 * clouds - 2, haze, heat, dust),
    ]
    return torch.stack(columns, 1), (power + spread * torch.randn(n))[:, None]
