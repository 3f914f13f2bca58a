"""A run that is recorded with sinks, and what is expected to arrive in these."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from gradlens import Aggregate, Cockpit, GradlensWarning, History, configuration
from gradlens.history.histograms import Histogram
from gradlens.quantities import GradHist1d, Loss, OutputNorm
from gradlens.sinks import Sink
from tests.cases.steps import tracked_backward

STEPS = 6
EPOCH = 3
LAYER = "0.weight"
HISTOGRAMS_EVERY = 2
OPTIONS: dict[str, Any] = {"layers": [LAYER], "histograms_every": HISTOGRAMS_EVERY}

Numbers = dict[tuple[str, int], float]
Counts = dict[tuple[str, int], list[float]]


class Arrived(NamedTuple):
    """Numbers, and counts of histograms, by name and step."""

    scalars: Numbers
    histograms: Counts


class Kept(Sink):
    """Keeps what it gets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.arrived = Arrived({}, {})
        self.notes: list[tuple[int, str]] = []
        self.closed = 0

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self.arrived.scalars.update({(name, step): value for name, value in scalars.items()})
        counts = {(name, step): one.counts.tolist() for name, one in histograms.items()}
        self.arrived.histograms.update(counts)

    def note(self, step: int, text: str) -> None:
        self.notes.append((step, text))

    def close(self) -> None:
        self.closed += 1


def cockpit_with(*sinks: Sink, **options: Any) -> Cockpit:
    """A cockpit of a small network with quantities that are recorded at different times."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    others = [one for one in configuration("economy") if not isinstance(one, GradHist1d)]
    histogram = GradHist1d(bins=8, keep_individual=True)
    tracked = [*others, histogram, OutputNorm(), Aggregate(Loss(name="Batch"))]
    loss_function = nn.CrossEntropyLoss()
    return Cockpit(model, tracked, loss_function=loss_function, sinks=sinks, **options)


def train(cockpit: Cockpit, after_step: Callable[[int], None] | None = None) -> History:
    """Six steps in two epochs, with an evaluation at the end of each; then it is closed.

    A context of the first step isn't entered, which a note says.
    """
    model = cockpit.model
    assert model is not None
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        loss = losses.mean()
        info = {"individual_losses": losses}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f".*{NOTE}", GradlensWarning)
            if step == 0:
                cockpit(step)
            tracked_backward(cockpit, step, loss, optimizer=optimizer, info=info)
        optimizer.step()
        cockpit.log(step, learning_rate=0.1, **{"Übung (groß)": float(step)})
        if step % EPOCH == EPOCH - 1:
            with cockpit.evaluation(step):
                model(inputs)
            cockpit.tick_epoch()
        if after_step is not None:
            after_step(step)
    cockpit.close()
    return cockpit.history


RENAMED = {
    "Time s/step": "Time_seconds_per_step",
    "GradHist1d clipped": "GradHist1d_clipped",
    "Übung (groß)": "Ubung_grou00df",
    "Batch (epoch) mean": "Batch_epoch_mean",
    "Batch (epoch) median": "Batch_epoch_median",
    "OutputNorm median": "OutputNorm_median",
    "OutputNorm (evaluation) median": "OutputNorm_evaluation_median",
}
NOTE = "the cockpit was called, and the context that it has returned hasn't been entered"
"""How the note on a run begins."""

BY_PARAMETER = ("GradNorm", "Distance", "UpdateSize")


def expected(history: History) -> Arrived:
    """What a sink with ``OPTIONS`` gets of a history."""
    numbers: Numbers = {}
    for one in history.scalars():
        name = f"gradlens/{RENAMED.get(one.name, one.name)}"
        for step, value in zip(one.line.steps, one.line.values, strict=True):
            numbers[name, int(step)] = value
    for kind in BY_PARAMETER:
        for step, value in history[kind].items():
            numbers[f"gradlens/{kind}_{LAYER}", step] = value[LAYER]
    counts: Counts = {}
    for step, value in history["GradHist1d"].items():
        of_layer = value["parameters"][LAYER]
        for entry in ("below", "above", "nan"):
            numbers[f"gradlens/GradHist1d_{LAYER}_{entry}", step] = of_layer[entry]
        if step % HISTOGRAMS_EVERY == 0:
            counts["gradlens/GradHist1d", step] = value["hist"].tolist()
            counts[f"gradlens/GradHist1d_{LAYER}", step] = of_layer["hist"].tolist()
    return Arrived({place: x for place, x in numbers.items() if not math.isnan(x)}, counts)
