"""Noise scales between parts, over steps, of some layers and in other norms, against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.intervals import KINDS, coverage
from gradlens import Cockpit, configuration
from gradlens.numerics.noise_scales import (
    APART,
    Averages,
    DualNorm,
    NoiseScale,
    dual_noise_scale,
)
from gradlens.operators.dense import Dense
from gradlens.quantities import GradNoiseScale
from gradlens.quantities.dual_norms import dual_sums
from gradlens.signals import is_normalization
from tests.cases.networks import NETWORKS, real
from tests.cases.steps import tracked_backward
from tests.quantities.networks import Attention, Residual

MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    **{n: (NETWORKS[n].build, NETWORKS[n].inputs) for n in ("mlp", "lstm", "embedding")},
    "residual": (Residual, real(4)),
    "transformer": (Attention, real(4)),
}


def made(name: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    return build().double(), inputs


def loss_of(model: nn.Module, x: Tensor, reduction: str = "mean") -> Tensor:
    losses = (model(x) - 0.3).flatten(1).square().sum(1)
    return losses.mean() if reduction == "mean" else losses.sum()


def gradient(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the mean loss."""
    found = torch.autograd.grad(loss_of(model, x), [*model.parameters()])
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def between_parts(
    gradients: Sequence[Mapping[str, Tensor]], sizes: Sequence[int], weights: Sequence[float]
) -> tuple[float, float]:
    """tr(Σ) and ‖G‖² from the gradients of parts, which have these sizes and weights."""
    flat = [[g.numpy().ravel() for g in each.values()] for each in gradients]
    rows = np.stack([np.concatenate(each) for each in flat])
    p, n = np.array(weights) / sum(weights), np.array(sizes)
    small, big = float(p @ (rows**2).sum(1)), float(((p @ rows) ** 2).sum())
    trace = (small - big) / float((p / n).sum() - (p**2 / n).sum())
    return trace, big - trace * float((p**2 / n).sum())


SPLITS: Mapping[str, tuple[tuple[int, ...], tuple[float, ...], str]] = {
    "4 × 2": ((2, 2, 2, 2), (0.25,) * 4, "mean"),
    "unequal": ((3, 2, 1), (0.5, 0.3, 0.2), "mean"),
    "sum": ((3, 2, 1), (1.0, 1.0, 1.0), "sum"),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("network", MODELS)
def test_parts_have_the_noise_of_their_gradients(network: str, split: str) -> None:
    (sizes, weights, reduction), (model, inputs) = SPLITS[split], made(network)
    quantity = GradNoiseScale(between="parts", by="parameter")
    cockpit = Cockpit(model, [quantity], loss_reduction=reduction)
    batches = [inputs(size) for size in sizes]
    truths = [gradient(model, x) for x in batches]
    for place, (x, weight) in enumerate(zip(batches, weights, strict=True)):
        loss = loss_of(model, x, reduction)
        with cockpit(0, loss=loss, accumulating=place < len(sizes) - 1):
            (weight * loss).backward()
    found = cockpit.history["GradNoiseScale"][0]
    shares = sizes if reduction == "sum" else weights
    expected = between_parts(truths, sizes, shares)
    assert (found["trace"], found["squared_norm"]) == pytest.approx(expected, rel=1e-9)
    assert expected[1] <= 0 or found["value"] == pytest.approx(expected[0] / expected[1])
    for name, own in found["parameters"].items():
        expected = between_parts([{name: each[name]} for each in truths], sizes, shares)
        assert (own["trace"], own["squared_norm"]) == pytest.approx(expected, abs=1e-12)


def test_half_precision_and_a_scaler() -> None:
    model, inputs = made("mlp")
    model.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    cockpit = Cockpit(model, [GradNoiseScale(between="parts")])
    batches = [inputs(4).float() for _ in range(3)]
    truths = [gradient(model, x) for x in batches]
    for place, x in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x)
        with cockpit(0, loss=loss, accumulating=place < 2, scaler=scaler):
            scaler.scale(loss / 3).backward()
    found, expected = (
        cockpit.history["GradNoiseScale"][0],
        between_parts(truths, (4,) * 3, (1,) * 3),
    )
    assert (found["trace"], found["squared_norm"]) == pytest.approx(expected, rel=0.1)


def track(*parts: Callable[[nn.Module, Tensor], Tensor], **info: Any) -> Any:
    """The value after backward passes of one parameter's network."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    cockpit = Cockpit(model, [GradNoiseScale(between="parts")], facts=False)
    for place, part in enumerate(parts):
        loss = part(model, torch.randn(4, 3))
        tracked_backward(cockpit, 0, loss, accumulating=place < len(parts) - 1, **info)
    found = cockpit.history["GradNoiseScale"][0]
    return found["value"] if isinstance(found, dict) else found


def usual(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def after_another(model: nn.Module, x: Tensor) -> Tensor:
    usual(model, x).backward()
    return usual(model, x)


def in_pieces(model: nn.Module, x: Tensor) -> Tensor:
    loss = usual(model, x)
    loss.register_hook(lambda _: usual(model, x).backward())
    return loss


ODD: Mapping[str, tuple[tuple[Callable[[nn.Module, Tensor], Tensor], ...], str]] = {
    "one part": ((usual,), "one part alone"),
    "left over": ((after_another, usual), "wasn't empty"),
    "infinite": ((usual, lambda m, x: usual(m, math.inf * x)), "NaN or Inf"),
    "equal": ((lambda m, x: usual(m, torch.ones(4, 3)),) * 2, "rounding errors"),
    "zero": ((lambda m, x: 0 * usual(m, x),) * 2, "the mean gradient is zero"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_has_no_noise_between_parts_says_why(case: str) -> None:
    parts, reason = ODD[case]
    assert reason in track(*parts).reason


def test_the_preset_for_large_models() -> None:
    tracked = configuration("training")
    assert not any(quantity.needs_graph or quantity.of_samples for quantity in tracked)
    model, inputs = made("mlp")
    cockpit, optimizer = Cockpit(model, tracked), torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for place in range(2):
            loss = loss_of(model, inputs(3))
            with cockpit(step, loss=loss, optimizer=optimizer, accumulating=place < 1):
                (loss / 2).backward()
        optimizer.step()
    assert [*cockpit.history.names] == [quantity.name for quantity in tracked]
    found = cockpit.history["GradNoiseScale"][3]
    assert 0 <= found["low"] <= found["high"]
    assert found["trace"] > 0


# Over steps -----------------------------------------------------------------------------------


def test_averages_are_those_of_weighted_steps() -> None:
    generator, averages, beta = np.random.default_rng(0), Averages(0.9), 0.9
    pairs = generator.normal([50, 4], [8, 1], (80, 2))
    for step, (trace, squared_norm) in enumerate(pairs):
        found = averages.add("", NoiseScale(0.0, 0.0, 0.0, trace, squared_norm))
        if step == 40:  # a checkpoint
            state, averages = averages.state_dict(), Averages(beta)
            averages.load_state_dict(state)
    weights = beta ** np.arange(80)[::-1]
    mean = weights @ pairs / weights.sum()
    assert (found.trace, found.squared_norm) == pytest.approx(tuple(mean))
    assert found.value == pytest.approx(mean[0] / mean[1])
    assert found.low < found.value
    assert found.high == math.inf  # with 19 steps that count
    nothing = averages.add("", NoiseScale(*(math.nan,) * 5))
    assert math.isnan(nothing.value)
    assert averages.add("", found).trace == pytest.approx(mean[0])


@pytest.mark.parametrize("network", ["mlp", "embedding"])
def test_smoothed_values_of_a_run(network: str) -> None:
    model, inputs = made(network)
    of_steps = GradNoiseScale(name="each", by="layer")
    cockpit = Cockpit(model, [of_steps, GradNoiseScale(smoothing=0.5, by="layer")])
    for step in range(4):
        tracked_backward(cockpit, step, loss_of(model, inputs(5)))
    each, found = [*cockpit.history["each"].values()], cockpit.history["GradNoiseScale"][3]
    for layer in (None, *found["layers"]):
        records = [one if layer is None else one["layers"][layer] for one in each]
        own = found if layer is None else found["layers"][layer]
        for key in ("trace", "squared_norm"):
            mean = np.average([one[key] for one in records], weights=[1, 2, 4, 8])
            assert own[key] == pytest.approx(mean)


# Some layers ----------------------------------------------------------------------------------


def test_normalising_layers_alone() -> None:
    model, inputs = made("transformer")
    alone = GradNoiseScale(layers=is_normalization, name="norms")
    cockpit = Cockpit(model, [alone, GradNoiseScale(by="layer")])
    tracked_backward(cockpit, 0, loss_of(model, inputs(6)))
    found, whole = cockpit.history["norms"][0], cockpit.history["GradNoiseScale"][0]
    layers = [whole["layers"][name] for name in ("block.norm1", "block.norm2")]
    for key in ("trace", "squared_norm"):
        assert found[key] == pytest.approx(sum(layer[key] for layer in layers))


def test_chosen_layers_of_micro_batches_are_those_of_the_batch() -> None:
    values = []
    for parts in ((6,), (2, 2, 2)):
        model, inputs = made("transformer")
        cockpit = Cockpit(model, [GradNoiseScale(layers=is_normalization)])
        x = inputs(6)
        for place, part in enumerate(x.split(parts)):
            loss = loss_of(model, part)
            with cockpit(0, loss=loss, accumulating=place < len(parts) - 1):
                (loss / len(parts)).backward()
        values.append(cockpit.history["GradNoiseScale"][0])
    assert values[0] == pytest.approx(values[1], nan_ok=True)


def test_networks_without_such_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="GradNoiseScale: no layer matches is_normalization"):
        Cockpit(nn.Linear(2, 2), [GradNoiseScale(layers=is_normalization)])
    with pytest.raises(ValueError, match="no parameters that it is of"):
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        Cockpit(model, [GradNoiseScale(layers=is_normalization, norm="nuclear")])


# Other norms ----------------------------------------------------------------------------------


def bounds(g: np.ndarray, norm: DualNorm) -> np.ndarray:
    """Those of ‖G‖ and of the noise, for gₙ ``[N, R, K]``; their means over samples ``[4, N]``."""

    def direction(matrix: np.ndarray) -> np.ndarray:
        if norm == "l1":
            return np.sign(matrix)
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return np.asarray((left * (values > 1e-12 * values[0])) @ right)

    n, mean = len(g), g.mean(0)
    axes = tuple(range(1, g.ndim))
    halves = g[: n // 2], g[n // 2 :]
    ways = [direction(half.mean(0)) for half in halves]
    least = np.concatenate([(halves[0] * ways[1]).sum(axes), (halves[1] * ways[0]).sum(axes)])
    most = (g * direction(mean)).sum(axes)
    if norm == "l1":
        without = [np.delete(g, i, 0).std(0, ddof=1).sum() for i in range(n)]
        noise = n * g.std(0, ddof=1).sum() - (n - 1) * np.array(without)
        return np.stack([least, most, noise, noise])
    apart = g - mean
    if apart.shape[1] > apart.shape[2]:
        apart = apart.swapaxes(1, 2)
    own = apart @ apart.swapaxes(1, 2) * n / (n - 1)  # the covariance is their mean
    values, vectors = np.linalg.eigh(own.mean(0))
    roots = np.sqrt(values.clip(0))
    inverse = np.where(values > 1e-13 * values[-1], 1 / np.where(roots > 0, roots, 1), 0)
    turned = np.einsum("ik,nij,jk->nk", vectors, own, vectors)
    less = roots.sum() / 2 + turned @ inverse / 2
    more = np.sqrt(len(values) * values.sum()) / 2 * (1 + turned.sum(1) / (values.sum() or 1))
    return np.stack([least, most, less, more])


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("norm", ["l1", "nuclear"])
def test_bounds_in_other_norms(norm: DualNorm, shift: float) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 3, 4)) + shift * np.eye(3, 4) + shift / 3
    sums = dual_sums(Dense(torch.from_numpy(rows)), norm)
    means = (sums.least_gradient, sums.most_gradient, sums.least_noise, sums.most_noise)
    least, most, less_noise, more_noise = bounds(rows, norm).mean(1)
    assert tuple(float(each.mean()) for each in means) == pytest.approx(
        (least, most, less_noise, more_noise)
    )
    found = dual_noise_scale(sums)
    assert found.low <= (less_noise / most) ** 2
    if shift:
        assert found.value == pytest.approx(less_noise * more_noise / (least * most))
    else:
        assert (more_noise / max(least, 1e-9) * most / less_noise) ** 2 > APART
        assert "can't be told from that of the noise" in found.value.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("norm", ["l1", "nuclear"])
def test_other_norms_of_a_network_add_up(norm: Any) -> None:
    model, inputs = made("mlp")
    quantity = GradNoiseScale(norm=norm, by="parameter")
    cockpit = Cockpit(model, [quantity])
    x = 5 + 0.1 * inputs(6)
    tracked_backward(cockpit, 0, loss_of(model, x))
    found = cockpit.history["GradNoiseScale"][0]
    each = [gradient(model, sample[None]) for sample in x]
    names = [n for n, p in model.named_parameters() if norm == "l1" or p.dim() > 1]
    rows = [np.stack([g[name].numpy() for g in each]) for name in names]
    of_all = [bounds(each.reshape(*each.shape[:2], -1), norm).mean(1) for each in rows]
    least, most, less_noise, more_noise = np.sum(of_all, 0)
    assert found["trace"] == pytest.approx(less_noise * more_noise)
    assert found["squared_norm"] == pytest.approx(least * most)
    assert [*found["parameters"]] == names


def test_few_samples_have_no_bounds() -> None:
    model, inputs = made("mlp")
    cockpit = Cockpit(model, [GradNoiseScale(norm="l1")])
    tracked_backward(cockpit, 0, loss_of(model, inputs(3)))
    assert "takes 4 samples" in cockpit.history["GradNoiseScale"][0].reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"between": "part"}, "between='part' is none of 'samples', 'parts'"),
        ({"norm": "l3"}, "norm='l3' is none of"),
        ({"smoothing": 1.0}, "use a factor from 0 up to 1"),
        ({"norm": "l1", "smoothing": 0.9}, "leave out between='parts' and smoothing"),
        ({"norm": "nuclear", "between": "parts"}, "leave out between='parts' and smoothing"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GradNoiseScale(**options)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("noise scale, l1, 5 × 6", 64),
        ("noise scale, nuclear, 5 × 6", 64),
        ("noise scale, smoothing 0.99", 20),
    ],
)
def test_intervals_hold_with_normal_noise(kind: str, number: int) -> None:
    (draws,) = (each.draws for each in KINDS if each.name == kind)
    assert coverage(partial(draws["normal"], number), 25).holds >= 0.9
