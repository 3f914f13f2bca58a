"""Gradients of groups against double loops over samples, and their intervals against the truth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import gradlens
from benchmarks.intervals import KINDS, Kind, coverage
from gradlens.quantities import GroupGradients
from gradlens.quantities.group_gradients import between_groups
from tests.cases.networks import NETWORKS
from tests.cases.records import assert_same_records
from tests.cases.references import flat, per_sample_gradients_of_losses

GROUPS = [10, "code", 10, "code", 9, "code", 9, 10, 9, 10, "code", 9, 10]


def tracked(
    model: nn.Module,
    inputs: Tensor,
    target: Tensor,
    groups: Sequence[Any],
    parts: Sequence[slice] = (slice(None),),
    reduction: str = "mean",
) -> Any:
    """The value of a step of so many micro-batches."""
    cockpit = gradlens.Cockpit(model, [GroupGradients()], loss_reduction=reduction)
    for number, part in enumerate(parts):
        losses = (model(inputs[part]) - target[part]).square().flatten(1).sum(1)
        loss = losses.mean() if reduction == "mean" else losses.sum()
        info = {"groups": groups[part]} if groups else None
        with cockpit(0, loss=loss, accumulating=number + 1 < len(parts), info=info):
            (loss * len(inputs[part]) / len(inputs) if reduction == "mean" else loss).backward()
    return cockpit.history["GroupGradients"][0]


# Formulas -------------------------------------------------------------------------------------


def squared_norm(rows: np.ndarray) -> float:
    n = len(rows)
    pairs = [float(rows[i] @ rows[j]) for i in range(n) for j in range(n) if i != j]
    return sum(pairs) / len(pairs)


def product(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean([a @ b for a in one for b in other]))


def changes(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Numerator and denominator of the cosine without each sample of ``one``, ``[n, 2]``."""
    whole, size = squared_norm(one), math.sqrt(squared_norm(one) * squared_norm(other))
    without = [np.delete(one, place, 0) for place in range(len(one))]
    return np.array(
        [(product(w, other), size * (1 + (squared_norm(w) / whole - 1) / 2)) for w in without]
    )


def jackknife(left_out: np.ndarray) -> np.ndarray:
    n, apart = len(left_out), left_out - left_out.mean(0)
    return (n - 1) / n * apart.T @ apart


def reference(rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for name, own in rows.items():
        without = np.array([[squared_norm(np.delete(own, i, 0))] for i in range(len(own))])
        spread = stats.t.ppf(0.975, len(own) - 1) * math.sqrt(float(jackknife(without)[0, 0]))
        squares = {"norm": 0.0, "low": -spread, "high": spread}
        roots = {n: max(squared_norm(own) + x, 0) ** 0.5 for n, x in squares.items()}
        groups[name] = {**roots, "samples": len(own)}
    names, every = [*rows], np.concatenate([*rows.values()])
    rounding = 1e-6 * np.abs(every @ every.T).max()  # what is lost in single precision
    pairs: dict[str, Any] = {}
    for one, other in [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]:
        a, b = rows[one], rows[other]
        x, m = product(a, b), math.sqrt(squared_norm(a) * squared_norm(b))
        v = jackknife(changes(a, b)) + jackknife(changes(b, a))
        t2 = stats.t.ppf(0.975, min(len(a), len(b)) - 1) ** 2
        polynomial = [m**2 - t2 * v[1, 1], 2 * (t2 * v[0, 1] - x * m), x**2 - t2 * v[0, 0]]
        roots = sorted(np.roots(polynomial).real) if polynomial[0] > 0 else [-9.0, 9.0]
        slack = rounding / m
        found = {"value": x / m, "low": roots[0] - slack, "high": roots[1] + slack}
        pairs[f"{one} and {other}"] = {n: min(max(e, -1.0), 1.0) for n, e in found.items()}
    return {"value": min(e["value"] for e in pairs.values()), "groups": groups, "pairs": pairs}


@pytest.mark.parametrize("network", ["mlp", pytest.param("conv2d", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("parts", [(slice(None),), (slice(0, 7), slice(7, None))], ids=len)
def test_formulas(network: str, reduction: str, parts: Sequence[slice]) -> None:
    torch.manual_seed(0)
    model = NETWORKS[network].build().double()
    inputs = 0.3 * NETWORKS[network].inputs(len(GROUPS)) + 1
    target = model(inputs).detach() + 0.3
    for group, place in ((9, 0), ("code", 1), (10, -1)):  # each errs in another output
        target.flatten(1)[[each == group for each in GROUPS], place] += 3
    found = tracked(model, inputs, target, GROUPS, parts, reduction)
    losses = [(model(x[None]) - t).square().sum() for x, t in zip(inputs, target, strict=True)]
    rows = flat(per_sample_gradients_of_losses(losses, model)).numpy()
    of_groups = {n: rows[[str(g) == n for g in GROUPS]] for n in ("9", "10", "code")}
    expected = reference(of_groups)
    assert [*found["pairs"]] == ["9 and 10", "9 and code", "10 and code"]
    assert any(-1 < each["low"] < each["high"] < 1 for each in found["pairs"].values())
    assert_same_records(found, expected, rtol=1e-8)


# Intervals ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["normal", "lognormal, samples"])
@pytest.mark.parametrize(
    "kind", [each for each in KINDS if "groups" in each.name], ids=lambda each: each.name
)
def test_intervals_hold_the_truth(kind: Kind, noise: str) -> None:
    found = coverage(partial(kind.draws[noise], 16), 60)
    assert found.holds > 0.86  # of 95 %, it is less in one of a thousand tests
    assert found.width < 1


def test_halves_of_a_group_agree_whatever_the_noise() -> None:
    rng = np.random.default_rng(1)
    for noise in (0.0, 0.1, 1.0, 10.0):
        rows = np.ones(5) + noise * rng.standard_normal((40, 5))
        groups = rng.permutation(40) % 2
        pair = between_groups(np.float32(rows @ rows.T), groups.tolist())["pairs"]["0 and 1"]
        assert pair["low"] <= 1 <= pair["high"]


# Bad input ------------------------------------------------------------------------------------


def test_groups_that_are_too_small_leave_the_others() -> None:
    gram = np.eye(7) + 1
    found = between_groups(gram, ["a"] * 3 + ["b"] * 3 + ["c"])
    assert found["pairs"]["a and b"]["value"] == pytest.approx(1)
    assert "group c has 1 of the batch's samples" in found["pairs"]["a and c"]["value"].reason
    assert "group c has 1 of the batch's samples" in found["groups"]["c"]["norm"].reason
    assert found["value"] == found["pairs"]["a and b"]["value"]
    alone = between_groups(gram, ["a"] * 6 + ["c"])
    assert "group c" in alone["value"].reason


def test_gradients_that_are_no_more_than_noise() -> None:
    found = between_groups(np.eye(6) - 0.01, [0, 0, 0, 1, 1, 1])
    pair = found["pairs"]["0 and 1"]
    assert "distinguished from zero" in pair["value"].reason
    assert (pair["low"], pair["high"]) == (-1, 1)
    assert "distinguished from zero" in found["groups"]["0"]["norm"].reason
    assert found["groups"]["0"]["low"] == 0
    assert math.isnan(between_groups(np.zeros((6, 6)), [0, 0, 0, 1, 1, 1])["value"])


REFUSED = {
    "one group": (["a"] * 6, "samples of 1 groups"),
    "a group for each sample": ([*range(40)], "samples of 40 groups"),
    "too few": (["a", "b"], "2 groups were passed, and the batch has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    groups, reason = REFUSED[case]
    n = 40 if len(groups) == 40 else 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = tracked(nn.Linear(2, 1), torch.randn(n, 2), torch.randn(n, 1), groups)
    assert reason in value.reason


def test_a_part_without_groups() -> None:
    cockpit = gradlens.Cockpit(model := nn.Linear(2, 1), [GroupGradients()])
    for step, groups in enumerate(([0, 0, 0, 1, 1, 1], None)):
        for is_last in (False, True):
            loss = model(torch.randn(6, 2)).square().mean()
            info = {"groups": groups} if (groups and is_last) or not is_last else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with cockpit(step, loss=loss, accumulating=not is_last, info=info):
                    loss.backward()
    found = cockpit.history["GroupGradients"]
    assert found[0]["pairs"]["0 and 1"]["high"] <= 1
    assert "groups" in found[1].reason


@pytest.mark.parametrize("groups", [3, "abc", [1.5, 2.0], [None], {"a": 1}, [[1], [2]]])
def test_what_is_no_group(groups: Any) -> None:
    cockpit = gradlens.Cockpit(nn.Linear(2, 1), [GroupGradients()])
    with pytest.raises(TypeError, match=r"are no groups of samples: pass a whole number or a text"):
        cockpit(0, info={"groups": groups})


def test_groups_must_be_passed() -> None:
    cockpit = gradlens.Cockpit(model := nn.Linear(2, 1), [GroupGradients()])
    loss = model(torch.randn(6, 2)).sum()
    with (
        pytest.raises(ValueError, match=r'needs the groups of samples.*info=\{"groups": groups\}'),
        cockpit(0, loss=loss),
    ):
        loss.backward()
