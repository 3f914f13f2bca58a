"""Outliers, predictions and spectra of several networks, against plain formulas of what flows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.quantities import Quantity
from tests.cases.records import assert_same_records
from tests.cases.steps import take_steps, tracked_backward

CLASSES = 3


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 2, 3, padding=1), nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        bent = self.second(torch.relu(self.norm(self.first(x)))) + x
        found: Tensor = self.head(bent.mean((2, 3)))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x)[0])
        return found


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, CLASSES)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 20), nn.GELU(), nn.Linear(20, CLASSES))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (4,)),
    "residual network": (Residual, (2, 5, 4)),
    "LSTM": (Recurrent, (7, 4)),
    "transformer": (transformer, (7, 4)),
}
TRACKED: tuple[type[Quantity], ...] = (
    quantities.ActivationOutliers,
    quantities.OutputEntropy,
    quantities.WeightSpectrum,
    quantities.UpdateSpectrum,
)


def built(network: str, samples: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = NETWORKS[network]
    return build().double(), torch.randn(samples, *shape).double()


def outputs(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The first output of each leaf, with features in the last axis: ``[N, S, F]``."""
    model, found = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if not [*module.children()] or isinstance(module, nn.MultiheadAttention):
            module.register_forward_hook(
                lambda module, _, output, name=name: found.update({name: (module, output)})
            )
    model(inputs)
    return {name: rows(*each) for name, each in found.items()}


def rows(module: nn.Module, output: Any) -> Tensor:
    tensor = (output[0] if isinstance(output, tuple) else output).detach().double()
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(len(tensor), -1, tensor.shape[-1])


def outliers(x: Tensor) -> dict[str, Any]:
    place = int(x.abs().argmax())
    apart = x - x.mean()
    return {
        "largest": x.abs().max().item(),
        "kurtosis": (apart.pow(4).mean() / apart.pow(2).mean().square() - 3).item(),
        "channel": place % x.shape[2],
        "position": place // x.shape[2] % x.shape[1],
    }


def predictions(z: Tensor) -> dict[str, Any]:
    z = z.flatten(0, 1)
    p = z.exp() / z.exp().sum(1, keepdim=True)
    counts = [int((z.argmax(1) == k).sum()) for k in range(CLASSES)]
    return {
        "entropy": -(p * p.log()).sum(1).mean().item(),
        "rms": z.square().mean().sqrt().item(),
        "largest": z.abs().max().item(),
        "top_share": max(counts) / len(z),
        "top_class": counts.index(max(counts)),
        "classes": CLASSES,
    }


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
        assert_same_records(found, outliers(expected[name]), rtol=1e-9, atol=1e-9)
    head = [*expected][-1]
    found = history["OutputEntropy"][0]["layers"]
    assert_same_records(found, {head: predictions(expected[head])}, rtol=1e-9)
    matrices = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}
    assert {*history["WeightSpectrum"][0]["parameters"]} == {*matrices}
    for name, after in matrices.items():
        for series, matrix in (
            ("WeightSpectrum", before[name]), ("UpdateSpectrum", after - before[name])
        ):  # fmt: skip
            spectrum = torch.linalg.svdvals(matrix.flatten(1).double())
            one = history[series][0]["parameters"][name]
            assert one["norm"] == pytest.approx(spectrum[0].item(), rel=1e-6 if bfloat16 else 1e-12)
            ranks = (spectrum.square().sum() / spectrum[0] ** 2).item()
            assert one["stable_rank"] == pytest.approx(ranks, rel=1e-5 if bfloat16 else 1e-12)
            assert abs(one["norm"] - spectrum[0].item()) <= one["residual"]


@pytest.mark.parametrize("network", ["MLP", "LSTM", "transformer"])
def test_micro_batches_have_the_values_of_the_whole(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = tracked(*built(network), 1).history
    # Those of micro-batches are also computed piece by piece.
    monkeypatch.setattr("gradlens.signals.reductions.CACHED", 7)
    monkeypatch.setattr("gradlens.signals.reductions.PIECE", 7)
    apart = tracked(*built(network), 4).history
    for kind in TRACKED:
        found, expected = (run[kind.__name__][0] for run in (apart, together))
        assert_same_records(found, expected, rtol=1e-9)


class Same(nn.Module):
    """Returns its inputs, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def one_layer(quantity: Quantity, inputs: Tensor, layer: nn.Module) -> Any:
    model = nn.Sequential(Same(), layer)
    cockpit = Cockpit(model, [quantity])
    tracked_backward(cockpit, 0, model(inputs).sum())
    return cockpit.history[quantity.name][0]["layers"]["1"]


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
    expected = outliers(inputs[:, None])
    found = history["ActivationOutliers"][0]["layers"]["0"]
    assert_same_records(found, expected, rtol=1e-6)


def test_a_planted_outlier_is_named() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6, 9, 16)
    inputs[4, 7, 11] = -300.0
    found = one_layer(quantities.ActivationOutliers(channel_last=True), inputs, Same())
    assert (found["channel"], found["position"], found["largest"]) == (11, 7, 300.0)
    assert found["kurtosis"] > 500


class Patches(nn.Module):
    """Pixels that become positions, as those of vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.dropout = nn.Conv2d(2, 6, 2, 2), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.dropout(self.patches(x).flatten(2).mT)
        return kept


def test_positions_that_were_pixels() -> None:
    torch.manual_seed(0)
    model, inputs = Patches().double(), torch.randn(5, 2, 4, 4).double()
    cockpit = Cockpit(model, [quantities.ActivationOutliers()])
    tracked_backward(cockpit, 0, model(inputs).square().mean())
    found = cockpit.history["ActivationOutliers"][0]["layers"]["dropout"]
    assert_same_records(found, outliers(model(inputs).detach()), rtol=1e-9)


def test_positions_of_samples_in_axis_1() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 6), "head": nn.Linear(6, CLASSES)}).double()
    model.forward = lambda x: model["head"](model["lstm"](x)[0])  # type: ignore[method-assign]
    inputs = torch.randn(7, 5, 4).double()
    cockpit = Cockpit(model, [quantities.ActivationOutliers()])
    output = model(inputs)
    losses = output.square().mean((0, 2))
    tracked_backward(cockpit, 0, losses.mean(), info={"individual_losses": losses})
    found = cockpit.history["ActivationOutliers"][0]["layers"]
    expected = {"lstm": outliers(model["lstm"](inputs)[0].detach().transpose(0, 1)),
                "head": outliers(output.detach().transpose(0, 1))}  # fmt: skip
    assert_same_records(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.full((3, 4), 1.5), "all outputs are equal"),
        (torch.full((3, 4), 1e7 / 3).double(), "all outputs are equal"),
        (torch.zeros(3, 4), "all outputs are equal"),
        (1e-80 * torch.arange(12.0).reshape(3, 4).double(), "beyond the range"),
        (1e160 * torch.arange(12.0).reshape(3, 4).double(), "beyond the range"),
        (torch.zeros(0, 4), "the batch is empty"),
        (torch.full((3, 4), math.inf), "has NaN or Inf"),
        (torch.full((3, 4), math.nan), "has NaN or Inf"),
    ],
)
def test_undefined_outliers_say_why(inputs: Tensor, reason: str) -> None:
    found = one_layer(quantities.ActivationOutliers(), inputs, Same())
    assert reason in (found["kurtosis"] if isinstance(found, dict) else found).reason


def test_one_column_is_the_logit_of_the_second_of_two_classes() -> None:
    inputs = torch.tensor([[0.0], [3.0], [40.0], [-1.0]]).double()
    found = one_layer(quantities.OutputEntropy(), inputs, Same())
    shares = inputs.sigmoid().clamp(1e-300, 1 - 1e-16)
    entropies = -shares * shares.log() - (1 - shares) * (1 - shares).log()
    assert found["entropy"] == pytest.approx(entropies.mean().item(), rel=1e-9)
    assert (found["classes"], found["top_share"], found["largest"]) == (2, 0.5, 40.0)


def test_classes_that_are_ruled_out() -> None:
    found = one_layer(quantities.OutputEntropy(), torch.tensor([[1.0, 1.0, -math.inf]]), Same())
    assert found["entropy"] == pytest.approx(math.log(2))
    assert (found["rms"], found["largest"], found["top_share"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("inputs", "layer", "reason"),
    [
        (torch.zeros(0, 4), nn.Linear(4, 2), "the batch is empty"),
        (torch.full((3, 4), math.nan), Same(), "has NaN or Inf"),
        (torch.full((3, 4), math.inf), Same(), "has NaN or Inf"),
        (torch.full((3, 4), -math.inf), Same(), "has NaN or Inf"),
        (torch.zeros(3, 4), nn.Softmax(1), "the outputs of Softmax are no logits"),
        (torch.zeros(3, 1), nn.Sigmoid(), "the outputs of Sigmoid are no logits"),
        (torch.randn(3, 4), nn.LayerNorm(4), "the outputs of LayerNorm are no logits"),
        (torch.randn(3, 4), nn.Dropout(), "the outputs of Dropout are no logits"),
        (torch.zeros(3, 0), Same(), "the layer has no features"),
    ],
)
def test_undefined_predictions_say_why(inputs: Tensor, layer: nn.Module, reason: str) -> None:
    assert reason in one_layer(quantities.OutputEntropy(), inputs, layer).reason


def trained(steps: int, change: Callable[[nn.Module, int], None]) -> gradlens.History:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 80, bias=False))
    cockpit = Cockpit(model, [quantities.WeightSpectrum(), quantities.UpdateSpectrum()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(step: int) -> Tensor:
        change(model, step)
        loss: Tensor = model(torch.randn(4, 90)).square().mean()
        return loss

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
