"""A batch in parts has the values of the joined batch, or says why not."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradlens
from gradlens import quantities, reductions
from gradlens.history.history import History
from gradlens.numerics.noise_scales import noise_scale
from gradlens.numerics.unavailable import uncontained
from gradlens.operators.dense import Dense
from gradlens.operators.outer_products import OuterProducts
from gradlens.parts.part import BatchPart, KeptGradients, Results, merged
from gradlens.quantities import InnerTest, NormTest, OrthoTest, Quantity
from gradlens.reductions import (
    MergeableReduction,
    ParameterGradients,
    Reduction,
)
from tests.cases.records import assert_same_histories, assert_same_records, leaves
from tests.cockpit.test_training_loops import noise_by_part

N = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 6),
        nn.Conv1d(5, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    ).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(7, (N, 5)), torch.randint(3, (N,))


class OwnDots(Reduction):
    """A user's reduction that says nothing of parts."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.dot(gradients.parameter)


OWN = OwnDots()


class Own(quantities.SingleStepQuantity):
    reductions = (OWN, reductions.Gram(), reductions.SquaredNorms(), reductions.Mean())

    def compute(self, step: Any) -> Any:
        return {
            "dots": step.total(OWN).tolist(),
            "gram": step.total(reductions.Gram()),
            "norms": step.total(reductions.SquaredNorms()).tolist(),
            "mean": step.total(reductions.Mean()),
            "squares": step.by_layer(reductions.SquaredNorms()),
        }


class SumsOfSquares(quantities.SingleStepQuantity):
    reductions = (reductions.SumOfSquares(), reductions.AbsMax())

    def compute(self, step: Any) -> Any:
        return [step.total(reduction) for reduction in self.reductions]


OTHERS = "Alpha Loss GradNorm UpdateSize"
"""Quantities that need no gradients of single samples, or more than those."""


def tracked() -> list[Quantity]:
    names = "NormTest InnerTest OrthoTest MeanGSNR EarlyStopping GradCovariance GradNoiseScale CABS"
    found = [getattr(quantities, name)() for name in [*names.split(), *OTHERS.split()]]
    adapt = quantities.bin_adaptation.GradAbsMax()
    found += [quantities.GradHist1d(adapt=adapt), quantities.GradHist2d(keep_individual=True)]
    return [*found, *noise_by_part(), Own(), SumsOfSquares()]


def weighted(losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """A mean or sum of weighted losses, such as those of so many tokens each."""
    return (losses * weights).sum() / (weights.sum() if reduction == "mean" else 1)


def train(
    sizes: Sequence[int],
    reduction: Any = "mean",
    factors: Sequence[float] | None = None,
    tokens: bool = False,
    **options: Any,
) -> gradlens.History:
    """Of micro-batches of some sizes; with one factor for each, or by their numbers of samples."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if reduction == "mean" else 0.05 / N)
    cockpit = gradlens.Cockpit(model, tracked(), loss_reduction=reduction, **options)
    weights = 1.0 + torch.arange(N).double() % 3 if tokens else torch.ones(N).double()
    places = torch.arange(N).split(list(sizes))
    if factors is None:
        factors = [float(weights[p].sum() / weights.sum()) for p in places]
    for step in range(3):
        optimizer.zero_grad()
        for number, (place, factor) in enumerate(zip(places, factors, strict=True)):
            losses = nn.functional.cross_entropy(model(x[place]), y[place], reduction="none")
            loss = weighted(losses, weights[place], reduction)
            # A loss of one sample is N times its contribution to the mean.
            scale = len(place) / weights[place].sum() if reduction == "mean" else 1.0
            info = {"individual_losses": losses * weights[place] * scale}
            more = number < len(sizes) - 1
            with cockpit(step, loss=loss, optimizer=optimizer, info=info, accumulating=more):
                (loss * factor if reduction == "mean" else loss).backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


WEIGHTS = (None, 0.0, 0.25, 0.5, 1.0, -1.0)
"""Factors of losses that backward is called with; ``None`` where it isn't called."""


@settings(max_examples=25)
@given(st.lists(st.sampled_from(WEIGHTS), min_size=2, max_size=4))
@pytest.mark.slow
def test_weights_of_parts(weights: list[float | None]) -> None:
    """The loss is the sum of what backward was called on, over the factors' sum.

    Per-sample gradients are those of all parts, or none.
    """
    model, loss_function = network(), nn.CrossEntropyLoss()
    cockpit = gradlens.Cockpit(model, [quantities.Loss(), quantities.NormTest()])
    sizes = [N // len(weights)] * len(weights)
    parts = [each.split(sizes) for each in (data()[0][: sum(sizes)], data()[1][: sum(sizes)])]
    losses, factors = [], [weight or 0.0 for weight in weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, (x, y, weight) in enumerate(zip(*parts, weights, strict=True)):
            loss = loss_function(model(x), y)
            losses.append(float(loss.detach()))
            with cockpit(0, loss=loss, accumulating=place < len(weights) - 1):
                if weight is not None:
                    (loss * weight).backward()
    found = {name: cockpit.history[name][0] for name in ("Loss", "NormTest")}
    partial_sums = [sum(factors[: place + 1]) for place in range(len(factors))]
    if any(not total and any(factors[:place]) for place, total in enumerate(partial_sums)):
        for value in found.values():
            assert "add up to zero" in value.reason
        return
    total = partial_sums[-1]
    shares = [f / total for f in factors] if total else [1 / len(factors)] * len(factors)
    expected = sum(share * loss for share, loss in zip(shares, losses, strict=True))
    assert found["Loss"] == pytest.approx(expected, rel=1e-9)
    reason = str(found["NormTest"])
    assert all(factors) == math.isfinite(found["NormTest"])
    assert all(factors) or "zero times the loss" in reason or "no gradient has come" in reason


class FourParts:
    """A step of four micro-batches; an exception leaves the context of one that is ``failing``."""

    def __init__(self, failing: int | None = None, is_before: bool = False) -> None:
        self.model = network()
        self.cockpit = gradlens.Cockpit(self.model, [quantities.Loss(), quantities.NormTest()])
        self.failing = failing
        self._is_before = is_before

    def run(self, parts: Sequence[int]) -> gradlens.History:
        x, y = data()
        for part in parts:
            rows = slice(5 * part, 5 * part + 5)
            loss = nn.functional.cross_entropy(self.model(x[rows]), y[rows])
            with self.cockpit(0, loss=loss, accumulating=part < 3):
                if part == self.failing and self._is_before:
                    raise MemoryError
                (loss / 4).backward()
                if part == self.failing:
                    raise MemoryError
        return self.cockpit.history


@pytest.mark.parametrize("is_before", [True, False], ids=["before backward", "behind"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_in_a_part(failing: int, is_before: bool) -> None:
    """The step is repeated, or goes on, which is known where ``p.grad`` has nothing from before."""
    repeated, going_on = FourParts(failing, is_before), FourParts(failing, is_before)
    for each in (repeated, going_on):
        with pytest.raises(MemoryError):
            each.run(range(failing + 1))
    repeated.failing = None
    repeated.model.zero_grad()
    assert_same_histories(repeated.run(range(4)), FourParts().run(range(4)))
    rest = range(failing + 1, 4)
    found = going_on.run(rest)
    if failing == 0 and is_before:
        assert_same_histories(found, FourParts().run(rest))
    else:
        assert all("still in p.grad" in found[name][0].reason for name in found.names)


@cache
def alphas(parts: int, at: int | None, how: str) -> Any:
    """Of four steps, the second of which is left ``at`` a part by an exception, or without it."""
    model, (x, y) = network(), data()
    optimizer, loss_function = torch.optim.SGD(model.parameters(), lr=0.05), nn.CrossEntropyLoss()
    cockpit = gradlens.Cockpit(model, [quantities.Alpha()], loss_function=loss_function)

    def train(step: int, at: int | None) -> None:
        optimizer.zero_grad()
        for part, (inputs, labels) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            if part == at and how == "left out":
                return
            loss = loss_function(model(inputs), labels)
            with cockpit(step, loss=loss, optimizer=optimizer, accumulating=part < parts - 1):
                if part == at:
                    raise MemoryError
                (loss / parts).backward()

    for step in range(4):
        try:
            train(step, at if step == 1 else None)
        except MemoryError:
            if how == "repeated":
                train(step, None)
        optimizer.step()
    cockpit.close()
    return cockpit.history["Alpha"]


@pytest.mark.filterwarnings("ignore:.*have no values, since none of them was the last")
@pytest.mark.parametrize("how", ["repeated", "given up", "left out"])
@pytest.mark.parametrize(("parts", "at"), [(1, 0), (4, 0), (4, 2), (4, 3)])
def test_an_interval_ends_with_a_step_that_was_completed(parts: int, at: int, how: str) -> None:
    found, expected = alphas(parts, at, how), alphas(parts, None, how)
    if how == "repeated":
        assert_same_records(dict(found), dict(expected))
    elif how == "left out" and at == 0:  # a step without any context
        assert "enter the context at every step" in found[0].reason
    else:
        assert "was never completed" in found[0].reason


@pytest.mark.parametrize(
    ("sizes", "reduction", "tokens"),
    [
        *itertools.product([(7, 13), (3, 1, 9, 7)], ["mean", "sum"], [False, True]),
        *itertools.chain(*([(s, "mean", True), (s, "sum", False)] for s in ((10, 10), (1,) * N))),
    ],
)
@pytest.mark.slow
def test_parts_are_one_batch(sizes: tuple[int, ...], reduction: str, tokens: bool) -> None:
    found = train(sizes, reduction, tokens=tokens, max_bytes=2**24)
    assert_same_histories(found, as_a_whole(reduction, tokens))


@cache
def as_a_whole(reduction: str, tokens: bool) -> gradlens.History:
    return train((N,), reduction, tokens=tokens)


@pytest.mark.slow
def test_whether_a_reduction_was_told_how_to_merge_makes_no_difference() -> None:
    """The values that are merged are those of all gradients together."""
    history = train((4, 9, 7), factors=(0.2, 0.5, 0.3), max_bytes=2**24)
    model, (x, y) = network(), data()
    factors = torch.cat(
        [
            torch.full((n,), N * f / n, dtype=torch.float64)
            for n, f in ((4, 0.2), (9, 0.5), (7, 0.3))
        ]
    )
    with gradlens.per_sample_gradients(model, batch_size=N) as gradients:
        nn.functional.cross_entropy(model(x), y).backward()
    rows = torch.cat([g.dense().flatten(1) for g in gradients.values()], 1)
    rows = rows * factors[:, None]
    own = history["Own"][0]
    assert_same_records(own["norms"], rows.square().sum(1).tolist())
    assert_same_records(own["mean"], rows.mean(0))
    assert_same_records(own["gram"], rows @ rows.T)
    apart = rows - rows.mean(0)
    squares = apart.square().sum() / (N - 1) / N / rows.mean(0).square().sum()
    assert history["NormTest"][0] == pytest.approx(math.sqrt(squares), rel=1e-9)
    counts = torch.histc(rows, 100, -2, 2)
    inside = torch.as_tensor(history["GradHist1d"][0]["hist"]).double()
    assert torch.equal(inside[1:-1], counts[1:-1].double())


# More gradients than fit ----------------------------------------------------------------------


@pytest.mark.slow
def test_what_does_not_fit_is_known_by_its_spread_or_says_so() -> None:
    found, exact = train((4,) * 5, max_bytes=0), train((N,))
    for name in ("NormTest", "MeanGSNR", "EarlyStopping", "CABS", "GradHist1d", "SumsOfSquares",
                 "NormTest by part", "MeanGSNR by part"):  # fmt: skip
        assert_same_records(found[name][0], exact[name][0])
    noise, exact_noise = found["GradNoiseScale"][0], exact["GradNoiseScale"][0]
    for key in ("trace", "squared_norm", "value"):
        assert noise[key] == pytest.approx(exact_noise[key], rel=1e-9, nan_ok=True)
    unknown = (noise["low"], noise["high"])
    for value in (found[n][0] for n in ("InnerTest", "OrthoTest", "GradCovariance", "Own")):
        unknown += (*(leaf for _, leaf in leaves(value)),)
    (reason,) = {leaf.reason for leaf in unknown}
    needed = re.search(r"more than max_bytes=0: pass Cockpit\(..., max_bytes=(\d+)\)", reason)
    assert needed is not None
    assert_same_histories(train((4,) * 5, max_bytes=int(needed[1])), exact)


def test_the_slopes_of_an_update_need_all_gradients() -> None:
    found = train((4,) * 5, max_bytes=0)["Alpha"][0]
    assert "more than max_bytes=0: pass Cockpit(..., max_bytes=" in found.reason


def test_histograms_of_parts_that_weigh_differently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train((10, 10), factors=(0.25, 0.75), max_bytes=0)
    assert "losses aren't weighted by their numbers of samples" in found["GradHist1d"][0].reason
    assert math.isfinite(found["NormTest"][0])


@pytest.mark.slow
def test_training_is_the_same_whatever_is_kept() -> None:
    def after(max_bytes: int) -> tuple[Tensor, Any]:
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = train((4,) * 5, max_bytes=max_bytes)
        return torch.rand(3), history["Loss"]

    (one, losses), (other, others) = after(0), after(2**24)
    assert torch.equal(one, other)
    assert losses == others


def history_of_overwritten_inputs(features: int, parts: int, overwrite: bool = True) -> History:
    """Of two steps, in each of which the input is set to zero before the optimizer's step."""
    torch.manual_seed(0)
    model, loss_function = nn.Linear(features, 3).double(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantities_ = [quantities.NormTest(), quantities.Alpha(), quantities.UpdateSize()]
    cockpit = gradlens.Cockpit(model, quantities_, loss_function=loss_function)
    inputs, labels = torch.empty(4, features, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    for step in range(2):
        for part in range(parts):
            inputs = inputs if overwrite else inputs.clone()
            inputs.copy_(torch.randn(4, features))
            loss = loss_function(model(inputs), labels)
            with cockpit(step, loss=loss, optimizer=optimizer, accumulating=part < parts - 1):
                loss.backward()
        if overwrite:
            inputs.zero_()
        optimizer.step()
        optimizer.zero_grad()
    return cockpit.history


@pytest.mark.parametrize(("features", "parts"), [(20_000, 1), (20_000, 2), (5, 2)])
def test_inputs_that_are_overwritten_before_they_are_used(features: int, parts: int) -> None:
    """Gradients that are kept would be computed from the next input: they are refused."""
    history = history_of_overwritten_inputs(features, parts)
    assert "was overwritten before" in history["Alpha"][0].reason
    is_lost = math.isnan(history["NormTest"][0])
    assert is_lost == (parts > 1)
    assert not is_lost or "was overwritten" in history["NormTest"][0].reason
    assert is_lost or history["UpdateSize"][0]["weight"] > 0


def test_elements_of_small_gradients_are_kept_when_inputs_are_overwritten() -> None:
    found, expected = (
        history_of_overwritten_inputs(5, 1, overwrite) for overwrite in (True, False)
    )
    for name in ("NormTest", "UpdateSize"):
        assert found[name] == expected[name]
    # Sums of a few products may differ in their last bit, by where in memory the factors are.
    assert found["Alpha"][0] == pytest.approx(expected["Alpha"][0], rel=1e-13)


@pytest.mark.parametrize("parts", [1, 4, 64])
@pytest.mark.parametrize("fitting", [0, 20, 10**6])
def test_memory_does_not_grow_with_the_number_of_parts(parts: int, fitting: int) -> None:
    factor, bytes_of_sample = torch.ones(8, 1, 100, dtype=torch.float64), 2 * 100 * 8
    kept = KeptGradients(fitting * bytes_of_sample)
    for _ in range(parts):
        kept.add({"w": OuterProducts(factor.clone(), factor.clone())}, 8, 1.0)
    assert kept.needed_bytes == 8 * parts * bytes_of_sample
    assert kept.are_all == (parts == 1 or 8 * parts <= fitting)
    found = kept.joined(float(parts), 8 * parts)
    assert [each.batch_size for each in found.values()] == [8 * parts] * kept.are_all


@pytest.mark.parametrize("sizes", [(40, 60, 10, 90), (200,), (1, 199)], ids=str)
def test_the_spread_of_parts_is_that_of_all_rows(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 6, dtype=torch.float64) * (1 + torch.arange(200)[:, None] % 3) + 1.0
    kind, found = reductions.Spread(), BatchPart(samples=0)
    for part in rows.split(list(sizes)):
        gradients = ParameterGradients("w", torch.zeros(rows.shape[1]), Dense(part))
        value = Results({"s": {"w": kind.reduce(gradients)}})
        one = BatchPart(len(part), len(part), results=value)
        found = merged(found, one, {"s": kind}, "mean", uncontained)
    spread, exact = found.results.values["s"]["w"], Dense(rows).deviations()
    known = spread.about(rows.mean(0), len(rows), "why")
    assert NormTest().value(known) == pytest.approx(NormTest().value(exact), rel=1e-12)
    scale, exact_scale = noise_scale(known), noise_scale(exact)
    assert scale.value == pytest.approx(exact_scale.value, rel=1e-9)
    unknown = (InnerTest().value(known), OrthoTest().value(known), scale.low, scale.high)
    assert {getattr(each, "reason", "") for each in unknown} == {"why"}
    both = reductions.Deviations().merge(known, exact, (200, 200))
    assert (both.samples, both.unknown) == (400, "why")
    assert both.spread == pytest.approx(2 * exact.spread)


# Merging ------------------------------------------------------------------------------------------

MERGED: dict[str, MergeableReduction] = {
    "norms": reductions.SquaredNorms(),
    "mean": reductions.Mean(),
    "elements": reductions.ElementDeviations(),
    "spread": reductions.Spread(),
    "squares": reductions.SumOfSquares(),
    "largest": reductions.AbsMax(),
    "histogram": reductions.Histogram1d(7, (-1.0, 1.0)),
    "joint": reductions.Histogram2d((5, 3), ((-1.0, 1.0), (-2.0, 2.0))),
    "dots": reductions.DirectionDots({"w": torch.arange(6.0).double().reshape(2, 3)}),
}


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, Tensor | float | int):
        return [value]
    if isinstance(value, dict | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in leaves_of(part)]
    return [leaf for part in vars(value).values() for leaf in leaves_of(part)]


@pytest.mark.parametrize("factor", [-2.0, 0.5])
@pytest.mark.parametrize("name", [n for n, each in MERGED.items() if each.degree is not None])
def test_values_are_scaled_as_gradients_are(name: str, factor: float) -> None:
    torch.manual_seed(0)
    rows, parameter = torch.randn(5, 2, 3).double(), torch.zeros(2, 3).double()
    one, other = (
        MERGED[name].reduce(ParameterGradients("w", parameter, Dense(each)))
        for each in (rows, factor * rows)
    )
    found = leaves_of(MERGED[name].scaled(one, factor))
    for a, b in zip(found, leaves_of(other), strict=True):
        torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double())


def test_parts_that_are_tracked_differently() -> None:
    one, other = (BatchPart(3, tracked=("step 0", name)) for name in ("NormTest", "InnerTest"))
    found = merged(one, other, {}, "mean", uncontained)
    assert "InnerTest on one and not on another; NormTest on one and not" in found.failure
