"""monitorch 0.1.0.7 on the same run, wherever it is right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import History, quantities

pytest.importorskip("monitorch")

from monitorch import lens
from monitorch.inspector import PyTorchInspector

STEPS = 4


def linear() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 4), nn.Tanh()), (5,)


def convolutional() -> tuple[nn.Module, tuple[int, ...]]:
    # Two axes of positions, in which monitorch is right too.
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 2), nn.ELU()), (2, 6, 5)


def sequence() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Sigmoid()), (7, 6)


NETWORKS = {"linear": linear, "convolutional": convolutional, "sequence": sequence}


def run(network: str) -> tuple[History, dict[str, Any]]:
    """Both of them watch one run; monitorch keeps all its values in lists."""
    torch.manual_seed(0)
    model, shape = NETWORKS[network]()
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    last = network == "sequence"
    lenses = {
        "norm": lens.OutputNorm(inplace=False, channel_last=last),
        "rms": lens.OutputNorm(inplace=False, normalize_by_size=True),
        "activation": lens.OutputActivation(inplace=False, channel_last=last),
        "output gradient": lens.OutputGradientGeometry(inplace=False, skip_activation=False),
        "gradient": lens.ParameterGradientGeometry(inplace=False),
        "gradient activation": lens.ParameterGradientActivation(inplace=False),
        "update": lens.ParameterUpdateGeometry(optimizer, inplace=False, normalize_by_size=True),
    }
    inspector = PyTorchInspector([*lenses.values()], module=model, visualizer="print")
    activations = [nn.ReLU, nn.Tanh, nn.ELU, nn.Sigmoid]
    cockpit = gradlens.Cockpit(
        model,
        [
            quantities.OutputNorm(),
            quantities.OutputNorm(normalize=True, name="OutputRMS"),
            quantities.OutputActivation(layers=[a for a in activations if has(model, a)]),
            quantities.OutputGradientGeometry(layers="*"),
            quantities.GradientGeometry(),
            quantities.GradientActivation(),
            quantities.UpdateGeometry(normalize=True),
        ],
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        # Its hooks warn where the input of the first layer needs no gradient.
        inputs = torch.randn(6, *shape, dtype=torch.float64, requires_grad=True)
        loss = model(inputs).square().mean()
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    found = {name: preprocessed(one) for name, one in lenses.items()}
    inspector.detach()
    return cockpit.history, found


def has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def preprocessed(one: Any) -> dict[str, Any]:
    """Lists by layer, or by parameter."""
    if not hasattr(one, "_preprocessors"):
        return dict(one._preprocessor.value)
    return {
        f"{layer}.{parameter}": value
        for parameter, preprocessor in one._preprocessors.items()
        for layer, value in preprocessor.value.items()
    }


def series(history: History, name: str, layer: str, field: str = "") -> Iterator[float]:
    for record in history[name].values():
        parts = record.get("layers", record.get("parameters"))
        yield parts[layer][field] if field else parts[layer]


def assert_close(found: Iterator[float], expected: list[Any]) -> None:
    values = [float(value) if isinstance(value, Tensor) else value for value in expected]
    assert list(found) == pytest.approx(values, rel=1e-6)


@pytest.fixture(scope="module", params=NETWORKS)
def both(request: pytest.FixtureRequest) -> tuple[History, Mapping[str, Any]]:
    return run(request.param)


@pytest.mark.parametrize(("name", "lens"), [("OutputNorm", "norm"), ("OutputRMS", "rms")])
@pytest.mark.slow
def test_output_norm(both: Any, name: str, lens: str) -> None:
    history, theirs = both
    assert theirs[lens]
    for layer, values in theirs[lens].items():
        assert_close(series(history, name, layer), values)


def test_output_activation(both: Any) -> None:
    history, theirs = both
    assert set(theirs["activation"]) == {"1", "3"}
    for layer, (rates, dead) in theirs["activation"].items():
        assert_close(series(history, "OutputActivation", layer, "active"), means(rates))
        assert_close(series(history, "OutputActivation", layer, "dead"), dead)


def means(rates: list[Any]) -> list[float]:
    """It keeps a rate for each channel, all steps in one list."""
    values = torch.tensor([float(rate) for rate in rates], dtype=torch.float64)
    return values.reshape(STEPS, -1).mean(1).tolist()


@pytest.mark.parametrize(
    ("name", "lens"),
    [("OutputGradientGeometry", "output gradient"), ("GradientGeometry", "gradient")],
)
def test_gradient_geometry(both: Any, name: str, lens: str) -> None:
    history, theirs = both
    assert theirs[lens]
    for part, (sizes, products) in theirs[lens].items():
        assert_close(series(history, name, part, "norm"), sizes)
        found = list(series(history, name, part, "correlation"))
        # The first one is undefined; there, it is recorded as zero.
        assert products[0] == 0
        assert "no step before" in found[0].reason  # type: ignore[attr-defined]
        norms = [before * now for before, now in itertools.pairwise(sizes)]
        # It adds 1e-8 to the product of the norms, which makes correlations of small ones smaller.
        exact = [p * (n + 1e-8) / n for p, n in zip(products[1:], norms, strict=True)]
        assert_close(iter(found[1:]), exact)


def test_update_geometry(both: Any) -> None:
    history, theirs = both
    assert theirs["update"]
    for part, (sizes, _) in theirs["update"].items():
        # It has lost the first update, and with it what the second one correlates with. Its
        # products divide by norms, whatever the sizes that it shows.
        found = list(series(history, "UpdateGeometry", part, "rms"))
        assert_close(iter(found[1:]), sizes)


def test_gradient_activation(both: Any) -> None:
    history, theirs = both
    assert theirs["gradient activation"]
    for part, (active, dead) in theirs["gradient activation"].items():
        assert_close(series(history, "GradientActivation", part, "active"), active)
        assert_close(series(history, "GradientActivation", part, "dead"), dead)
