"""Statistics over epochs and windows: against numpy, in constant memory, across processes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

from gradlens import Cockpit, History, quantities, schedules
from gradlens.aggregation import (
    STATISTICS,
    Aggregate,
    QuantileSketch,
    RunningMoments,
    Summary,
    numbers,
)
from gradlens.undefined import Undefined


def expected(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "mean": np.mean(values), "std": np.std(values), "min": min(values), "q1": q1,
        "median": median, "q3": q3, "max": max(values), "iqr": q3 - q1, "count": len(values),
    }  # fmt: skip


def summary(values: Sequence[float]) -> Summary:
    found = Summary()
    for value in values:
        found.add(value)
    return found


STREAMS = {
    "one": [3.5],
    "two": [2.0, -1.0],
    "equal": [7.0] * 9,
    "normal": list(np.random.default_rng(0).normal(1e6, 1.0, 500)),
    "with infinity": [1.0, math.inf, 2.0],
}


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("case", [case for case in STREAMS if case != "with infinity"])
def test_statistics(case: str) -> None:
    found = summary(STREAMS[case]).record()
    assert set(found) == {*STATISTICS, "count"}
    assert found == pytest.approx(expected(STREAMS[case]), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
def test_merged_summaries_are_one(parts: int) -> None:
    values = np.random.default_rng(1).lognormal(size=400)
    total = Summary()
    for part in np.array_split(values, parts):
        total.merge(pickle.loads(pickle.dumps(summary(part))))
    assert total.record() == pytest.approx(expected(values))
    empty = Summary()
    total.merge(empty)
    empty.merge(total)
    assert empty.record() == pytest.approx(total.record())


def test_moments_do_not_lose_digits() -> None:
    moments = RunningMoments()
    for value in (1e9 + 1, 1e9 + 2, 1e9 + 3):
        moments = moments.add(value)
    assert moments.std == pytest.approx(math.sqrt(2 / 3))
    assert math.isnan(RunningMoments().std)


@pytest.mark.parametrize("order", ["random", "ascending", "descending", "alternating"])
@pytest.mark.parametrize("count", [513, 2000, 20_000])
@pytest.mark.parametrize("merged", [False, True])
def test_quantiles_of_many_are_as_exact_as_stated(order: str, count: int, merged: bool) -> None:
    values = np.arange(count, dtype=float)
    if order == "random":
        np.random.default_rng(2).shuffle(values)
    elif order == "descending":
        values = values[::-1]
    elif order == "alternating":
        values = np.where(np.arange(count) % 2, values, count - values)
    sketches = [QuantileSketch() for _ in range(4 if merged else 1)]
    for place, value in enumerate(values):
        sketches[place % len(sketches)].add(float(value))
    for other in sketches[1:]:
        sketches[0].merge(other)
    allowed = math.ceil(math.log2(count / 512)) / 512
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        found = sketches[0].quantile(share)
        rank = np.mean(values < found)
        assert abs(rank - share) <= allowed + 2 / count


def test_a_sketch_stays_small() -> None:
    sketch = QuantileSketch()
    sizes = []
    for place in range(100_000):
        sketch.add(place % 1013)
        if place % 25_000 == 24_999:
            sizes.append(len(pickle.dumps(sketch)))
    assert sizes[-1] < 2 * sizes[0]
    assert sum(len(level) for level in sketch._levels) <= 512 * 10


def test_undefined_values_are_left_out_and_lend_their_reason() -> None:
    found = summary([Undefined("first step"), 2.0, 4.0])
    assert found.record()["mean"] == 3
    assert found.undefined == 1
    nothing = summary([Undefined("first step"), math.nan]).record()
    assert nothing["count"] == 0
    assert nothing["median"].reason == "first step"  # type: ignore[attr-defined]
    assert Summary().record()["mean"].reason == "there was no number"  # type: ignore[attr-defined]


def test_numbers_of_a_record() -> None:
    record = {"layers": {"a": {"norm": 1.0, "kind": "x"}, "b": 2}, "hist": np.ones(3), "ok": True}
    assert dict(numbers(record)) == {("layers", "a", "norm"): 1.0, ("layers", "b"): 2}
    assert dict(numbers(3.0)) == {(): 3.0}


# In a cockpit -----------------------------------------------------------------------------------


def train(tracked: list[Any], epochs: int = 3, length: int = 5, **arguments: Any) -> Cockpit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, tracked, **arguments)
    for step in range(epochs * length):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        with cockpit(step, loss=loss):
            loss.backward()
        optimizer.step()
        if step % length == length - 1:
            cockpit.tick_epoch()
    return cockpit


@pytest.mark.parametrize("name", ["Loss", "OutputNorm", "UpdateSize", "GradientGeometry"])
def test_epochs_are_those_of_the_values_themselves(name: str) -> None:
    build = getattr(quantities, name)
    raw = train([build()]).history[name]
    aggregated = train([Aggregate(build())]).history
    assert aggregated.names == (f"{name} (epoch)",)
    records = aggregated[f"{name} (epoch)"]
    assert [*records] == [4, 9, 14]
    for last, record in records.items():
        told = [dict(numbers(raw[step])) for step in range(last - 4, last + 1)]
        found = dict(numbers(record))
        for path in told[0]:
            known = [value[path] for value in told if not math.isnan(value[path])]
            for statistic, value in expected(known).items():
                assert found[(*path, statistic)] == pytest.approx(value)


def test_windows_are_recorded_when_they_are_full_and_the_rest_at_the_end() -> None:
    cockpit = train([Aggregate(quantities.Loss(), over=4, raw=True, statistics=("min", "max"))])
    assert cockpit.history.names == ("Loss", "Loss (window)")
    cockpit.close()
    loss, windows = cockpit.history["Loss"], cockpit.history["Loss (window)"]
    assert [*windows] == [3, 7, 11, 14]
    assert windows[7] == {"min": min(loss[s] for s in range(4, 8)),
                          "max": max(loss[s] for s in range(4, 8)), "count": 4}  # fmt: skip
    assert windows[14]["count"] == 3
    cockpit.close()
    assert len(windows) == 4


def test_an_epoch_that_nobody_ended_is_recorded_at_the_end() -> None:
    cockpit = train([Aggregate(quantities.Loss())], epochs=1, length=3)
    step(cockpit, 3)
    cockpit.close()
    assert cockpit.history["Loss (epoch)"][3]["count"] == 1


def step(cockpit: Cockpit, number: int) -> None:
    assert cockpit.model is not None
    loss = cockpit.model(torch.randn(6, 4)).square().mean()
    with cockpit(number, loss=loss):
        loss.backward()


def test_every_second_epoch() -> None:
    schedule = schedules.epochs(2, length=5, offset=1)
    cockpit = train([Aggregate(quantities.Loss(schedule))], epochs=4)
    assert [*cockpit.history["Loss (epoch)"]] == [9, 19]
    with pytest.raises(ValueError, match="length=0"):
        schedules.epochs(1, 0)


def test_pushed_metrics(tmp_path: Path) -> None:
    cockpit = train([quantities.Loss()], epochs=1, run=tmp_path / "run.jsonl")
    for accuracy in (0.5, 0.7):
        cockpit.push(valid_accuracy=accuracy, valid_loss=torch.tensor(1.0))
    cockpit.tick_epoch()
    cockpit.close()
    for history in (cockpit.history, History.load(tmp_path / "run.jsonl")):
        assert history["valid_accuracy"][4] == pytest.approx(expected([0.5, 0.7]))
        assert history["valid_loss"][4]["count"] == 2
        assert history.sources["valid_accuracy"].kind == "Aggregate"


def test_series_have_views_of_their_own() -> None:
    cockpit = train([Aggregate(quantities.OutputNorm()), Aggregate(quantities.Loss(), over=5)])
    titles = {name: source.view.title for name, source in cockpit.history.sources.items()}
    assert titles == {
        "OutputNorm (epoch)": "Output norm (epoch)", "Loss (window)": "Mini-batch loss (5 values)"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Aggregate("Loss"), "'Loss' is not a quantity"),  # type: ignore[arg-type]
        (lambda: Aggregate(quantities.Loss(), over=0), "over=0"),
        (lambda: Aggregate(quantities.Loss(), over="batch"), "over='batch'"),  # type: ignore[arg-type]
        (lambda: Aggregate(quantities.Loss(), statistics=("average",)), "choose some of mean"),  # type: ignore[arg-type]
        (lambda: Aggregate(quantities.Loss(), statistics="mean"), "choose some of mean"),  # type: ignore[arg-type]
        (
            lambda: Cockpit(
                nn.Linear(1, 1), [quantities.Loss(), Aggregate(quantities.Time(), name="Loss")]
            ),
            "two series are called 'Loss'",
        ),
        (
            lambda: Cockpit(nn.Linear(1, 1), [quantities.Loss(), Aggregate(quantities.Loss())]),
            "two quantities are called 'Loss'",
        ),
        (
            lambda: train([Aggregate(quantities.Loss())]).tick_epoch(across_processes=True),
            "init_process_group",
        ),
    ],
)
def test_bad_input(build: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        build()


def test_memory_does_not_grow() -> None:
    names = ("OutputNorm", "GradNorm")
    moments = ("mean", "std", "min", "max")
    tracked = [Aggregate(getattr(quantities, name)(), statistics=moments) for name in names]
    cockpit = train(tracked, epochs=1)
    sizes = []
    for number in range(5, 2005):
        step(cockpit, number)
        if number in (100, 2004):
            sizes.append(len(pickle.dumps(cockpit._aggregation._windows)))
    assert sizes[1] <= sizes[0] + 100
    assert cockpit.history.steps == (4,)


def in_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    cockpit = Cockpit(nn.Linear(1, 1), [Aggregate(quantities.Loss())])
    assert cockpit.model is not None
    for step in range(3):
        loss = cockpit.model(torch.ones(2, 1)).square().mean() * 0 + 10 * rank + step
        with cockpit(step, loss=loss):
            loss.backward()
    if rank == 1:
        cockpit.push(only_here=1.0)
    cockpit.tick_epoch(across_processes=True)
    cockpit.history.write(f"{folder}/{rank}.jsonl")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_across_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_process, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        history = History.load(tmp_path / f"{rank}.jsonl")
        assert history["Loss (epoch)"][2] == pytest.approx(expected([0, 1, 2, 10, 11, 12]))
        assert history["only_here"][2]["mean"] == 1


@pytest.mark.parametrize(
    ("values", "mean"), [((1e200, -1e200), 0.0), ((math.inf, math.inf), math.inf)]
)
def test_moments_of_extremes(values: tuple[float, ...], mean: float) -> None:
    moments = RunningMoments()
    for value in values:
        moments = moments.add(value)
    assert moments.mean == mean
