"""Where ``gradlens export`` passes a run on to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlens.history.history import History
from gradlens.history.lines import number_lines
from gradlens.sinks import CSV, MLflow, Sink, TensorBoard, WandB
from gradlens.sinks.publisher import is_inside
from gradlens.sinks.sink import library
from gradlens.spelling import near

Open = Callable[..., AbstractContextManager[Sink]]
"""Makes a context with a sink for a run's file, a place if there is one, and a sink's options."""


@dataclass(frozen=True)
class Destination:
    """What a run is exported to: its ``place`` on the command line, and whether it needs one."""

    open: Open
    place: str
    needs_place: bool


@contextmanager
def _tensorboard(run: Path, place: str, **options: Any) -> Iterator[Sink]:
    if any(Path(place).glob("*tfevents*")):
        raise FileExistsError(f"{place} has a run already, which is kept: choose another folder")
    yield TensorBoard(place, **options)


@contextmanager
def _csv(run: Path, place: str, **options: Any) -> Iterator[Sink]:
    yield CSV(place, **options)


@contextmanager
def _wandb(run: Path, place: str | None = None, **options: Any) -> Iterator[Sink]:
    with library("wandb", "wandb").init(project=place, name=run.stem) as live:
        yield WandB(live, **options)


@contextmanager
def _mlflow(run: Path, place: str | None = None, **options: Any) -> Iterator[Sink]:
    mlflow = library("mlflow", "mlflow")
    if place is not None:
        mlflow.set_experiment(place)
    with mlflow.start_run(run_name=run.stem):
        yield MLflow(**options)


DESTINATIONS = {
    "tensorboard": Destination(_tensorboard, "DIR", True),
    "csv": Destination(_csv, "FILE", True),
    "wandb": Destination(_wandb, "PROJECT", False),
    "mlflow": Destination(_mlflow, "EXPERIMENT", False),
}
"""By the name on the command line."""


def check_layers(history: History, layers: Sequence[str]) -> None:
    """``ValueError`` names a layer or parameter of which a run has no numbers."""
    places = {place for name in history.names for place in number_lines(history[name])}
    known = {word for place in places for word in place.split("/") if word}
    for layer in layers:
        if not any(is_inside(name, layer) for name in known):
            raise ValueError(f"the run has no numbers of {layer!r}{near(layer, known)}")
