"""What arrives in the files of TensorBoard, W&B, MLflow, trackio and CSV is what a run has."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradlens import History
from gradlens.cli.main import main
from gradlens.sinks import CSV, MLflow, Sink, TensorBoard, Trackio, WandB
from tests.sinks.cases import (
    HISTOGRAMS_EVERY,
    LAYER,
    NOTE,
    OPTIONS,
    STEPS,
    Arrived,
    cockpit_with,
    expected,
    train,
)
from tests.sinks.wandb_file import rows

pytestmark = [
    pytest.mark.slow,
    # Of the libraries themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}


@dataclass(frozen=True)
class Recorded:
    """A run that was recorded with a sink of each library, in a folder with all their files."""

    folder: Path
    history: History
    run_file: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in ENVIRONMENT.items():
            patch.setenv(variable, value)
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        import mlflow
        import trackio
        import wandb

        mlflow.set_tracking_uri(f"file://{folder / 'mlruns'}")
        with wandb.init(project="gradlens", dir=folder) as run, mlflow.start_run():
            tracked = trackio.init(project="gradlens", embed=False)
            sinks: list[Sink] = [
                TensorBoard(folder / "tensorboard", **OPTIONS),
                WandB(**OPTIONS),
                MLflow(**OPTIONS),
                Trackio(tracked, **OPTIONS),
                CSV(folder / "run.csv", **OPTIONS),
            ]
            cockpit = cockpit_with(*sinks, run=folder / "run.jsonl")
            history = train(cockpit, lambda step: run.log({"mine": float(step)}, step=step))
            trackio.finish()
        wandb.teardown()  # which forgets the folder
    return Recorded(folder, history, folder / "run.jsonl")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)


# How each library's files are read ---------------------------------------------------------------


def in_tensorboard(folder: Path) -> Arrived:
    """All that TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    reader.Reload()
    tags = reader.Tags()
    scalars = {(n, one.step): one.value for n in tags["scalars"] for one in reader.Scalars(n)}
    histograms = {
        (name, one.step): list(one.histogram_value.bucket)
        for name in tags["histograms"]
        for one in reader.Histograms(name)
    }
    return Arrived(scalars, histograms)


def in_wandb(folder: Path) -> Arrived:
    """All that an offline run of W&B has, by the charts' own step."""
    found = Arrived({}, {})
    for row in rows(folder):
        step = row.pop("gradlens/step", None)
        for name, value in row.items():
            if name.endswith("/values"):
                found.histograms[name.removesuffix("/values"), step] = value
            elif name.startswith("gradlens/") and isinstance(value, (int, float)):
                found.scalars[name, step] = value
    return found


def in_mlflow(folder: Path) -> Arrived:
    """All metrics of the only run in a file store of MLflow."""
    import mlflow

    client = mlflow.MlflowClient(f"file://{folder}")
    (run,) = client.search_runs(["0"])
    found = {
        (name, one.step): one.value
        for name in run.data.metrics
        for one in client.get_metric_history(run.info.run_id, name)
    }
    return Arrived(found, {})


def in_trackio(folder: Path) -> Arrived:
    """All that trackio's database has."""
    found = Arrived({}, {})
    with sqlite3.connect(folder / "gradlens.db") as database:
        for step, metrics in database.execute("SELECT step, metrics FROM metrics"):
            for name, value in json.loads(metrics).items():
                if isinstance(value, dict):
                    found.histograms[name, step] = value["values"]
                elif isinstance(value, (int, float)):
                    found.scalars[name, step] = value
    return found


def in_csv(path: Path) -> Arrived:
    """All lines of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [*csv.DictReader(file)]
    return Arrived({(each["name"], int(each["step"])): float(each["value"]) for each in lines}, {})


@dataclass(frozen=True)
class Library:
    """Where a library's files are, how they are read, and whether they have histograms."""

    files: str
    read: Callable[[Path], Arrived]
    digits: float = 1e-12
    has_histograms: bool = True


LIBRARIES = {
    "tensorboard": Library("tensorboard", in_tensorboard, digits=1e-6),  # in single precision
    "wandb": Library("wandb", in_wandb),
    "mlflow": Library("mlruns", in_mlflow, has_histograms=False),
    "trackio": Library("trackio", in_trackio),
    "csv": Library("run.csv", in_csv, has_histograms=False),
}


def assert_arrived(found: Arrived, history: History, library: Library) -> None:
    wanted = expected(history)
    assert {*found.scalars} == {*wanted.scalars}
    assert found.scalars == pytest.approx(wanted.scalars, rel=library.digits)
    assert found.histograms == (wanted.histograms if library.has_histograms else {})


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_number_and_histogram_is_under_its_step(name: str, recorded: Recorded) -> None:
    library = LIBRARIES[name]
    assert_arrived(library.read(recorded.folder / library.files), recorded.history, library)


def test_expected_numbers_come_at_all_times(recorded: Recorded) -> None:
    """After the optimizer's step, a step late, at an epoch's end, by evaluations and by logs."""
    steps: dict[str, list[int]] = {}
    for name, step in sorted(expected(recorded.history).scalars):
        steps.setdefault(name.removeprefix("gradlens/"), []).append(step)
    every = [*range(STEPS)]
    assert steps["Loss"] == steps["UpdateSize"] == steps["Ubung_grou00df"] == every
    assert {*steps["Alpha"]} <= {*every[:-1]}
    assert steps["Time_seconds_per_step"] == every[1:]
    assert steps["Batch_epoch_mean"] == steps["OutputNorm_evaluation_median"] == [2, 5]


def test_notes_are_passed_on(recorded: Recorded) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (note,) = recorded.history.notes
    assert note.text.startswith(NOTE)
    reader = EventAccumulator(str(recorded.folder / "tensorboard"))
    reader.Reload()
    (text,) = reader.Tensors("gradlens/notes/text_summary")
    assert text.tensor_proto.string_val == [note.text.encode()]
    assert [
        r["gradlens/note"] for r in rows(recorded.folder / "wandb") if "gradlens/note" in r
    ] == [note.text]
    (file,) = (recorded.folder / "mlruns").rglob("notes.txt")
    assert file.read_text() == f"step 0: {note.text}\n"


def test_rows_of_wandb_are_those_of_the_training_loop(recorded: Recorded) -> None:
    """What the loop logs with ``step=`` isn't dropped, and no rows come in between."""
    found = rows(recorded.folder / "wandb")
    assert [row.get("mine") for row in found] == [float(step) for step in range(STEPS)]
    assert [row["_step"] for row in found] == [*range(STEPS)]


# Runs that are over ------------------------------------------------------------------------------


EXPORTED = {
    "tensorboard": ["tensorboard", "exported"],
    "wandb": ["wandb", "gradlens"],
    "mlflow": ["mlflow"],
    "csv": ["csv", "exported/run.csv"],
}
"""What ``--to`` is given."""


@pytest.mark.parametrize("name", EXPORTED)
def test_export(
    name: str,
    recorded: Recorded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import mlflow
    import wandb

    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    monkeypatch.chdir(tmp_path)
    options = ["--layers", LAYER, "--histograms-every", str(HISTOGRAMS_EVERY)]
    call = ["export", str(recorded.run_file), *options, "--to", *EXPORTED[name]]
    assert main(call) == 0
    assert f"exported {STEPS} steps to {' '.join(EXPORTED[name])}" in capsys.readouterr().out
    wandb.teardown()  # which writes what its process still has
    files = {"tensorboard": "exported", "csv": "exported/run.csv", "mlflow": "mlruns"}
    found = LIBRARIES[name].read(tmp_path / files.get(name, name))
    assert_arrived(found, recorded.history, LIBRARIES[name])
