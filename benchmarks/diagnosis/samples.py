"""How many samples with injected wrong labels ``gradlens samples`` ranks first.

``python -m benchmarks.diagnosis.samples`` trains networks on data of which 2, 5 and 10 % of the
labels are replaced by another class, and ranks all samples by what the run has recorded of them.
Precision is that among the first k, where k is the number of wrong labels, so that recall is the
same; ``twice`` is the recall among the first 2k. ``--csv FILE`` writes a row for each run.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_classification
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import gradlens
from gradlens.diagnosis.samples import rank
from gradlens.quantities import NormTest
from gradlens.schedules import linear

NOISE = (0.02, 0.05, 0.1)
BATCH = 64
EVERY = 10
"""Steps between two that are tracked, with gradient norms."""


@dataclass(frozen=True)
class Outcome:
    """One run: precision at the number of wrong labels, and recall at twice as many.

    ``by_norm`` is the precision of the gradient norms alone, among the samples that have some.
    """

    data: str
    network: str
    optimizer: str
    epochs: int
    noise: float
    seed: int
    wrong: int
    precision: float
    twice: float
    by_norm: float
    accuracy: float


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """1797 images of handwritten digits, 8x8, flat."""
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def synthetic(seed: int) -> tuple[Tensor, Tensor]:
    """2000 points in 64 dimensions, in two clusters for each of six classes."""
    points, classes = make_classification(
        2000, 64, n_informative=20, n_redundant=10, n_classes=6, class_sep=2.0, flip_y=0.0,
        random_state=seed,
    )  # fmt: skip
    normal = (points - points.mean(0)) / points.std(0)
    return torch.tensor(normal, dtype=torch.float32), torch.tensor(classes)


def mlp(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def cnn(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


DATA = {"digits": digits, "synthetic": synthetic}
NETWORKS = {"MLP": mlp, "CNN": cnn}


def optimizer_of(name: str, network: nn.Module) -> Optimizer:
    if name == "Adam":
        return Adam(network.parameters(), lr=2e-3)
    return SGD(network.parameters(), lr=0.05, momentum=0.9)


def run(data: str, network: str, optimizer: str, epochs: int, noise: float, seed: int) -> Outcome:
    """Train with wrong labels, and rank the samples."""
    generator = np.random.default_rng(seed)
    inputs, right = DATA[data](seed)
    count, classes = len(right), int(right.max()) + 1
    wrong = generator.choice(count, round(noise * count), replace=False)
    labels = right.clone()
    labels[wrong] += torch.tensor(generator.integers(1, classes, len(wrong)))
    labels %= classes

    torch.manual_seed(seed)
    model = NETWORKS[network](classes)
    steps = optimizer_of(optimizer, model)
    cockpit = gradlens.Cockpit(model, [NormTest(linear(EVERY))])
    step = 0
    for _ in range(epochs):
        for batch in torch.randperm(count).split(BATCH):
            loss = cross_entropy(model(inputs[batch]), labels[batch])
            steps.zero_grad()
            with cockpit(step, loss=loss, optimizer=steps, info={"ids": batch}):
                loss.backward()
            steps.step()
            step += 1
    cockpit.close()

    samples = cockpit.history.samples
    assert samples is not None
    ranked = [each.id for each in rank(samples)]
    norms = np.nan_to_num(samples.norm, nan=-1)
    by_norm = [samples.ids[place] for place in np.argsort(-norms)]
    with torch.no_grad():
        accuracy = float((model(inputs).argmax(1) == right).float().mean())
    k = len(wrong)
    return Outcome(
        data, network, optimizer, epochs, noise, seed, k,
        _share(ranked[:k], wrong), _share(ranked[: 2 * k], wrong), _share(by_norm[:k], wrong),
        accuracy,
    )  # fmt: skip


def _share(chosen: list[Any], wrong: NDArray[Any]) -> float:
    """The share of the wrong ones that were chosen."""
    return len({*chosen} & {*wrong.tolist()}) / len(wrong)


def outcomes(seeds: int) -> Iterator[Outcome]:
    settings = [("Adam", 10), ("Adam", 40), ("SGD", 20)]
    for data, network, (optimizer, epochs), noise, seed in product(
        DATA, NETWORKS, settings, NOISE, range(seeds)
    ):
        yield run(data, network, optimizer, epochs, noise, seed)


def table(found: list[Outcome]) -> str:
    """Means over seeds and optimizers, by data, network and noise."""
    groups: dict[tuple[str, str, float], list[Outcome]] = defaultdict(list)
    for each in found:
        groups[each.data, each.network, each.noise].append(each)
    lines = ["data       network  noise  runs  precision (least)  recall at 2k  by norms  accuracy"]
    for (data, network, noise), runs in groups.items():
        values = [mean(getattr(r, n) for r in runs) for n in ("twice", "by_norm", "accuracy")]
        precisions = [r.precision for r in runs]
        lines.append(
            f"{data:10} {network:7} {noise:6.0%} {len(runs):5}  {mean(precisions):9.3f} "
            f"({min(precisions):.2f}) {values[0]:14.3f} {values[1]:9.3f} {values[2]:9.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = list(outcomes(options.seeds))
    print(table(found))
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*Outcome.__dataclass_fields__])
            writer.writeheader()
            writer.writerows(map(asdict, found))


if __name__ == "__main__":
    main()
