"""Chords, tempos, notes, drums and sounds.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import torch

from benchmarks.diagnosis.draws import Samples, noisy, uniform

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
