"""What arrives in TensorBoard, W&B, MLflow, trackio and CSV files is what the history has."""

from __future__ import annotations

import csv
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from gradlens import Aggregate, Cockpit, History, configuration
from gradlens.cli.main import main
from gradlens.history.histograms import Histogram
from gradlens.quantities import GradHist1d, Loss, OutputNorm
from gradlens.sinks import CSV, MLflow, Sink, TensorBoard, Trackio, WandB

STEPS = 6
LAYERS = ("0.weight",)

Numbers = dict[tuple[str, int], float]
Counts = dict[tuple[str, int], list[float]]


class Arrived(NamedTuple):
    """Numbers and counts of histograms by name and step."""

    scalars: Numbers
    histograms: Counts


class Kept(Sink):
    """Keeps what it gets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.arrived = Arrived({}, {})
        self.order: list[int] = []
        self.notes: list[tuple[int, str]] = []
        self.closed = 0

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self.order.append(step)
        self.arrived.scalars.update({(name, step): value for name, value in scalars.items()})
        counts = {(name, step): one.counts.tolist() for name, one in histograms.items()}
        self.arrived.histograms.update(counts)

    def note(self, step: int, text: str) -> None:
        self.notes.append((step, text))

    def close(self) -> None:
        self.closed += 1


def train(cockpit: Cockpit, steps: int = STEPS, epoch: int = 3) -> History:
    """Train a little, with an epoch's end and an evaluation; everything is closed at the end."""
    assert cockpit.model is not None
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(cockpit.parameters.values(), lr=0.1)
    for step in range(steps):
        inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(cockpit.model(inputs), labels)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
        cockpit.log(step, learning_rate=0.1, **{"größe": float(step)})
        cockpit.push(hits=step)
        if step % epoch == epoch - 1:
            with cockpit.evaluation(step):
                cockpit.model(inputs)
            cockpit.tick_epoch()
    cockpit.close()
    return cockpit.history


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def cockpit_with(*sinks: Sink) -> Cockpit:
    preset = [one for one in configuration("economy") if not isinstance(one, GradHist1d)]
    histogram = GradHist1d(bins=8, keep_individual=True)
    return Cockpit(network(), [*preset, histogram, Aggregate(OutputNorm())], sinks=sinks)


NAMES = {
    "Time s/step": "Time_seconds_per_step",
    "größe": "groue",
    "OutputNorm (epoch) mean": "OutputNorm_epoch_mean",
}


def expected(history: History, every: int = 1) -> Numbers:
    """The numbers of a history, by the names that they have in sinks."""
    found = {}
    for one in history.scalars():
        name = one.name.replace("größe", "groue").replace("s/step", "seconds_per_step")
        name = f"gradlens/{name.replace(' ', '_').translate(str.maketrans('', '', '()'))}"
        numbers = zip(one.line.steps, one.line.values, strict=True)
        found |= {(name, int(step)): value for step, value in numbers}
    for step, value in history["GradNorm"].items():
        found["gradlens/GradNorm_0.weight", step] = value["0.weight"]
    for kind in ("Distance", "UpdateSize"):
        for step, value in history[kind].items():
            found[f"gradlens/{kind}_0.weight", step] = value["0.weight"]
    return {place: value for place, value in found.items() if not math.isnan(value)}


def expected_histograms(history: History, every: int) -> Counts:
    series = history["GradHist1d"]
    whole = {("gradlens/GradHist1d", s): series[s]["hist"].tolist() for s in series}
    part = {
        ("gradlens/GradHist1d_0.weight", s): series[s]["parameters"]["0.weight"]["hist"].tolist()
        for s in series
    }
    return {place: counts for place, counts in (whole | part).items() if place[1] % every == 0}
