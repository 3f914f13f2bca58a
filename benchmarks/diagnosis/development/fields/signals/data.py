"""Sounds and time series.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, uniform

PHONES = 5
"""Kinds of sounds; 0 stands for silence between them."""
SAID = 4
"""Sounds of each recording."""


def phones(n: int, length: int = 48, bands: int = 12) -> Samples:
    """Spectra ``[bands, length]`` of four sounds, each at its pace; which sounds, ``[SAID]``.

    A sound has two formants, which differ between speakers.
    """
    formants = torch.tensor([[2.0, 6.0], [3.0, 9.0], [4.5, 7.0], [1.5, 9.5], [4.0, 10.5]])
    said = torch.randint(PHONES, (n, SAID))
    spoken, silent = uniform(5, 9, n, SAID), uniform(2, 4, n, SAID)
    starts = silent.cumsum(1) + spoken.cumsum(1) - spoken
    time = torch.arange(length)[:, None]
    loud = ((time - starts[:, None]) / 0.7).sigmoid()
    loud = loud * ((starts[:, None] + spoken[:, None] - time) / 0.7).sigmoid()
    heights = noisy(formants[said] + 0.4 * torch.randn(n, 1, 1), 0.2)
    shapes = (-(((torch.arange(bands) - heights[..., None]) / 1.2) ** 2)).exp().sum(2)
    spectra = (loud @ shapes).transpose(1, 2)
    return noisy(2.5 * spectra - 0.5, 0.4), said + 1


def sales(n: int, past: int = 36, future: int = 6) -> Samples:
    """Sales ``[past]``, by the mean of which they are divided, and those to come, ``[future + 1]``.

    They have a trend and a season of twelve. The last target is the mean absolute difference
    between past sales and those a season before, which errors are compared with.
    """
    time = torch.arange(past + future) + torch.randint(12, (n, 1))
    angle = 2 * math.pi * time / 12
    season = uniform(0.1, 0.5, n, 1) * (angle + uniform(0, 6, n, 1)).sin()
    season = season + uniform(0, 0.3, n, 1) * (2 * angle + uniform(0, 6, n, 1)).sin()
    trend = uniform(-0.02, 0.02, n, 1) * torch.arange(past + future)
    series = noisy(1 + season + trend, 0.08)
    series = 2 * (series / series[:, :past].mean(1, keepdim=True) - 1)
    usual = (series[:, 12:past] - series[:, : past - 12]).abs().mean(1, keepdim=True)
    return series[:, :past], torch.cat([series[:, past:], usual], 1)


def visits(n: int, length: int = 28) -> Samples:
    """Visitors of a shop and the day of the week, ``[length, 8]``; those of the next days.

    The number is the logarithm of one more, and the targets ``[length]`` are counts.
    """
    days = torch.arange(length + 1) + torch.randint(7, (n, 1))
    week = noisy(torch.zeros(n, 7), 0.7).gather(1, days % 7)
    drift = (0.1 * torch.randn(n, length + 1)).cumsum(1)
    level = uniform(0.5, 3.5, n, 1)
    counts = torch.poisson((level + week + drift).clamp(max=6).exp())
    is_day = F.one_hot(days[:, 1:] % 7, 7).float()
    known = ((counts[:, :-1] + 1).log() - 2) / 1.3
    return torch.cat([known[..., None], is_day], 2), counts[:, 1:]


def chirps(n: int, length: int = 128) -> Samples:
    """Signals ``[length, 1]``: rising, falling, steady, swelling, or broken in two."""
    labels = torch.randint(5, (n,))
    time = torch.linspace(0, 1, length)
    low, high = uniform(4, 8, n, 1), uniform(14, 20, n, 1)
    steady = uniform(6, 18, n, 1)
    second = (time > uniform(0.35, 0.65, n, 1)).float()
    paces = torch.stack(
        [
            low + (high - low) * time,
            high + (low - high) * time,
            *(steady + 0 * time for _ in range(2)),
            torch.where(
                torch.rand(n, 1) < 0.5, low + (high - low) * second, high - (high - low) * second
            ),
        ]
    )
    pace = paces[labels, torch.arange(n)]
    phase = 2 * math.pi * (pace.cumsum(1) / length + torch.rand(n, 1))
    swell = 1 + 0.9 * (2 * math.pi * (uniform(2, 4, n, 1) * time + torch.rand(n, 1))).sin()
    volume = torch.where(labels[:, None] == 3, swell, torch.ones(()))
    return noisy(1.2 * volume * phase.sin(), 0.4)[..., None], labels


def hums(n: int, length: int = 128) -> Samples:
    """Noisy recordings ``[1, length]`` of two notes with overtones, and those without the noise."""
    time = torch.arange(length) / length
    clean = torch.zeros(n, length)
    for _ in range(2):
        pitch, start = uniform(4, 12, n, 1), uniform(0, 0.5, n, 1)
        phase = 2 * math.pi * (pitch * time + torch.rand(n, 1))
        tone = phase.sin() + 0.5 * (2 * phase).sin() + 0.3 * (3 * phase).sin()
        volume = (40 * (time - start)).sigmoid() * (-2 * (time - start).clamp(min=0)).exp()
        clean = clean + volume * tone
    hiss = _coloured(n, length)
    return noisy(clean + 0.6 * hiss, 0.2)[:, None], clean[:, None]


def _coloured(n: int, length: int) -> Tensor:
    """Noise of which neighbours differ in sign more often than not, ``[n, length]``."""
    white = torch.randn(n, length + 1)
    return (white[:, 1:] - white[:, :-1]) / math.sqrt(2)
