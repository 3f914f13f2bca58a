"""Numbers of samples that differ little, and of inputs far from zero.

References are slow formulas in float64, of the same numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import quantities
from gradlens.history.undefined import Undefined
from gradlens.numerics.deviations import ROUNDINGS
from gradlens.quantities import Quantity
from tests.cases.records import leaves
from tests.cases.references import flat, per_sample_gradients_of_losses
from tests.cases.steps import tracked_backward

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)), (20,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3), nn.Flatten(),
            nn.Linear(6 * 6 * 6, 5),
        ),
        (3, 8, 8),
    ),
    "sequence": (
        lambda: nn.Sequential(
            nn.Linear(6, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 12), nn.Flatten(),
            nn.Linear(12 * 7, 5),
        ),
        (7, 6),
    ),
    "recurrent": (lambda: _Recurrent(), (4, 6)),
}  # fmt: skip
SAMPLES = 16


class _Recurrent(nn.Module):
    """One weight, which is used at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(6, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 9)
        for position in x.unbind(1):
            state = self.cell(position, state)
        return self.head(state)


def network(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name][0]().to(dtype)


def samples(name: str, spread: float, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    """Inputs and targets that differ by ``spread`` from sample to sample, in float64."""
    generator = torch.Generator().manual_seed(1)

    def near_each_other(shape: tuple[int, ...]) -> Tensor:
        centre = torch.randn(shape, generator=generator, dtype=torch.float64)
        noise = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
        return centre + spread * noise

    return near_each_other(NETWORKS[name][1]) + mean, near_each_other((5,))


def losses_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    output = model(inputs)
    precision = torch.promote_types(output.dtype, torch.float32)
    return (output.to(precision) - target).square().sum(1)


def values_of(
    model: nn.Module, tracked: Sequence[Quantity], inputs: Tensor, target: Tensor
) -> dict[str, Any]:
    """The quantities at one step."""
    cockpit = gradlens.Cockpit(model, list(tracked))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    info: dict[str, Any] = {}
    outputs = model.register_forward_hook(lambda *call: info.update(outputs=call[2]))
    losses = losses_of(model, inputs, target)
    loss, info["individual_losses"] = losses.mean(), losses
    outputs.remove()
    tracked_backward(cockpit, 0, loss, optimizer=optimizer, info=info)
    optimizer.step()
    return {quantity.name: cockpit.history[quantity.name][0] for quantity in tracked}


def of_gradients() -> list[Quantity]:
    return [
        quantities.NormTest(),
        quantities.InnerTest(),
        quantities.OrthoTest(),
        quantities.GradNoiseScale(),
        quantities.GradCovariance(k=2),
        quantities.MeanGSNR(epsilon=0.0),
        quantities.EarlyStopping(epsilon=0.0),
        quantities.CABS(),
    ]


PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SPREADS = [1.0, 1e-2, 1e-4, 1e-5, 1e-6, 1e-8, 0.0]
SEVERAL_ROUNDINGS = 30
"""How far apart relative errors may be, in roundings over the spread: each element of a gradient is
off by 1.6, variances by twice as much, and the elements that vary least count most in ratios."""


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_samples_that_differ_little(name: str, dtype: torch.dtype, spread: float) -> None:
    """Values are those of exact gradients, or NaN where rounding in gradients is as large."""
    model, eps = network(name, dtype), torch.finfo(dtype).eps
    inputs, target = (each.to(dtype) for each in samples(name, spread))
    exact = Deviations(copy.deepcopy(model).double(), inputs.double(), target.double())
    expected = exact.values()
    found = values_of(model, of_gradients(), inputs, target.to(torch.float64))
    clear = exact.spread > 3 * ROUNDINGS * max(eps, math.sqrt(2.0**-52))
    for place, value in leaves(found):
        path = tuple(map(str, place))
        if "layers" in path or not isinstance(value, float):
            continue
        if math.isnan(value):
            assert isinstance(value, Undefined), path
            assert "rounding" in value.reason, (path, value.reason)
            along = exact.along if path[0] == "InnerTest" else exact.spread
            assert not clear or along < 3 * ROUNDINGS * eps or path[0] in PER_ELEMENT, path
            continue
        if "/".join(path) in expected:
            apart = exact.along if path[0] == "InnerTest" else exact.spread
            tolerance = SEVERAL_ROUNDINGS * (eps / apart + 2.0**-52 / apart**2) + 1e-6
            assert value == pytest.approx(expected["/".join(path)], rel=tolerance), path


PER_ELEMENT = {"MeanGSNR", "EarlyStopping"}


class Deviations:
    """Slow formulas of gradients that are computed in float64, sample by sample."""

    def __init__(self, model: nn.Module, inputs: Tensor, target: Tensor) -> None:
        losses = losses_of(model, inputs, target)
        rows = flat(per_sample_gradients_of_losses(losses, model))
        self.mean_loss = float(losses.detach().mean())
        self.mean = rows.mean(0).numpy()
        self.apart = rows.numpy() - self.mean
        self.squared_mean = float(self.mean @ self.mean)

    @property
    def spread(self) -> float:
        """Root mean square of ‖gₙ − ḡ‖ relative to ‖ḡ‖."""
        return math.sqrt((self.apart**2).sum() / len(self.apart) / self.squared_mean)

    @property
    def along(self) -> float:
        """Of the part along ḡ."""
        along = self.apart @ self.mean / self.squared_mean
        return math.sqrt((along**2).mean())

    def values(self) -> dict[str, float]:
        n = len(self.apart)
        trace = (self.apart**2).sum() / (n - 1)
        squared_norm = self.squared_mean - trace / n
        eigenvalues = np.linalg.eigvalsh(self.apart @ self.apart.T).clip(min=0)[::-1] / (n - 1)
        shares = eigenvalues[eigenvalues > 0] / eigenvalues.sum()
        across = self.spread**2 - self.along**2
        variances = (self.apart**2).sum(0)
        with np.errstate(all="ignore"):
            ratio = float((self.mean**2 / variances).mean())
        return {
            "NormTest": self.spread / math.sqrt(n - 1),
            "InnerTest": self.along / math.sqrt(n - 1),
            "OrthoTest": math.sqrt(max(across, 0) / (n - 1)),
            "GradNoiseScale/value": trace / squared_norm,
            "GradNoiseScale/trace": trace,
            "GradNoiseScale/squared_norm": squared_norm,
            "GradCovariance/trace": trace,
            "GradCovariance/eigenvalues/0": float(eigenvalues[0]),
            "GradCovariance/stable_rank": float(eigenvalues.sum() / eigenvalues[0]),
            "GradCovariance/effective_rank": float(np.exp(-(shares * np.log(shares)).sum())),
            "MeanGSNR": n * ratio,
            "EarlyStopping": 1 - n * (n - 1) * ratio,
            "CABS": 1e-3 * trace * (n - 1) / n / self.mean_loss,
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_noise_scales_interval_does_not_depend_on_precision(dtype: torch.dtype) -> None:
    inputs, target = samples("mlp", 1e-3)
    found = values_of(
        network("mlp", dtype), [quantities.GradNoiseScale()], inputs.to(dtype), target
    )
    # A spread of a thousandth of another one has an interval of a millionth.
    tracked = [quantities.GradNoiseScale()]
    wide = values_of(network("mlp", torch.float64), tracked, *samples("mlp", 1e-2))
    scale = found["GradNoiseScale"], wide["GradNoiseScale"]
    for end in ("low", "high"):
        ratios = [record[end] / record["value"] for record in scale]
        assert ratios[0] == pytest.approx(ratios[1], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e3, 1e5, 1e7])
@pytest.mark.parametrize(
    ("shape", "calls"), [((64, 10), 1), ((64, 10), 2), ((6, 20), 1), ((5, 8, 10), 1)], ids=str
)
def test_inputs_far_from_zero(
    shape: tuple[int, ...], calls: int, mean: float, dtype: torch.dtype
) -> None:
    class Called(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self[0](part) for part in x.chunk(calls)])

    torch.manual_seed(0)
    inputs = (torch.randn(shape, dtype=torch.float64) + mean).to(dtype)
    model = Called(nn.Linear(shape[-1], 3)).to(dtype)
    tracked = [
        quantities.InputCovariance(),
        quantities.InputMean(),
        quantities.InputStd(),
        quantities.InputStd(by_feature=True, name="by feature"),
    ]
    cockpit = gradlens.Cockpit(model, tracked)
    tracked_backward(cockpit, 0, model(inputs).square().mean() / max(mean, 1) ** 2)
    found = {each.name: cockpit.history[each.name][0]["layers"]["0"] for each in tracked}
    rows = inputs.reshape(-1, shape[-1]).double().numpy()
    eigenvalues = np.linalg.eigvalsh(np.cov(rows.T))[::-1]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-8
    covariance = found["InputCovariance"]
    assert covariance["trace"] == pytest.approx(eigenvalues.sum(), rel=tolerance)
    assert covariance["eigenvalues"] == pytest.approx(list(eigenvalues[:5]), rel=tolerance)
    ranks = eigenvalues.sum() / eigenvalues[0]
    assert covariance["stable_rank"] == pytest.approx(ranks, rel=tolerance)
    assert found["InputMean"] == pytest.approx(rows.mean(), rel=tolerance)
    assert found["InputStd"] == pytest.approx(rows.std(), rel=tolerance)
    assert found["by feature"] == pytest.approx(rows.std(0), rel=tolerance)


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_rank_of_gradients_of_inputs_far_from_zero(mean: float) -> None:
    inputs, target = samples("mlp", 1.0, mean)
    model = nn.Sequential(nn.Linear(20, 5)).to(torch.float32)
    exact = Deviations(copy.deepcopy(model).double(), inputs.float().double(), target)
    found = values_of(model, [quantities.GradCovariance()], inputs.float(), target)
    expected = exact.values()["GradCovariance/effective_rank"]
    assert found["GradCovariance"]["effective_rank"] == pytest.approx(expected, rel=1e-4)
