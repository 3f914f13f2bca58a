"""Programs of the shapes of cockpit's examples, tests and experiments, with other imports."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from backpack import extend
from torch import nn

import gradlens
from gradlens.compat.cockpit import Cockpit, CockpitPlotter, quantities
from gradlens.compat.cockpit.utils.configuration import (
    configuration,
    quantities_cls_for_configuration,
)
from gradlens.compat.cockpit_log import VIEWS, read_cockpit_log
from gradlens.history.undefined import Undefined
from gradlens.schedules import linear

PROGRAMS = sorted(Path(__file__).parent.glob("cockpit_programs/*.py"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive"),
]


@pytest.fixture(autouse=True)
def _windowless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context({"backend": "agg"}):
        yield
    import_module("matplotlib.pyplot").close("all")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.* is another run's file and is kept")
@pytest.mark.slow
def test_programs_run_and_run_again(program: Path, tmp_path: Path) -> None:
    if "tracking_data" in program.read_text():
        pytest.importorskip("pandas")
    runpy.run_path(str(program))
    logs = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    if logs:
        runpy.run_path(str(program))
    assert all(path.read_bytes() == content for path, content in logs.items())
    assert len([*tmp_path.rglob("*.json")]) == 2 * len(logs)


def tracked(*given: Any) -> Cockpit:
    """A cockpit after two steps of a small network."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    loss_function = extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model.parameters(), given)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_function(model(torch.randn(5, 4)), torch.randint(2, (5,)))
        with cockpit(step, info={"batch_size": 5, "loss": loss, "optimizer": optimizer}):
            loss.backward()
        optimizer.step()
    return cockpit


def test_there_are_all_of_cockpits_quantities() -> None:
    assert set(quantities.__all__) == {*VIEWS}
    for name in quantities.__all__:
        assert issubclass(getattr(quantities, name), getattr(gradlens.quantities, name))


def test_a_log_has_what_was_recorded() -> None:
    cockpit = tracked(
        quantities.GradNorm(),
        quantities.Parameters(),
        quantities.HessTrace(curvature="diag_ggn_mc"),
        quantities.GradHist1d(bins=3),
        quantities.GradHist2d(bins=(3, 4), keep_individual=True),
    )
    read = read_cockpit_log(cockpit.write("log"))
    for name in ("GradNorm", "Parameters"):
        for step, value in cockpit.history[name].items():
            assert read[name][step].keys() == value.keys()
            for parameter in value:
                np.testing.assert_allclose(read[name][step][parameter], value[parameter])
    for step in (0, 1):
        trace = cockpit.history["HessTrace"][step]["trace"]
        assert read["HessTrace"][step]["trace"] == pytest.approx(trace)
        for name in ("GradHist1d", "GradHist2d"):
            found, expected = read[name][step], cockpit.history[name][step]
            assert (found["hist"] == expected["hist"]).all()
        parts = read["GradHist2d"][step]["parameters"].values()
        assert sum(part["hist"] for part in parts).tolist() == found["hist"].tolist()


def test_a_second_run_draws_its_own_log() -> None:
    pytest.importorskip("pandas")  # of the plotter's tables
    tracked(quantities.Loss()).write("log")
    second = tracked(quantities.GradNorm())
    with pytest.warns(gradlens.GradlensWarning, match="is another run's file"):
        second.write("log")
    plotter = CockpitPlotter()
    for path, column in (("log", "GradNorm"), ("log-2", "GradNorm"), ("log.json", "Loss")):
        plotter.plot(path, show_plot=False)
        assert column in plotter.tracking_data
    plotter._read_tracking_results("log")
    assert "GradNorm" in plotter.tracking_data


def test_a_number_that_does_not_exist_is_a_nan_in_the_log() -> None:
    cockpit = tracked(quantities.GradNorm(), quantities.NormTest())
    cockpit.history.append(1, {"NormTest": Undefined("one sample has no spread")})
    log = json.loads(cockpit.write("log").read_text())
    assert math.isnan(log["1"]["NormTest"])
    assert math.isnan(read_cockpit_log("log.json")["NormTest"][1])


def test_quantities_have_their_values() -> None:
    norm = quantities.GradNorm(linear(1))
    assert norm.output == norm.get_output() == {}
    cockpit = tracked(norm)
    assert norm.output == {step: each["GradNorm"] for step, each in cockpit.output.items()}


def test_the_method_for_eigenvalues_is_no_choice() -> None:
    quantity = quantities.HessMaxEV(linear(1), use_power=False, tolerance=0.1)
    assert (quantity.name, quantity.tolerance) == ("HessMaxEV", 0.1)


def test_quantities_are_complete_at_the_first_step() -> None:
    cockpit = tracked(quantities.GradNorm())
    with pytest.raises(RuntimeError, match=r"Loss comes after the first step: .* second cockpit"):
        cockpit.add(quantities.Loss())
    with pytest.raises(ValueError, match="'Loss' is no quantity"):
        Cockpit([nn.Parameter(torch.ones(1))], ["Loss"])  # type: ignore[list-item]


def test_without_quantities_nothing_is_tracked() -> None:
    assert tracked().output == {}


@pytest.mark.parametrize(("label", "count"), [("economy", 9), ("business", 11), ("full", 13)])
def test_presets_are_cockpits(label: str, count: int) -> None:
    classes = quantities_cls_for_configuration(label)
    assert [type(quantity) for quantity in configuration(label, linear(3))] == classes
    assert len(classes) == count


def test_an_unknown_preset_is_an_error() -> None:
    with pytest.raises(ValueError, match="no configuration is called 'fulll': did you mean full"):
        configuration("fulll")


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("context", "get_batch_size", r"step\.samples"),
        ("instruments", "max_ev_gauge", r"gradlens\.instruments, as HessMaxEVInstrument"),
        ("quantities.quantity", "TwoStepQuantity", r"gradlens\.quantities\.UpdateQuantity"),
        ("quantities.utils_transforms", "BatchGradTransformsHook", r"reductions: .*own-quantity"),
        ("quantities.utils_hists", "histogram2d", r"numpy\.histogramdd"),
        ("utils.optim", "ComputeStep", r"gradlens\.quantities\.UpdateQuantity"),
    ],
)
def test_what_is_not_there_names_what_takes_its_place(module: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=f"{name} isn't there: use {instead}"):
        getattr(import_module(f"gradlens.compat.cockpit.{module}"), name)


MODULES = (
    *("alpha", "cabs", "distance", "early_stopping", "grad_hist", "grad_norm", "hess_max_ev"),
    *("hess_trace", "inner_test", "loss", "mean_gsnr", "norm_test", "ortho_test", "parameters"),
    *("tic", "time", "update_size"),
)


def test_each_module_of_cockpit_has_its_classes() -> None:
    found: list[str] = []
    for name in MODULES:
        module = import_module(f"gradlens.compat.cockpit.quantities.{name}")
        classes = [each for each in vars(module) if each in quantities.__all__]
        assert all(getattr(module, each) is getattr(quantities, each) for each in classes)
        found += classes
        with pytest.raises(AttributeError, match="Missing"):
            module.Missing  # noqa: B018
    assert found == quantities.__all__


def test_a_quantity_with_cockpits_interface_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Mine\._compute is never called: .* defines compute"):

        class Mine(quantities.GradNorm):  # type: ignore[misc]
            def _compute(self, global_step: int, params: Any, batch_loss: Any) -> float:
                return 0.0


@pytest.mark.slow
def test_animations_of_both_screens(tmp_path: Path) -> None:
    tracked(quantities.GradNorm()).write("log")
    CockpitPlotter(secondary_screen=True).build_animation("log")
    assert {path.name for path in tmp_path.glob("*.gif")} == {
        "log__primary.gif",
        "log__secondary.gif",
    }
