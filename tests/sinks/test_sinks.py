"""When sinks get what, and what happens if one fails."""

from __future__ import annotations

import atexit
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradlens import GradlensWarning, History, Undefined
from gradlens.cockpit.aggregation import Aggregation
from gradlens.cockpit.run import Run
from gradlens.history.histograms import Histogram
from gradlens.history.records import Source
from gradlens.sinks import CSV, MLflow, Sink, TensorBoard, Trackio, WandB
from gradlens.sinks.publisher import Publisher, is_inside, tag
from tests.sinks.cases import LAYER, OPTIONS, Kept, cockpit_with, expected, train

ROOT = Path(__file__).parents[2]


class Broken(Kept):
    """A sink of which one method raises."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__()

        def fail(*_: object) -> None:
            raise error

        setattr(self, method, fail)


def published(*records: tuple[int, dict[str, Any]], **options: Any) -> Kept:
    """A sink that got records one by one."""
    sink = Kept(**options)
    publisher = Publisher([sink], unexpected)
    for step, values in records:
        publisher.record(step, values, {"GradNorm": Source(("GradNorm",))}, {"w": (2,)})
    publisher.close()
    return sink


def unexpected(what: str, error: Exception) -> None:
    raise AssertionError(what) from error


# What they get -----------------------------------------------------------------------------------


def test_a_sink_gets_all_numbers_and_histograms_of_a_run() -> None:
    sink = Kept(**OPTIONS)
    wanted = expected(train(cockpit_with(sink)))
    assert {*sink.arrived.scalars} == {*wanted.scalars}
    assert sink.arrived.scalars == pytest.approx(wanted.scalars, rel=1e-12)
    assert sink.arrived.histograms == wanted.histograms
    assert sink.closed == 1


def test_a_process_that_writes_nothing_passes_nothing_on() -> None:
    sink = Kept()
    parameters = {"weight": nn.Parameter(torch.zeros(2))}
    run = Run(Aggregation([]), parameters, None, False, writes=False, sinks=[sink])
    run.record(0, {"Loss": 1.0})
    run.close()
    assert not sink.arrived.scalars
    assert not sink.closed


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (1, (0, 1, 2), (0, 1, 2)),
        (2, (0, 1, 2, 3, 4), (0, 2, 4)),
        (5, (3, 7, 8, 20), (3, 8, 20)),  # whatever step the first one is
        (5, (0, 4, 5, 0, 4, 5), (0, 5, 0, 5)),  # training goes back to a checkpoint
        (3, (0, 1, 1, 3, 3), (0, 3, 3)),  # a later value of a step replaces the one before
    ],
)
def test_steps_between_records(
    every: int, steps: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    class Steps(Kept):
        def record(self, step: int, scalars: Any, histograms: Any) -> None:
            found.append(step)

    found: list[int] = []
    publisher = Publisher([Steps(every=every)], unexpected)
    for step in steps:
        publisher.record(step, {"Loss": 1.0}, {}, {})
    assert tuple(found) == expected


def test_a_number_that_does_not_exist_is_left_out_and_one_of_a_diverged_run_is_not() -> None:
    sink = published(
        (0, {"GradNorm": {"w": 1.0}, "valid_loss": 2.0}),
        (1, {"GradNorm": Undefined("no gradient"), "valid_loss": math.nan}),
        (2, {"GradNorm": {"w": math.inf}, "valid_loss": math.inf, "words": "text"}),
    )
    norms, losses = "gradlens/GradNorm", "gradlens/valid_loss"
    assert sink.arrived.scalars == pytest.approx(
        {(norms, 0): 1.0, (losses, 0): 2.0, (losses, 1): math.nan, (norms, 2): math.inf,
         (losses, 2): math.inf},
        nan_ok=True,
    )  # fmt: skip


def test_layers_are_those_of_a_module_too() -> None:
    values = {"GradNorm": {"0.weight": 1.0, "0.bias": 2.0, "01.weight": 3.0}}
    sink = published((0, values), layers="0", prefix="mine/generator")
    names = {name for name, _ in sink.arrived.scalars}
    assert names == {f"mine/generator/GradNorm{part}" for part in ("", "_0.weight", "_0.bias")}
    assert is_inside("0.weight", "0.weight")
    assert not is_inside("0", "0.weight")


NAMES = {
    ("Loss", ""): "gradlens/Loss",
    ("OutputNorm (evaluation)", "median"): "gradlens/OutputNorm_evaluation_median",
    ("Time", "s/step"): "gradlens/Time_seconds_per_step",
    ("HessEigenvalues", "λ1"): "gradlens/HessEigenvalues_lambda1",
    ("σ² of größe #1", ""): "gradlens/u03c32_of_grou00dfe__1",
    ("valid/accuracy", ""): "gradlens/valid/accuracy",
}


@pytest.mark.parametrize(("series", "part"), NAMES)
def test_names_are_ascii(series: str, part: str) -> None:
    assert tag("gradlens", series, part) == NAMES[series, part]


def test_page_works_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "sinks.rst").read_text("utf-8")
    code, output = (
        textwrap.dedent(block)
        for directive in ("testcode", "testoutput")
        for block in re.findall(rf"{directive}::\n\n(.*?)\n\n\S", page, re.DOTALL)
    )
    exec(code, {})
    assert capsys.readouterr().out.strip() == output.strip()


# What fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["record", "note", "close"])
def test_a_sink_that_raises_is_noted_once_and_left_out(method: str) -> None:
    broken, sound, after = Broken(method, OSError("no route")), Kept(), Kept()
    with pytest.warns(GradlensWarning, match=r"sink Broken failed, .*OSError: no route") as caught:
        history = train(cockpit_with(sound, broken, after))
    assert len(caught) == 1
    assert len([note for note in history.notes if "Broken" in note.text]) == 1
    wanted = expected(history).scalars
    for sink in (sound, after):
        assert sink.closed == 1
        assert {name for name, _ in sink.arrived.scalars} == {
            name for name, _ in wanted if LAYER not in name
        }
        texts = [note.text for note in history.notes]
        # A note on closing has no sinks to go to.
        assert {text for _, text in sink.notes} == {*texts[: len(texts) - (method == "close")]}


def test_a_series_that_cannot_be_read_is_reported_and_the_others_go_on() -> None:
    reports: list[str] = []
    sink = Kept()
    publisher = Publisher([sink], lambda what, error: reports.append(f"{what}: {error!r}"))
    sources = {"Mine": Source(("GradHist1d",))}
    for step in range(3):
        publisher.record(step, {"Mine": {"below": 1}, "Loss": 2.0}, sources, {})
    assert reports == ["reading Mine for sinks: KeyError('hist')"]
    assert [step for _, step in sink.arrived.scalars] == [0, 1, 2]


@pytest.mark.parametrize("option", ["every", "histograms_every"])
@pytest.mark.parametrize("count", [0, -1, 1.5, "often", True])
def test_numbers_of_steps_that_are_none(option: str, count: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}="):
        Kept(**{option: count})


class LiveRun:
    """A run of W&B without W&B, with the calls of ``log``."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def define_metric(self, name: str, **options: Any) -> None:
        """Nothing depends on it."""

    def log(self, values: dict[str, Any], commit: bool = True) -> None:
        self.rows.append(values)


@pytest.mark.slow
def test_the_records_of_a_step_are_one_row_of_wandb() -> None:
    run = LiveRun()
    sink = WandB(run)  # type: ignore[arg-type]
    for step, name in [(0, "Loss"), (0, "UpdateSize"), (0, "Alpha"), (1, "Loss"), (0, "Late")]:
        sink.record(step, {name: 1.0}, {})
    sink.note(2, "a note")
    sink.close()
    assert [(row.pop("gradlens/step"), [*row]) for row in run.rows] == [
        (0, ["Loss", "UpdateSize", "Alpha"]),
        (1, ["Loss"]),
        (0, ["Late"]),
        (2, ["gradlens/note"]),
    ]


@pytest.mark.slow
def test_the_last_row_of_wandb_is_logged_without_close(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    run = LiveRun()
    publisher = Publisher([WandB(run)], lambda what, error: None)  # type: ignore[arg-type]
    publisher.record(0, {"Loss": 1.0}, {}, {})
    assert not run.rows
    (end,) = ends
    end()
    assert run.rows == [{"gradlens/Loss": 1.0, "gradlens/step": 0}]


@pytest.mark.slow
@pytest.mark.parametrize("bins", [512, 513, 1500])
def test_bins_of_wandb_are_joined_beyond_512(bins: int) -> None:
    run = LiveRun()
    counts, edges = np.arange(float(bins)), np.linspace(-1, 1, bins + 1)
    histogram = Histogram(0, counts, (edges,), (0,), (0,), 0)
    sink = WandB(run)  # type: ignore[arg-type]
    sink.record(0, {}, {"h": histogram})
    sink.close()
    found = run.rows[0]["h"]
    assert len(found.histogram) <= 512
    joined = -(-bins // 512)
    assert found.histogram == [counts[n : n + joined].sum() for n in range(0, bins, joined)]
    assert found.bins == [*edges[:-1:joined], edges[-1]]


def test_a_table_that_exists_is_kept_or_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.csv"
    for step, options in enumerate(({}, {"append": True})):
        sink = CSV(path, **options)
        sink.record(step, {"Loss": 0.5}, {})
        sink.note(step, "nothing")
        sink.close()
    assert path.read_text() == "step,name,value\n0,Loss,0.5\n1,Loss,0.5\n"
    with pytest.raises(FileExistsError, match=r"run.csv exists and is kept: .*append=True"):
        CSV(path)


MISSING: dict[str, tuple[str, Any]] = {
    "tensorboard": ("torch.utils.tensorboard", lambda: TensorBoard("folder")),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
    "trackio": ("trackio", lambda: Trackio(None)),  # type: ignore[arg-type]
    "pandas": ("pandas", lambda: History().to_dataframe()),
}


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_library_names_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, use = MISSING[extra]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'gradlens\[{extra}\]'"):
        use()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("sink", "remedy"), [(WandB, r"wandb.init\(\)"), (MLflow, r"mlflow.start_run\(\)")]
)
def test_without_a_run_to_log_to(sink: type[Sink], remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"call {remedy} first"):
        sink()
