"""Tours, bicycles, lorries, stacks, warehouses and couriers.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import torch

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform

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
