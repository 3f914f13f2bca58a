"""Runs made by hand: the facts of a healthy one, and changes that are signs of faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradlens.history.history import History
from gradlens.history.json_lines import encoded
from gradlens.history.records import Source
from gradlens.history.setup import Layer, ParameterGroup, Setup

STEPS = 160
SAMPLES = 32
CLASSES = 10
SHAPES: Mapping[str, tuple[int, ...]] = {
    "0.weight": (64, 20),
    "0.bias": (64,),
    "2.weight": (64, 64),
    "2.bias": (64,),
    "4.weight": (10, 64),
    "4.bias": (10,),
}
WEIGHTS = tuple(name for name, shape in SHAPES.items() if len(shape) > 1)

SETUP = Setup(
    optimizer="SGD",
    groups=(ParameterGroup({"momentum": 0.9, "weight_decay": 0.0}, tuple(SHAPES)),),
    loss="NllLossBackward",
    loss_reduction="mean",
    declared_reduction="mean",
    layers={
        name: Layer(("Linear",), True, SHAPES[f"{name}.weight"][1]) for name in ("0", "2", "4")
    },
    activations={"0": "relu", "2": "relu"},
    order=tuple(SHAPES),
    dtypes=("float32",),
    input_kind="real",
)

Columns = dict[str, np.ndarray]


def step_columns(steps: int = STEPS, seed: int = 0) -> Columns:
    """The table of steps of a healthy run."""
    random = np.random.default_rng(seed)
    fall = 0.2 + 2.1 * np.exp(-np.arange(steps) / 40)
    noise = random.normal(1, 0.05, steps)
    sizes = 3 * fall * random.normal(1, 0.2, steps)
    return {
        "loss": fall * noise,
        "samples": np.full(steps, float(SAMPLES)),
        "labels": np.full(steps, float(SAMPLES)),
        "classes": np.full(steps, float(CLASSES)),
        "lr": np.full(steps, 0.1),
        "input_rms": random.normal(1, 0.02, steps),
        "input_mean": random.normal(0, 0.02, steps),
        "input_std": random.normal(1, 0.02, steps),
        "input_spread": random.normal(0.98, 0.002, steps),
        "row_rms_max": random.normal(1.5, 0.1, steps),
        "row_rms_median": random.normal(1, 0.02, steps),
        "row_largest": random.integers(0, SAMPLES, steps).astype(float),
        "bad_rows": np.zeros(steps),
        "distinct_rows": np.full(steps, float(SAMPLES)),
        "checksum": random.normal(0, 1, steps),
        "label_entropy": random.normal(2.1, 0.05, steps),
        "loss_max": fall * 3,
        "loss_largest": random.integers(0, SAMPLES, steps).astype(float),
        "loss_median": fall * 0.7,
        "loss_over": np.full(steps, 0.005),
        "grad_norm": sizes,
        "grad_norm_at_step": sizes,
        "stale": np.zeros(steps),
        "updates": np.ones(steps),
    }


def layer_steps(steps: int = STEPS) -> list[int]:
    """The steps of the layers' table."""
    return [step for step in range(steps) if step in (0, 1, 2, 4, 8, 16) or step % 20 == 0]


def layer_columns(steps: int = STEPS, seed: int = 0, still: Sequence[str] = ()) -> Columns:
    """The layers' table of a healthy run; some parameters may stay what they are."""
    random = np.random.default_rng(seed)
    count = len(layer_steps(steps))
    found: Columns = {}
    for name, shape in SHAPES.items():
        size = 0.58 / math.sqrt(SHAPES[f"{name.partition('.')[0]}.weight"][1])
        found[f"weight_rms/{name}"] = size * np.linspace(1, 1 if name in still else 1.5, count)
        found[f"gradient_rms/{name}"] = np.abs(random.normal(0.01, 0.002, count))
        found[f"update_rms/{name}"] = np.full(count, 0.0 if name in still else 3e-3 * size)
        found[f"zero_gradients/{name}"] = np.full(count, 0.0 if name.startswith("4.") else 0.1)
        if len(shape) > 1:
            found[f"row_spread/{name}"] = np.full(count, 0.95)
    for layer in ("0", "2"):
        found[f"dead/{layer}"] = np.full(count, 0.1)
    for label in range(CLASSES):
        found[f"labels/{label}"] = 3.2 * (np.array(layer_steps(steps)) + 1.0)
    return found


def row(columns: Columns, place: int) -> dict[str, float]:
    return {name: float(each[place]) for name, each in columns.items()}


def run(
    steps: Columns | None = None,
    layers: Columns | None = None,
    setup: Setup = SETUP,
    series: Mapping[str, Mapping[int, Any]] | None = None,
) -> History:
    """A run with these tables; by default, those of a healthy one."""
    columns = step_columns() if steps is None else steps
    sources = {name: Source((name,)) for name in series or {}}
    history = History(sources, SHAPES, setups={0: setup})
    count = len(next(iter(columns.values()), ()))
    for step in range(count):
        history.add_facts(step, {"steps": encoded(row(columns, step))})
    table = layer_columns(max(count, 1)) if layers is None else layers
    for place, step in enumerate(layer_steps(count)[: len(next(iter(table.values()), ()))]):
        by_kind: dict[str, dict[str, float]] = {}
        for name, value in row(table, place).items():
            kind, of = name.split("/", 1)
            by_kind.setdefault(kind, {})[of] = value
        history.add_facts(step, {"layers": encoded(by_kind)})
    for name, values in (series or {}).items():
        for step, value in values.items():
            history.append(step, {name: value})
    return history


def changed(columns: Columns, **changes: Any) -> Columns:
    """Columns with others in place; a number stands for all rows, a function gets the column."""
    count = len(next(iter(columns.values())))
    found = dict(columns)
    for name, value in changes.items():
        if isinstance(value, Callable):  # type: ignore[arg-type]
            value = value(found[name].copy())
        found[name] = np.broadcast_to(np.asarray(value, dtype=float), count).copy()
    return found


def at(step: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Changes one row."""

    def change(column: np.ndarray) -> np.ndarray:
        column[step] = value
        return column

    return change


def with_options(**options: float) -> Setup:
    return replace(SETUP, groups=(ParameterGroup(options, tuple(SHAPES)),))
