"""Labels of words and pixels: padding, and the share of the most frequent one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradlens.facts.rows import dense_labels
from gradlens.graph.loss import read_loss

N, T, CLASSES, PADDING = 8, 20, 10, 0


def labels(padded: bool) -> Tensor:
    torch.manual_seed(0)
    found = torch.randint(1, CLASSES, (N, T))
    lengths = torch.arange(6, 6 + N) if padded else torch.full((N,), T)
    return found.where(torch.arange(T) < lengths[:, None], PADDING)


def numbers(loss: Tensor) -> dict[str, float]:
    found = dense_labels(read_loss(loss, N)).get("dense_labels", {})
    return {name: each.item() for name, each in found.items()}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ignored", [-100, PADDING])
def test_padding_counts_unless_it_is_ignored(flat: bool, ignored: int) -> None:
    scores, targets = torch.randn(N, CLASSES, T, requires_grad=True), labels(padded=True)
    given = (scores.transpose(1, 2).flatten(0, 1), targets.flatten()) if flat else (scores, targets)
    found = numbers(functional.cross_entropy(*given, ignore_index=ignored))
    expected = 0.0 if ignored == PADDING else (targets == PADDING).float().mean().item()
    assert found["padding"] == pytest.approx(expected)


def test_a_mask_in_front_of_the_mean() -> None:
    scores, targets = torch.randn(N, CLASSES, T, requires_grad=True), labels(padded=True)
    losses = functional.cross_entropy(scores, targets, reduction="none")
    assert numbers((losses * (targets != PADDING)).mean()) == {}


def test_without_padding() -> None:
    scores, targets = torch.randn(N, CLASSES, T, requires_grad=True), labels(padded=False)
    found = numbers(functional.cross_entropy(scores, targets))
    assert found["padding"] == 0
    counts = torch.bincount(targets.flatten())
    assert found["most"] == pytest.approx(counts.max().item() / targets.numel())


def test_groups_of_a_class_each_have_no_padding() -> None:
    """As of queries, of which a sample is all of one class."""
    scores = torch.randn(N, CLASSES, T, requires_grad=True)
    targets = (torch.arange(N) % CLASSES)[:, None].expand(N, T)
    assert numbers(functional.cross_entropy(scores, targets))["padding"] == 0


def test_one_end_of_some_texts_is_no_padding() -> None:
    scores, targets = torch.randn(N, CLASSES, T, requires_grad=True), labels(padded=False)
    targets = targets.clamp(min=1)
    targets[::2, -1] = 0
    assert numbers(functional.cross_entropy(scores, targets))["padding"] == 0


def test_images_have_no_padding() -> None:
    targets = labels(padded=True).reshape(N, 4, 5)
    scores = torch.randn(N, CLASSES, 4, 5, requires_grad=True)
    assert {*numbers(functional.cross_entropy(scores, targets))} == {"most"}


@pytest.mark.parametrize("weight", [None, torch.ones(CLASSES)])
def test_one_label_for_each_sample_or_weights(weight: Tensor | None) -> None:
    length = 1 if weight is None else T
    scores = torch.randn(N, CLASSES, length, requires_grad=True)
    assert numbers(functional.cross_entropy(scores, labels(True)[:, :length], weight=weight)) == {}
