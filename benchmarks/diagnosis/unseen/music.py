"""Problems for music.

Functions of data draw ``n`` samples with torch's global random numbers. Losses have the reductions
of PyTorch's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, AdamW, RMSprop

from benchmarks.diagnosis.development.networks import (
    Apply,
    Memory,
    Mixture,
    mean,
    mlp,
    stack,
    turned,
)
from benchmarks.diagnosis.draws import Samples, noisy, uniform
from benchmarks.diagnosis.problem import reduced
from benchmarks.diagnosis.schedules import cosine, exponential, linear, warmed_up_cosine
from benchmarks.diagnosis.training import Training, trained


def bounded_pairs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Labels above zero and the others below it, by log-sum-exp (Su et al., 2022)."""
    present = torch.where(targets > 0, -outputs, -torch.inf)
    absent = torch.where(targets > 0, -torch.inf, outputs)
    zero = (1, 0)
    losses = F.pad(present, zero).logsumexp(1) + F.pad(absent, zero).logsumexp(1)
    return reduced(losses, reduction)


CHORDS = ((0, 4, 7), (0, 3, 7), (0, 5, 7))
"""Major, minor and suspended chords, in semitones above the root."""
OVERTONES = ((0, 1.0), (12, 0.6), (19, 0.4), (24, 0.3))
"""Semitones above the note, and how loud."""
RHYTHMS = (
    ("x...x...", "..x...x.", "xxxxxxxx", "........"),
    ("x..x..x.", "....x...", "x.x.x.x.", "x......."),
    ("x.....x.", "....x..x", "..x...x.", "....x..."),
    ("x.x.....", "...x..x.", "xx.xx.xx", "......x."),
    ("x...x.x.", "..x..x..", "x...x...", ".x.....x"),
    ("xx..x...", "...xx...", ".x.x.x.x", "x...x..."),
)
"""Bars of eight steps of bass drum, snare, hi-hat and cymbal."""


def chords(n: int, frames: int = 8) -> Samples:
    """How loud each pitch is over time, ``[1, 12, frames]``; which of 36 chords is played."""
    root, kind = torch.randint(12, (n,)), torch.randint(3, (n,))
    pitches = (torch.tensor(CHORDS)[kind] + root[:, None]) % 12
    loud = torch.zeros(n, 12, frames)
    loud.scatter_(1, pitches[..., None].expand(-1, -1, frames), uniform(0, 1.2, n, 3, frames))
    passing = (torch.rand(n, 12, frames) < 0.2) * uniform(0.3, 1, n, 12, frames)
    return (noisy(loud + passing, 0.5)[:, None] - 0.28) / 0.65, 3 * root + kind


def tempos(n: int, length: int = 128) -> Samples:
    """How suddenly a recording gets louder, ``[length]``; the logarithm of the beat's period."""
    period, phase = uniform(6, 20, n, 1), torch.rand(n, 1)
    turns = (torch.arange(length) / period + phase) % 1
    away = torch.minimum(turns, 1 - turns) * period
    beats = (-0.5 * away.square()).exp() * uniform(0.6, 1.4, n, length)
    offbeat = (-0.5 * ((turns - 0.5) * period).square()).exp() * uniform(0, 0.5, n, 1)
    heard = noisy(beats + offbeat, 0.25)
    return (heard - 0.3) / 0.5, (period.log() - 2.5) / 0.34


def notes(n: int, frames: int = 24, pitches: int = 12) -> Samples:
    """A spectrum over time, ``[frames, 36]``, and which notes sound, ``[frames, pitches]``."""
    start, last = uniform(-8, frames, n, 1, pitches), uniform(6, 14, n, 1, pitches)
    time = torch.arange(frames)[:, None] - start
    is_played = torch.rand(n, 1, pitches) < 0.5
    sounds = (time >= 0) & (time < last) & is_played
    decaying = sounds * (-0.08 * time.clamp(min=0)).exp() * uniform(0.7, 1.3, n, 1, pitches)
    spectrum = torch.zeros(n, frames, 36)
    for semitones, loudness in OVERTONES:
        spectrum[..., semitones : semitones + pitches] += loudness * decaying[..., : 36 - semitones]
    return (noisy(spectrum, 0.1) - 0.12) / 0.25, sounds.float()


def drums(n: int, length: int = 32) -> Samples:
    """Which drums are hit at each step, ``[length, 4]``, and at the step after it."""
    bars = torch.tensor([[[hit == "x" for hit in drum] for drum in bar] for bar in RHYTHMS])
    which, phase = torch.randint(len(RHYTHMS), (n, 1)), torch.randint(8, (n, 1))
    step = (torch.arange(length + 1) + phase) % 8
    hits = bars.transpose(1, 2)[which, step].float()
    hits = (hits - (torch.rand_like(hits) < 0.03).float()).abs()
    return 2 * hits[:, :-1] - 1, hits[:, 1:]


def tagged_sounds(n: int, bands: int = 24, frames: int = 32) -> Samples:
    """How loud each band is, ``[1, bands, frames]``; drums, bass, song, hiss and echo, ``[5]``."""
    tags = (torch.rand(n, 5) < 0.45).float()
    drum, bass, song, hiss, echo = tags[:, :, None, None].unbind(1)
    band, time = torch.arange(bands)[:, None], torch.arange(frames)
    beat = uniform(5, 9, n, 1, 1)
    since = (time + uniform(0, 9, n, 1, 1)) % beat
    height = uniform(10, 14, n, 1, 1) + 3 * (time / uniform(2, 4, n, 1, 1)).sin()
    low = uniform(1, 4, n, 1, 1)
    sound = 0.9 * drum * (-since).exp()
    sound = sound + bass * (-0.5 * (band - low).square()).exp()
    sound = sound + song * (-0.5 * (band - height).square()).exp()
    sound = sound + 0.5 * hiss * (band > 17) * torch.rand(n, bands, frames)
    late = torch.roll(sound, 4, 2) * (time >= 4)
    steady = echo * 0.5 * ((band - 7 - low).abs() < 1)
    return noisy((sound + 0.2 * late + steady - 0.25) / 0.35, 0.25)[:, None], tags


def synthesisers(n: int) -> Samples:
    """Knobs of a synthesiser, ``[6]``, the first for the wave; how it sounds, ``[3]``."""
    knobs = uniform(-1.7, 1.7, n, 6)
    kind = ((knobs[:, 0] + 1.7) / 0.85).long().clamp(0, 3)
    cutoff, resonance, attack, detune, drive = knobs[:, 1:].unbind(1)
    bright = torch.stack([-resonance, cutoff, cutoff * drive, 0.5 * cutoff + drive], 1)
    rough = torch.stack([0.5 * drive, detune, -detune + 0.5 * drive, resonance * drive], 1)
    rising = torch.stack([attack, attack - 0.5 * cutoff, -attack, 0.6 * detune], 1)
    chosen = [each.gather(1, kind[:, None]) for each in (bright, rough, rising)]
    return knobs, noisy(torch.cat(chosen, 1), 0.1)


class PitchConvolution(nn.Module):
    """Each pitch sees all others by their distance on the circle of pitches."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, (12, 3), padding=(0, 1), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(torch.cat([x, x[:, :, :11]], 2))


def chord_network(width: int = 12, kinds: int = 3) -> nn.Module:
    """The same numbers for each root, so that a transposed chord has transposed outputs."""
    return stack(
        *(PitchConvolution(1, width), nn.BatchNorm2d(width), nn.ReLU()),
        *(PitchConvolution(width, width), nn.BatchNorm2d(width), nn.ReLU()),
        *(mean(3), turned(), nn.Linear(width, kinds), nn.Flatten()),
    )


def autocorrelation(x: Tensor, delays: int) -> Tensor:
    """How alike a series ``[N, T]`` is to itself some steps later, for each delay."""
    length = x.shape[1]
    spectrum = torch.fft.rfft(x, 2 * length).abs().square()
    return torch.fft.irfft(spectrum, 2 * length)[:, 1 : delays + 1] / length


def tempo_network(delays: int = 48, width: int = 64) -> nn.Module:
    """Layers over the autocorrelation."""
    alike = Apply(partial(autocorrelation, delays=delays)), nn.LayerNorm(delays)
    return stack(*alike, mlp(delays, width, width, 1, activation=nn.GELU))


class Transcriber(nn.Module):
    """Onsets by convolutions over time, and notes by a memory that sees them."""

    def __init__(self, bins: int = 36, width: int = 32, size: int = 16, pitches: int = 12) -> None:
        super().__init__()
        self.acoustics = nn.Sequential(
            *(nn.Conv1d(bins, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU()),
        )
        self.memory = nn.GRU(width, size, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * size + width, pitches)

    def forward(self, x: Tensor) -> Tensor:
        heard = self.acoustics(x.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.cat([heard, self.memory(heard)[0]], 2))


def drummer(drums: int = 4, size: int = 48) -> nn.Module:
    """A memory of what was hit, and layers for the next step."""
    heard = Memory(nn.LSTM, drums, size), nn.LayerNorm(size)
    return stack(*heard, mlp(size, size, drums, activation=nn.Tanh))


class TimbreAndRhythm(nn.Module):
    """Tall filters for timbre beside wide ones for rhythm (Pons et al., 2018)."""

    def __init__(self, width: int = 12, bands: int = 24, tags: int = 5) -> None:
        super().__init__()
        self.tall = nn.Sequential(
            *(nn.Conv2d(1, width, (bands // 2, 3), (2, 1), (0, 1)), nn.GroupNorm(3, width)),
            *(nn.SiLU(), nn.MaxPool2d((7, 1))),
        )
        self.wide = nn.Sequential(
            *(nn.AvgPool2d((6, 1)), nn.Conv2d(1, width, (1, 11), padding=(0, 5))),
            *(nn.GroupNorm(3, width), nn.SiLU(), nn.MaxPool2d((4, 1))),
        )
        self.over_time = nn.Sequential(
            *(nn.Conv1d(2 * width, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU())
        )
        self.head = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, tags))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.over_time(torch.cat([self.tall(x), self.wide(x)], 1)[:, :, 0])
        return self.head(torch.cat([seen.mean(2), seen.amax(2)], 1))


def synthesiser_mixture(knobs: int = 6, width: int = 24, experts: int = 4) -> nn.Module:
    """Hidden layers of several synthesisers, mixed before the last layer."""
    hidden = Mixture(knobs, experts, lambda: mlp(knobs, width, width).append(nn.ReLU()))
    return nn.Sequential(hidden, nn.Linear(width, 3))


# fmt: off
MUSIC: tuple[Training, ...] = (
    trained("chords", chord_network, chords, 4000, F.cross_entropy,
        SGD, 0.05, 32, 150, cosine, momentum=0.9, weight_decay=1e-4),
    trained("tempos", tempo_network, tempos, 5000, F.l1_loss,
        Adam, 2e-3, 64, 180, exponential),
    trained("transcription", Transcriber, notes, 2400, F.binary_cross_entropy_with_logits,
        Adam, 4e-3, 16, 150, clip=3.0),
    trained("drums", drummer, drums, 3000, F.binary_cross_entropy_with_logits,
        RMSprop, 3e-3, 32, 160, linear, clip=1.0),
    trained("tagged sounds", TimbreAndRhythm, tagged_sounds, 3000, bounded_pairs,
        AdamW, 4e-3, 32, 160, warmed_up_cosine, weight_decay=0.01),
    trained("experts for synthesisers", synthesiser_mixture, synthesisers, 8000, F.mse_loss,
        Adam, 1e-2, 64, 200, cosine),
)
