"""Tracked steps on a device that is simulated on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import gradlens
from gradlens.history.history import History
from gradlens.quantities import (
    ActivationOutliers,
    ClippedGradNorm,
    CriticalSharpness,
    OptimizerState,
    OutputEntropy,
    Quantity,
    RelativeUpdate,
    Stability,
    StepLedger,
    UpdateSpectrum,
    WeightSpectrum,
)
from tests.cases.records import assert_same_records
from tests.cases.row_cases import Net
from tests.cases.simulated_device import SimulatedDevice


def perceptron(layers: int) -> nn.Module:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(10, 10), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(10, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


def recurrent() -> nn.Module:
    layers = {"inside": nn.LSTM(2, 4, batch_first=True), "head": nn.Linear(4, 3)}
    return Net(lambda net, x: net.head(net.inside(x.unflatten(1, (5, 2)))[0][:, -1]), **layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": partial(perceptron, 3),
    "convolutions": convolutions,
    "recurrent": recurrent,
}


PRESETS = ("economy", "business", "full", "training")
OTHERS: Mapping[str, tuple[type[Quantity], ...]] = {
    "layers": (ActivationOutliers, OutputEntropy, WeightSpectrum, UpdateSpectrum),
    "updates": (OptimizerState, RelativeUpdate, CriticalSharpness, StepLedger, Stability),
    "state": (OptimizerState, RelativeUpdate, ClippedGradNorm),
}

WITH_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tracked(
    model: nn.Module, preset: str, steps: int, device: SimulatedDevice | Gpu | None = None
) -> tuple[History, Counter[str]]:
    """The history of a training, and where the last of its steps has waited for a device."""
    where = next(model.parameters()).device
    torch.manual_seed(0)
    loss_function = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if preset == "state":
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
    quantities = gradlens.configuration(preset) if preset in PRESETS else []
    quantities += [kind() for kind in OTHERS.get(preset, ())]
    # Facts are read once in several steps.
    cockpit = gradlens.Cockpit(model, quantities, loss_function=loss_function, facts=False)
    place, waits = device or nullcontext(), Counter[str]()
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(12, 10, dtype=torch.float64, device="cpu")
        labels = torch.randint(3, (12,), device="cpu")
        inputs, labels = inputs.to(where), labels.to(where)
        outputs = model(inputs)
        loss = loss_function(outputs, labels)
        before = Counter(device.waits) if device is not None else waits
        info = {
            "outputs": outputs,
            "optimizer": optimizer,
            "closure": lambda x=inputs, y=labels: loss_function(model(x), y),
        }
        with place, cockpit(step, loss=loss, info=info):
            loss.backward()
        with place:
            optimizer.step()
        if device is not None:
            waits = device.waits - before
    with place:
        cockpit.close()
    return cockpit.history, waits


class Gpu:
    """A context that counts where a program waits for the GPU, as torch reports it."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()  # a real device raises them
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Gpu:
        with ExitStack() as stack:
            mode = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, mode)
            raised = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            raised.clear()  # torch warns once that it may miss some waits
            stack.callback(lambda: self.waits.update(map(_place_of, raised)))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()


def _place_of(warning: warnings.WarningMessage) -> str:
    return f"{warning.filename}:{warning.lineno} {str(warning.message)[:40]}"


def simulated(model: nn.Module) -> SimulatedDevice:
    """The device that a model of the CPU counts as being on."""
    return SimulatedDevice()


def gpu(model: nn.Module) -> Gpu:
    """The device that the model is moved to."""
    model.cuda()
    return Gpu()


DEVICES = (simulated, pytest.param(gpu, marks=WITH_A_GPU))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("preset", "most"),
    [("", 2), ("economy", 4), ("business", 9), ("layers", 6), ("training", 4), ("state", 4)],
)
def test_waits_do_not_depend_on_the_number_of_parameters(
    preset: str, most: int, device: Callable[[nn.Module], SimulatedDevice | Gpu]
) -> None:
    """Each wait takes as long as several operations. Steps 1, 2, 4, ... are labelled anew."""
    models = [perceptron(layers).double() for layers in (3, 7)]
    few, many = (tracked(model, preset, 6, device(model))[1] for model in models)
    assert few == many
    assert few.total() <= most, few


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("preset", "network"), [*(("full", each) for each in NETWORKS), ("layers", "convolutions")]
)
def test_values_of_a_device_are_those_of_the_host(
    preset: str, network: str, device: Callable[[nn.Module], SimulatedDevice | Gpu]
) -> None:
    """And tensors of both are never mixed, as no real device would permit."""
    model = NETWORKS[network]().double()
    expected = tracked(copy.deepcopy(model), preset, 3)[0]
    place = device(model)
    # Layers of cuDNN that are recurrent can't be differentiated twice.
    with torch.backends.cudnn.flags(enabled=False):
        found = tracked(model, preset, 3, place)[0]
    assert not place.errors
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("preset", ["full", "layers", "updates"])
@pytest.mark.slow
def test_the_default_device_is_not_where_the_model_must_be(preset: str, network: str) -> None:
    model = NETWORKS[network]().double()
    expected = tracked(copy.deepcopy(model), preset, 3)[0]
    with torch.device("meta"):
        found = tracked(model, preset, 3)[0]
    assert_same(found, expected)


def assert_same(found: History, expected: History) -> None:
    """The same notes, and the same values but for rounding."""
    assert [note.text for note in found.notes] == [note.text for note in expected.notes]
    for name in set(expected.names) - {"Time"}:
        assert_same_records(found[name], expected[name], rtol=1e-6)
