"""Every quantity under a loss in other units: a multiple of the loss, and a sum over the samples.

Each law is that of the quantity's formula. What the values are in one unit is compared with slow
references elsewhere in this folder, and in ``tests/curvature``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from gradlens import Cockpit, quantities
from gradlens.history.undefined import Undefined
from gradlens.quantities import Quantity
from tests.cases.records import leaves
from tests.cases.steps import tracked_backward

N, STEPS, RATE = 6, 3, 0.1

Exponents = Mapping[str, int]
"""Exponents by the last of these keys on the way to a number of a record; ``""`` is for others."""


@dataclass(frozen=True)
class Law:
    """How a quantity's numbers grow with the unit c of the loss, at the learning rate η/c.

    ``build`` makes the quantity with options in units of the loss. ``of_sum`` are the exponents for
    a sum loss at η/N, whose unit is N: all zero, but for what is read off the sum's own gradient.
    """

    build: Callable[[float], Quantity]
    exponents: Exponents = field(default_factory=lambda: {"": 0})
    of_sum: Exponents = field(default_factory=lambda: {"": 0})


ONCE, NEVER = {"": 1}, {"": 0}
NORM = {"": 0, "norm": 1}
SPECTRUM = {"": 0, "eigenvalues": 2, "trace": 2}
OF_OWN_GRADIENT: dict[str, Exponents] = {
    **dict.fromkeys(("Loss", "GradNorm", "StepLedger"), ONCE),
    **dict.fromkeys(("GradientGeometry", "OutputGradientGeometry", "InputGradientGeometry"), NORM),
    "OutputGradientCovariance": SPECTRUM,
}
OF_MEAN: dict[str, Exponents] = {
    "GradCovariance": SPECTRUM,
    "GroupGradients": {"": 0, "groups": 1, "samples": 0},
    "GradNoiseScale": {"": 0, "trace": 2, "squared_norm": 2},
    "HessMaxEV": ONCE,
    "Stability": {"": 1, "ratio": 0},
} | dict.fromkeys((
    "ActivationOutliers", "Alpha", "CABS", "ConditionNumber", "DeadNeurons", "Distance",
    "InnerTest", "InputCovariance", "InputMean", "InputNorm", "InputStd", "MeanTID", "NormTest",
    "OrthoTest", "OutputActivation", "OutputEntropy", "OutputNorm", "ParameterNorm",
    "Parameters", "RankMe", "RelativeUpdate", "UpdateGeometry", "UpdateSize", "UpdateSpectrum",
    "VarTID", "WeightSignFlips", "WeightSpectrum",
), NEVER)  # fmt: skip
"""Quantities that need no options, with their exponents."""


def plain(name: str) -> Callable[[float], Quantity]:
    return lambda unit: getattr(quantities, name)()


LAWS: dict[str, Law] = {
    **{name: Law(plain(name), each, each) for name, each in OF_OWN_GRADIENT.items()},
    **{name: Law(plain(name), each) for name, each in OF_MEAN.items()},
    "GradientActivation": Law(
        lambda c: quantities.GradientActivation(threshold=1e-3 * c), NEVER, NEVER
    ),
    "GradHist1d": Law(
        lambda c: quantities.GradHist1d(range=(-0.1 * c, 0.2 * c)), {"": 0, "edges": 1}
    ),
    "GradHist2d": Law(
        lambda c: quantities.GradHist2d(range=((-0.1 * c, 0.2 * c), (-1, 1))), {"": 0, "edges 0": 1}
    ),
    "MeanGSNR": Law(lambda c: quantities.MeanGSNR(epsilon=1e-5 * c**2)),
    "EarlyStopping": Law(lambda c: quantities.EarlyStopping(epsilon=1e-5 * c**2)),
    "HessEigenvalues": Law(
        lambda c: quantities.HessEigenvalues(k=2, max_products=60),
        {"": 0, "eigenvalues": 1, "residuals": 1},
    ),
    "DirectionalDerivatives": Law(
        lambda c: quantities.DirectionalDerivatives(k=2), {"": 0, "eigenvalues": 1, "gradient": 1}
    ),
    "HessTrace": Law(lambda c: quantities.HessTrace(curvature="diag_ggn_exact"), ONCE),
    "SpectralDensity": Law(
        lambda c: quantities.SpectralDensity(probes=2, steps=6), {"": -1, "grid": 1, "width": 1}
    ),
    "TICDiag": Law(
        lambda c: quantities.TICDiag(curvature="diag_ggn_exact", epsilon=1e-7 * c), ONCE
    ),
    "TICTrace": Law(
        lambda c: quantities.TICTrace(curvature="diag_ggn_exact", epsilon=1e-7 * c), ONCE
    ),
}
WITHOUT_LAW = {"Time", "Phase", "AttentionEntropy", "AttentionLogits"}
"""Time has no units of the loss, and the network has no attention."""
WITHOUT_LAW |= {"ClippedGradNorm", "OptimizerState"}  # of other optimizers: test_optimizer_state.py
WITHOUT_LAW |= {"CriticalSharpness"}  # by a search, whose rates are rounded: test_along_update.py


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    "normalised": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)
    ),
    "sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.ReLU(), nn.LayerNorm(5), nn.Flatten(),
        nn.Linear(10, 3),
    ),
}  # fmt: skip


def sgd(model: nn.Module, unit: float) -> Optimizer:
    return SGD(model.parameters(), lr=RATE / unit)


def adam(model: nn.Module, unit: float) -> Optimizer:
    """Its rate is in units of the parameters, ε in those of gradients."""
    return Adam(model.parameters(), lr=RATE, eps=1e-3 * unit)


def values(
    quantity: Quantity,
    unit: float = 1.0,
    reduction: Any = "mean",
    optimizer: Callable[[nn.Module, float], Optimizer] = sgd,
    bad: float | None = None,
    network: str = "mlp",
    dtype: torch.dtype = torch.float64,
    is_passed: bool = False,
) -> Mapping[int, Any]:
    """Values of three steps on the same batches, under ``unit`` times a mean loss or a sum loss.

    The second batch has a ``bad`` number. The unit may be passed to the context.
    """
    torch.manual_seed(0)
    model = NETWORKS["normalised" if "TID" in quantity.name else network]().to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    kind = nn.CrossEntropyLoss if bad is None else nn.MSELoss
    loss_function = kind(reduction=reduction)
    opt = optimizer(model, unit * (N if reduction == "sum" else 1))
    cockpit = Cockpit(model, [quantity], loss_reduction=reduction, loss_function=loss_function)
    for step in range(STEPS):
        inputs, labels = torch.randn(N, 4).to(dtype), torch.randint(3, (N,))
        if bad is not None:
            labels = torch.zeros(N, 3).double()
            inputs[2, 1] = bad if step == 1 else 1.0
        opt.zero_grad()

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            return unit * loss_function(model(inputs).to(wide), labels)

        info = {"groups": [n % 2 for n in range(N)]}
        given = {"loss_scale": unit} if is_passed else {}
        tracked_backward(
            cockpit, step, closure(), optimizer=opt, closure=closure, info=info, **given
        )
        opt.step()
    cockpit.close()
    return cockpit.history[quantity.name]


@cache
def usual(name: str, network: str = "mlp", dtype: torch.dtype = torch.float64) -> Mapping[int, Any]:
    """Values under a mean loss in units of one."""
    return values(LAWS[name].build(1.0), network=network, dtype=dtype)


def numbers(record: Any) -> list[tuple[list[str], Any]]:
    """All numbers of a record, and the keys that lead to each, with the place in a list."""
    found = []
    for path, value in leaves(record):
        keys = [str(key) for key in path]
        names = [f"{a} {b}" if b.isdigit() else b for a, b in itertools.pairwise(["", *keys])]
        found.append((names, value))
    return found


def assert_law(
    found: Mapping[int, Any],
    reference: Mapping[int, Any],
    unit: float,
    law: Exponents,
    rtol: float = 1e-6,
) -> None:
    pairs = list(zip(numbers(found), numbers(reference), strict=True))
    known = [np.isfinite(other).any() for _, (_, other) in pairs if not isinstance(other, str)]
    assert any(known)
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        if isinstance(other, (str, Undefined)):
            without_numbers = [re.sub(r"\S*\d\S*", "", str(each)) for each in (one, other)]
            assert without_numbers[0] == without_numbers[1]
            continue
        exponent = next((law[key] for key in reversed(path) if key in law), law[""])
        # Numbers that are rounding errors in one unit are others in another.
        noise = 1e-9 * np.abs(np.nan_to_num(other, posinf=0)).max(initial=1e-6)
        expected = np.asarray(other) * unit**exponent
        np.testing.assert_allclose(one, expected, rtol=rtol, atol=noise * unit**exponent)


UNITS = (
    (-200, torch.float64, "sequence"),
    (60, torch.float32, "sequence"),
    (-60, torch.bfloat16, "mlp"),
    (200, torch.float64, "convolution"),
    # Those of float16 vanish or overflow with less than 2^±10, and small elements before.
    (-60, torch.float32, "convolution"),
    (60, torch.bfloat16, "convolution"),
    (-7, torch.float64, "mlp"),
)
"""Exponents of the loss's unit, with a precision and a network; each law is shown in two."""


@pytest.mark.parametrize(
    ("name", "exponent", "dtype", "network"),
    [(name, *UNITS[(n + k) % len(UNITS)]) for n, name in enumerate(LAWS) for k in (0, 3)],
)
@pytest.mark.filterwarnings("ignore:.*normalisation over the batch")
def test_a_multiple_of_the_loss(name: str, exponent: int, dtype: torch.dtype, network: str) -> None:
    """A loss times a power of two has the same gradients, times the same power, exactly."""
    law, unit = LAWS[name], 2.0**exponent
    found = values(law.build(unit), unit, network=network, dtype=dtype)
    rtol = 1e-6 if dtype == torch.float64 else 1e-5
    assert_law(found, usual(name, network, dtype), unit, law.exponents, rtol)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.filterwarnings("ignore:.*normalisation over the batch")
def test_a_sum_loss(name: str) -> None:
    law = LAWS[name]
    of_own_gradient = law.of_sum is law.exponents
    found = values(law.build(N if of_own_gradient else 1.0), reduction="sum")
    assert_law(found, usual(name), N, law.of_sum)


CURVATURE = (
    "HessMaxEV", "HessTrace", "HessEigenvalues", "SpectralDensity", "DirectionalDerivatives",
    "TICDiag", "TICTrace", "Stability", "CABS", "Alpha",
)  # fmt: skip


@pytest.mark.parametrize("unit", [8.0, 1 / 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CURVATURE)
def test_a_multiple_that_is_passed_has_no_unit(name: str, reduction: str, unit: float) -> None:
    found = values(LAWS[name].build(1.0), unit, reduction, is_passed=True)
    assert_law(found, usual(name), 1.0, NEVER)


@pytest.mark.parametrize(
    ("unit", "reduction"), [(2.0**-27, "mean"), (2.0**27, "mean"), (1.0, "sum")]
)
def test_sharpness_for_adam_has_no_unit(unit: float, reduction: str) -> None:
    found = values(quantities.Stability(), unit, reduction, adam)
    reference = values(quantities.Stability(), optimizer=adam)
    assert reference[2]["ratio"] > 0
    assert_law(found, reference, unit, {"": 0})


WITHOUT_REASON = {"HessTrace", "SpectralDensity"}
"""A field next to those that are NaN says why."""


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize("name", sorted(LAWS.keys() - WITHOUT_REASON))
@pytest.mark.filterwarnings("ignore")
def test_a_sample_that_is_not_finite(name: str, bad: float) -> None:
    """Numbers are missing for a reason alone."""
    records = values(LAWS[name].build(1.0), bad=bad).values()
    floats = [one for record in records for _, one in numbers(record) if isinstance(one, float)]
    assert floats or records
    assert all(isinstance(each, Undefined) for each in floats if math.isnan(each))


def test_every_public_quantity_has_a_law() -> None:
    abstract = {name for name in quantities.__all__ if name.endswith("Quantity")}
    assert set(quantities.__all__) - abstract == LAWS.keys() | WITHOUT_LAW
