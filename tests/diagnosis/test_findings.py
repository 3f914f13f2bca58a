"""Training loops with mistakes that people ask about, and healthy ones: what is said of them."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from gradlens import Cockpit
from gradlens.diagnosis.diagnose import diagnose
from gradlens.history.finding import Finding
from gradlens.messages import GradlensWarning
from tests.cases.steps import take_steps, tracked_backward

STEPS, AT = 60, 40
SAMPLES = 16
SEVENTH = str(SAMPLES * AT + 7)
"""The number of a sample of the batch in which the fault is."""


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    optimizer: Optimizer | None = None,
    update: Callable[[Tensor], object] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Cockpit:
    """Train it, and diagnose while it runs; samples are called by their number in the run."""
    optimizer = Adam(model.parameters(), 1e-3) if optimizer is None else optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradlensWarning)
        cockpit = Cockpit(model, [], diagnose=True, **options)
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(step)
            ids = [*range(SAMPLES * step, SAMPLES * (step + 1))]
            with cockpit(step, loss=loss, optimizer=optimizer, info={"ids": ids}):
                if loss.requires_grad:
                    loss.backward()
            if update is None:
                optimizer.step()
            else:
                update(loss)
        cockpit.close()
    return cockpit


def alarms(cockpit: Cockpit) -> list[Finding]:
    return [each for each in diagnose(cockpit) if each.is_alarm]


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 10)
    return inputs, inputs[:, :3].argmax(1)


# Numbers that aren't finite.


def nan_target(step: int, model: nn.Module) -> Tensor:
    inputs, _ = batch()
    targets = inputs[:, :3].clone()
    targets[7] += math.nan if step == AT else 0
    return functional.mse_loss(model(inputs), targets)


def log_of_zero(step: int, model: nn.Module) -> Tensor:
    inputs, labels = batch()
    shares = model(inputs).softmax(1)
    if step == AT:
        shares = shares * (torch.arange(SAMPLES) != 7)[:, None]
    return functional.cross_entropy(model(inputs), labels) + 0.1 * -(shares.log()).mean()


def division_by_zero(step: int, model: nn.Module) -> Tensor:
    inputs, _ = batch()
    variances = (inputs[:, 1].square() + 1) * (torch.arange(SAMPLES) != (7 if step == AT else -1))
    return ((model(inputs)[:, 0] - inputs[:, 0]).square() / variances).mean()


def empty_mask(step: int, model: nn.Module) -> Tensor:
    inputs, labels = batch()
    chosen = inputs[:, 0] > (9 if step == AT else -9)
    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
    return losses[chosen].mean() + 0.01 * model(inputs).square().mean()


def root_of_zero(step: int, model: nn.Module) -> Tensor:
    inputs, _ = batch()
    inputs[5] *= 0.0 if step == AT else 1.0
    outputs = model(inputs) * inputs[:, :1]
    return (outputs.square().sum(1).sqrt() - 1).square().mean()


@pytest.mark.parametrize(
    ("loss", "fault", "words"),
    [
        (nan_target, "nonfinite_target", [SEVENTH]),
        (log_of_zero, "nonfinite_loss", ["Log of 0", "term 2 of 2", SEVENTH]),
        (division_by_zero, "nonfinite_loss", [SEVENTH]),
        (empty_mask, "nonfinite_loss", ["Mean of no elements", "term 1 of 2"]),
        (root_of_zero, "nonfinite_gradient", ["Sqrt"]),
    ],
)
@pytest.mark.slow
def test_the_first_nan_is_named_at_its_step(
    loss: Callable[[int, nn.Module], Tensor], fault: str, words: list[str]
) -> None:
    model = mlp(10, 16, 3)
    cockpit = train(model, lambda step: loss(step, model))
    found = alarms(cockpit)
    assert (found[0].fault, found[0].step) == (fault, AT)
    assert all(each in found[0].sentence for each in words)
    assert "lr_too_high" not in [each.fault for each in found]
    live = [(each.fault, each.step) for each in cockpit.history.findings]
    assert (fault, AT) in live


@pytest.mark.slow
def test_it_is_told_at_once() -> None:
    model = mlp(10, 16, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer, cockpit = SGD(model.parameters(), 0.01), Cockpit(model, [], diagnose=True)
        for step in range(AT + 1):
            with cockpit(step, loss=(loss := nan_target(step, model)), optimizer=optimizer):
                loss.backward()
            optimizer.zero_grad()
        assert any("NaN or infinite target" in str(each.message) for each in caught)


@pytest.mark.slow
def test_a_micro_batch_is_counted_from_one_and_the_first_culprit_stays() -> None:
    model = mlp(10, 16, 3)
    cockpit, optimizer = Cockpit(model, [], autopsy=True), SGD(model.parameters(), 0.1)
    for step in range(AT + 1):
        for part in range(4):
            inputs, labels = batch()
            inputs[5, 1] += math.nan if (step, part) == (AT, 2) else 0
            loss = functional.cross_entropy(model(inputs), labels) / 4
            info = {"ids": [f"sample {100 * part + n}" for n in range(SAMPLES)]}
            with cockpit(step, loss=loss, loss_scale=1 / 4, accumulating=part < 3, info=info):
                loss.backward()
        optimizer.zero_grad()
    spike = cockpit.history.spikes[AT]
    assert (spike.origin, spike.part, spike.suspects[0].id) == ("input", 3, "sample 205")
    assert diagnose(cockpit)[0].samples == ("sample 205",)
    cockpit.close()


@pytest.mark.slow
def test_a_nan_that_a_skipped_step_has_left_is_not_the_next_one() -> None:
    model = mlp(10, 16, 3)
    cockpit = Cockpit(model, [])
    for step in range(AT + 2):
        inputs, labels = batch()
        inputs[5, 1] += math.nan if step == AT else 0
        tracked_backward(cockpit, step, functional.cross_entropy(model(inputs), labels))
        if step < AT:
            model.zero_grad()
    assert [*cockpit.history.spikes] == [AT]
    cockpit.close()


# What is no fault.


@pytest.mark.parametrize("value", [1e20, 9.97e36])
def test_large_finite_inputs_are_finite(value: float) -> None:
    model = nn.Sequential(nn.Hardtanh(-3, 3), mlp(10, 16, 3))

    def loss_of(step: int) -> Tensor:
        inputs, labels = batch()
        inputs[3, 9] = value if step == 10 else inputs[3, 9]
        return functional.cross_entropy(model(inputs), labels)

    found = train(model, loss_of, steps=20)
    assert "nonfinite_input" not in [each.fault for each in diagnose(found)]
    assert np.nanmax(found.history.facts["steps"].column("bad_rows").numbers()) == 0


def test_updates_by_another_method_are_updates() -> None:
    model = mlp(10, 16, 3)

    def update(loss: Tensor) -> None:
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.05 * each.grad

    assert not alarms(train(model, lambda step: plain(model, *batch()), update=update, steps=30))


def adversaries(cockpit_of: str, detached: bool = False) -> list[str]:
    """The alarms of a generator or its discriminator."""
    generator, discriminator = mlp(8, 16, 2), mlp(2, 16, 1)
    models = {"generator": generator, "discriminator": discriminator}
    optimizers = {name: Adam(each.parameters(), 1e-3) for name, each in models.items()}
    loss = functional.binary_cross_entropy_with_logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradlensWarning)
        cockpit = Cockpit(models[cockpit_of], [], diagnose=True)
        for step in range(100):
            angles = 7 * torch.rand(32)
            real = torch.stack([angles.cos(), angles.sin()], 1)
            fake = generator(torch.randn(32, 8))
            for name in ("discriminator", "generator"):
                for each in optimizers.values():
                    each.zero_grad()
                if name == "discriminator":
                    found = loss(discriminator(real), torch.ones(32, 1))
                    found = found + loss(discriminator(fake.detach()), torch.zeros(32, 1))
                else:
                    found = loss(
                        discriminator(fake.detach() if detached else fake), torch.ones(32, 1)
                    )
                if name == cockpit_of:
                    tracked_backward(cockpit, step, found, optimizer=optimizers[name])
                else:
                    found.backward()
                optimizers[name].step()
        cockpit.close()
    said = {each.fault for each in cockpit.history.findings if each.is_alarm}
    return sorted(said | {each.fault for each in alarms(cockpit)})


@pytest.mark.slow
def test_adversaries_are_healthy() -> None:
    assert adversaries("generator") == []
    assert adversaries("discriminator") == []


@pytest.mark.slow
def test_a_generator_whose_samples_are_detached() -> None:
    assert adversaries("generator", detached=True) == ["no_gradient"]


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "seeds"), [(8, 3), (32, 1)])
def test_small_batches_of_a_healthy_regression(samples: int, seeds: int) -> None:
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

        def loss_of(step: int, network: nn.Module = model) -> Tensor:
            inputs = torch.randn(samples, 10)
            return functional.mse_loss(network(inputs), inputs[:, :1])

        optimizer = Adam(model.parameters(), 1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradlensWarning)
            cockpit = Cockpit(model, [], diagnose=True)
            take_steps(cockpit, optimizer, loss_of, range(600))
        found = [*cockpit.history.findings, *diagnose(cockpit)]
        assert not [each.fault for each in found if each.is_alarm]


class LastState(nn.Module):
    """A recurrent layer, and a linear one on its last state."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(5, 8, batch_first=batch_first), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(x)[1][0])
        return found


@pytest.mark.parametrize("tracked", [[], ["NormTest"]], ids=str)
@pytest.mark.parametrize(("batch_first", "samples"), [(False, 32), (True, 32), (True, 4)])
def test_steps_in_the_first_axis_are_no_small_batch(
    batch_first: bool, samples: int, tracked: list[str]
) -> None:
    torch.manual_seed(0)
    model = LastState(batch_first)
    cockpit = Cockpit(model, tracked)
    for step in range(9):
        inputs = torch.randn((samples, 4, 5) if batch_first else (4, samples, 5))
        inputs[(0, 0) if batch_first else (0,)] *= 1000.0 if step == 4 else 1.0
        loss = functional.cross_entropy(model(inputs), torch.randint(3, (samples,)))
        tracked_backward(cockpit, step, loss)
    cockpit.close()
    faults = {each.fault for each in diagnose(cockpit)}
    assert ("batch_too_small" in faults) == (samples == 4)
    assert batch_first or "outlier_sample" not in faults


# What a loss can't be learnt from.


def softmax_over_samples(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(model(inputs).log_softmax(0), labels)


def one_class(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy(model(inputs)[:, :1].softmax(1), labels[:, None] / 2)


def plain(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), labels)


NAMED: Mapping[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "softmax_axis": softmax_over_samples,
    "one_element": one_class,
    "": plain,
}


@pytest.mark.parametrize("fault", NAMED)
def test_what_the_graph_shows(fault: str) -> None:
    model = mlp(10, 16, 3)
    found = alarms(train(model, lambda step: NAMED[fault](model, *batch()), steps=30))
    assert [each.fault for each in found if not each.explained_by] == ([fault] if fault else [])
