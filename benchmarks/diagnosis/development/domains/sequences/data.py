"""Sequences: text, series and sounds.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, uniform


def heartbeats(n: int, length: int = 80) -> Samples:
    """Electrocardiograms ``[1, length]``: normal, without P waves, with raised ST, or premature."""
    labels = torch.randint(4, (n,))
    period, first = uniform(24, 30, n, 1), uniform(6, 18, n, 1)
    beats = first + period * torch.arange(4)
    beats[:, 1] -= torch.where(labels == 3, 0.35 * period[:, 0], 0.0)
    beats = noisy(beats, 0.3)
    has_p = torch.where(labels == 1, 0.0, 1.0)[:, None]
    raised = torch.where(labels == 2, 0.6, 0.0)[:, None]
    waves = ((-5.0, 1.2, 0.4 * has_p), (0.0, 0.8, 2.0), (1.8, 0.7, -0.6), (7.0, 2.0, 0.6))
    time = torch.arange(length)
    signal = torch.zeros(n, length)
    for beat in beats.T:
        passed = time - beat[:, None]
        for place, width, height in waves:
            signal = signal + height * (-(((passed - place) / width) ** 2)).exp()
        signal = signal + raised * (-(((passed - 4) / 2) ** 4)).exp()
    wander = 0.2 * (0.1 * time + uniform(0, 6, n, 1)).sin()
    return noisy(1.5 * (signal + wander - 0.2), 0.35)[:, None], labels


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
CHARACTERS = " -0123456789" + "".join(sorted({*"".join(MONTHS)}))
WRITTEN, STANDARD = 11, 10
"""Characters of a date such as ``17 mar 1994`` and ``1994-03-17``."""


def dates(n: int) -> Samples:
    """Dates as they are written and behind them what is known in standard form, ``[21]``.

    The targets are the characters of the standard form, each of which is to be predicted from
    those before it; the first of these is a space.
    """
    choose = random.Random(int(torch.randint(2**31, ())))
    texts = []
    for _ in range(n):
        day, month, year = choose.randint(1, 28), choose.randint(1, 12), choose.randint(1900, 2039)
        texts.append(f"{day:2d} {MONTHS[month - 1]} {year} {year}-{month:02d}-{day:02d}")
    tokens = torch.tensor([[CHARACTERS.index(character) for character in text] for text in texts])
    return tokens[:, :-1], tokens[:, 1 + WRITTEN :]


def brackets(n: int, length: int = 20, kinds: int = 3, deepest: int = 5) -> Samples:
    """Nested brackets of several kinds, and the bracket that comes next at each place.

    Token 0 starts a sequence, ``1 .. kinds`` open, and ``kinds + 1 .. 2 * kinds`` close.
    """
    choose = random.Random(int(torch.randint(2**31, ())))
    sequences = []
    for _ in range(n):
        sequence, opened = [0], list[int]()
        while len(sequence) < length + 1:
            must_close, must_open = len(opened) == deepest, not opened
            if must_open or (not must_close and choose.random() < 0.3):
                opened.append(choose.randint(1, kinds))
                sequence.append(opened[-1])
            else:
                sequence.append(kinds + opened.pop())
        sequences.append(sequence)
    tokens = torch.tensor(sequences)
    return tokens[:, :-1], tokens[:, 1:]


WORDS = 60
"""The first 12 praise, the next 12 blame, and the next 3 negate what comes next."""


def reviews(n: int, length: int = 16) -> Samples:
    """Texts of ``length`` words, and whether there is more praise than blame, ``[1]``."""
    leaning = uniform(0.15, 0.85, n, 1)
    group = torch.where(torch.rand(n, length) < leaning, 0, 12)
    feeling = group + torch.randint(12, (n, length))
    kind = torch.rand(n, length)
    neutral = torch.randint(27, WORDS, (n, length))
    negation = torch.randint(24, 27, (n, length))
    words = torch.where(kind < 0.4, feeling, torch.where(kind < 0.55, negation, neutral))
    value = (words < 12).float() - ((words >= 12) & (words < 24)).float()
    is_negation = ((words >= 24) & (words < 27)).float()
    turned = F.pad(is_negation, (1, 0))[:, :-1]
    total = (value * (1 - 2 * turned)).sum(1, keepdim=True)
    return words, (noisy(total, 0.1) > 0).float()


def consumption(n: int, past: int = 24, future: int = 6) -> Samples:
    """Hourly consumption and the time of day, ``[past, 3]``; the consumption to come, ``[future]``.

    Households differ in their morning and evening peaks, and the level drifts.
    """
    hours = torch.arange(past + future) + torch.randint(24, (n, 1))
    angle = 2 * math.pi * hours / 24
    morning, evening = uniform(0, 1.5, n, 1), uniform(0.5, 2, n, 1)
    peaks = (
        morning * (4 * (angle - 2).cos() - 4).exp() + evening * (3 * (angle - 5).cos() - 3).exp()
    )
    drift = 0.12 * torch.randn(n, past + future).cumsum(1)
    values = noisy(1.6 * peaks + drift + 0.5 * torch.randn(n, 1) - 0.6, 0.08)
    known = torch.stack([values, angle.sin(), angle.cos()], 2)[:, :past]
    return known, values[:, past:]


def instruments(n: int, length: int = 1024, frame: int = 64) -> Samples:
    """Spectrograms ``[1, 33, 31]`` of a flute, a clarinet, a violin, a bell or a drum."""
    labels = torch.randint(5, (n,))
    time = torch.arange(length) / length
    pitch = uniform(40, 90, n, 1)
    vibrato = 1.5 * (uniform(30, 40, n, 1) * time).sin()
    phase = 2 * math.pi * pitch * time

    def tone(partials: tuple[float, ...], strengths: tuple[float, ...], bend: Tensor) -> Tensor:
        parts = [s * (p * (phase + bend)).sin() for p, s in zip(partials, strengths, strict=True)]
        return torch.stack(parts).sum(0)

    steady = torch.zeros(1)
    attack, decay = 1 - (-20 * time).exp(), (-uniform(3, 6, n, 1) * time).exp()
    sounds = torch.stack(
        [
            attack * tone((1, 2), (1.0, 0.1), steady),
            attack * tone((1, 3, 5), (1.0, 0.6, 0.4), steady),
            attack * tone((1, 2, 3, 4), (1.0, 0.5, 0.33, 0.25), vibrato),
            decay * tone((1, 2.76, 5.4), (1.0, 0.7, 0.5), steady),
            decay**2 * torch.randn(n, length),
        ]
    )
    waves = noisy(sounds[labels, torch.arange(n)] * uniform(0.5, 1.5, n, 1), 0.05)
    spectra = torch.stft(
        waves, frame, window=torch.hann_window(frame), center=False, return_complex=True
    )
    return (spectra.abs() + 0.1).log()[:, None, :, ::2], labels
