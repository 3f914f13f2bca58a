"""Logs of cockpit-for-pytorch 1.0.2 become histories that all instruments draw.

``data/cockpit_1.0.2.json`` was written by cockpit's own ``Cockpit.write`` after six steps of plain
SGD on ``network()`` below, with batches of 16. All its quantities were tracked at each step, apart
from ``GradHist1d(bins=16, range=(-1, 1))`` at every second one, ``Parameters`` at every third and
``GradHist2d(bins=(6, 8), range=((-1, 1), (-1, 1)), keep_individual=True)`` at every fourth;
``Cockpit.log`` was called at steps 0 and 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradlens
from gradlens import quantities
from gradlens.compat.cockpit_log import read_cockpit_log
from gradlens.history.history import History
from gradlens.plotting.loading import load_run
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.plotting.screen import layer_parts, main_parts
from tests.cases.steps import take_steps

LOG = Path(__file__).parent / "data" / "cockpit_1.0.2.json"
RAW: dict[str, dict[str, Any]] = json.loads(LOG.read_text())
NAMES = ["param_0", "param_1", "param_2", "param_3"]
ELEMENTS = 16 * (6 * 4 + 4 + 4 * 3 + 3)
"""In a batch's per-sample gradients."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3))


@pytest.fixture(scope="module")
def history() -> History:
    return load_run(LOG)


def test_every_value_is_there(history: History) -> None:
    assert history.steps == tuple(range(6))
    for step, values in RAW.items():
        assert {name for name in history.names if int(step) in history[name]} == set(values)


def test_numbers_are_those_of_the_log(history: History) -> None:
    numbers = {name for name, value in RAW["0"].items() if isinstance(value, (int, float))}
    assert {"Alpha", "CABS", "HessMaxEV", "TICDiag", "Time", "train_loss"} <= numbers
    for name in numbers:
        expected = {int(step): values[name] for step, values in RAW.items() if name in values}
        assert dict(history[name]) == expected


@pytest.mark.parametrize("name", ["GradNorm", "Distance", "UpdateSize"])
def test_lists_become_dicts_by_parameter(history: History, name: str) -> None:
    assert history[name][1] == dict(zip(NAMES, RAW["1"][name], strict=True))


def test_parameters_are_arrays_and_give_the_shapes(history: History) -> None:
    shapes = {"param_0": (4, 6), "param_1": (4,), "param_2": (3, 4), "param_3": (3,)}
    assert history.parameters == shapes
    assert list(history.parameters) == NAMES
    for step in (0, 3):
        for name, raw in zip(NAMES, RAW[str(step)]["Parameters"], strict=True):
            np.testing.assert_array_equal(history["Parameters"][step][name], np.array(raw))


def test_traces_are_exact(history: History) -> None:
    blocks, found = RAW["2"]["HessTrace"], history["HessTrace"][2]
    assert found["trace"] == found["low"] == found["high"] == pytest.approx(sum(blocks))
    assert found["standard_error"] == 0
    assert [found["parameters"][name]["trace"] for name in NAMES] == blocks


def test_histograms_are_counts_with_edges(history: History) -> None:
    one, two = history["GradHist1d"][2], history["GradHist2d"][4]
    assert one["hist"].shape == (16,)
    assert one["edges"].shape == (17,)
    assert one["hist"].sum() == ELEMENTS
    assert two["hist"].shape == (6, 8)
    assert [len(edges) for edges in two["edges"]] == [7, 9]
    assert list(two["parameters"]) == NAMES
    assert sum(part["hist"] for part in two["parameters"].values()).tolist() == two["hist"].tolist()
    for name, shape in history.parameters.items():
        assert two["parameters"][name]["hist"].sum() == 16 * np.prod(shape)


def test_many_parameters_keep_their_order(tmp_path: Path) -> None:
    history = written({"0": {"GradNorm": [float(n) for n in range(12)]}}, tmp_path)
    assert list(history.parameters) == [f"param_{n}" for n in range(12)]
    assert list(history["GradNorm"][0].values()) == list(range(12))


def test_values_are_shown_as_our_quantities_are(history: History) -> None:
    tracked = set(RAW["0"]) & set(quantities.__all__)
    assert set(history.sources) == tracked
    for name, source in history.sources.items():
        assert source.kind == name
        assert source.view == vars(quantities)[name].view


@pytest.mark.filterwarnings("ignore:.*diag_h is estimated")
def test_values_have_the_structure_of_ours(history: History) -> None:
    ours = tracked_by_gradlens(tuple(history.sources))
    for name in history.sources:
        theirs = {path for value in history[name].values() for path in paths(value)}
        known = {path for value in ours[name].values() for path in paths(value)}
        assert theirs <= known, name


@pytest.mark.slow
def test_every_instrument_draws_it(history: History) -> None:
    parts = {*main_parts(history), *layer_parts(history)}
    shown = {name for one in parts for name in one.names}
    assert shown == set(history.names) - {"epoch_count"}  # which is said in words
    for one in parts:
        assert "message" not in one.plot(history).artists, one


@pytest.mark.slow
def test_plotter_takes_a_log_with_and_without_its_ending() -> None:
    for source in (LOG, str(LOG), str(LOG.with_suffix(""))):
        figure = CockpitPlotter().plot(source, show_plot=False)
        titles = [ax.get_title(loc="left") for ax in figure.axes]
        assert {"Loss", "Gradient tests", "Hessian trace", "Learning rate"} <= set(titles)


def test_logs_become_runs(history: History, tmp_path: Path) -> None:
    history.write(tmp_path / "run.jsonl")
    again = load_run(tmp_path / "run.jsonl")
    assert again.sources == history.sources
    assert again["HessTrace"] == history["HessTrace"]


ARRAYS = {
    # What json_tricks 3.17.3 writes for these arrays.
    "list": ({"__ndarray__": [1.5, 2.5], "dtype": "float64", "shape": [2]}, [1.5, 2.5]),
    "scalar": ({"__ndarray__": 4, "dtype": "int64", "shape": []}, 4),
    "bool": ({"__ndarray__": [True], "dtype": "bool", "shape": [1]}, [True]),
    "nan": ({"__ndarray__": [float("nan")], "dtype": "float64", "shape": [1]}, [float("nan")]),
    "empty": (
        {"__ndarray__": [], "dtype": "float64", "shape": [0, 3], "Corder": True},
        np.zeros((0, 3)),
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, tmp_path: Path) -> None:
    encoded, expected = ARRAYS[name]
    found = written({"7": {"Mine": encoded}}, tmp_path)["Mine"][7]
    np.testing.assert_array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)


def test_what_is_not_ours_stays_as_it_is(tmp_path: Path) -> None:
    history = written({"10": {"Mine": {"a": [1, 2]}, "Alpha": None, "Loss": 1.0}}, tmp_path)
    assert history["Mine"][10] == {"a": [1, 2]}
    assert "Mine" not in history.sources
    assert not history["Alpha"]


@pytest.mark.parametrize("kept", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_logs_that_were_cut_off(kept: float, tmp_path: Path) -> None:
    text = LOG.read_text().rstrip()
    content = text[: min(int(kept * len(text)), len(text) - 1)]
    assert "no whole log of cockpit's" in refusal(content.encode(), tmp_path)


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"hello\n", "not a gradlens run"),
    "list": (b"[1, 2]", "not a gradlens run"),
    "other JSON": (b'{"learning_rate": 0.1}', "no whole log of cockpit's"),
    "other JSON by number": (b'{"1": 3}', "no whole log of cockpit's"),
    "other JSON lines": (b'{"a": 1}\n{"a": 2}\n', "no whole log of cockpit's"),
    "no steps": (b"{}", "has no steps"),
    "image": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "both begin with a brace"),
    "binary": (b"{\0\1\2", "no whole log of cockpit's"),
    "not UTF-8": (b'{"0": {"Loss": "\xff"}}', "no whole log of cockpit's"),
    "array without a type": (b'{"0": {"Mine": {"__ndarray__": [1]}}}', "no whole log of cockpit's"),
    "array of another shape": (
        b'{"0": {"Mine": {"__ndarray__": [1, 2], "dtype": "int64", "shape": [3]}}}',
        "no whole log of cockpit's",
    ),
    "bytes": (
        b'{"0": {"Mine": {"__ndarray__": "b64.gz:AAAA", "dtype": "int64", "shape": [3]}}}',
        "no whole log of cockpit's",
    ),
    "number for a list": (b'{"3": {"GradNorm": 1.0}}', "GradNorm at step 3"),
    "list for a histogram": (b'{"3": {"GradHist1d": [1.0]}}', "GradHist1d at step 3"),
    "histogram without edges": (b'{"3": {"GradHist1d": {"hist": [1]}}}', "GradHist1d at step 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_log(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    assert message in refusal(content, tmp_path)


def test_a_directory_and_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory, not a run: pass the file"):
        load_run(tmp_path)
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(ValueError, match=r"such as .*run\.jsonl$"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_run(tmp_path / "nowhere")


def test_runs_of_ours_are_known_by_their_header(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ours = History()
    ours.append(3, {"Loss": 1.0})
    ours.write(path)
    for source in (path, str(tmp_path / "run")):
        assert load_run(source)["Loss"] == {3: 1.0}
    path.write_bytes(path.read_bytes()[:-5])
    assert load_run(path).truncated


def written(log: dict[str, Any], folder: Path) -> History:
    """The history in a log with this content."""
    path = folder / "log.json"
    path.write_text(json.dumps(log))
    return read_cockpit_log(path)


def refusal(content: bytes, folder: Path) -> str:
    """The error of a file with this content: one line that names the file."""
    path = folder / "strange.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"strange\.json") as caught:
        load_run(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def tracked_by_gradlens(names: tuple[str, ...]) -> History:
    """Three steps of the log's network under quantities of ours with the log's arguments."""
    arguments: dict[str, dict[str, Any]] = {"GradHist2d": {"keep_individual": True}}
    torch.manual_seed(0)
    model, loss_function = network(), gradlens.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = [vars(quantities)[name](**arguments.get(name, {})) for name in names]
    cockpit = gradlens.Cockpit(model, tracked)
    take_steps(
        cockpit,
        optimizer,
        lambda _: loss_function(model(torch.randn(16, 6)), torch.randint(3, (16,))),
    )
    return cockpit.history


def paths(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Where there is something in a value, and of which sort; all parameters are one."""
    if isinstance(value, dict):
        for key, entry in value.items():
            place = "parameter" if key.startswith(("param_", "0.", "2.")) else key
            yield from paths(entry, f"{at}/{place}")
    elif isinstance(value, list):
        for place, entry in enumerate(value):
            yield from paths(entry, f"{at}/{place}")
    elif isinstance(value, np.ndarray):
        yield at, f"{value.ndim}-dimensional {'counts' if value.dtype.kind == 'i' else 'numbers'}"
    else:
        yield at, "text" if isinstance(value, str) else "number"
