"""Tables: a bundled one and generated ones of scikit-learn's, and simulated ones.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor

from benchmarks.diagnosis.draws import Samples, noisy, random_state, standardised, uniform


def reals(values: np.ndarray) -> Tensor:
    """As single precision."""
    return torch.tensor(values, dtype=torch.float32)


def iris(n: int) -> Samples:
    """Four lengths of ``n`` of 150 flowers, and which of three species each is."""
    columns, species = datasets.load_iris(return_X_y=True)
    order = torch.randperm(len(species))[:n]
    return standardised(reals(columns))[order], torch.tensor(species)[order]


def shells(n: int) -> Samples:
    """Points ``[10]``, and whether they are outside of a sphere (Hastie et al., 2009, eq. 10.2)."""
    points, outside = datasets.make_hastie_10_2(n, random_state=random_state())
    return reals(points), (reals(outside)[:, None] + 1) / 2


def prototypes(n: int) -> Samples:
    """Points ``[20]`` around corners of a cube, and which of five classes each belongs to."""
    points, labels = datasets.make_classification(
        n,
        n_features=20,
        n_informative=10,
        n_redundant=4,
        n_classes=5,
        n_clusters_per_class=2,
        class_sep=2.0,
        random_state=random_state(),
    )
    return standardised(reals(points)), torch.tensor(labels)


def topics(n: int) -> Samples:
    """Frequencies ``[30]`` of words, and which of eight topics a document has, ``[8]``."""
    counts, labels = datasets.make_multilabel_classification(
        n, n_features=30, n_classes=8, n_labels=2, length=60, random_state=random_state()
    )
    return standardised(reals(counts).sqrt()), reals(labels)


FACTORS = (12, 10, 8, 3, 4, 15)
"""Numbers of regions, brands, ages, fuels, uses and bonus classes."""


def claims(n: int) -> Samples:
    """Six codes of an insured car and the number of claims in a year, ``[1]``."""
    codes = torch.stack([torch.randint(count, (n,)) for count in FACTORS], 1)
    effects = [0.6 * torch.randn(count) for count in FACTORS]
    of_each = [effect[code] for effect, code in zip(effects, codes.unbind(1), strict=True)]
    return codes, torch.poisson((torch.stack(of_each).sum(0) - 2.5).exp())[:, None]


def regimes(n: int) -> Samples:
    """Numbers ``[8]``, and a sum of four of them whose signs depend on two others, ``[1]``."""
    numbers = torch.randn(n, 8)
    regime = 2 * (numbers[:, 0] > 0) + (numbers[:, 1] > 0)
    slopes = torch.tensor([[1.0, 1, -1, 0.5], [-1, 1, 1, -0.5], [1, -1, 1, 1], [-1, -1, -1, 1]])
    total = (slopes[regime] * numbers[:, 2:6]).sum(1, keepdim=True)
    return numbers, noisy(total, 0.2) / 1.8


def arm_positions(n: int) -> Samples:
    """Where the hand of an arm with two joints is, ``[2]``, and the angles of the joints, ``[2]``.

    The elbow may be bent either way, so that two pairs of angles fit (Bishop, 1994).
    """
    shoulder = uniform(0.3, 1.2, n)
    elbow = uniform(0.4, 1.6, n) * (2 * torch.randint(2, (n,)) - 1)
    hand = [shoulder.cos() + (shoulder + elbow).cos(), shoulder.sin() + (shoulder + elbow).sin()]
    angles = noisy(torch.stack([shoulder, elbow], 1), 0.15)
    return standardised(torch.stack(hand, 1)), standardised(angles)


def search_results(n: int, results: int = 10, features: int = 8) -> Samples:
    """Features ``[results, features]`` of the results of a search; their grades from 0 to 4."""
    shown = torch.randn(n, results, features)
    merit = shown[..., 0] + shown[..., 1] * shown[..., 2] - shown[..., 3].abs()
    return shown, noisy(1.2 * merit + 2.5, 0.3).round().clamp(0, 4)


def transactions(n: int) -> Samples:
    """Numbers ``[12]`` of a payment, and whether it is one of few frauds."""
    numbers = torch.randn(n, 12)
    crosses = numbers[:, 0] * numbers[:, 1] + numbers[:, 2] * numbers[:, 3] + 0.5 * numbers[:, 4]
    return numbers, (noisy(crosses, 0.2) > 2).long()
