"""Outliers, predictions and spectra of several networks, against plain formulas of what flows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.quantities import Quantity
from tests.cases.records import assert_same_records
from tests.cases.row_cases import Net
from tests.cases.steps import take_steps, tracked_backward
from tests.quantities.networks import Attention, Recurrent, Residual, mlp
from tests.quantities.test_layer_quantities import (
    Array,
    Same,
    distribution,
    of_layer,
    predictions,
    singular_values,
)

NETWORKS = {
    "MLP": mlp,
    "residual": Residual,
    "LSTM": partial(Recurrent, True),
    "transformer": Attention,
}
TRACKED: tuple[type[Quantity], ...] = (
    quantities.ActivationOutliers,
    quantities.OutputEntropy,
    quantities.WeightSpectrum,
    quantities.UpdateSpectrum,
)


def built(network: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETWORKS[network]().double(), torch.randn(12, 4).double()


def outputs(model: nn.Module, inputs: Tensor) -> dict[str, Array]:
    """The first output of each leaf, with features in the last axis: ``[N, S, F]``."""
    model, found = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if not [*module.children()] or isinstance(module, nn.MultiheadAttention):
            module.register_forward_hook(
                lambda module, _, output, name=name: found.update({name: output})
            )
    model(inputs)
    return {name: rows(each) for name, each in found.items()}


def rows(output: Any) -> Array:
    tensor = (output[0] if isinstance(output, tuple) else output).detach().double()
    if tensor.dim() == 4:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(len(tensor), -1, tensor.shape[-1]).numpy()


def tracked(model: nn.Module, inputs: Tensor, parts: int, bfloat16: bool = False) -> Cockpit:
    cockpit = Cockpit(model, [kind() for kind in TRACKED])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part, some in enumerate(inputs.chunk(parts)):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model(some).float().square().mean() / parts
        tracked_backward(cockpit, 0, loss, optimizer=optimizer, accumulating=part < parts - 1)
    optimizer.step()
    cockpit.close()
    return cockpit


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_values_are_those_of_the_formulas(network: str, bfloat16: bool) -> None:
    model, inputs = built(network)
    model, inputs = (model.float(), inputs.float()) if bfloat16 else (model, inputs)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        expected = outputs(model, inputs)
    history = tracked(model, inputs, 1, bfloat16).history
    layers = history["ActivationOutliers"][0]["layers"]
    # The names of inner leaves of attention, which computes with their weights itself, differ.
    assert {*layers} <= {*expected}
    for name, found in layers.items():
        assert_same_records(found, distribution(expected[name]), rtol=1e-9, atol=1e-9)
    head = [*expected][-1]
    found = history["OutputEntropy"][0]["layers"]
    assert_same_records(found, {head: predictions(expected[head])}, rtol=1e-9)
    matrices = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}
    assert {*history["WeightSpectrum"][0]["parameters"]} == {*matrices}
    for name, after in matrices.items():
        for series, matrix in (
            ("WeightSpectrum", before[name]), ("UpdateSpectrum", after - before[name])
        ):  # fmt: skip
            spectrum = singular_values(matrix.double().numpy())
            one = history[series][0]["parameters"][name]
            assert one["norm"] == pytest.approx(spectrum["norm"], rel=1e-6 if bfloat16 else 1e-12)
            ranks = pytest.approx(spectrum["stable_rank"], rel=1e-5 if bfloat16 else 1e-12)
            assert one["stable_rank"] == ranks
            assert abs(one["norm"] - spectrum["norm"]) <= one["residual"]


@pytest.mark.parametrize("mean", [0.0, 1e4, -1e7])
def test_kurtosis_of_outputs_far_from_zero_in_micro_batches(
    mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradlens.signals.reductions.CACHED", 7)
    torch.manual_seed(0)
    inputs = torch.randn(8, 5).double() + mean
    model = nn.Sequential(nn.Linear(5, 5, bias=False)).double()
    nn.init.eye_(model[0].weight)
    history = tracked(model, inputs, 4).history
    expected = distribution(inputs[:, None].numpy())
    found = history["ActivationOutliers"][0]["layers"]["0"]
    assert_same_records(found, expected, rtol=1e-6)


def test_positions_that_were_pixels() -> None:
    torch.manual_seed(0)
    layers = {"patches": nn.Conv2d(2, 6, 2, 2), "dropout": nn.Dropout(0.0)}
    model = Net(lambda net, x: net.dropout(net.patches(x).flatten(2).mT), **layers).double()
    inputs = torch.randn(5, 2, 4, 4).double()
    cockpit = Cockpit(model, [quantities.ActivationOutliers()])
    tracked_backward(cockpit, 0, model(inputs).square().mean())
    found = cockpit.history["ActivationOutliers"][0]["layers"]["dropout"]
    assert_same_records(found, distribution(model(inputs).detach().numpy()), rtol=1e-9)


def test_one_column_is_the_logit_of_the_second_of_two_classes() -> None:
    inputs = torch.tensor([[0.0], [3.0], [40.0], [-1.0]]).double()
    found = of_layer(quantities.OutputEntropy(), inputs, Same())
    shares = inputs.sigmoid().clamp(1e-300, 1 - 1e-16)
    entropies = -shares * shares.log() - (1 - shares) * (1 - shares).log()
    assert found["entropy"] == pytest.approx(entropies.mean().item(), rel=1e-9)
    assert (found["classes"], found["top_share"], found["largest"]) == (2, 0.5, 40.0)


def test_classes_that_are_ruled_out() -> None:
    found = of_layer(quantities.OutputEntropy(), torch.tensor([[1.0, 1.0, -math.inf]]), Same())
    assert found["entropy"] == pytest.approx(math.log(2))
    assert (found["rms"], found["largest"], found["top_share"]) == (1.0, 1.0, 1.0)


def trained(steps: int, change: Callable[[nn.Module, int], None]) -> gradlens.History:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 80, bias=False))
    cockpit = Cockpit(model, [quantities.WeightSpectrum(), quantities.UpdateSpectrum()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(step: int) -> Tensor:
        change(model, step)
        return model(torch.randn(4, 90)).square().mean()

    take_steps(cockpit, optimizer, loss_of, range(steps))
    return cockpit.history


def weights(history: gradlens.History) -> Iterator[Any]:
    return (record["parameters"]["0.weight"] for record in history["WeightSpectrum"].values())


def test_vectors_are_kept_from_step_to_step() -> None:
    exact = []

    def change(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model[0].weight.add_(1e-4 * torch.randn(80, 90))  # type: ignore[index]
            exact.append(torch.linalg.svdvals(model[0].weight.double())[0].item())  # type: ignore[index]

    found = [*weights(trained(4, change))]
    errors = [abs(one["norm"] / value - 1) for one, value in zip(found, exact, strict=True)]
    assert max(errors) < 1e-4


def test_matrices_without_a_spectrum_say_why() -> None:
    def change(model: nn.Module, step: int) -> None:
        nn.init.constant_(model[0].weight, (0.0, math.nan, 1.0)[step])  # type: ignore[index]

    history = trained(3, change)
    zero, broken, ones = weights(history)
    assert zero.reason == "the parameter is zero"
    assert broken.reason == "the parameter 0.weight has NaN or Inf"
    assert ones["stable_rank"] == pytest.approx(1)
    assert history["UpdateSpectrum"][0]["parameters"]["0.weight"].reason == "the update is zero"
