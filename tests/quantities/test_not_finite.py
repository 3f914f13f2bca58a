"""Every quantity of a step on which a sample isn't finite: a value, or a NaN with its reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gradlens import Cockpit
from gradlens.history.undefined import Undefined
from tests.cases.steps import tracked_backward
from tests.quantities.test_units import LAWS, network, numbers

WITHOUT_REASON = {"HessTrace", "SpectralDensity"}
"""A field next to those that are NaN says why."""


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize("name", sorted(LAWS.keys() - WITHOUT_REASON))
@pytest.mark.filterwarnings("ignore")
def test_a_sample_that_is_not_finite(name: str, bad: float) -> None:
    model, loss_function = network("TID" in name), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, [LAWS[name].build(1.0)], loss_function=loss_function)
    for step in range(3):
        inputs = torch.randn(6, 4).double()
        if step == 1:
            inputs[2, 1] = bad
        optimizer.zero_grad()

        def closure(inputs: Tensor = inputs) -> Tensor:
            loss: Tensor = loss_function(model(inputs), torch.zeros(6, 3).double())
            return loss

        info = {"groups": [n % 2 for n in range(6)]}
        tracked_backward(cockpit, step, closure(), optimizer=optimizer, closure=closure, info=info)
        optimizer.step()
    cockpit.close()
    found = [number for record in cockpit.history[name].values() for _, number in numbers(record)]
    assert found
    floats = [number for number in found if isinstance(number, float)]
    assert all(isinstance(each, Undefined) for each in floats if math.isnan(each))
