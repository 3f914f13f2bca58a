"""Tables: generated ones of scikit-learn's, and simulated ones.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from sklearn import datasets
from torch import Tensor

from benchmarks.diagnosis.draws import Samples, noisy, random_state, standardised
from benchmarks.diagnosis.problem import Split

FIELDS = (80, 60, 8, 7)
"""How many readers, books, devices and weekdays there are."""
GRADES = 5


def opinions(n: int) -> Samples:
    """A reader, a book, a device and a weekday, ``[4]``, and one of five grades, equally often."""
    codes = torch.stack([torch.randint(count, (n,)) for count in FIELDS], 1)
    own = [torch.randn(count) for count in FIELDS]
    tastes = [torch.randn(count, 3) / math.sqrt(3) for count in FIELDS[:2]]
    shares = (0.5, 1.0, 0.3, 0.3)
    alone = sum(
        s * values[codes[:, k]] for k, (s, values) in enumerate(zip(shares, own, strict=True))
    )
    together = (tastes[0][codes[:, 0]] * tastes[1][codes[:, 1]]).sum(1)
    liking = noisy(alone + 2 * together, 0.2)
    bounds = liking.quantile(torch.arange(1, GRADES) / GRADES)
    return codes, torch.bucketize(liking, bounds)


OFFERS, CUSTOMER, OFFER = 8, 10, 6
"""Offers that a customer sees, and the numbers that describe a customer and an offer."""


def choices(n: int) -> Samples:
    """A customer and eight offers, ``[58]``; the offers' numbers from the best one on, ``[8]``."""
    customers, offers = torch.randn(n, CUSTOMER), torch.randn(n, OFFERS, OFFER)
    wishes = (customers @ torch.randn(CUSTOMER, OFFER) / math.sqrt(CUSTOMER)).tanh()
    liked = (offers @ wishes[..., None])[..., 0] - 0.5 * offers[..., 0] * offers[..., 1]
    order = noisy(liked, 0.1).argsort(1, descending=True)
    return torch.cat([customers, offers.flatten(1)], 1), order


PERIODS = 8


def patients(n: int) -> Samples:
    """Nine numbers of a patient; the period of the last visit, and whether it was a relapse.

    A third or so of the patients stay away before they have one.
    """
    numbers = torch.randn(n, 9)
    risk = 0.8 * numbers[:, 0] + numbers[:, 1] * numbers[:, 2] - 0.6 * numbers[:, 3].abs()
    relapse = (-torch.rand(n).log()) ** 0.25 * (-0.7 * risk).exp()
    leaving = relapse.median() * (0.5 + 2 * torch.rand(n))
    is_relapse = relapse < leaving
    last = torch.minimum(relapse, leaving)
    bounds = last.quantile(torch.arange(1, PERIODS) / PERIODS)
    return numbers, torch.stack([torch.bucketize(last, bounds), is_relapse.long()], 1).float()


def impedances(n: int) -> Samples:
    """Friedman's second table (1991): four numbers of a circuit and its impedance, ``[1]``.

    The larger it is, the less exactly it is measured.
    """
    numbers, exact = datasets.make_friedman2(n, random_state=random_state())
    columns = standardised(torch.tensor(numbers, dtype=torch.float32))
    impedance = torch.tensor(exact, dtype=torch.float32)[:, None] / 500
    return columns, standardised(impedance * (1 + 0.12 * torch.randn(n, 1)))


def applications(n: int) -> Samples:
    """Ten numbers of an application, and one of four decisions by rules about six of them."""
    numbers = torch.randn(n, 10)
    is_large = numbers > 0
    first = torch.where(is_large[:, 0], is_large[:, 1], is_large[:, 2])
    second = torch.where(is_large[:, 3], is_large[:, 4], is_large[:, 5])
    return numbers, 2 * first.long() + second.long()


def damages(n: int) -> Samples:
    """Eight numbers of a house, and its damages in a year, ``[1]``: often none, sometimes large.

    What matters depends on the first two of the numbers.
    """
    numbers = torch.randn(n, 8)
    kind = 2 * (numbers[:, 0] > 0) + (numbers[:, 1] > 0)
    slopes = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [-1, 0, 1, 0], [0, -1, 0, 1]])
    expected = (1 + 0.8 * (slopes[kind] * numbers[:, 2:6]).sum(1)).clamp(-2, 3).exp()
    events = torch.poisson(3 * expected**0.5)
    sizes = torch._standard_gamma(2 * events + 1e-9) / 2  # of which each has a mean of one
    return numbers, (sizes * expected**0.5 / 3)[:, None]


GESTURES, TOGETHER = 16, 4
"""Kinds of gestures, and how many samples of a kind come together."""


def gestures(n: int) -> Samples:
    """Readings ``[24]`` of sensors, which also depend on the hand, and the kind of the gesture."""
    labels = torch.randint(GESTURES, (n,))
    kinds, hand = noisy(torch.randn(GESTURES, 6)[labels], 0.25), torch.randn(n, 4)
    hidden = (torch.cat([kinds, hand], 1) @ torch.randn(10, 20) / 2).tanh()
    return standardised(noisy(hidden @ torch.randn(20, 24) / 4, 0.1)), labels


def in_groups(split: Split, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Epochs in random order, in which ``TOGETHER`` samples of a class follow each other."""
    while True:
        order = torch.randperm(len(split.targets), generator=generator)
        by_class = order[split.targets[order].argsort(stable=True)]
        of_each = by_class.split(split.targets.bincount().tolist())
        full = [ids[: len(ids) - len(ids) % TOGETHER] for ids in of_each]
        groups = torch.cat(full).view(-1, TOGETHER)
        groups = groups[torch.randperm(len(groups), generator=generator)]
        count = batch_size // TOGETHER
        for chosen in groups[: len(groups) - len(groups) % count].split(count):
            yield chosen.flatten()
