"""Problems for logistics.

Functions of data draw ``n`` samples with torch's global random numbers. Losses have the reductions
of PyTorch's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, RMSprop

from benchmarks.diagnosis.development.networks import turned
from benchmarks.diagnosis.draws import Samples, fixed, noisy, pixels, uniform
from benchmarks.diagnosis.layers import Attention, Residual, SelfAttention
from benchmarks.diagnosis.problem import reduced
from benchmarks.diagnosis.schedules import cosine, exponential, linear, warmed_up_linear
from benchmarks.diagnosis.training import Training, trained


def late_costs_more(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Exponential where it gets later than said, linear where it doesn't (Varian, 1975)."""
    errors = targets - outputs
    return reduced((errors.clamp(max=5).exp() - errors - 1).sum(1), reduction)


def exponential_pairs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of each pair that is in the wrong order (Freund et al., 2003)."""
    is_better = (targets[:, :, None] > targets[:, None]).to(outputs.dtype)
    pairs = torch.exp((outputs[:, None] - outputs[:, :, None]).clamp(max=5))
    return reduced((is_better * pairs).sum((1, 2)) / is_better.sum((1, 2)), reduction)


HAULIERS, DEPOTS = 10, 6
"""Who drives the lorries, and from where."""


def tours(n: int, stops: int = 10) -> Samples:
    """Place, deadline and load of stops, ``[stops, 4]``; which of them is the next one.

    It is the one with the smallest sum of its distance and its deadline, of those whose load fits.
    """
    place, deadline = uniform(-1.7, 1.7, n, stops, 2), uniform(-1.7, 1.7, n, stops)
    load = uniform(-1.7, 1.7, n, stops)
    costs = place.norm(dim=2) + 0.8 * deadline + 3 * (load > 0.6)
    inputs = torch.cat([place, deadline[..., None], load[..., None]], 2)
    return inputs, costs.argmin(1)


def bicycles(n: int, times: int = 6, side: int = 10) -> Samples:
    """Bicycles lent and returned at places, ``[2, times, side, side]``; those lent next.

    A crowd moves over the town. Those who lent bicycles return them one time later.
    """
    rows, columns = pixels(side)
    time = torch.arange(times + 1)[:, None, None]
    lent = torch.zeros(n, times + 1, side, side)
    for _ in range(2):
        start, move = uniform(-0.7, 0.7, n, 2), uniform(-0.2, 0.2, n, 2)
        row, column = (
            start[:, i, None, None, None] + move[:, i, None, None, None] * time for i in range(2)
        )
        away = (rows - row).square() + (columns - column).square()
        lent += uniform(0.6, 1.4, n, 1, 1, 1) * (-away / 0.12).exp()
    returned = torch.roll(lent, 1, 1)[:, 1:]
    both = torch.stack([lent[:, :-1], returned], 1)
    return noisy((both - 0.35) / 0.4, 0.2), (lent[:, -1] - 0.35) / 0.4


def lorries(n: int) -> Samples:
    """Haulier, depot and six numbers of a trip, ``[8]``; how late it is, ``[1]``."""
    haulier, depot = torch.randint(HAULIERS, (n,)), torch.randint(DEPOTS, (n,))
    x = torch.randn(n, 6)
    way, rain, load, hour, works, stops = x.unbind(1)
    late = 0.4 * fixed(71, HAULIERS)[haulier] + 0.3 * fixed(72, DEPOTS)[depot]
    late = late + 0.5 * way * (works > 0) + 0.4 * rain * way + 0.3 * (2 * hour).sin()
    late = late + 0.3 * stops.relu() - 0.2 * load
    columns = torch.cat([haulier[:, None].float(), depot[:, None].float(), x], 1)
    return columns, noisy(late, 0.15)[:, None]


def stacks(n: int, count: int = 6, height: int = 5) -> Samples:
    """When each container of each stack leaves, ``[count, height]``; how many are in the way.

    A container is in the way if one below it leaves earlier. Empty places leave at -2.
    """
    leaves = uniform(0, 1, n, count, height)
    filled = torch.randint(1, height + 1, (n, count, 1)) > torch.arange(height)
    below = torch.where(filled, leaves, 2.0).cummin(2).values
    blocking = ((leaves > below) & filled).sum((1, 2), dtype=torch.float32)
    inputs = torch.where(filled, 3 * leaves - 1, -2.0)
    return inputs, (blocking[:, None] - 6.5) / 2.3


def warehouses(n: int, count: int = 8) -> Samples:
    """Six numbers of warehouses for an order, ``[count, 6]``; how good each is, ``[count]``.

    One number is the order's urgency, which is the same for all.
    """
    x = torch.randn(n, count, 6)
    x[..., 5] = x[:, :1, 5]
    near, stock, price, staff, space, urgent = x.unbind(2)
    worth = torch.where(urgent > 0, 1.5 * near + staff, -price + 0.7 * space) + stock.clamp(max=0)
    return x, noisy(worth, 0.1)


def couriers(n: int) -> Samples:
    """Distance, hills, traffic, rain, weight and hour, ``[6]``; minutes by the best means, ``[1]``.

    Bicycles, vans and drones depend on other things.
    """
    x = torch.randn(n, 6)
    way, hills, traffic, rain, weight, hour = x.unbind(1)
    bicycle = 1.5 * way + hills + 0.5 * rain
    van = 0.5 * way + 1.5 * traffic * (1 + 0.3 * hour) - 0.3
    drone = 0.3 * way.abs() + 1.5 * weight - 0.2
    fast = torch.where(weight < -0.4, drone, torch.where(way + hour < 0.2, bicycle, van))
    return x, noisy(fast, 0.1)[:, None]


class TourNetwork(nn.Module):
    """Stops that see each other, and a pointer with bounded scores (Kool et al., 2019)."""

    def __init__(self, inputs: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.encoder = nn.Sequential(
            *(Residual(SelfAttention(width, 4)), turned(), nn.BatchNorm1d(width)),
            *(turned(), Residual(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))),
            *(turned(), nn.BatchNorm1d(width), turned()),
        )
        self.glimpse = Attention(width, 4)
        self.bound = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        stops = self.encoder(self.embed(x))
        query = self.glimpse(stops.mean(1, keepdim=True), stops)
        scores = (query * stops).sum(2) / stops.shape[2] ** 0.5
        return 10 * self.bound(scores / 2)


def bicycle_network(times: int = 6, width: int = 12) -> nn.Module:
    """Convolutions over time and town, which change the last map."""
    return nn.Sequential(
        *(nn.Conv3d(2, width, 3, padding=(0, 1, 1)), nn.GroupNorm(3, width), nn.GELU()),
        *(nn.Conv3d(width, width, 3, padding=(0, 1, 1)), nn.GroupNorm(3, width), nn.GELU()),
        *(nn.Conv3d(width, 1, (times - 4, 3, 3), padding=(0, 1, 1)), nn.Flatten(1, 3)),
    )


class LorryNetwork(nn.Module):
    """Residual blocks with normalised branches and dropout (Gorishniy et al., 2021)."""

    def __init__(self, size: int = 4, width: int = 32) -> None:
        super().__init__()
        self.haulier = nn.Embedding(HAULIERS, size)
        self.depot = nn.Embedding(DEPOTS, size)
        self.layers = nn.Sequential(
            nn.Linear(2 * size + 6, width),
            *(
                Residual(
                    *(nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU()),
                    *(nn.Dropout(0.1), nn.Linear(2 * width, width)),
                )
                for _ in range(2)
            ),
            *(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        haulier, depot = self.haulier(x[:, 0].long()), self.depot(x[:, 1].long())
        return self.layers(torch.cat([haulier, depot, x[:, 2:]], 1))


class StackNetwork(nn.Module):
    """A memory that goes up each stack, and numbers that are added over stacks."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.memory = nn.GRU(1, size, batch_first=True)
        self.stack = nn.Sequential(
            *(nn.Linear(size, size), nn.LeakyReLU(0.1), nn.Linear(size, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        last = self.memory(x.flatten(0, 1)[..., None])[1][0]
        return self.stack(last).unflatten(0, x.shape[:2]).sum(1)


class WarehouseNetwork(nn.Module):
    """A score of each warehouse, beside the mean of all of them."""

    def __init__(self, inputs: int = 6, width: int = 32) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())
        self.score = nn.Sequential(
            *(nn.Linear(2 * width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = self.look(x)
        others = seen.mean(1, keepdim=True).expand_as(seen)
        return self.score(torch.cat([seen, others], 2))[..., 0]


class CourierMixture(nn.Module):
    """Experts on normalised hidden units, beside a linear layer."""

    def __init__(self, inputs: int = 6, width: int = 32, experts: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.LeakyReLU())
        self.linear = nn.Linear(inputs, 1)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.LeakyReLU(), nn.Linear(24, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        minutes = torch.cat([expert(hidden) for expert in self.experts], 1)
        mixed = (self.gate(hidden).softmax(1) * minutes).sum(1, keepdim=True)
        return mixed + self.linear(x)


# fmt: off
LOGISTICS: tuple[Training, ...] = (
    trained("tours", TourNetwork, tours, 6000, F.cross_entropy,
        Adam, 2e-3, 64, 180, cosine, clip=1.0),
    trained("bicycles", bicycle_network, bicycles, 1600, F.mse_loss,
        AdamW, 4e-3, 16, 120, cosine, weight_decay=0.01),
    trained("lorries", LorryNetwork, lorries, 8000, late_costs_more,
        AdamW, 3e-3, 64, 180, warmed_up_linear, clip=2.0, weight_decay=0.01),
    trained("stacks", StackNetwork, stacks, 6000, F.smooth_l1_loss,
        Adam, 4e-3, 64, 180, exponential, clip=1.0),
    trained("warehouses", WarehouseNetwork, warehouses, 4000, exponential_pairs,
        Adam, 3e-3, 32, 150, clip=5.0),
    trained("experts for couriers", CourierMixture, couriers, 8000, F.l1_loss,
        RMSprop, 3e-3, 64, 200, linear),
)
