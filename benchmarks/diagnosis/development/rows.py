"""Rows of the development problems: tables, sets of points and graphs.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, uniform


def solids(n: int, points: int = 48) -> Samples:
    """Points ``[points, 3]`` of a sphere, cube, cylinder, torus or cone, turned and stretched."""
    labels = torch.randint(5, (n,))
    ball = F.normalize(torch.randn(n, points, 3), dim=2)
    u, v = uniform(0, 2 * math.pi, n, points), uniform(-1, 1, n, points)
    tube = 1 + 0.4 * (math.pi * v).cos()
    kinds = torch.stack(
        [
            ball,
            0.8 * ball / ball.abs().amax(2, keepdim=True),
            torch.stack([0.8 * u.cos(), 0.8 * u.sin(), v], 2),
            torch.stack([tube * u.cos(), tube * u.sin(), 0.4 * (math.pi * v).sin()], 2) / 1.2,
            torch.stack([(1 - v) / 2 * u.cos(), (1 - v) / 2 * u.sin(), v], 2),
        ]
    )
    x, y, z = kinds[labels, torch.arange(n)].unbind(2)
    turn = uniform(0, 2 * math.pi, n, 1)
    turned = torch.stack([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos(), z], 2)
    return noisy(turned * uniform(0.85, 1.15, n, 1, 3), 0.03), labels


def distinct_tokens(n: int, size: int = 12, values: int = 20) -> Samples:
    """Sets of ``size`` draws from a part of the values; how many distinct ones there are."""
    part = torch.randint(3, values + 1, (n, 1))
    tokens = (torch.rand(n, size) * part).long()
    distinct = F.one_hot(tokens, values).amax(1).sum(1, keepdim=True)
    return tokens, distinct.float() / size


def communities(n: int, nodes: int = 16) -> Samples:
    """Graphs ``[nodes, nodes + 4]``: the adjacency, and four features of each node.

    Each node is in one of two communities, which few edges join; the targets say in which.
    """
    labels = torch.randint(2, (n, nodes))
    together = labels[:, :, None] == labels[:, None, :]
    upper = (torch.rand(n, nodes, nodes) < torch.where(together, 0.6, 0.1)).float().triu(1)
    features = torch.randn(n, nodes, 4)
    features[..., 0] += 1.2 * (2 * labels - 1)
    return torch.cat([upper + upper.transpose(1, 2), features], 2), labels


CATEGORIES = (50, 20, 8)
"""How many users, items and hours the click log has."""


def click_log(n: int) -> Samples:
    """Codes of user, item and hour, and five numbers, ``[8]``; clicked or not."""
    tables = [torch.randn(count, 3) for count in CATEGORIES]
    codes = [torch.randint(count, (n,)) for count in CATEGORIES]
    numbers = torch.randn(n, 5)
    user, item, hour = (table[code] for table, code in zip(tables, codes, strict=True))
    logit = 2 * (user * item).sum(1) + hour[:, 0] + 1.5 * numbers[:, 0] - numbers[:, 1] - 1.5
    clicked = torch.rand(n) < logit.sigmoid()
    return torch.cat([torch.stack(codes, 1).float(), numbers], 1), clicked.float()[:, None]


PEOPLE, FILMS = 60, 40


def ratings(n: int) -> Samples:
    """A person and a film, ``[2]``, and the rating that the person gives, mostly from 1 to 5."""
    people, films = torch.randn(PEOPLE, 4), torch.randn(FILMS, 4)
    person, film = torch.randint(PEOPLE, (n,)), torch.randint(FILMS, (n,))
    taste = (people[person, :3] * films[film, :3]).sum(1)
    rating = 3 + 0.4 * people[person, 3] + 0.6 * films[film, 3] + 0.3 * taste
    return torch.stack([person, film], 1), noisy(rating, 0.2)[:, None]


def rentals(n: int) -> Samples:
    """Hour, temperature and rain as shares, and the weekday one-hot, ``[10]``; the demand.

    It varies more where it is larger.
    """
    hour, warm, rain = torch.rand(3, n).unbind(0)
    day = torch.randint(7, (n,))
    rush = (-(((hour - 0.33) / 0.07) ** 2)).exp() + (-(((hour - 0.73) / 0.1) ** 2)).exp()
    leisure = (-(((hour - 0.6) / 0.15) ** 2)).exp()
    demand = (0.3 + torch.where(day < 5, 1.5 * rush, leisure)) * (0.4 + warm) * (1 - 0.6 * rain**2)
    demand = demand * (0.2 * torch.randn(n)).exp()
    shares = torch.stack([hour, warm, rain], 1)
    return torch.cat([shares, F.one_hot(day, 7).float()], 1), (demand[:, None] - 0.6) / 0.45


def resonance(n: int) -> Samples:
    """Two particles' logarithmic energies, that of 1 - cos of their angle, and noise, ``[6]``.

    The target is 1 where both come from the decay of a third, so that their invariant mass is
    about 3, and else -1.
    """
    decayed = torch.rand(n) < 0.5
    energy, other = uniform(0.5, 4, 2, n)
    opening = uniform(0.1, 2, n)
    partner = noisy(torch.full((n,), 3.0), 0.2) ** 2 / (2 * energy * opening)
    second = torch.where(decayed, partner, 2 * other)
    logarithms = torch.stack([energy, second, opening], 1).log()
    return torch.cat([noisy(logarithms, 0.05), torch.randn(n, 3)], 1), (2.0 * decayed - 1)[:, None]


def decisions(n: int) -> Samples:
    """Contexts ``[6]``, and which of five actions was tried with which reward, ``[2]``."""
    merits = 1.5 * torch.randn(6, 5)
    context = torch.randn(n, 6)
    action = torch.randint(5, (n,))
    chances = (context @ merits + 2 * (2 * context[:, :1]).sin() * merits[:1]).softmax(1)
    reward = (torch.rand(n) < chances[torch.arange(n), action]).float()
    return context, torch.stack([action.float(), reward], 1)


def encounters(n: int) -> Samples:
    """Places and velocities of two discs, ``[8]``; whether and how close they meet."""
    place, velocity = 2 * torch.randn(n, 2), torch.randn(n, 2)
    soonest = (-(place * velocity).sum(1) / (velocity**2).sum(1)).clamp(0, 4)
    closest = (place + soonest[:, None] * velocity).norm(dim=1)
    first, drift = torch.randn(n, 2), torch.randn(n, 2)
    rows = torch.cat([first, first + place, drift, drift + velocity], 1)
    return rows, torch.stack([(closest < 1.2).float(), closest], 1)


def throws(n: int) -> Samples:
    """Speed, angle, height and drag of a throw, scaled to 0..1, ``[4]``; how far it goes.

    The distance is measured the less exactly the larger it is.
    """
    scaled = torch.rand(n, 4)
    speed, angle, height, drag = scaled.unbind(1)
    up, along = (2 + 4 * speed) * (1.4 * angle).sin(), (2 + 4 * speed) * (1.4 * angle).cos()
    up, along, y, x = up, along, 2 * height, torch.zeros(n)
    for _ in range(150):
        flying = (y >= 0).float()
        x, y = x + 0.02 * flying * along, y + 0.02 * flying * up
        up, along = up - 0.02 * (5 + drag * up), along - 0.02 * drag * along
    return scaled, noisy(x, 0.02)[:, None] + 0.03 * (x * torch.randn(n))[:, None]
