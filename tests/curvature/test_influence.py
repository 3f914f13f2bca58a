"""Influence scores equal those of a dense system, and what has none says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradlens
from gradlens.curvature import GGNOperator, InverseOperator
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.curvature_cases import Problem, Reduction, build, dense_ggn, sample_gradients
from tests.cases.row_cases import Net

DAMPING = 0.5


def dense(problem: Problem, test: list[Any], reduction: Reduction) -> NDArray[Any]:
    """``[N, M]``, by torch.func and a solver for dense matrices."""
    rows = sample_gradients(problem, reduction)
    others = sample_gradients(replace(problem, batches=test), reduction)
    matrix = dense_ggn(problem, reduction) / (len(rows) if reduction == "sum" else 1)
    damped = matrix + DAMPING * torch.eye(len(matrix), dtype=matrix.dtype)
    return (rows @ torch.linalg.solve(damped, others.T) / len(rows)).detach().numpy()


CASES: list[tuple[str, str, Reduction]] = [
    ("perceptron", "cross-entropy", "mean"),
    ("convolutional", "bce", "sum"),
    ("recurrent", "mse", "mean"),
    ("tied", "cross-entropy", "sum"),
    ("frozen", "cross-entropy", "mean"),
]


@pytest.mark.parametrize(("model", "loss", "reduction"), CASES)
def test_scores_equal_those_of_a_dense_system(model: str, loss: str, reduction: Reduction) -> None:
    problem = build(model, loss)
    test = problem.batches[:1]
    arguments = (problem.model, problem.loss_of(reduction), problem.batches, test)
    options: Any = {"damping": DAMPING, "loss_reduction": reduction, "tolerance": 1e-11}
    expected = dense(problem, test, reduction)
    each = gradlens.influence(*arguments, by_sample=True, **options)
    np.testing.assert_allclose(each.scores, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    assert each.residuals.shape == (expected.shape[1],)
    assert bool((each.residuals <= 1e-11).all())
    mean = gradlens.influence(*arguments, **options)
    np.testing.assert_allclose(mean.scores, each.scores.mean(1), rtol=1e-9, atol=1e-12)
    assert mean.reason == each.reason == ""


def test_few_test_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build("perceptron", "cross-entropy")
    loss = problem.loss_of("mean")
    arguments = (problem.model, loss, problem.batches, problem.batches[:1])
    together = gradlens.influence(*arguments, damping=DAMPING, by_sample=True)
    monkeypatch.setattr("gradlens.curvature.operator.JOINT_BYTES", 6_200)  # two, and no more
    apart = gradlens.influence(*arguments, damping=DAMPING, by_sample=True)
    np.testing.assert_allclose(apart.scores, together.scores, rtol=1e-9, atol=1e-12)
    assert apart.products == together.products


def test_influence_of_a_part_of_the_network_leaves_it_as_it_was() -> None:
    problem = build("perceptron", "cross-entropy")
    model, loss = problem.model, problem.loss_of("mean")
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = gradlens.influence(
        model, loss, problem.batches, problem.batches, damping=DAMPING, parameters=["2"]
    )
    model[0].requires_grad_(False)
    np.testing.assert_allclose(
        found.scores, dense(problem, problem.batches, "mean").mean(1), rtol=1e-4
    )
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_planted_wrong_labels_have_the_lowest_scores() -> None:
    """They raise the loss of clean data, so that leaving them out lowers it."""
    torch.manual_seed(0)
    centres = 3 * torch.eye(3, 6, dtype=torch.float64)
    labels = torch.randint(3, (60,))
    inputs = centres[labels] + torch.randn(60, 6, dtype=torch.float64) / 2
    wrong = torch.arange(0, 60, 12)
    given = labels.clone()
    given[wrong] = (given[wrong] + 1) % 3
    model, loss = nn.Linear(6, 3).double(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.01)
    for _ in range(50):
        optimizer.zero_grad()
        loss(model(inputs), given).backward()
        optimizer.step()
    train = DataLoader(TensorDataset(inputs, given), batch_size=16)
    test = centres.repeat(20, 1) + torch.randn(60, 6, dtype=torch.float64) / 2
    clean = [(test, torch.arange(3).repeat(20))]
    scores = gradlens.influence(model, loss, train, clean, damping=0.01).scores
    assert {*np.argsort(scores)[:5].tolist()} == {*wrong.tolist()}
    assert bool((scores[wrong.numpy()] < 0).all())


def indefinite(outputs: Tensor, targets: Tensor) -> Tensor:
    return -nn.functional.mse_loss(outputs[:, 0], targets[:, 0])


def problem_with(change: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = change(nn.Sequential(nn.Linear(4, 3))).double()
    batches = [(torch.randn(n, 4).double(), torch.randn(n, 3).double()) for n in (5, 3)]
    return {"model": model, "loss": nn.MSELoss(), "train": batches, "test": batches}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative damping": ({"damping": -1.0}, ValueError, "damping=-1"),
    "no batches": ({"test": []}, ValueError, "no batches"),
    "an iterator": ({"train": iter([])}, ValueError, "ends after one pass"),
    "no mean": ({"loss": lambda out, y: (out - y).mean() ** 2}, ValueError, "isn't the mean"),
    "other shapes": ({"test": [(torch.randn(2, 5).double(), torch.randn(2, 3))]}, RuntimeError, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(case: str) -> None:
    arguments, kind, reason = REFUSED[case]
    given = problem_with(lambda model: model) | {"damping": DAMPING} | arguments
    with pytest.raises(kind, match=reason or "shapes"):
        gradlens.influence(**given)


def test_several_outputs() -> None:
    """Two tensors in a tuple have the scores of one, which has both."""
    joined = problem_with(lambda model: model)
    size = joined["loss"]

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return size(torch.cat(outputs, 1), targets)

    def halves(net: Any, x: Tensor) -> tuple[Tensor, ...]:
        weight, bias = net.inner.parameters()
        return tuple(nn.functional.linear(x, weight[i:j], bias[i:j]) for i, j in ((0, 2), (2, 3)))

    split = Net(halves, inner=joined["model"])
    found, expected = (
        gradlens.influence(**given, damping=DAMPING).scores
        for given in (joined | {"model": split, "loss": loss}, joined)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_coupled_samples_are_refused() -> None:
    given = problem_with(lambda model: model.append(nn.BatchNorm1d(3)))
    with pytest.raises(UnavailableError, match="eval mode"):
        gradlens.influence(**given, damping=DAMPING)


def test_systems_that_are_not_solved_have_no_scores() -> None:
    given = problem_with(lambda model: model)
    few = gradlens.influence(**given, damping=DAMPING, max_products=0)
    assert bool(np.isnan(few.scores).all())
    assert "raise max_products" in few.reason
    assert bool((few.residuals > 1e-6).all())
    concave = gradlens.influence(**given | {"loss": indefinite}, damping=0.01)
    assert bool(np.isnan(concave.scores).all())
    assert "isn't positive definite" in concave.reason
    nn.init.constant_(given["model"][0].bias, float("inf"))
    infinite = gradlens.influence(**given, damping=DAMPING)
    assert bool(np.isnan(infinite.scores).all())
    assert "NaN or Inf" in infinite.reason


def test_preconditioned_products_solve_the_same_system_in_fewer_products() -> None:
    generator = np.random.default_rng(0)
    root, _ = np.linalg.qr(generator.standard_normal((30, 30)))
    matrix = root @ np.diag(np.logspace(4, -2, 30)) @ root.T
    vectors = generator.standard_normal((3, 30))
    plain = InverseOperator(matrix, 0.01, tolerance=1e-10)
    scaled = InverseOperator(matrix, 0.01, tolerance=1e-10, rank=15)
    exact = np.linalg.solve(matrix + 0.01 * np.eye(30), vectors.T)
    found = scaled.solve_many(vectors)
    np.testing.assert_allclose(np.stack([each.vector for each in found], 1), exact, rtol=1e-6)
    np.testing.assert_allclose(scaled @ vectors.T, exact, rtol=1e-6)
    fewer = [each.products for each in found]
    assert max(fewer) < min(each.products for each in plain.solve_many(vectors)) / 2
    # All eigenvalues, of which some are zero, without damping; and one that is negative.
    low = root[:, :5] @ root[:, :5].T
    solved = InverseOperator(low, 0.0, rank=100).solve(low @ vectors[0])
    np.testing.assert_allclose(solved.vector, low @ vectors[0], rtol=1e-9)
    assert "isn't positive definite" in InverseOperator(-low, 0.1, rank=3).solve(vectors[0]).reason
    nan = InverseOperator(low * np.nan, 0.1, rank=3).solve(vectors[0])
    assert "NaN or Inf" in nan.reason


def test_several_solutions_take_one_pass_for_each_product() -> None:
    problem = build("perceptron", "cross-entropy")
    ggn = GGNOperator.over_data(problem.model, problem.loss_of("mean"), problem.batches)
    passes = []
    ggn.loss.each, each = lambda add: (passes.append(1), each(add)), ggn.loss.each  # type: ignore[method-assign]
    vectors = np.random.default_rng(0).standard_normal((4, 35))
    vectors[2] = 0.0
    vectors[3, 0] = np.nan
    found = InverseOperator(ggn, 0.1).solve_many(vectors)
    assert len(passes) == max(one.products for one in found)
    assert [one.converged for one in found] == [True, True, True, False]
    assert not found[2].vector.any()
    alone = InverseOperator(ggn, 0.1).solve(vectors[1])
    np.testing.assert_array_equal(found[1].vector, alone.vector)
    assert found[1].products == alone.products
