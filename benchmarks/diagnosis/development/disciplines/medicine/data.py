"""Scans, blood values and histories of patients.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy, pixels, standardised, uniform


def nodules(n: int, depth: int = 8, side: int = 12) -> Samples:
    """Volumes ``[1, depth, side, side]`` of a round nodule, a vessel, or a cavity with a wall."""
    labels = torch.randint(3, (n,))
    axes = [torch.linspace(-1, 1, size) for size in (depth, side, side)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    offset = grid - uniform(-0.25, 0.25, n, 1, 1, 1, 3)
    direction = torch.nn.functional.normalize(torch.randn(n, 1, 1, 1, 3), dim=-1)
    along = (offset * direction).sum(-1, keepdim=True)
    radius = torch.linalg.vector_norm(offset, dim=-1)
    across = torch.linalg.vector_norm(offset - along * direction, dim=-1)
    size = uniform(0.4, 0.6, n, 1, 1, 1)
    kinds = torch.stack(
        [
            (-((radius / size) ** 2)).exp(),
            (-((across / (0.6 * size)) ** 2)).exp(),
            (-(((radius - size) / 0.15) ** 2)).exp(),
        ]
    )
    return noisy(2 * kinds[labels, torch.arange(n)] - 0.4, 0.5)[:, None], labels


def ultrasound(n: int, side: int = 20) -> Samples:
    """Pictures ``[1, side, side]`` with speckle, in which a dark, tilted organ is to be found."""
    rows, columns = pixels(side)
    down = rows - uniform(-0.3, 0.3, n, 1, 1)
    right = columns - uniform(-0.3, 0.3, n, 1, 1)
    tilt = uniform(0, math.pi, n, 1, 1)
    first = (down * tilt.cos() + right * tilt.sin()) / uniform(0.5, 0.7, n, 1, 1)
    second = (right * tilt.cos() - down * tilt.sin()) / uniform(0.3, 0.5, n, 1, 1)
    organ = (first.square() + second.square() < 1).float()
    echo = (1 - 0.65 * organ) * (1.1 - 0.3 * rows)
    speckle = torch.randn(n, 2, side, side).square().sum(1).sqrt() / 1.25
    pictures = (echo * (0.4 + 0.6 * speckle)).log1p()
    return ((pictures - 0.5) / 0.2)[:, None], organ[:, None]


def blood_values(n: int, values: int = 12, diagnoses: int = 5) -> Samples:
    """Values ``[values]`` of a blood sample, and which of the diagnoses hold, ``[diagnoses]``.

    Each diagnosis shifts some of the values, and one of them hides what another one does.
    """
    holds = (torch.rand(n, diagnoses) < 0.3).float()
    effects = 1.2 * fixed(1, diagnoses, values)
    hidden = holds[:, :1] * holds[:, 1:2] * effects[1]
    person = torch.randn(n, 2) @ (0.4 * fixed(2, 2, values))
    return standardised(noisy(holds @ effects - hidden + person, 0.4)), holds


def follow_ups(n: int, columns: int = 10) -> Samples:
    """Ten numbers of a patient; until when they were seen and whether they died, ``[2]``."""
    x = torch.randn(n, columns)
    risk = (
        1.5 * x[:, 0] + 1.2 * x[:, 1].clamp(min=0) + 0.5 * x[:, 2] * x[:, 3] + (2 * x[:, 4]).tanh()
    )
    died = (-torch.rand(n).clamp(min=1e-6).log() * (-6 * risk).exp()).pow(0.5)
    left = uniform(0.5, 8.0, n)
    return x, torch.stack([torch.minimum(died, left), (died <= left).float()], 1)


def glucose(n: int, past: int = 24, future: int = 4) -> Samples:
    """Glucose, meals and insulin, ``[past, 3]``; the glucose to come, ``[future]``.

    Meals and insulin work for some time, so that those of late decide what comes.
    """
    total = past + future
    has_meal = (torch.rand(n, total) < 0.1).float()
    meals = has_meal * uniform(0.5, 1.5, n, total)
    insulin = 0.5 * meals + (torch.rand(n, total) < 0.06).float() * uniform(0.4, 1.0, n, total)
    meals[:, past:] = insulin[:, past:] = 0
    level, eaten, injected = torch.randn(n), torch.zeros(n), torch.zeros(n)
    levels = []
    for time in range(total):
        levels.append(level)
        eaten, injected = 0.75 * eaten + meals[:, time], 0.85 * injected + insulin[:, time]
        level = noisy(0.92 * level + 0.6 * eaten - 0.55 * injected, 0.1)
    series = torch.stack([torch.stack(levels, 1) / 2, 2 * meals, 2 * insulin], 2)
    return series[:, :past], series[:, past:, 0]


def doses(n: int) -> Samples:
    """Nine numbers of a patient; the dose of a medicine, ``[1]``, by one of three guidelines.

    Function of the kidneys, of the liver and of the heart say which guideline holds.
    """
    x = torch.randn(n, 9)
    guideline = x[:, :3].argmax(1)
    weight, age, other, level = x[:, 3], x[:, 4], x[:, 5], x[:, 6]
    rules: list[Tensor] = [
        1.5 * weight + 0.5 * age - 1.0,
        (1.5 * other).tanh() - 1.2 * weight + 0.3,
        1.2 * age + 0.8 * level + 1.0,
    ]
    dose = torch.stack(rules)[guideline, torch.arange(n)]
    return x, noisy(dose, 0.1)[:, None]
