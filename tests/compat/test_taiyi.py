"""Configurations of Taiyi: what they ask for, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradlens
from gradlens import from_taiyi, quantities
from gradlens.compat.taiyi import QUANTITIES
from gradlens.quantities import Quantity
from tests.cases.steps import tracked_backward


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))


def recorded(tracked: list[Quantity], steps: int = 10) -> gradlens.History:
    torch.manual_seed(0)
    model = network()
    cockpit = gradlens.Cockpit(model, tracked)
    for step in range(steps):
        tracked_backward(cockpit, step, model(torch.randn(5, 1, 6, 6)).square().mean())
    return cockpit.history


def test_a_configuration() -> None:
    config: dict[Any, Any] = {
        nn.BatchNorm2d: [["MeanTID", "linear(5,2)"], "VarTID"],
        "3": [["InputSndNorm"], "WeightNorm", ["WeightParamJump", "linear( 0, 0 )"]],
        "Conv2d": ["InputSndNorm", ["WeightGradNorm", "linear(3,0)"]],
    }
    found = from_taiyi(config)
    assert {quantity.name: type(quantity) for quantity in found} == {
        "MeanTID": quantities.MeanTID,
        "VarTID": quantities.VarTID,
        "InputSndNorm": quantities.InputNorm,
        "WeightNorm": quantities.ParameterNorm,
        "WeightParamJump": quantities.WeightSignFlips,
        "WeightGradNorm": quantities.GradientGeometry,
    }
    history = recorded(found)
    assert [*history["MeanTID"]] == [2, 7]
    assert [*history["WeightGradNorm"]] == [0, 3, 6, 9]
    assert [*history["WeightParamJump"]] == [*range(10)]
    assert set(history["InputSndNorm"][0]["layers"]) == {"0", "3"}
    assert set(history["WeightGradNorm"][0]["parameters"]) == {"0.weight"}
    assert history["MeanTID"][2]["layers"]["1"] > 0


def test_all_of_a_spectrum_is_one_quantity() -> None:
    names = [name for name in QUANTITIES if name.startswith("InputCov")]
    found = from_taiyi({"Linear": names})
    assert [quantity.name for quantity in found] == ["InputCovariance"]


def test_two_schedules_of_a_quantity_are_two_series() -> None:
    found = from_taiyi({"Conv2d": "WeightNorm", "Linear": [["WeightNorm", "linear(2, 1)"]]})
    history = recorded(found, 4)
    assert {name: [*history[name]] for name in history.names} == {
        "WeightNorm": [0, 1, 2, 3],
        "WeightNorm, linear(2,1)": [1, 3],
    }


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_of_taiyi(name: str) -> None:
    layer = {"MeanTID": "BatchNorm2d", "VarTID": "BatchNorm2d"}.get(name, "Linear")
    (quantity,) = from_taiyi({layer: [name]})
    record = recorded([quantity], 2)[quantity.name][1]
    assert next(iter(record.values()))


def test_one_schedule_in_several_spellings_is_one_series() -> None:
    entries = ["WeightNorm", ["WeightNorm", "linear(0,0)"], ["WeightNorm", "linear(1, 0)"]]
    more = [["WeightNorm", "linear(3,1)"], ["WeightNorm", " linear( 03,1 ) "]]
    found = from_taiyi({"Conv2d": [*more, *entries]})
    assert [quantity.name for quantity in found] == ["WeightNorm", "WeightNorm, every step"]


def test_a_layer_that_is_not_there_is_found_by_the_cockpit() -> None:
    with pytest.raises(ValueError, match="InputSndNorm: no layer matches 'Conv2D': did you mean"):
        gradlens.Cockpit(network(), from_taiyi({"Conv2D": ["InputSndNorm"]}))
