"""The suite's faults are there, by what is measured in the network and the batches themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.diagnosis.development.problems import BASICS
from benchmarks.diagnosis.faults.catalogue import FAULTS, LIKES, NAMES, SYMPTOMS
from benchmarks.diagnosis.faults.fault import Fault, Injected
from benchmarks.diagnosis.faults.presence import diverges, gained, swings
from benchmarks.diagnosis.loop import Outcome, train
from benchmarks.diagnosis.training import Batch, Training, batches, model_of

PROBLEMS = tuple(training.problem for training in BASICS)
BY_NAME = {problem.name: problem for problem in PROBLEMS}
WAYS = {(fault.name, fault.way): fault for fault in FAULTS}
SEARCHED = {"lr_too_high": ["tanh"], "lr_edge": ["sigmoid"], "overfitting": ["sigmoid"]}
"""Problems for faults whose strengths are searched for by training."""


def injected(name: str, way: str, problem: str, level: int = 2) -> Injected:
    """The strongest injection."""
    fault = WAYS[name, way]
    found = fault.apply(Training(BY_NAME[problem]), fault.strengths[level], 0)
    assert found is not None
    return found


def run_batches(found: Injected) -> list[Batch]:
    """All batches of a run."""
    training = found.training
    return [batch for _, batch in batches(training, training.problem.data(0), 0)]


def first_batch_gradients(found: Injected) -> dict[str, Tensor]:
    """The gradients of the first batch by parameter."""
    model = model_of(found.training, 0)
    batch = run_batches(found)[0]
    found.training.problem.loss(model(batch.inputs), batch.targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def outputs(found: Injected) -> dict[str, Tensor]:
    """What each leaf module gives for the first batch."""
    model, taken = model_of(found.training, 0), dict[str, Tensor]()

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: taken.update({name: output})

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
    model(run_batches(found)[0].inputs)
    return taken


# All of them.


def test_there_are_all_faults_of_the_catalogue() -> None:
    assert len(NAMES) == 38
    assert len(WAYS) == len(FAULTS) >= 41
    assert LIKES.keys() <= {*NAMES}
    assert {*NAMES} >= SYMPTOMS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}, {fault.way}")
def test_each_fault_can_be_injected_at_each_strength(fault: Fault) -> None:
    assert len(set(fault.strengths)) == 3
    problems = [Training(BY_NAME[name]) for name in SEARCHED.get(fault.name, [*BY_NAME])]
    for strength in fault.strengths:
        assert any(fault.apply(each, strength, 0) is not None for each in problems), strength


def _strongest() -> Iterator[tuple[str, Injected]]:
    for fault in FAULTS:
        if fault.name not in SEARCHED:
            found = (fault.apply(Training(p), fault.strengths[2], 0) for p in PROBLEMS)
            yield fault.name, next(each for each in found if each is not None)


@pytest.mark.slow
def test_layers_with_a_fault_are_those_of_the_network() -> None:
    for name, found in _strongest():
        model = model_of(found.training, 0)
        modules = {*dict(model.named_modules()), *dict(model.named_parameters())}
        assert found.layers <= modules, name


@pytest.mark.slow
def test_samples_with_a_fault_are_in_the_batch_of_its_step() -> None:
    for name, found in _strongest():
        if found.samples and found.step is not None:
            ids = {*run_batches(found)[found.step].ids.tolist()}
            assert found.samples <= ids, name


# What a network does.


def test_equal_units_stay_equal() -> None:
    found = injected("symmetric_init", "share of pairs of layers", "MLP", 0)
    model = model_of(found.training, 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in run_batches(found)[:5]:
        optimizer.zero_grad()
        found.training.problem.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    for name in found.layers:
        weight = model.get_submodule(name).get_parameter("weight")
        assert (weight - weight.mean(0)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("way", "problem"),
    [("so many more sigmoids", "tanh"), ("1 over factor of weights", "MLP")],
)
def test_gradients_vanish_towards_the_input(way: str, problem: str) -> None:
    gradients = first_batch_gradients(injected("vanishing_gradients", way, problem))
    sizes = [
        gradient.square().mean().sqrt() for gradient in gradients.values() if gradient.ndim > 1
    ]
    assert sizes[0] < 1e-3 * max(sizes)


def test_units_are_dead() -> None:
    found = injected("dead_units", "share, all layers", "CNN")
    taken = outputs(found)
    for name in found.layers:
        if isinstance(model_of(found.training, 0).get_submodule(name), nn.ReLU):
            dead = (taken[name].transpose(0, 1).flatten(1) == 0).all(1)
            assert dead.float().mean() >= 0.9


def test_a_linear_network_is_linear() -> None:
    found = injected("no_nonlinearity", "share of the activations", "MLP")
    model = model_of(found.training, 0)
    x = run_batches(found)[0].inputs
    torch.testing.assert_close(model(3 * x) - model(0 * x), 3 * (model(x) - model(0 * x)))
    assert found.notice == "never"


# What the optimizer does.


@pytest.mark.parametrize("way", ["from the input on", "from the output on"])
def test_the_optimizer_lacks_parameters(way: str) -> None:
    found = injected("optimizer_misses", way, "CNN")
    model = model_of(found.training, 0)
    passed = {id(parameter) for parameter in found.training.trained(model)}
    missed = {name for name, p in model.named_parameters() if id(p) not in passed}
    assert missed == found.layers
    assert missed


def test_layers_are_frozen() -> None:
    found = injected("frozen_layer", "from the input on", "CNN")
    frozen = {n for n, p in model_of(found.training, 0).named_parameters() if not p.requires_grad}
    assert frozen == found.layers
    assert frozen


@pytest.mark.parametrize(
    "way", ["share of the steps, at the end", "share of the steps with a rate of 0"]
)
def test_without_steps_nothing_is_learnt(way: str) -> None:
    validated = train(injected("no_step", way, "tanh").training, 0).validated
    assert len(set(validated.values())) == 1


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("zero_grad_missing", "zeroed every so many steps"),
        ("weight_decay_high", "steps over memory"),
        ("lr_too_low", "1 over factor"),
        ("labels_random", "share of targets"),
        ("input_constant", "1 over the spread that is left"),
    ],
)
def test_hardly_anything_is_learnt(name: str, way: str) -> None:
    healthy = train(Training(BY_NAME["tanh"]), 0)
    assert gained(train(injected(name, way, "tanh").training, 0), healthy) < 0.3


@pytest.mark.slow
def test_a_rate_that_is_too_high_diverges() -> None:
    healthy = train(Training(BY_NAME["regression"]), 0)
    found = injected("lr_too_high", "times a rate that diverges", "regression")
    assert diverges(train(found.training, 0), healthy)


@pytest.mark.slow
def test_a_rate_at_the_edge_does_harm_without_divergence() -> None:
    healthy = train(Training(BY_NAME["sigmoid"]), 0)
    fault = WAYS["lr_edge", "place between harm and divergence"]
    found = [fault.apply(Training(BY_NAME["sigmoid"]), place, 0) for place in fault.strengths]
    rates = [each.training.problem.rate for each in found if each is not None]
    assert len(rates) == 3
    assert rates == sorted(rates)
    assert all(swings(train(each.training, 0), healthy) for each in found if each is not None)


@pytest.mark.slow
def test_few_samples_are_overfitted() -> None:
    way = "most samples that are overfitted over"
    outcome = train(injected("overfitting", way, "sigmoid", 0).training, 0)
    assert outcome.valid_end > 1.1 * outcome.valid_least


# What the batches are.


@pytest.mark.parametrize("kind", ["NaN", "infinity"])
def test_rows_have_bad_numbers(kind: str) -> None:
    found = injected("nonfinite_input", f"{kind} in a share of one batch", "tanh", 1)
    bad = [
        (step, int(sample))
        for step, batch in enumerate(run_batches(found))
        for sample, row in zip(batch.ids, batch.inputs, strict=True)
        if not row.isfinite().all()
    ]
    assert bad == [(found.step, sample) for sample in found.samples]


@pytest.mark.parametrize(
    ("way", "problem"),
    [("one row of one batch times", "tanh"), ("one row of the data times", "tanh")],
)
def test_one_row_is_large(way: str, problem: str) -> None:
    found = injected("outlier_sample", way, problem)
    assert found.step is not None
    first = run_batches(found)[found.step]
    sizes = first.inputs.square().mean(1).sqrt()
    assert {int(first.ids[sizes.argmax()])} == found.samples
    assert sizes.max() > 20 * sizes.median()
    before = [batch.inputs.abs().max() for batch in run_batches(found)[: found.step]]
    assert max(before, default=torch.zeros(())) < 20


def test_all_labels_of_a_batch_are_wrong() -> None:
    found, split = injected("corrupt_batch", "share of wrong labels", "tanh"), None
    split = BY_NAME["tanh"].data(0)
    wrong = [int((b.targets != split.targets[b.ids]).sum()) for b in run_batches(found)]
    assert [step for step, count in enumerate(wrong) if count] == [found.step]
    assert max(wrong) == BY_NAME["tanh"].batch_size


def test_some_labels_are_wrong() -> None:
    found, split = injected("label_noise", "share of labels", "MLP"), BY_NAME["MLP"].data(0)
    noisy = found.training.problem.data(0)
    wrong = (noisy.targets != split.targets).nonzero()[:, 0]
    assert {*wrong.tolist()} == found.samples
    assert torch.equal(noisy.valid_targets, split.valid_targets)


def outcome(*losses: float) -> Outcome:
    """A run of these losses, whose validation losses are the same."""
    return Outcome([*losses], dict(enumerate(losses)))


def test_divergence_is_a_peak_or_an_end_above_the_start() -> None:
    healthy = outcome(1.0, 0.5, 0.1)
    assert diverges(outcome(1.0, 6.0, 0.1), healthy)
    assert diverges(outcome(1.0, 0.9, math.nan), healthy)
    assert not diverges(outcome(1.0, 0.9, 0.8), healthy)
