"""The sample, the layer and the step behind a jump of the loss are the right ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import gradlens
from gradlens import History, quantities
from gradlens.cockpit.cockpit import Cockpit
from gradlens.diagnosis.autopsy import autopsy
from gradlens.history.spikes import NEVER, Spike
from gradlens.operators.operator import GradientOperator
from gradlens.schedules import linear
from tests.cases.row_cases import Net
from tests.cases.spikes import (
    AT,
    BAD,
    SAMPLES,
    Damage,
    Problem,
    bad_batch,
    bad_target,
    classification,
    images,
    nan_input,
    nan_target,
    nan_weight,
    outlier,
    regression,
    smoothed,
    train,
)
from tests.cases.steps import tracked_backward

pytestmark = pytest.mark.filterwarnings("ignore:.*normalisation over the batch")


def only_spike(cockpit: Cockpit | None) -> Spike:
    assert cockpit is not None
    assert [*cockpit.history.spikes] == [AT]
    return cockpit.history.spikes[AT]


@pytest.mark.parametrize("problem", [classification, regression])
@pytest.mark.parametrize("scheduled", [(), (quantities.NormTest,)])
def test_an_outlier(
    problem: Callable[[], Problem], scheduled: tuple[type[quantities.NormTest], ...]
) -> None:
    damage = bad_target if problem is regression else outlier
    tracked = [quantity(linear(10, offset=3)) for quantity in scheduled]
    found = train(problem(), damage, tracked)
    spike = only_spike(found.cockpit)
    worst = spike.suspects[0]
    assert (worst.index, worst.id) == (BAD, found.bad_id)
    assert worst.share > 0.95
    assert worst.loss_share > 0.5
    assert spike.samples == SAMPLES
    assert spike.loss == found.losses[AT]
    assert spike.back is not None
    assert set(spike.ratios) == (set(spike.layers) if scheduled else set())
    assert all(ratio > 5 for ratio in spike.ratios.values())
    conclusion = autopsy(spike)
    assert (conclusion.cause, conclusion.certainty) == ("sample", "very likely")
    assert conclusion.samples == (found.bad_id,)


def test_the_numbers_are_those_of_per_sample_gradients() -> None:
    problem = classification()
    seen: dict[str, Tensor] = {}

    def keep(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
        outlier(inputs, targets, network)
        loss = functional.cross_entropy(network(inputs), targets)
        with gradlens.per_sample_gradients(network, loss=loss) as gradients:
            loss.backward()
        operators: dict[str, GradientOperator] = dict(gradients)
        seen.update({name: each.squared_norms() for name, each in operators.items()})
        losses = functional.cross_entropy(network(inputs), targets, reduction="none")
        seen["losses"] = losses.detach()
        sums = [torch.autograd.grad(each.sum(), [*network.parameters()], retain_graph=True)
                for each in (losses, others(losses))]  # fmt: skip
        norm, without = (torch.cat([g.flatten() for g in each]).norm() for each in sums)
        seen["without"] = without / (len(losses) - 1) / (norm / len(losses))

    spike = only_spike(train(problem, keep).cockpit)
    losses, without = seen.pop("losses"), seen.pop("without")
    assert spike.suspects[0].loss_without == pytest.approx(float(others(losses).mean()), rel=1e-5)
    assert spike.suspects[0].norm_without == pytest.approx(float(without), rel=1e-2)
    assert "Without it, the mean loss" in autopsy(spike).text
    layers = {
        layer: sum(float(each.sum()) for name, each in seen.items() if name.startswith(layer))
        for layer in ("0", "2")
    }
    assert spike.layers == pytest.approx(layers, rel=1e-5)
    total = sum(seen.values())
    assert isinstance(total, Tensor)
    for suspect in spike.suspects:
        assert suspect.share == pytest.approx(float(total[suspect.index] / total.sum()), rel=1e-4)
        assert suspect.loss == pytest.approx(float(losses[suspect.index]), rel=1e-5)
    assert [each.index for each in spike.suspects] == total.topk(4).indices.tolist()


def others(losses: Tensor) -> Tensor:
    return torch.cat([losses[:BAD], losses[BAD + 1 :]])


@pytest.mark.slow
def test_leaving_out_whom_it_names_avoids_what_leaving_out_the_bad_samples_avoids() -> None:
    """Of the other samples' loss after the update: at least 80 %, in 95 % of 20 runs."""
    shares = []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        bad = [*map(int, generator.permutation(SAMPLES)[: generator.integers(1, 4)])]
        factor = float(10 ** generator.uniform(2, 3))
        seen: list[Any] = []

        def damage(
            inputs: Tensor,
            targets: Tensor,
            network: nn.Module,
            bad: list[int] = bad,
            factor: float = factor,
            seen: list[Any] = seen,
        ) -> None:
            if targets.is_floating_point():
                targets[bad] = factor
            else:
                inputs[bad] *= factor
                targets[bad] = network(inputs[bad]).argmin(1)
            seen += [inputs, targets, copy.deepcopy(network)]

        problem = classification() if seed % 2 else regression()
        spike = only_spike(train(problem, damage, with_ids=False).cockpit)
        named = [int(each) for each in autopsy(spike).samples]
        none, by_name, by_truth = (
            loss_after(problem, *seen, left_out, bad) for left_out in ([], named, bad)
        )
        shares.append((none - by_name) / (none - by_truth))
    assert sum(share >= 0.8 for share in shares) >= 19


def loss_after(
    problem: Problem,
    inputs: Tensor,
    targets: Tensor,
    network: nn.Module,
    left_out: list[int],
    bad: list[int],
) -> float:
    """The loss of the samples that aren't bad, after an update without some."""
    moved = copy.deepcopy(network)
    kept, healthy = ([n for n in range(SAMPLES) if n not in those] for those in (left_out, bad))
    problem.loss(moved(inputs[kept]), targets[kept]).backward()
    SGD(moved.parameters(), lr=0.1).step()
    return float(problem.loss(moved(inputs[healthy]), targets[healthy]).detach())


@pytest.mark.parametrize("problem", [classification, regression])
def test_a_bad_batch(problem: Callable[[], Problem]) -> None:
    def damage(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
        bad_batch(inputs, targets, network)
        if targets.is_floating_point():
            targets += 20

    spike = only_spike(train(problem(), damage, rate=lambda step: 0.001).cockpit)
    assert spike.suspects[0].share < 0.5
    assert spike.back == 1
    assert autopsy(spike).cause == "batch"
    assert autopsy(spike).certainty == "very likely"


def with_network(build: Callable[[], nn.Module]) -> Callable[[], Problem]:
    def problem() -> Problem:
        found = classification()
        found.network = build()
        return found

    return problem


def logarithm() -> nn.Module:
    """NaN for samples whose first entry is far below zero."""
    return Net(
        lambda net, x: torch.cat([net.inner(x)[:, :3], (x[:, :1] + 9).log()], 1),
        inner=nn.Sequential(nn.Linear(20, 4), nn.Tanh()),
    )


def root() -> nn.Module:
    """The derivative of the square root at zero is infinite, and zero times it is NaN."""

    def compute(net: Any, x: Tensor) -> Tensor:
        outputs: Tensor = net.network(x)
        roots = (x[:, :1] * outputs[:, :1] * 0).abs().sqrt() * 0
        return outputs + roots if x[BAD, 0] == 0 else outputs

    return Net(compute, network=nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4)))


def filled(value: float) -> Damage:
    def damage(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
        inputs[BAD] = value

    return damage


ORIGINS: list[tuple[Callable[[], Problem], Damage, str, str]] = [
    (classification, nan_input, "input", ""),
    (images, nan_input, "input", ""),
    (regression, nan_target, "target", ""),
    (regression, nan_input, "input", ""),
    (classification, nan_weight, "weights", "2"),
    (with_network(logarithm), filled(-50), "forward", ""),
    (classification, filled(3e38), "forward", "0"),
    (with_network(root), filled(0), "backward", "network.2"),
]


@pytest.mark.parametrize(("problem", "damage", "origin", "place"), ORIGINS)
def test_where_a_nan_comes_from(
    problem: Callable[[], Problem], damage: Damage, origin: str, place: str
) -> None:
    """The sample or the layer, the first one that overflows."""
    found = train(problem(), damage)
    spike = only_spike(found.cockpit)
    assert spike.origin == origin
    assert math.isfinite(spike.loss) == (origin == "backward")
    assert not place or spike.place == place
    if origin in ("weights", "backward"):
        assert spike.suspects == () or origin == "backward"
        assert autopsy(spike).where == place
    else:
        assert [(each.index, each.id) for each in spike.suspects] == [(BAD, found.bad_id)]
        assert spike.back == NEVER or spike.back is None
    if origin != "forward":
        assert (autopsy(spike).cause, autopsy(spike).certainty) == (origin, "fact")


def test_gradients_that_a_scaler_leaves_out_are_no_spike() -> None:
    network = nn.Linear(4, 1)
    cockpit = Cockpit(network, [])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    loss = network(torch.full((3, 4), 1e38)).mean() * 1e-3
    with cockpit(0, loss=loss, scaler=scaler):
        scaler.scale(loss).backward()
    assert network.weight.grad is not None
    assert not network.weight.grad.isfinite().all()
    assert not cockpit.history.spikes


@pytest.mark.slow
def test_a_healthy_run_has_none() -> None:
    for problem in (classification, images, regression):
        found = train(problem(), steps=150)
        assert found.cockpit is not None
        assert not found.cockpit.history.spikes


def test_nothing_is_read_if_it_is_switched_off() -> None:
    found = train(classification(), outlier, autopsy=False)
    assert found.cockpit is not None
    assert not found.cockpit.history.spikes


@pytest.mark.slow
def test_a_new_level_of_the_loss_is_one_spike() -> None:
    def damage(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
        problem.targets += 20

    problem = regression()
    found = train(problem, damage, steps=200, rate=lambda step: 1e-5)
    assert found.cockpit is not None
    assert [*found.cockpit.history.spikes] == [AT + 1]
    spike = found.cockpit.history.spikes[AT + 1]
    assert spike.back == NEVER
    assert autopsy(spike).certainty == "consistent with"


def test_without_a_loss_nothing_happens() -> None:
    network = nn.Linear(3, 1)
    cockpit = Cockpit(network, [])
    for step in range(20):
        loss = network(torch.full((4, 3), 1.0 if step < 19 else 1e6)).square().mean()
        with cockpit(step):
            loss.backward()
    assert not cockpit.history.spikes


@pytest.mark.slow
def test_micro_batches() -> None:
    """A spike is that of one micro-batch, and values of the whole step are what they are."""
    problem = classification()
    values = []
    state = nn.Sequential(nn.Linear(20, 4)).state_dict()
    for wanted in (True, False):
        network = nn.Sequential(nn.Linear(20, 4))
        network.load_state_dict(state)
        cockpit = Cockpit(network, [quantities.NormTest()], autopsy=wanted)
        for step in range(20):
            for part in range(3):
                rows = slice(96 * step % 400 + 8 * part, 96 * step % 400 + 8 * part + 8)
                inputs, ids = problem.inputs[rows].clone(), range(512)[rows]
                if (step, part) == (15, 1):
                    inputs[5] *= -1000
                loss = functional.cross_entropy(network(inputs), problem.targets[rows])
                scaled = loss / 3
                info = {"ids": [*ids]}
                with cockpit(step, loss=scaled, loss_scale=1 / 3, accumulating=part < 2, info=info):
                    scaled.backward()
            network.zero_grad()
        values.append([*cockpit.history["NormTest"].values()])
        if wanted:
            assert [*cockpit.history.spikes] == [15]
            spike = cockpit.history.spikes[15]
            assert spike.part == 2
            assert spike.suspects[0].index == 5
            assert spike.suspects[0].id == 96 * 15 % 400 + 8 + 5
            assert spike.suspects[0].share > 0.9
        cockpit.close()
    assert values[0] == values[1]


def test_a_loss_that_no_single_node_shows() -> None:
    problem = classification()
    problem.loss = smoothed
    found = train(problem, outlier, with_ids=False)
    worst = only_spike(found.cockpit).suspects[0]
    assert worst.index == BAD
    assert worst.share > 0.9
    assert math.isnan(worst.loss)
    assert worst.input_ratio > 50


WORDS, LENGTH, WRONG = 12, 8, 6

LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "joined": lambda o, y: functional.cross_entropy(o.reshape(-1, WORDS), y.reshape(-1)),
    "channels": lambda o, y: functional.cross_entropy(o.transpose(1, 2), y),
    "by position": lambda o, y: functional.cross_entropy(
        o.transpose(0, 1).reshape(-1, WORDS), y.t().reshape(-1)
    ),
    "sum": lambda o, y: functional.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_positions_of_a_sample(layout: str) -> None:
    """Each word follows the one before, but for wrong labels of one sample."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    reduction = "sum" if layout == "sum" else "mean"
    cockpit = Cockpit(network, [], loss_reduction=reduction)
    for step in range(AT + 1):
        text = (torch.randint(WORDS, (4, 1)) + torch.arange(LENGTH + 1)) % WORDS
        inputs, targets, ids = text[:, :-1], text[:, 1:].clone(), [100 + step + n for n in range(4)]
        places = torch.randperm(LENGTH)[:WRONG]
        if step == AT:
            targets[2, places] = (targets[2, places] + 5) % WORDS
        outputs = network(inputs)
        loss = LAYOUTS[layout](outputs, targets)
        optimizer.zero_grad()
        with cockpit(step, loss=loss, info={"ids": ids}):
            loss.backward()
        optimizer.step()
    cockpit.close()
    worst = only_spike(cockpit).suspects[0]
    logits = outputs.detach().transpose(1, 2)
    losses = functional.cross_entropy(logits, targets, reduction="none")[2]
    assert worst.id == ids[2]
    assert {each.index for each in worst.positions} < {*places.tolist()}
    for each in worst.positions:
        assert each.target == targets[2, each.index]
        assert each.share == pytest.approx(float(losses[each.index] / losses.sum()), rel=1e-5)
    of_sample = losses.sum() if layout == "sum" else losses.mean()
    assert worst.loss == pytest.approx(float(of_sample), rel=1e-5)
    samples = cockpit.history.samples
    assert samples is not None
    place = samples.ids.index(ids[2])
    assert samples.last_loss[place] == pytest.approx(float(of_sample), rel=1e-5)
    conclusion = autopsy(only_spike(cockpit))
    assert f"{worst.positions[0].index} (label {worst.positions[0].target})" in conclusion.text


def test_without_per_sample_gradients_the_spike_is_recorded_with_the_reason() -> None:
    network = nn.Linear(3, 2)
    cockpit = Cockpit(network, [])
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for step in range(20):
        outputs = network(inputs * (1 if step < 19 else 1e4))
        loss = outputs.mean(0).square().sum()  # samples meet before the loss
        tracked_backward(cockpit, step, loss)
        network.zero_grad()
    spike = cockpit.history.spikes[19]
    assert spike.without_norms or spike.suspects
    assert autopsy(spike).certainty == "consistent with"


def test_rates_and_sharpness() -> None:
    tracked = [quantities.HessMaxEV(linear(13))]
    found = train(classification(), None, tracked, rate=lambda step: 200.0 if step >= AT else 0.1)
    assert found.cockpit is not None
    first = min(found.cockpit.history.spikes)
    spike = found.cockpit.history.spikes[first]
    assert first > AT
    assert spike.rate == 200
    assert spike.rate_before in (0.1, 200)
    assert spike.sharpness_step == 39
    assert spike.threshold == pytest.approx(2 / 200)
    assert autopsy(spike).cause == "rate"


def test_spikes_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    found = train(classification(), outlier, [quantities.Loss()], run=path)
    assert found.cockpit is not None
    read = History.load(path)
    assert repr(read.spikes) == repr(found.cockpit.history.spikes)
    assert read[: AT + 1].spikes.keys() == {AT}
    assert not read[:AT].spikes
    read.write(tmp_path / "copy.jsonl")
    assert repr(History.load(tmp_path / "copy.jsonl").spikes) == repr(read.spikes)
    problem = classification()
    cockpit = Cockpit(problem.network, [quantities.Loss()], run=path, resume=True)
    assert cockpit.history.spikes.keys() == {AT}
    cockpit.close()


def test_a_run_that_goes_back_loses_later_spikes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    network = nn.Linear(2, 1)
    optimizer = SGD(network.parameters(), lr=1e-9)
    inputs = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))

    def step(cockpit: Cockpit, number: int, factor: float = 1) -> None:
        loss = (network(inputs) * factor).square().mean()
        optimizer.zero_grad()
        tracked_backward(cockpit, number, loss, optimizer=optimizer)

    cockpit = Cockpit(network, [], run=path)
    for number in range(20):
        step(cockpit, number)
    state = cockpit.state_dict()
    step(cockpit, 20, 100)
    assert [*cockpit.history.spikes] == [20]
    cockpit.close()
    cockpit = Cockpit(network, [], run=path, resume=True)
    cockpit.load_state_dict(state)
    assert not cockpit.history.spikes
    assert not History.load(path).spikes
    step(cockpit, 20)
    step(cockpit, 21, 100)
    assert [*cockpit.history.spikes] == [21]
    cockpit.close()
