"""Problems for finance and insurance.

Functions of data draw ``n`` samples with torch's global random numbers. Losses have the reductions
of PyTorch's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam

from benchmarks.diagnosis.development.networks import Apply, Mixture, mlp, stack
from benchmarks.diagnosis.draws import Samples, fixed, noisy, uniform
from benchmarks.diagnosis.problem import reduced
from benchmarks.diagnosis.schedules import cosine, exponential
from benchmarks.diagnosis.training import Training, trained


def gamma_deviance(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Half the deviance of gamma regression, of the mean's logarithm."""
    ratio = targets.log() - outputs
    return reduced((ratio.exp() - ratio - 1).sum(1), reduction)


def quasi_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of a variance by its logarithm, in parts of squared returns (Patton, 2011)."""
    return reduced((outputs + targets * (-outputs).exp()).sum(1), reduction)


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


class GalerkinLayer(nn.Module):
    """Gates that see the inputs again at each layer (Sirignano and Spiliopoulos, 2018)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.kept, self.reset, self.mixed = (
            nn.Sequential(nn.Linear(inputs + width, width), nn.Sigmoid()),
            nn.Sequential(nn.Linear(inputs + width, width), nn.Sigmoid()),
            nn.Sequential(nn.Linear(inputs + width, width), nn.Tanh()),
        )

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        both = torch.cat([x, state], 1)
        kept = self.kept(both)
        mixed = self.mixed(torch.cat([x, self.reset(both) * state], 1))
        return (1 - kept) * mixed + kept * state


class OptionNetwork(nn.Module):
    """Two such layers."""

    def __init__(self, inputs: int = 4, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.layers = nn.ModuleList(GalerkinLayer(inputs, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.enter(x)
        for layer in self.layers:
            state = layer(x, state)
        return self.head(state)


class RepairNetwork(nn.Module):
    """Embeddings of make and region beside numbers, and a linear way (Schelldorfer, 2019)."""

    def __init__(self, size: int = 4, width: int = 32) -> None:
        super().__init__()
        self.make, self.region = nn.Embedding(MAKES, size), nn.Embedding(REGIONS, size)
        self.linear = nn.Linear(2 * size + 4, 1)
        self.hidden = nn.Sequential(
            *(nn.Linear(2 * size + 4, width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        make, region = self.make(x[:, 0].long()), self.region(x[:, 1].long())
        joined = torch.cat([make, region, x[:, 2:]], 1)
        return self.linear(joined) + self.hidden(joined)


def volatility(width: int = 24) -> nn.Module:
    """Mean squares over the last days, weeks and months (Corsi, 2009), and layers on top."""
    return stack(Apply(over_spans), mlp(5, width, width, 1, activation=nn.SiLU))


def over_spans(x: Tensor) -> Tensor:
    """Logarithms of the mean squares over the latest days."""
    means = [x[:, -span:].square().mean(1) for span in (3, 6, 12, 24, 48)]
    return (torch.stack(means, 1) + 1e-3).log()


class OrderBookNetwork(nn.Module):
    """Convolutions over levels and time, and a memory (Zhang et al., 2019)."""

    def __init__(self, levels: int = 5, width: int = 12, size: int = 24, classes: int = 3) -> None:
        super().__init__()
        self.books = nn.Sequential(
            *(nn.Conv2d(2, width, (levels, 1)), nn.BatchNorm2d(width), nn.LeakyReLU(0.01)),
            *(nn.Conv2d(width, width, (1, 4), (1, 2)), nn.BatchNorm2d(width), nn.LeakyReLU(0.01)),
            *(nn.Conv2d(width, width, (1, 3)), nn.BatchNorm2d(width), nn.LeakyReLU(0.01)),
        )
        self.memory = nn.LSTM(width, size, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.books(x.unflatten(1, (2, -1)))[:, :, 0].transpose(1, 2)
        return self.head(self.memory(seen)[0][:, -1])


def mortgage_mixture(inputs: int = 7, width: int = 24, experts: int = 5) -> nn.Module:
    """Experts whose logits are mixed by a gate that sees hidden units too."""
    look = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
    return Mixture(width, experts, lambda: mlp(inputs, width, 1, activation=nn.GELU), look)


# fmt: off
FINANCE: tuple[Training, ...] = (
    trained("options", OptionNetwork, options, 6000, F.mse_loss,
        Adam, 3e-3, 64, 160, exponential),
    trained("repairs", RepairNetwork, repairs, 6000, gamma_deviance,
        AdamW, 5e-3, 64, 180, cosine, clip=5.0, weight_decay=0.01),
    trained("volatilities", volatility, volatilities, 6000, quasi_likelihood,
        NAdam, 3e-3, 64, 150, clip=5.0),
    trained("order books", OrderBookNetwork, order_books, 4000, F.cross_entropy,
        Adam, 3e-3, 32, 160, clip=2.0),
    trained("experts for mortgages", mortgage_mixture, mortgages, 10000,
        F.binary_cross_entropy_with_logits, Adam, 8e-3, 64, 200, cosine),
)
