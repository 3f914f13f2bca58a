"""Stars, planets, galaxies and what telescopes see of them.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples, noisy, pixels, standardised, uniform

GLOBAL = 64
"""Points of a light curve over a whole period."""
LOCAL = 32
"""Points around the place where the light is the weakest."""
BINS = 12
"""Ranges of redshifts."""


def transits(n: int) -> Samples:
    """A light curve and its middle, ``[GLOBAL + LOCAL]``; whether a planet passes, ``[1]``.

    Planets have flat transits. Binary stars have pointed ones, with a second one half a period
    away, and spotted stars are waves.
    """
    kinds = torch.randint(4, (n, 1)).clamp(max=2)
    is_planet = (torch.randint(2, (n, 1)) == 0).float()
    depth, width = uniform(0.8, 1.4, n, 1), uniform(0.08, 0.14, n, 1)
    second, wave = uniform(0.3, 0.8, n, 1), uniform(0.5, 0.8, n, 1)

    def curve(phase: torch.Tensor) -> torch.Tensor:
        box = ((width - phase.abs()) / 0.02).clamp(0, 1)
        point = (1.4 - phase.abs() / width).clamp(0, 1.4)
        other = (1.4 - (phase.abs() - 0.5).abs() / width).clamp(0, 1.4)
        binary = point + second * other
        spotted = wave * (0.5 + 0.5 * (2 * math.pi * phase).cos())
        false = torch.where(kinds == 0, spotted, binary)
        return -depth * torch.where(is_planet > 0, box, false)

    views = [curve(torch.linspace(-0.5, 0.5, GLOBAL)), curve(torch.linspace(-0.2, 0.2, LOCAL))]
    return noisy(2 * torch.cat(views, 1) + 0.7, 0.5), is_planet


def stellar_spectra(n: int, points: int = 64) -> Samples:
    """Spectra ``[1, points]``; temperature, gravity and share of metals of the star, ``[3]``.

    Temperature tilts the spectrum, gravity widens hydrogen's lines, and metals deepen others.
    """
    heat, gravity, metals = uniform(-1.7, 1.7, n, 3, 1).unbind(1)
    place = torch.arange(points)
    hydrogen, others = torch.tensor([12, 30, 52]), torch.tensor([6, 18, 22, 37, 43, 58])
    wide = 1.5 + 0.5 * gravity
    narrow = torch.full_like(wide, 1.0)
    spectra = 0.6 * heat * torch.linspace(1, -1, points)
    for lines, width, depth in (
        (hydrogen, wide, 1.5 + 0.4 * heat),
        (others, narrow, 0.9 + 0.4 * metals - 0.15 * heat),
    ):
        for line in lines:
            spectra = spectra - depth * (-(((place - line) / width) ** 2)).exp()
    spectra = (noisy(spectra, 0.1) + 0.4) / 0.6
    return spectra[:, None], torch.cat([heat, gravity, metals], 1)


def redshifts(n: int, bands: int = 6) -> Samples:
    """Colours ``[bands]`` of galaxies, their size and brightness; the range of the redshift.

    A step and a slope of the spectrum move through the bands as the redshift grows.
    """
    shift = torch.rand(n, 1)
    kind = uniform(-1, 1, n, 1)
    centres = torch.linspace(0.0, 1.0, bands)
    step = ((centres - 0.1 - 0.9 * shift) / 0.12).sigmoid()
    magnitudes = (1.3 + 0.3 * kind) * step + 0.3 * kind * centres
    size = 1 / (0.4 + shift) + 0.2 * torch.randn(n, 1)
    bright = shift.sqrt() + 0.2 * torch.randn(n, 1)
    columns = torch.cat([noisy(magnitudes, 0.05), size, bright], 1)
    return standardised(columns), (BINS * shift[:, 0]).long().clamp(max=BINS - 1)


def lenses(n: int, side: int = 16) -> Samples:
    """Galaxies ``[1, side, side]`` with arcs around or with neighbours; 1 for arcs, ``[1]``."""
    rows, columns = pixels(side)
    is_lens = (torch.rand(n, 1, 1) < 0.5).float()
    rows = rows - uniform(-0.15, 0.15, n, 1, 1)
    columns = columns - uniform(-0.15, 0.15, n, 1, 1)
    radius, angle = torch.hypot(rows, columns), torch.atan2(rows, columns)
    distance, turned = uniform(0.5, 0.7, n, 1, 1), uniform(0, 2 * math.pi, n, 1, 1)
    sky = 1.5 * (-((radius / 0.25) ** 2)).exp()
    for opposite in (0.0, math.pi):
        along = (angle - turned - opposite + math.pi) % (2 * math.pi) - math.pi
        arc = (-(((radius - distance) / 0.1) ** 2) - (along / 0.9) ** 4).exp()
        blob = (-(((radius - distance) / 0.22) ** 2) - (along / 0.4) ** 2).exp()
        sky = sky + torch.where(is_lens > 0, 1.2 * arc, 1.5 * blob)
    return noisy((sky - 0.35) / 0.5, 0.5)[:, None], is_lens[:, 0]


def supernovae(n: int, seen: int = 16) -> Samples:
    """Time, brightness and band of observations, ``[seen, 3]``; which of four kinds it is.

    One fades fast, one stays for a while, one slowly comes and goes, and one pulsates.
    """
    labels = torch.randint(4, (n,))
    time = torch.rand(n, seen).sort(1).values
    band = torch.where(torch.rand(n, seen) < 0.5, -1.0, 1.0)
    since = time - uniform(0.1, 0.3, n, 1)
    rise = (since / 0.03).sigmoid()
    pulses = 0.5 + 0.5 * (2 * math.pi * (time * uniform(3, 4, n, 1) + torch.rand(n, 1))).sin()
    kinds = torch.stack(
        [
            1.6 * rise * (-since.clamp(min=0) * (6 + 2 * band)).exp(),
            rise * ((0.45 - since) / 0.03).sigmoid() * (1 - 0.1 * band),
            1.2 * (-(((time - 0.5) / 0.3) ** 2)).exp() * (1 + 0.2 * band),
            pulses * (1 + 0.2 * band),
        ]
    )
    bright = kinds[labels, torch.arange(n)] * uniform(0.8, 1.2, n, 1)
    return torch.stack([3.4 * time - 1.7, noisy(2 * bright - 1, 0.3), band], 2), labels


def dirty_images(n: int, side: int = 16, sources: int = 5) -> Samples:
    """Pictures ``[1, side, side]`` by an array of antennas, and the sky that they are of.

    The array gives each source rings and rays.
    """
    place = uniform(2, side - 3, n, sources, 2, 1, 1)
    rows = torch.arange(side)[:, None] - place[:, :, 0]
    columns = torch.arange(side) - place[:, :, 1]
    flux = uniform(0.6, 1.6, n, sources, 1, 1)
    sky = (flux * (-(rows.square() + columns.square()) / 2).exp()).sum(1, keepdim=True)
    down, right = pixels(9)
    radius = 4 * torch.hypot(down, right)
    rays = 1 + 0.5 * (6 * torch.atan2(down, right)).cos()
    beam = (-(radius.square()) / 4).exp() + 0.25 * rays * (1.6 * radius).cos() * (radius > 2)
    dirty = F.conv2d(F.pad(sky, (4, 4, 4, 4)), beam[None, None] / beam.sum().sqrt() / 2)
    dirty = (dirty - dirty.mean()) / dirty.std()
    return noisy(dirty, 0.1), 2 * sky
