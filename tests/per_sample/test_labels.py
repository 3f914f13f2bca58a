"""Labels leave no trace, and belong to the samples of this step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradlens
from gradlens import Cockpit, quantities
from tests.cases.references import assert_covered


def test_labels_leave_no_trace() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(), nn.Linear(12, 3)
    )
    plain = copy.deepcopy(model)
    cockpit = Cockpit(model, [quantities.NormTest()])
    states = []
    for tracked, network in ((True, model), (False, plain)):
        torch.manual_seed(1)
        loss = nn.functional.cross_entropy(network(torch.randn(5, 2, 4, 4)), torch.arange(5) % 3)
        if tracked:
            with pytest.warns(UserWarning, match="couples the samples"), cockpit(0, loss=loss):
                loss.backward()
        else:
            loss.backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        states.append([*gradients, *network.buffers(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_plan_is_not_kept_where_rows_are_selected_by_other_numbers() -> None:
    """The same shapes, and another permutation at each step."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
    model = gradlens.extend(nn.ModuleDict({"first": first, "last": last}))
    for _ in range(6):
        inputs, order = torch.randn(6, 4, dtype=torch.float64), torch.randperm(6)
        outputs = last(first(inputs)[order].tanh())[order.argsort()]
        assert_covered(model, outputs.square().sum(1), batch_size=6)


def test_a_part_of_one_sample_is_its_own() -> None:
    """Changing p.grad afterwards changes nothing."""
    model = gradlens.extend(nn.Linear(3, 2))
    loss = model(torch.randn(1, 3)).square().mean()
    with gradlens.per_sample_gradients(model, loss=loss) as gradients:
        loss.backward()
    before = {name: gradients[name].dense().clone() for name in gradients}
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    assert all(torch.equal(gradients[name].dense(), before[name]) for name in before)
    assert all(bool(each.any()) for each in before.values())


def test_selected_rows_that_are_not_finite() -> None:
    """The indices say which rows they are, whatever the numbers are."""
    torch.manual_seed(0)
    model = gradlens.extend(nn.Sequential(nn.Embedding(13, 4), nn.Tanh(), nn.Linear(4, 3)))
    words, mask = torch.arange(12).reshape(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    mask[[0, 0, 1, 2, 3], [0, 2, 1, 2, 0]] = True
    with torch.no_grad():
        model[0].weight[0] = torch.nan
    outputs = model[2](model[1](model[0](words))[mask])
    loss = nn.functional.cross_entropy(outputs, torch.tensor([0, 1, 2, 0, 1]))
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=4) as gradients:
        loss.backward()
    assert len(gradients) == 3
    bad = gradients["2.weight"].dense().isnan().flatten(1).any(1)
    assert bad.tolist() == [True, False, False, False]
