"""What series of every form say in single numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gradlens.history.history import History
from gradlens.history.scalars import KNOWN
from gradlens.history.undefined import Undefined
from tests.instruments.test_instruments import VIEWS, realistic, recorded

NAN = float("nan")
WHY = Undefined("one sample has no spread")


def told(history: History) -> dict[str, list[float]]:
    """The values of all numbers by name."""
    return {one.name: one.line.values.tolist() for one in history.scalars()}


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Same names in the same order, same values."""
    assert [*found] == [*expected]
    for name, values in found.items():
        assert values == pytest.approx(expected[name], nan_ok=True)


def hist(below: int) -> dict[str, Any]:
    """A histogram of ten elements."""
    return {"hist": np.array([below, 10 - below]), "edges": np.array([0.0, 1, 2]), "below": below,
            "above": 0, "nan": 0}  # fmt: skip


CASES: dict[str, tuple[tuple[Any, ...], dict[str, list[float]]]] = {
    "Mine": ((1.5, 2, True), {"Mine": [1.5, 2.0, 1.0]}),
    "Words": (("a", "b"), {}),
    "Time": ((10.0, 10.5, 12.5), {"Time s/step": [0.5, 2.0]}),
    "GradNorm": (({"w": 3.0, "b": 4.0}, {"w": 1.0}), {"GradNorm": [5.0, 1.0]}),
    "Distance": (({"w": 3.0, "b": NAN}, {"w": 1.0}), {"Distance": [NAN, 1.0]}),
    "UpdateSize": ((1.0, 2.0), {"UpdateSize": [1.0, 2.0]}),
    "ClippedGradNorm": (({"w": 3.0, "b": 4.0},), {"ClippedGradNorm": [5.0]}),
    "OptimizerState": (
        ({"parameters": {}, "cosine": 0.5, "largest_rms": 2.0},),
        {"OptimizerState largest RMS": [2.0], "OptimizerState cosine": [0.5]},
    ),
    "RelativeUpdate": (
        ({"parameters": {}, "value": 0.1, "rms": 2.0},),
        {"RelativeUpdate": [0.1], "RelativeUpdate RMS": [2.0]},
    ),
    "Parameters": (
        ({"w": np.array([[1.0, 2.0]]), "b": np.array([2.0])},), {"Parameters norm": [3.0]}
    ),
    "GradHist1d": ((hist(1), hist(0)), {"GradHist1d clipped": [0.1, 0.0]}),
    "GradHist2d": (({"hist": np.ones((2, 2)), "edges": [[0, 1, 2]] * 2},), {}),
    "GradCovariance": (
        ({"trace": 4.0, "effective_rank": 2.0, "eigenvalues": np.ones(3), "layers": {}},),
        {"GradCovariance trace": [4.0], "GradCovariance rank": [2.0]},
    ),
    "HessTrace": (({"trace": 4.0, "low": 1.0, "method": "exact", "parameters": {}},),
                  {"HessTrace": [4.0]}),
    "HessEigenvalues": (
        ({"eigenvalues": np.array([3.0, 1.0]), "converged": True},
         {"eigenvalues": np.array([9.0, 1.0]), "converged": False, "reason": "tired"}),
        {"HessEigenvalues λ1": [3.0, NAN]},
    ),
    "DirectionalDerivatives": (
        ({"overlap": 0.5, "gradient_snr": [4.0, 1.0, 2.0]},
         {"overlap": NAN, "gradient_snr": [3.0, NAN]}),
        {"DirectionalDerivatives overlap": [0.5, NAN],
         "DirectionalDerivatives median SNR": [2.0, 3.0]},
    ),
    "SpectralDensity": (({"grid": np.ones(3), "density": np.ones(3)},), {}),
    "Stability": (
        ({"sharpness": 3.0, "threshold": 2.0, "ratio": 1.5},),
        {"Stability sharpness": [3.0], "Stability ratio": [1.5]},
    ),
    "CriticalSharpness": (
        ({"sharpness": 3.0, "threshold": 2.0, "ratio": 1.5, "low": 1.4, "high": 1.6},),
        {"CriticalSharpness sharpness": [3.0], "CriticalSharpness ratio": [1.5]},
    ),
    "StepLedger": (
        ({"change": -3.0, "first": -4.0, "second": 1.5, "rest": -0.5, "layers": {}},),
        {"StepLedger change": [-3.0], "StepLedger rest": [-0.5]},
    ),
    "GroupGradients": (({"value": -0.5, "pairs": {}},), {"GroupGradients smallest cosine": [-0.5]}),
    "GradNoiseScale": (({"value": math.inf, "low": 1.0},), {"GradNoiseScale": [math.inf]}),
    **{
        kind: (({"value": 1.5, "layers": {"in": 1.0, "out": 2.0}}, 3.0), {kind: [1.5, 3.0]})
        for kind in ("NormTest", "InnerTest", "OrthoTest", "MeanGSNR")
    },
    "OutputNorm": (
        ({"layers": {"0": 1.0, "1": 3.0, "2": WHY}}, {"layers": {"0": WHY}}),
        {"OutputNorm median": [2.0, NAN]},
    ),
    "ParameterNorm": (({"parameters": {"0.weight": 3.0}},), {"ParameterNorm median": [3.0]}),
    "UpdateGeometry": (
        ({"parameters": {"w": {"norm": 3.0, "correlation": 0.5}}, "correlation": 0.5},),
        {"UpdateGeometry median": [3.0], "UpdateGeometry correlation": [0.5]},
    ),
    "InputCovariance": (
        ({"layers": {"0": {"trace": 4.0, "stable_rank": 2.0}, "2": WHY}},),
        {"InputCovariance median trace": [4.0], "InputCovariance median stable rank": [2.0]},
    ),
    "OutputActivation": (
        ({"layers": {"1": {"dead": 0.5}}, "active": 0.45, "dead": 0.25, "worst": 0.5},),
        {"OutputActivation active": [0.45], "OutputActivation dead": [0.25],
         "OutputActivation worst": [0.5]},
    ),
    "WeightSpectrum": (
        ({"parameters": {"w": {"norm": 3.0, "residual": 0.1, "stable_rank": 2.0}}},),
        {"WeightSpectrum median σ₁": [3.0], "WeightSpectrum median stable rank": [2.0]},
    ),
    "Aggregate": (({"mean": 2.0, "median": 2.0, "std": 1.0, "count": 9},),
                  {"Aggregate mean": [2.0], "Aggregate median": [2.0]}),
    "Few": (({"a": 1.0, "b": np.array([3.0, -3.0]), "c": "word"}, {"a": 2.0}),
            {"Few a": [1.0, 2.0], "Few b": [3.0, NAN]}),
    "Many": (({f"p{n}": float(n) for n in range(9)},), {"Many least": [0.0], "Many most": [8.0]}),
    "Array": ((np.array([1.0, 9.0, 2.0]), np.array([4.0])), {"Array median": [2.0, 4.0]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_numbers_of_a_series(kind: str) -> None:
    values, expected = CASES[kind]
    assert_same(told(recorded(kind, values)), expected)


def test_each_way_of_reading_has_a_case() -> None:
    tested = {KNOWN[kind] for kind in {*CASES} & {*KNOWN}}
    assert {*KNOWN.values()} == tested


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case[1]])
def test_a_record_that_is_no_number_keeps_its_reason(kind: str) -> None:
    values, expected = CASES[kind]
    found = recorded(kind, [*values, WHY]).scalars()
    assert {one.name for one in found} == {*expected}
    for one in found:
        assert math.isnan(one.line.values[-1])
        assert one.line.reason == WHY.reason


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("value", [None, NAN, WHY])
def test_nothing_but_gaps(kind: str, value: Any) -> None:
    assert all(not one.line.finite.any() for one in recorded(kind, [value, value]).scalars())


@pytest.mark.parametrize("broken", [NAN, WHY])
@pytest.mark.parametrize("place", range(3))
def test_one_broken_parameter_is_not_hidden(broken: float, place: int) -> None:
    value = {f"p{n}": broken if n == place else 1.0 + n for n in range(3)}
    history = recorded("Mine", [value], dict.fromkeys(value, (2,)))
    least, most = history.scalars()
    assert (least.part, most.part) == ("least", "most")
    assert np.isnan([least.line.values, most.line.values]).all()
    assert least.line.reason == (WHY.reason if broken is WHY else "")


def test_a_record_of_another_form_is_a_gap() -> None:
    found = told(recorded("GradNorm", [{"w": 3.0}, "gone", {"w": 4.0}]))
    assert_same(found, {"GradNorm": [3.0, NAN, 4.0]})


def test_order_and_views() -> None:
    history = realistic(10)
    found = history.scalars()
    order = [history.names.index(one.series) for one in found]
    assert order == sorted(order)
    views = {one.series: one.view for one in found}
    assert views["NormTest"] == VIEWS["NormTest"]
    assert views["learning_rate"].group == "performance"


def test_of_an_empty_history() -> None:
    assert History().scalars() == ()
    assert realistic(0).scalars() == ()
