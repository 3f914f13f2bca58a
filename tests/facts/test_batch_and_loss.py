"""Numbers of batches and of losses of single samples, against plain formulas in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import gradlens
from gradlens import quantities
from gradlens.facts.rows import (
    batch_columns,
    counts_of,
    distinct,
    joined,
    known_rows,
    label_columns,
    loss_columns,
    loss_rows,
    output_columns,
    row_numbers,
)
from gradlens.graph.loss import read_loss
from tests.cases.steps import tracked_backward

Floats = NDArray[np.float64]

SHAPES = [(1, 4), (2, 1), (16, 20), (5, 3, 7, 7), (8, 1)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def columns(rows: Tensor) -> dict[str, float]:
    return only(batch_columns(joined([row_numbers(rows)])[None], rows[0].numel()))


def only(columns: Mapping[str, Floats], place: int = 0) -> dict[str, float]:
    """The numbers of one step that aren't NaN."""
    return {n: float(c[place]) for n, c in columns.items() if not math.isnan(c[place])}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_of_a_batch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = (3 * torch.randn(shape) + 1).to(dtype)
    found, flat = columns(rows), rows.double().flatten(1).numpy()
    rms = np.sqrt(np.square(flat).mean(1))
    spread = np.sqrt(np.square(flat - flat.mean(0)).mean() / np.square(flat).mean())
    expected = {
        "samples": len(flat),
        "bad_rows": 0,
        "input_rms": np.sqrt(np.square(flat).mean()),
        "input_mean": flat.mean(),
        "input_std": flat.std(),
        "input_spread": spread,
        "row_rms_max": rms.max(),
        "row_rms_median": np.sort(rms)[len(rms) // 2],
        "row_largest": rms.argmax(),
        "distinct_rows": len(flat),
    }
    checksum = found.pop("checksum")
    assert math.isfinite(checksum)
    assert found == pytest.approx(expected, rel=1e-4, abs=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 2, 4])
def test_rows_that_are_not_finite(row: int, bad: float) -> None:
    rows = torch.randn(5, 6)
    rows[row, 3] = bad
    assert columns(rows) == {"samples": 5, "bad_rows": 1, "bad_row": row}


@pytest.mark.parametrize("kind", ["normal", "one-hot", "words", "images", "a time", "days"])
@pytest.mark.parametrize("copies", [1, 2, 8])
def test_rows_that_occur_repeatedly(kind: str, copies: int) -> None:
    torch.manual_seed(0)
    several = {
        "normal": torch.randn(8, 300),
        "one-hot": torch.eye(8, 20),
        "words": torch.randint(50, (8, 12)),
        "images": torch.rand(8, 3, 16, 16),
        "a time": torch.cat([torch.full((8, 1), 1.7e9), torch.randn(8, 5)], 1),
        "days": torch.cat([1.7e9 + 86400.0 * torch.arange(8)[:, None] // 4, torch.randn(8, 5)], 1),
    }[kind]
    batch = several.repeat(copies, *[1] * (several.dim() - 1))[torch.randperm(8 * copies)]
    assert columns(batch)["distinct_rows"] == 8
    again = columns(batch.flip(0))["checksum"]
    assert again == pytest.approx(columns(batch)["checksum"], rel=1e-4)


def test_rows_without_a_difference() -> None:
    found = columns(torch.ones(4, 9) * 5)
    assert found["input_spread"] == pytest.approx(0, abs=1e-3)
    assert found["distinct_rows"] == 1
    assert distinct(np.zeros((1, 4)), np.zeros((1, 4))) == 1


NUMBERS = st.floats(-10, 10, width=32)
OR_BAD = st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


@given(st.data(), st.integers(1, 6), st.integers(1, 5))
@pytest.mark.slow
def test_batches_of_the_same_size_are_reduced_together(
    data: st.DataObject, steps: int, samples: int
) -> None:
    def drawn(elements: st.SearchStrategy[float], *shape: int) -> Floats:
        return data.draw(hnp.arrays(np.float64, shape, elements=elements))

    rows = drawn(OR_BAD, steps, 4, samples)
    losses = drawn(OR_BAD, steps, samples)
    labels = drawn(st.sampled_from([-1.0, 0.0, 1.0, 2.0, 7.0, 0.5, 1e4]), steps, samples)
    together = [batch_columns(rows, 3), loss_columns(losses, 3), label_columns(counts_of(labels))]
    for n in range(steps):
        one = slice(n, n + 1)
        alone = [
            batch_columns(rows[one], 3),
            loss_columns(losses[one], 3),
            label_columns(counts_of(labels[one])),
        ]
        for several, single in zip(together, alone, strict=True):
            assert only(several, n) == pytest.approx(only(single), rel=1e-12)


CLASSES = torch.tensor([0, 2, 1, 2, 2, 0])


def scores(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("wrap", ["none", "sum of none", "scaled", "viewed"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_a_classification(reduction: str, wrap: str) -> None:
    x = scores(6, 3)
    single = functional.cross_entropy(x, CLASSES, reduction="none")
    loss = {
        "none": lambda: functional.cross_entropy(x, CLASSES, reduction=reduction),
        "sum of none": lambda: single.mean() if reduction == "mean" else single.sum(),
        "scaled": lambda: 3 * functional.cross_entropy(x, CLASSES, reduction=reduction) / 7,
        "viewed": lambda: functional.cross_entropy(x, CLASSES, reduction=reduction).reshape(1),
    }[wrap]()
    assert read_loss(loss).name == "NllLossBackward"
    found = loss_rows(read_loss(loss))
    assert found.classes == 3
    assert found.count == 6
    assert found.losses is not None
    assert found.labels is not None
    torch.testing.assert_close(found.losses, single.detach())
    assert found.labels.tolist() == CLASSES.tolist()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["classes", "two classes", "targets between classes"])
def test_weights_of_a_loss(loss: str, weighted: bool) -> None:
    x, targets = scores(6, 3), (CLASSES > 0).float()
    weight = torch.tensor([1.0, 2.0, 3.0]) if weighted else None
    found = {
        "classes": lambda: functional.cross_entropy(x, CLASSES, weight=weight),
        "two classes": lambda: functional.binary_cross_entropy_with_logits(
            x[:, 0], targets, pos_weight=None if weight is None else weight[1]
        ),
        "targets between classes": lambda: functional.binary_cross_entropy(
            x.sigmoid(), targets[:, None].expand(6, 3), weight=weight
        ),
    }[loss]()
    assert read_loss(found).is_weighted == weighted


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("weights", [[1.0, -2.0, 0.0, 0.5], [1.0, 0.0, 1.0, 1.0]])
def test_weights_of_rows(weights: list[float], is_first: bool) -> None:
    given, scores = torch.tensor(weights), torch.randn(4, 3, requires_grad=True)
    losses = functional.cross_entropy(scores, torch.tensor([0, 1, 2, 0]), reduction="none")
    weighted = given * losses if is_first else losses * given
    found = read_loss(weighted.mean() + 0.5 * scores[:, 0].square().mean(), 4).row_weights
    assert found is not None
    assert found.tolist() == weights
    assert read_loss(losses.mean(), 4).row_weights is None


@pytest.mark.parametrize("ignored", [-100, -1, 255, 3])
def test_ignored_labels_have_neither_loss_nor_class(ignored: int) -> None:
    targets = CLASSES.clone()
    targets[1] = targets[4] = ignored
    loss = functional.cross_entropy(scores(6, 3), targets, ignore_index=ignored)
    found = loss_rows(read_loss(loss))
    assert found.losses is not None
    assert found.labels is not None
    losses, labels = known_rows(
        found.losses.double().numpy(), found.labels.double().numpy(), found.ignored
    )
    assert np.isnan(losses).tolist() == [False, True, False, False, True, False]
    assert labels.tolist() == [0, -1, 1, 2, -1, 0]


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("with_logits", [True, False])
def test_losses_of_two_classes(with_logits: bool, shape: tuple[int, ...]) -> None:
    x, targets = scores(*shape), (CLASSES > 0).float().reshape(shape)
    function = (
        functional.binary_cross_entropy_with_logits
        if with_logits
        else functional.binary_cross_entropy
    )
    x = x if with_logits else x.sigmoid()
    found = loss_rows(read_loss(function(x, targets)))
    assert found.losses is not None
    assert found.labels is not None
    expected = function(x, targets, reduction="none").reshape(6)
    torch.testing.assert_close(found.losses, expected.detach())
    assert found.labels.tolist() == (CLASSES > 0).float().tolist()


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 4), (6, 2, 3)])
def test_losses_of_a_regression(shape: tuple[int, ...]) -> None:
    x, targets = scores(*shape), torch.randn(shape)
    found = loss_rows(read_loss(functional.mse_loss(x, targets)))
    assert found.losses is not None
    expected = (x - targets).square().reshape(6, -1).mean(1)
    torch.testing.assert_close(found.losses, expected.detach())
    of_targets = {"target_variance": targets.var(correction=0), "target_mean": targets.mean()}
    torch.testing.assert_close(dict(found.of_targets), of_targets)


SQUARED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda x, y: (x - y).square().mean(),
    "reversed": lambda x, y: ((y - x) ** 2).mean(),
    "half of a sum": lambda x, y: 0.5 * (x - y).pow(2).sum() / 6,
    "by rows": lambda x, y: (x - y).square().flatten(1).mean(1).mean(),
}


@pytest.mark.parametrize("last", [nn.Identity(), torch.tanh, torch.sigmoid])
@pytest.mark.parametrize("loss", SQUARED)
def test_errors_that_are_squared_by_hand(loss: str, last: Callable[[Tensor], Tensor]) -> None:
    """Also those of rows that are single numbers, or of no rows."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    outputs, targets = last(model(torch.randn(6, 4))), 2 * torch.randn(6, 3) + 1
    read = read_loss(SQUARED[loss](outputs, targets), 6)
    assert read.name == "MseLossBackward"
    found, columns = loss_rows(read), output_columns(read)
    assert found.losses is not None
    assert found.count == 6
    squares = (outputs - targets).square().mean(1)
    torch.testing.assert_close(found.losses, squares.detach())
    torch.testing.assert_close(columns["target_variance"], targets.var(correction=0))
    spread = outputs.detach().var(0, correction=0).mean().sqrt()
    torch.testing.assert_close(columns["output_std"], spread)
    for rows in (6, 0):
        one = read_loss((outputs[:rows, 0] - targets[:rows, 0]).square().mean(), rows)
        single = loss_rows(one)
        assert single.count == rows
        if rows:
            assert single.losses is not None
            expected = (outputs - targets)[:, 0].square().detach()
            torch.testing.assert_close(single.losses, expected)


def test_outputs_of_parameters_that_are_freed_are_unknown() -> None:
    """As those that ``fully_shard`` gathers for their layer alone."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    read = read_loss((model(torch.randn(6, 4)) - torch.randn(6, 3)).square().mean(), 6)
    assert output_columns(read)
    model[2].weight.untyped_storage().resize_(0)
    assert output_columns(read) == {}


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (x[:, :1] - torch.randn(6, 3)).square().mean(),
        lambda x: (x - torch.randn(6, 3)).square().mean() + x.square().mean(),
        lambda x: (x - torch.randn(6, 3)).square().mean().sqrt(),
        lambda x: (x - x.detach() * x).square().mean(),
        lambda x: (x - torch.randn(6, 3)).abs().pow(3).mean(),
    ],
)
def test_what_are_no_squared_errors(loss: Callable[[Tensor], Tensor]) -> None:
    read = read_loss(loss(scores(6, 3)), 6)
    assert read.squared is None
    assert read.name == ""


@pytest.mark.parametrize("loss", ["two", "its own", "no graph", "of probabilities"])
def test_other_losses_have_no_rows(loss: str) -> None:
    x = scores(6, 3)
    other = {
        "two": lambda: (
            functional.cross_entropy(x, CLASSES) + functional.mse_loss(x, torch.zeros(6, 3))
        ),
        "its own": lambda: x.square().exp().mean(),
        "no graph": lambda: x.detach().sum(),
        "of probabilities": lambda: functional.cross_entropy(x, torch.full((6, 3), 1 / 3)),
    }[loss]()
    assert read_loss(other).function is None


@pytest.mark.parametrize("labels", [[0], [0, 0, 1], [3, 1, 2, 2], [-1, 1, 0]])
def test_numbers_of_labels(labels: list[int]) -> None:
    known = [each for each in labels if each >= 0]
    shares = [known.count(each) / len(known) for each in {*known}]
    entropy = -sum(share * math.log(share) for share in shares)
    of_classes = counts_of(np.array([labels], dtype=float))
    assert only(label_columns(of_classes))["label_entropy"] == pytest.approx(entropy)
    assert {n: c for n, c in enumerate(of_classes[0]) if c} == Counter(known)


@pytest.mark.parametrize("labels", [[], [-1, -1], [0.5, 1], [1e9]])
def test_labels_that_are_no_classes(labels: list[float]) -> None:
    of_classes = counts_of(np.array([labels], dtype=float))
    assert only(label_columns(of_classes)) == {}
    assert not of_classes.any()


def test_numbers_of_losses() -> None:
    found = only(loss_columns(np.array([[0.1, math.nan, 4.0, 0.3, 0.2]]), 3))
    assert found == {"loss_max": 4, "loss_largest": 2, "loss_median": 0.3, "loss_over": 0.25}
    assert only(loss_columns(np.array([[math.nan]]), 3)) == {}
    assert "loss_over" not in loss_columns(np.array([[1.0]]), 0)


EMPTY_LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "classes": (nn.CrossEntropyLoss(), torch.empty(0, dtype=torch.int64)),
    "two classes": (nn.BCEWithLogitsLoss(), torch.empty(0, 2)),
    "squares": (nn.MSELoss(), torch.empty(0, 2)),
    "smooth": (nn.SmoothL1Loss(), torch.empty(0, 2)),
    "Huber": (nn.HuberLoss(), torch.empty(0, 2)),
    "margin": (nn.SoftMarginLoss(), torch.empty(0, 2)),
}


@pytest.mark.filterwarnings("ignore:.*cover 0 %")
@pytest.mark.parametrize("name", EMPTY_LOSSES)
def test_losses_of_an_empty_batch(name: str) -> None:
    loss_function, targets = EMPTY_LOSSES[name]
    model = nn.Linear(3, 2)
    cockpit = gradlens.Cockpit(
        model, [quantities.NormTest()], loss_function=loss_function, strict=True
    )
    for step in range(2):
        tracked_backward(cockpit, step, loss_function(model(torch.randn(0, 3)), targets))
    cockpit.close()
    assert cockpit.history["NormTest"][0].reason.endswith("the batch is empty")


@pytest.mark.parametrize("loss_function", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_a_loss_of_one_number(loss_function: nn.Module) -> None:
    loss = loss_function(torch.randn((), requires_grad=True), torch.tensor(1.0))
    assert loss_rows(read_loss(loss)).count == 1
