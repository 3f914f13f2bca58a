"""Genes, proteins, reactions and spectra.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy, standardised, uniform

RESIDUES = 20
"""Kinds of amino acids."""
CHLORINE = 4
"""Possible numbers of atoms of chlorine, from none on."""
BROMINE = 3
"""The same of bromine."""
COMPONENTS = 4
"""Components of a mixture."""


def motifs(n: int, length: int = 48, kinds: int = 4, size: int = 8) -> Samples:
    """Sequences of DNA, one-hot, ``[4, length]``; which motifs are somewhere in them, ``[kinds]``.

    Each motif has a half of the sequence where it may be, and is copied with some mistakes.
    """
    patterns = fixed(6, kinds, size, 4).argmax(2)
    bases = torch.randint(4, (n, length))
    has = torch.rand(n, kinds) < 0.5
    slots = torch.rand(n, kinds).argsort(1) * (length // kinds)
    starts = slots + torch.randint(length // kinds - size + 1, (n, kinds))
    for kind in range(kinds):
        places = starts[:, kind : kind + 1] + torch.arange(size)
        mistaken = torch.rand(n, size) < 0.05
        copied = torch.where(mistaken, torch.randint(4, (n, size)), patterns[kind])
        kept = bases.gather(1, places)
        bases.scatter_(1, places, torch.where(has[:, kind : kind + 1], copied, kept))
    return F.one_hot(bases, 4).transpose(1, 2).float(), has.float()


def proteins(n: int, length: int = 24) -> Samples:
    """Amino acids by number, ``[length]``; whether each is in a helix, a sheet or neither.

    Each structure lasts for some residues, and prefers some kinds of them.
    """
    begins = torch.rand(n, length) < 0.15
    begins[:, 0] = True
    drawn = torch.randint(3, (n, length))
    last = torch.where(begins, torch.arange(length), 0).cummax(1).values
    structures = drawn.gather(1, last)
    preferred = (1.5 * fixed(7, 3, RESIDUES)).softmax(1)
    residues = torch.multinomial(preferred[structures.flatten()], 1).view(n, length)
    return residues, structures


def reactions(n: int, descriptors: int = 6) -> Samples:
    """Descriptors of two reagents, ``[2, descriptors]``; the yield's logit, ``[1]``.

    It depends on how well the one's charges fit the other's, and on how large both are.
    """
    x = torch.randn(n, 2, descriptors)
    first, second = x.unbind(1)
    fit = first[:, 0] * second[:, 1] + first[:, 1] * second[:, 0] - first[:, 2] * second[:, 2]
    large = first[:, 3] + second[:, 3] + 0.5 * first[:, 4] * second[:, 5]
    return x, noisy((fit + 0.7 * large).mul(0.6), 0.1)[:, None]


def isotopes(n: int, points: int = 24) -> Samples:
    """Spectra ``[1, points]`` of molecules; their numbers of chlorine and bromine atoms, ``[2]``.

    Each atom is heavier by two in a part of the molecules: a quarter of chlorine, half of bromine.
    """
    chlorine, bromine = torch.randint(CHLORINE, (n,)), torch.randint(BROMINE, (n,))
    shares = torch.zeros(CHLORINE, BROMINE, points)
    for first in range(CHLORINE):
        for second in range(BROMINE):
            for heavy in range(first + 1):
                for other in range(second + 1):
                    part = math.comb(first, heavy) * 0.25**heavy * 0.75 ** (first - heavy)
                    shares[first, second, 2 * (heavy + other)] += (
                        part * math.comb(second, other) * 0.5**second
                    )
    spectra = shares[chlorine, bromine]
    light = 0.1 * spectra.roll(1, 1)
    moved = (torch.arange(points) - torch.randint(2, 12, (n, 1))) % points
    spectra = (spectra + light).gather(1, moved) * uniform(0.8, 1.2, n, 1)
    return noisy(6 * spectra - 0.2, 0.1)[:, None], torch.stack([chlorine, bromine], 1)


def recordings(n: int, points: int = 48, substances: int = 30) -> Samples:
    """Two noisy spectra ``[2, points]`` of one mixture of substances; its main substance.

    Each has another background.
    """
    place = torch.arange(points)
    peaks = (fixed(8, substances, 4).sigmoid() * points)[..., None]
    heights = fixed(9, substances, 4, 1).abs() + 0.5
    pure = (heights * (-(((place - peaks) / 1.5) ** 2)).exp()).sum(1)
    main = torch.randint(substances, (n,))
    shares = F.one_hot(main, substances) + 0.5 * torch.rand(n, substances).pow(6)
    mixed = (shares @ pure)[:, None]
    slope, level = uniform(-1, 1, n, 2, 1), uniform(-0.7, 0.7, n, 2, 1)
    seen = mixed * uniform(0.7, 1.3, n, 2, 1) + slope * torch.linspace(-1, 1, points) + level
    return noisy((seen - 0.9) / 0.8, 0.7), main


def free_energies(n: int) -> Samples:
    """Logits of a mixture's shares and of heat, ``[COMPONENTS]``; its free energy, ``[1]``.

    The energy is a convex function of them.
    """
    x = torch.randn(n, COMPONENTS)
    partition = (1.5 * x[:, :3]).logsumexp(1)
    stiff = 0.4 * (x[:, 0] - x[:, 3]).square() + 0.6 * (x[:, 1] + x[:, 2]).abs()
    return x, standardised(noisy(partition + stiff, 0.1)[:, None])
