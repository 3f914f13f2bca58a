"""Samples are followed by their ids, and ranked."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import gradlens
from gradlens import Cockpit, History, quantities
from gradlens.cli.diagnosis_text import samples_text
from gradlens.diagnosis.samples import have_losses, rank
from gradlens.history.records import Samples
from gradlens.instruments.scales import number_label
from gradlens.observers import sample_log
from gradlens.schedules import linear
from tests.cases.spikes import classification, regression, smoothed, train
from tests.cases.steps import tracked_backward


def samples_of(cockpit: Cockpit | None) -> Samples:
    assert cockpit is not None
    assert cockpit.history.samples is not None
    return cockpit.history.samples


@pytest.mark.parametrize("as_ids", ["numbers", "texts", "array"])
def test_losses_and_norms_of_each_sample(as_ids: str) -> None:
    network = nn.Linear(5, 3)
    inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 3
    cockpit = Cockpit(network, [quantities.NormTest(linear(2))])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses: dict[Any, list[float]] = {}
    norms: dict[Any, list[float]] = {}
    excess: dict[Any, list[float]] = {}
    for step in range(20):
        drawn = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:8]
        outputs = network(inputs[drawn])
        each = functional.cross_entropy(outputs, labels[drawn], reduction="none").detach()
        loss = functional.cross_entropy(outputs, labels[drawn])
        choices: dict[str, Any] = {
            "numbers": drawn.tolist(),
            "texts": [f"s{n}" for n in drawn.tolist()],
            "array": drawn.numpy(),
        }
        ids = choices[as_ids]
        optimizer.zero_grad()
        tracked_backward(cockpit, step, loss, info={"ids": ids})
        error = outputs.detach().softmax(1) - functional.one_hot(labels[drawn], 3)
        squared = error.square().sum(1) * (inputs[drawn].square().sum(1) + 1)
        relative = (squared / squared.mean()).sqrt()
        for place, name in enumerate(ids):
            losses.setdefault(name, []).append(float(each[place]))
            excess.setdefault(name, []).append(float(each[place]) - float(np.median(each)))
            if step % 2 == 0:
                norms.setdefault(name, []).append(float(relative[place]))
        optimizer.step()
    cockpit.close()
    samples = samples_of(cockpit)
    assert {*samples.ids} == {*losses}
    for place, name in enumerate(samples.ids):
        known = losses[name]
        assert samples.visits[place] == len(known)
        assert samples.mean_loss[place] == pytest.approx(np.mean(known), rel=1e-5)
        assert samples.excess[place] == pytest.approx(np.mean(excess[name]), abs=1e-5)
        assert samples.last_loss[place] == pytest.approx(known[-1], rel=1e-5)
        if name in norms:
            assert samples.norm[place] == pytest.approx(np.mean(norms[name]), rel=1e-4)
        else:
            assert math.isnan(samples.norm[place])
        number = int(str(name).removeprefix("s"))
        assert samples.label[place] == number % 3


def test_losses_of_permuted_rows() -> None:
    """The loss function's rows may have another order than the tensors that its terms are."""
    network = nn.Linear(5, 3)
    inputs, labels = torch.randn(8, 5), torch.arange(8) % 3
    cockpit = Cockpit(network, [quantities.NormTest()])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    outputs = network(inputs)
    loss = functional.nll_loss(outputs.log_softmax(1)[order], labels[order])
    tracked_backward(cockpit, 0, loss, info={"ids": [*range(8)]})
    cockpit.close()
    expected = functional.cross_entropy(outputs, labels, reduction="none").detach()
    np.testing.assert_allclose(samples_of(cockpit).last_loss, expected.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(samples_of(cockpit).label, labels.numpy())


def test_real_targets_have_no_classes() -> None:
    ranked = rank(samples_of(train(regression()).cockpit))
    assert {each.label for each in ranked} == {None}
    assert not any(each.is_contradicted for each in ranked)


def test_losses_that_the_user_passes() -> None:
    network = nn.Linear(2, 1)
    cockpit = Cockpit(network, [])
    for step in range(3):
        each = network(torch.eye(2)[[0, 1, 1]]).square().flatten()
        loss = (each * torch.tensor([1.0, 2.0, 3.0])).mean()
        info = {"ids": ["a", "b", "c"], "individual_losses": each * torch.tensor([1.0, 2.0, 3.0])}
        tracked_backward(cockpit, step, loss, info=info)
    cockpit.close()
    samples = samples_of(cockpit)
    assert samples.ids == ("a", "b", "c")
    assert samples.mean_loss[2] == pytest.approx(1.5 * samples.mean_loss[1], rel=1e-5)


def test_what_cannot_be_had_is_noted_once() -> None:
    problem = classification()
    problem.loss = smoothed
    with pytest.warns(gradlens.GradlensWarning, match="losses of single samples") as caught:
        found = train(problem, quantities=[quantities.NormTest(linear(5))])
    assert len(caught) == 1
    samples = samples_of(found.cockpit)  # norms alone
    assert not samples.visits.any()
    assert rank(samples)[0].score > -math.inf


@pytest.mark.filterwarnings("ignore::gradlens.GradlensWarning")
@pytest.mark.parametrize("chance_of_losses", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tracked", [[], [quantities.NormTest]])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_of_no_sample_is_not_a_number(
    tracked: list[Any], chance_of_losses: float, seed: int, tmp_path: Path
) -> None:
    """Losses are passed at some steps, and some of them are infinite."""
    draw, run = random.Random(seed), tmp_path / "run.jsonl"
    network, losses, seen = nn.Linear(2, 1), dict[int, list[float]](), set[int]()
    inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
    for resumed in (False, True):
        cockpit = Cockpit(network, [kind() for kind in tracked], run=run, resume=resumed)
        for step in range(3):
            ids = draw.sample(range(8), 4)
            loss = network(inputs[ids]).square().mean()
            info: dict[str, Any] = {"ids": ids}
            if draw.random() < chance_of_losses:
                known = [draw.choice([draw.random(), math.inf, math.nan]) for _ in ids]
                info["individual_losses"] = torch.tensor(known)
                for name, each in zip(ids, known, strict=True):
                    losses.setdefault(name, []).extend([each] * math.isfinite(each))
            seen |= {*ids}
            tracked_backward(cockpit, 3 * resumed + step, loss, info=info)
        cockpit.close()
    samples = cockpit.history.samples
    if samples is None:
        assert not tracked
        assert not any(losses.values())
        return
    for place, name in enumerate(samples.ids):
        known = losses.get(name, [])
        assert samples.visits[place] == len(known)
        for found, truth in ((samples.last_loss, known[-1:]), (samples.mean_loss, known)):
            expected = np.mean(truth) if truth else math.nan
            assert found[place] == pytest.approx(expected, rel=1e-5, nan_ok=True)
    text = samples_text(samples, rank(samples), "run")
    assert have_losses(samples) == any(losses.values())
    assert ("mean of a sample's losses" in text) == any(losses.values())
    assert ("how far a sample's norm" in text.replace("\n", " ")) != any(losses.values())
    for each, line in zip(rank(samples), text.splitlines()[3:], strict=False):
        numbers = (each.score, each.visits, each.mean_loss, each.last_loss, each.norm)
        shown = [number_label(n) for n in numbers[:1] + numbers[2:] if math.isfinite(n)]
        assert sorted(line.split()) == sorted([f"{each.id}", f"{each.visits}", *shown])


def test_another_number_of_ids_is_noted() -> None:
    network = nn.Linear(2, 2)
    cockpit = Cockpit(network, [])
    loss = functional.cross_entropy(network(torch.ones(3, 2)), torch.zeros(3, dtype=torch.long))
    with (
        pytest.warns(gradlens.GradlensWarning, match="2 ids were passed"),
        cockpit(0, loss=loss, info={"ids": [1, 2]}),
    ):
        loss.backward()
    cockpit.close()
    assert cockpit.history.samples is None


@pytest.mark.parametrize("ids", [[1.5], 7, "abc", [None], torch.ones(2, 2).tolist(), [b"x"]])
def test_what_are_no_ids(ids: object) -> None:
    cockpit = Cockpit(nn.Linear(1, 1), [])
    with pytest.raises(TypeError, match="no ids of samples"):
        cockpit(0, info={"ids": ids})


def test_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "MOST_SAMPLES", 20)
    samples = samples_of(train(classification()).cockpit)
    assert len(samples) == 20
    assert samples.left_out == 20  # as many are counted at most


@pytest.mark.slow
def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    problem = classification()
    whole = samples_of(train(problem, quantities=[quantities.Loss()], run=path).cockpit)
    read = History.load(path).samples
    assert read is not None
    assert read.ids == whole.ids
    assert np.array_equal(read.excess, whole.excess)
    again = train(problem, quantities=[quantities.Loss()], run=path, resume=True)
    twice = samples_of(again.cockpit)
    assert {*twice.ids} == {*whole.ids}
    assert np.array_equal(twice.visits, 2 * whole.visits)


def with_values(values: NDArray[np.float32]) -> Samples:
    """Samples all of whose numbers are these, without classes."""
    visits = np.zeros(len(values), np.int32)
    ids = tuple(range(len(values)))
    classes = visits - 1
    return Samples(0, ids, visits, values, values, values, values, classes, classes)


def test_a_ranking_of_anything() -> None:
    nothing = np.full(5, np.nan, np.float32)
    assert [each.score for each in rank(with_values(nothing))] == [-math.inf] * 5
    infinite = nothing.copy()
    infinite[0] = np.inf
    assert len(rank(with_values(infinite), 2)) == 2
    equal = np.ones(5, np.float32)
    assert [each.score for each in rank(with_values(equal))] == [0.0] * 5
    assert rank(with_values(np.zeros(0, np.float32))) == []
