"""Equations of physics, operators, families of functions, and logged decisions.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch

from benchmarks.diagnosis.draws import Samples, noisy, uniform


def membrane(n: int) -> Samples:
    """Places ``[2]`` from -1 to 1, half of them at the edge; the load and whether it is the edge.

    The load ``[2]`` of Poisson's equation has two peaks, which differ between seeds.
    """
    places = uniform(-1, 1, n, 2)
    side, end = torch.randint(2, (n,)), 2.0 * torch.randint(2, (n,)) - 1
    is_edge = torch.rand(n) < 0.5
    at_edge = places.scatter(1, side[:, None], end[:, None])
    places = torch.where(is_edge[:, None], at_edge, places)
    peaks = uniform(-0.6, 0.6, 2, 2)
    distances = (places[:, None] - peaks).square().sum(2)
    load = ((-distances / 0.3).exp() * torch.tensor([4.0, -4.0])).sum(1)
    return places, torch.stack([load, is_edge.float()], 1)


SENSORS = 20


def antiderivatives(n: int) -> Samples:
    """Values ``[SENSORS]`` of a smooth function and a place; the integral up to it, ``[1]``."""
    orders = torch.arange(1, 5)
    waves = torch.randn(2, n, 4) / orders.sqrt()
    where = uniform(0, 1, n, 1)
    angles = math.pi * orders * torch.linspace(0, 1, SENSORS)[:, None]
    values = waves[0] @ angles.sin().T + waves[1] @ angles.cos().T
    angle = math.pi * orders * where
    integral = (waves[0] * (1 - angle.cos()) + waves[1] * angle.sin()) / (math.pi * orders)
    scaled = integral.sum(1, keepdim=True) / 0.45
    return torch.cat([values / 1.4, 4 * where - 2], 1), noisy(scaled, 0.02)


ACTIONS, STATE = 4, 4
"""Directions in which to move, and the numbers that describe a state."""


def moves(n: int) -> Samples:
    """A place and a goal before and after a move, ``[8]``; the move and its reward, ``[2]``.

    The reward is how much nearer the goal is, and moves are chosen at random.
    """
    place, goal = uniform(-1, 1, 2, n, 2).unbind(0)
    action = torch.randint(ACTIONS, (n,))
    directions = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    later = noisy(place + 0.4 * directions[action], 0.02).clamp(-1, 1)
    reward = 3 * ((place - goal).norm(dim=1) - (later - goal).norm(dim=1))
    states = torch.cat([place, goal, later, goal], 1) / 0.6
    return states, torch.stack([action.float(), reward], 1)


def resonators(n: int) -> Samples:
    """Four numbers of a damped oscillator and a time, ``[5]``; where it is then, ``[1]``."""
    numbers, time = uniform(-1, 1, n, 4), uniform(0, 1, n, 1)
    start, speed, pace, damping = numbers.split(1, 1)
    angle = (5 + 2 * pace) * time
    place = (-(1.5 + damping) * time).exp() * (start * angle.cos() + speed * angle.sin())
    return torch.cat([numbers, 2 * time - 1], 1) / 0.58, noisy(place, 0.01) / 0.35
