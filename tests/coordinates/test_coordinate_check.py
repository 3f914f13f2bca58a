"""The coordinate check: of parametrisations that are known, and against the plain formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from scipy.stats import t as student
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from gradlens import coordinate_check
from gradlens.coordinates.result import CoordinateCheck

WIDTHS = (32, 96, 256)
CLASSES = 4
LOSS = nn.CrossEntropyLoss()
DRAWS = torch.Generator().manual_seed(0)
BATCH = torch.randn(32, 8, generator=DRAWS), torch.randint(CLASSES, (32,), generator=DRAWS)


class MLP(nn.Module):
    """In the standard parametrisation, or the maximal update one (Yang et al., 2022, Table 3)."""

    def __init__(self, width: int, is_mup: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)
        for layer in (self.first, self.second, self.head):
            is_last = is_mup and layer is self.head
            nn.init.normal_(layer.weight, std=layer.in_features ** (-1.0 if is_last else -0.5))
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs).relu()).relu()
        return self.head(hidden)


def optimizer(
    model: nn.Module, kind: Callable[..., Optimizer] = Adam, rate: float = 0.01, is_mup: bool = True
) -> Optimizer:
    """With the rates of the parametrisation, which are the same at width 64."""
    width = model.head.in_features / 64 if is_mup else 1.0  # type: ignore[operator,union-attr]
    vectors = width if kind is SGD else 1.0
    matrices = 1.0 if kind is SGD else 1 / width
    by_name = {"first": vectors, "second.weight": matrices, "second.bias": vectors}
    by_name |= {"head.weight": 1 / width, "head.bias": 1.0, "third": 1.0}
    return kind(
        [
            {"params": [p], "lr": rate * next(r for n, r in by_name.items() if name.startswith(n))}
            for name, p in model.named_parameters()
        ],
        lr=rate,
    )


def check(
    kind: Callable[..., Optimizer] = Adam, is_mup: bool = True, rate: float = 0.01, **options: Any
) -> CoordinateCheck:
    models = {width: partial(MLP, width, is_mup) for width in WIDTHS}
    make = partial(optimizer, kind=kind, rate=rate, is_mup=is_mup)
    return coordinate_check(models, [BATCH], LOSS, make, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rate", "seeds"), [(SGD, 0.1, 7), (Adam, 0.01, 5)])
def test_the_maximal_update_parametrisation_passes(
    kind: type[Optimizer], rate: float, seeds: int
) -> None:
    found = check(kind, rate=rate, seeds=seeds)
    assert found.passes, str(found)
    assert {*found.verdicts.values()} == {"constant"}
    assert str(found).startswith("coordinate check: passes, after 4 steps at widths 32, 96, 256")


@pytest.mark.slow
def test_the_standard_parametrisation_fails() -> None:
    found = check(is_mup=False, seeds=3)
    assert found.outcome == "fails"
    assert (found.grows, found.vanishes) == (("second", "head"), ())
    assert "head grows with the width" in str(found)
    found = check(SGD, False, 0.1, seeds=6)
    assert (found.outcome, found.vanishes) == ("fails", ("first",))
    assert found.change_slopes["head"].low > 0


def test_sizes_and_slopes_are_those_of_the_plain_formula() -> None:
    batches = [BATCH, tuple(each.flip(0) for each in BATCH)]
    models = [(width, partial(MLP, width)) for width in (32, 8, 16)]
    found = coordinate_check(models, batches, LOSS, optimizer, steps=3, seeds=3, layers="head")
    assert found.widths.tolist() == [8, 16, 32]
    sizes, changes = np.zeros((2, 3, 3, 4))
    for place, width in enumerate((8, 16, 32)):
        for seed in range(3):
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                model = MLP(width)
            own, start = optimizer(model), model(BATCH[0]).detach()
            for step in range(4):
                now = model(BATCH[0]).detach()
                sizes[place, seed, step] = now.double().square().mean().sqrt()
                changes[place, seed, step] = (now - start).double().square().mean().sqrt()
                own.zero_grad()
                inputs, targets = batches[step % 2]
                LOSS(model(inputs), targets).backward()
                own.step()
    np.testing.assert_allclose(found.sizes[0], sizes, rtol=1e-5)
    np.testing.assert_allclose(found.changes[0], changes, rtol=1e-4, atol=1e-7)
    slopes = [np.polyfit(np.log([8, 16, 32]), row, 1)[0] for row in np.log(changes[..., 3]).T]
    half = student.ppf(0.975, 2) * np.std(slopes, ddof=1) / 3**0.5
    one = found.change_slopes["head"]
    mean = np.mean(slopes)
    np.testing.assert_allclose([one.value, one.low, one.high], [mean, mean - half, mean + half])


def test_intervals_hold_the_truth_as_often_as_they_state() -> None:
    draws = np.random.default_rng(0)
    widths = np.array([32.0, 64, 128, 256])
    errors = draws.normal(0, 1 / np.sqrt(widths)[:, None], (400, 4, 5))  # larger at small widths
    table = np.exp(0.4 * np.log(widths)[:, None] + errors)[..., None]
    found = CoordinateCheck(widths, tuple(map(str, range(400))), table, table)
    held = [one.low < 0.4 < one.high for one in found.change_slopes.values()]
    assert 0.93 <= np.mean(held) <= 0.98


def test_nothing_else_is_changed() -> None:
    model, other = MLP(16), nn.Sequential(MLP(16))
    models = [(8, MLP(8)), (8, MLP(8)), (16, model), (16, MLP(16))]
    model.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = coordinate_check(models, [BATCH], LOSS, optimizer, steps=1)
    assert found.layers == ("first", "second", "head")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not model.training
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert not any(each._forward_hooks for each in (*model.modules(), *other.modules()))


def test_other_batches_and_layers() -> None:
    def build(width: int) -> nn.Module:
        parts = nn.Embedding(5, width), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * width, 2)
        return nn.Sequential(*parts)

    tokens = [{"ids": torch.arange(12).reshape(4, 3) % 5, "labels": torch.tensor([0, 1, 0, 1])}]
    found = coordinate_check(
        {width: partial(build, width) for width in (4, 8)}, tokens, LOSS,
        lambda model: SGD(model.parameters(), 0.1), steps=1, seeds=2, exclude=nn.Flatten,
        split=lambda batch: (batch["ids"], batch["labels"]),
    )  # fmt: skip
    assert found.layers == ("0", "1", "3")
    assert (found.changes[..., 0] == 0).all()  # the same elements are dropped each time


def test_what_diverges_or_never_changes() -> None:
    table = np.ones((2, 3, 2, 3)) + np.arange(2)[:, None] / 10
    changes = table * [0, 1, 1] * np.array([0, 1])[:, None, None, None]
    found = CoordinateCheck(np.array([8.0, 16, 32]), ("input", "head"), table, changes)
    assert found.passes
    table, changes = table.copy(), changes.copy()
    changes[1, 0, 0, 1:] = 0  # of one seed at one width
    found = replace(found, changes=changes)
    assert (found.outcome, found.undecided) == ("undecided", ("head",))
    assert found.change_slopes["head"].value.reason == "it is 0, NaN or infinite at some widths"
    table[1, 2, 1, 2] = np.inf
    found = replace(found, sizes=table)
    assert (found.outcome, found.step) == ("fails", 1)
    assert "outputs are NaN or infinite at the next step" in str(found)
    found = replace(found, sizes=np.nan * table)
    assert (found.outcome, found.step) == ("fails", -1)
    found.plot()


def test_a_picture_says_which_layers_grow() -> None:
    widths, sizes = np.array([8.0, 16, 32]), np.ones((3, 3, 2, 2))
    changes = sizes * np.stack([widths**2, widths**0, widths**-1])[..., None, None] * [0.0, 1.0]
    drawn = CoordinateCheck(widths, ("a", "b", "c"), sizes, changes).plot()
    np.testing.assert_allclose(drawn.artists["a"].get_ydata(), widths**2)
    shown = {each.get_text() for each in drawn.figure.findobj(Text)}
    assert {"fails", "grow: a", "vanish: c", "constant: 1 layer", "width"} <= shown
    assert (drawn.ax.get_xscale(), drawn.ax.get_yscale()) == ("log", "log")


def test_what_cannot_be_compared_is_refused() -> None:
    def refused(models: Any, words: str, loader: Any = (BATCH,), **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            coordinate_check(models, loader, LOSS, optimizer, **{"steps": 1, "seeds": 2} | options)

    good = {width: partial(MLP, width) for width in (8, 16)}
    refused({8: good[8]}, "two widths")
    refused({}, "two widths")
    refused({"8": good[8], 16: good[16]}, "'8' is no width")
    refused({0: good[8], 16: good[16]}, "0 is no width")
    refused({8: 3, 16: good[16]}, r"at width 8 is int: pass a function")
    refused({8: MLP(8), 16: MLP(16)}, "two seeds")
    refused(good, "two seeds", seeds=1)
    refused([(8, MLP(8)), *good.items()], "width 16 has 2 models, and width 8 has 3")
    refused({width: lambda: MLP(width) for width in (8, 16)}, "the loop's last width")  # noqa: B023
    refused({width: partial(_equal, width) for width in (8, 16)}, "without seeding")
    refused(good, "no batches", [])
    refused(good, "no pair", [BATCH[0]])
    refused(
        {8: partial(MLP, 8), 16: partial(_Deeper, 16)},
        "of width 8 has no layer third, which that of 16",
    )
    refused(good, "no layer matches 'nothing'", layers="nothing")


class _Deeper(MLP):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.third = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.third(self.first(inputs)).mean()


def _equal(width: int) -> nn.Module:
    torch.manual_seed(0)
    return MLP(width)
