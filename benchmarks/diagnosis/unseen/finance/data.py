"""Options, repairs, markets and mortgages.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy, uniform

MAKES, REGIONS = 12, 8
"""Of cars, and where they are driven."""


def options(n: int) -> Samples:
    """Moneyness, time, volatility and rate of a call option, ``[4]``; its price, ``[1]``.

    By the formula of Black and Scholes, in parts of the strike.
    """
    money, time = uniform(0.6, 1.4, n), uniform(0.1, 2, n)
    volatility, rate = uniform(0.1, 0.6, n), uniform(0, 0.1, n)
    spread = volatility * time.sqrt()
    near = (money.log() + (rate + volatility.square() / 2) * time) / spread
    discount = (-rate * time).exp()
    price = money * torch.special.ndtr(near) - discount * torch.special.ndtr(near - spread)
    inputs = [(money - 1) / 0.23, (time - 1.05) / 0.55, (volatility - 0.35) / 0.144]
    columns = torch.stack([*inputs, (rate - 0.05) / 0.029], 1)
    return columns, ((price - 0.2) / 0.15)[:, None]


def repairs(n: int) -> Samples:
    """Make, region and four numbers of a damaged car, ``[6]``; what the repair costs, ``[1]``."""
    make, region = torch.randint(MAKES, (n,)), torch.randint(REGIONS, (n,))
    age, speed, worth, season = torch.randn(n, 4).unbind(1)
    mean = 0.5 * fixed(61, MAKES)[make] + 0.4 * fixed(62, REGIONS)[region]
    mean = mean + 0.5 * speed - 0.3 * age * (worth > 0) + 0.3 * worth + 0.2 * (2 * season).sin()
    noise = torch.stack([-torch.rand(n).clamp(min=1e-6).log() for _ in range(8)]).mean(0)
    columns = [make.float(), region.float(), age, speed, worth, season]
    return torch.stack(columns, 1), (mean.exp() * noise)[:, None]


def volatilities(n: int, past: int = 48, future: int = 24) -> Samples:
    """Daily returns ``[past]`` and the mean of their squares in the days to come, ``[1]``."""
    level = uniform(-1.5, 1.5, n, 1)
    slope = 0.6 * torch.randn(n, 1)
    time = torch.linspace(-1, 0.5, past + future)
    deviation = (level + slope * time).exp()
    returns = deviation * torch.randn(n, past + future)
    return returns[:, :past] / 1.5, returns[:, past:].square().mean(1, keepdim=True) + 1e-3


def order_books(n: int, levels: int = 5, length: int = 32) -> Samples:
    """Volumes offered and asked for, ``[2 * levels, length]``; whether the price falls or rises.

    It follows the pressure of the best levels in the last quarter, and otherwise stays.
    """
    target = torch.randint(3, (n,))
    time = torch.linspace(0, 1, length)
    begins = uniform(0.55, 0.75, n, 1)
    pressure = (target[:, None] - 1) * ((time - begins) / 0.05).sigmoid() * uniform(0.7, 1.2, n, 1)
    old = torch.randint(-1, 2, (n, 1)) * ((0.4 - time) / 0.05).sigmoid()
    depth = (-0.5 * torch.arange(levels)).exp()[:, None]
    both = depth * (pressure + old)[:, None]
    busy = 0.4 * (2 * math.pi * (uniform(1, 3, n, 1, 1) * time + torch.rand(n, 1, 1))).sin()
    volumes = torch.cat([busy + both, busy - both], 1)
    return noisy(volumes, 1.0) / 1.1, target


def mortgages(n: int) -> Samples:
    """Seven numbers of a household, ``[7]``; whether it pays back early, ``[1]``.

    What matters depends on the contract, which two of the numbers say.
    """
    x = torch.randn(n, 7)
    fix, long, gap, income, age, left, region = x.unbind(1)
    fixed_rate = torch.where(long > 0, 2 * gap - left, gap + 1.5 * income)
    floating = torch.where(long > 0, 1.5 * age - income, -2 * left + 0.7 * region)
    score = 2 * torch.where(fix > 0, fixed_rate, floating)
    return x, (torch.rand(n) < score.sigmoid()).float()[:, None]
