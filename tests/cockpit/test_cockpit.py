"""The context around backward: no side effects, clear errors, nothing lost."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.quantities import Quantity, SingleStepQuantity
from gradlens.quantities.step import Step
from tests.cases.references import assert_covered
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

CURVED = quantities.CurvatureQuantity | quantities.GradientCurvatureQuantity


def every_quantity() -> list[Quantity]:
    """All that need neither per-sample losses nor an optimizer nor second derivatives."""
    return [
        *(
            q
            for q in gradlens.configuration("full")
            if not isinstance(q, CURVED | quantities.Alpha)
        ),
        quantities.Parameters(),
        quantities.EarlyStopping(),
        quantities.GradNoiseScale(),
        quantities.GradHist1d(
            bins=7, adapt=quantities.bin_adaptation.GradAbsMax(), keep_individual=True, name="fine"
        ),
    ]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_of(model: nn.Module, n: int = 5) -> Tensor:
    return model(torch.randn(n, 4)).square().mean()


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.usefixtures("no_other_objects")
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_step_keeps_no_tensor(model: nn.Module, scheduled: bool) -> None:
    chosen = [type(q)(lambda _: scheduled) for q in every_quantity()[:-1]]
    cockpit = Cockpit(model, chosen, facts=False, autopsy=False)

    def step(number: int) -> None:
        tracked_backward(cockpit, number, loss_of(model))
        model.zero_grad()

    step(0)
    before = tensors_alive()
    for number in range(1, 4):
        step(number)
    assert tensors_alive() == before


@pytest.mark.usefixtures("no_other_objects")
@pytest.mark.parametrize("tracked", [True, False])
def test_inputs_are_freed_by_backward(model: nn.Module, tracked: bool) -> None:
    """Even while the user still holds the loss."""
    cockpit = Cockpit(model, [quantities.NormTest()])
    loss = model(torch.randn(5, 4) + 0).square().mean()
    tracked_backward(cockpit if tracked else None, 0, loss)
    del cockpit
    held = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (5, 4)]
    assert not held
    assert loss.isfinite()


@pytest.mark.usefixtures("no_other_objects")
def test_a_forward_pass_without_backward_is_freed_with_its_graph(model: nn.Module) -> None:
    gradlens.extend(model)
    output = model(torch.randn(5, 4))
    before = tensors_alive()
    del output
    assert tensors_alive() < before
    held = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (5, 4)]
    assert not held


@pytest.mark.slow
def test_threads_do_not_meet() -> None:
    def run(seed: int, results: dict[int, list[float]]) -> None:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        cockpit = Cockpit(model, [quantities.NormTest()])
        for step in range(50):
            model.zero_grad()
            loss = model(torch.randn(6, 4, generator=generator)).square().mean()
            tracked_backward(cockpit, step, loss)
        results[seed] = list(cockpit.history["NormTest"].values())

    alone: dict[int, list[float]] = {}
    for seed in (1, 2):
        run(seed, alone)
    together: dict[int, list[float]] = {}
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in (1, 2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # 5 ms by default, in which a whole step is done
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert together == alone


def test_warnings_point_at_the_users_line(model: nn.Module) -> None:
    cockpit = Cockpit(model, [quantities.NormTest()])
    with pytest.warns(UserWarning, match="add up") as caught, cockpit(0):
        (loss_of(model) + model[0].weight.sum()).backward()
    assert caught[0].filename == __file__


def test_input_that_was_overwritten_is_not_needed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    model[1].weight.requires_grad_(False)
    hidden = model[0](torch.randn(5, 4, dtype=torch.float64))
    losses = model[1](hidden).square().mean(1)
    with torch.no_grad():
        hidden.zero_()
    assert_covered(model, losses, batch_size=5)


class Centres(nn.Module):
    """Samples meet here."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_what_is_not_covered_is_said() -> None:
    """And quantities describe the rest alone."""
    model = nn.Sequential(nn.Linear(4, 3), Centres(), nn.Linear(3, 2)).double()
    rest = copy.deepcopy(model)
    rest[0].requires_grad_(False)
    inputs = torch.randn(5, 4, dtype=torch.float64)
    match = r"cover 34.78 % .* Missing are 0.weight, 0.bias, .* meet between it and 2\.\w+, "
    cockpit = Cockpit(model, [quantities.NormTest()])
    with pytest.warns(UserWarning, match=match), cockpit(0):
        model(inputs).square().mean().backward()
    alone = Cockpit(rest, [quantities.NormTest()])
    with alone(0):
        rest(inputs).square().mean().backward()
    assert cockpit.history["NormTest"][0] == pytest.approx(alone.history["NormTest"][0], rel=1e-12)
    assert math.isfinite(cockpit.history["NormTest"][0])


class NamesOfInfo(SingleStepQuantity):
    def compute(self, step: Step) -> list[str]:
        return sorted(step.info)


def test_own_quantity_sees_all_of_info(model: nn.Module) -> None:
    cockpit = Cockpit(model, [NamesOfInfo()])
    with cockpit(0, info={"mine": 1}, batch_size=5):
        loss_of(model).backward()
    assert cockpit.history["NamesOfInfo"][0] == ["batch_size", "mine"]


def test_extended_models_can_be_copied_and_pickled(model: nn.Module) -> None:
    gradlens.extend(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with gradlens.per_sample_gradients(clone) as gradients:
            loss_of(clone).backward()
        assert set(gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_parameters_without_gradient_are_left_out_as_optimizers_do(model: nn.Module) -> None:
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    cockpit = Cockpit(model, [quantities.GradNorm()])
    with cockpit(0):
        loss_of(model).backward()
    with cockpit(1):
        model.zero_grad()
    norms = cockpit.history["GradNorm"]
    assert norms[0].keys() == {n for n, _ in model.named_parameters()} - {"unused"}
    assert "no parameter has a gradient" in norms[1].reason


def test_numbers_of_samples_that_contradict_each_other(model: nn.Module) -> None:
    """Nothing is guessed, and both are named."""
    layers = {"first": nn.Linear(4, 3), "last": nn.Linear(4, 2)}
    transposing = gradlens.extend(
        Net(lambda net, x: net.last(net.first(x).T.reshape(3, -1)[:, :4]), **layers)
    )
    cockpit = Cockpit(transposing, [quantities.NormTest(), quantities.Time()])
    match = r"called with 5 rows.*of shape \[3, 2\].*batch_size="
    with pytest.warns(UserWarning, match=f"cover 0 %.*{match}"), cockpit(0):
        loss_of(transposing).backward()
    assert set(cockpit.get_output()[0]) == {"NormTest", "Time"}
    with gradlens.per_sample_gradients(transposing) as gradients:
        loss_of(transposing).backward()
    with pytest.raises(KeyError, match=f"first.weight.*{match}"):
        gradients["first.weight"]
    cockpit = Cockpit(model, [quantities.NormTest()])
    with (
        pytest.warns(UserWarning, match=r"cover 0 %.*N = 7 by batch_size=.*of shape \[5"),
        cockpit(0, batch_size=7),
    ):
        loss_of(model).backward()
    assert "N = 7 by batch_size=" in cockpit.history["NormTest"][0].reason


@pytest.mark.parametrize("outputs", [3, 4])
def test_a_sample_without_an_axis_of_samples(outputs: int) -> None:
    """Is one sample if the user says so, and its outputs are never taken for several."""
    layer, inputs = gradlens.extend(nn.Linear(4, outputs)).double(), torch.randn(4).double()
    with gradlens.per_sample_gradients(layer, batch_size=1) as gradients:
        layer(inputs).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name].dense(), parameter.grad[None])
    with gradlens.per_sample_gradients(layer) as gradients:
        layer(inputs).sum().backward()
    assert not gradients or gradients.batch_size == 1


@pytest.mark.parametrize("name", ["economy", "Business", "FULL", "training"])
def test_presets_by_name(name: str, model: nn.Module) -> None:
    expected = [quantity.name for quantity in gradlens.configuration(name.lower())]
    assert [quantity.name for quantity in gradlens.configuration(name)] == expected
    assert [quantity.name for quantity in Cockpit(model, name).quantities] == expected


@pytest.mark.parametrize("change", ["unfrozen", "added"])
def test_parameters_that_come_later_are_noted(model: nn.Module, change: str) -> None:
    """They are left out of every value, which no coverage says."""
    model[0].requires_grad_(change == "added")
    cockpit = Cockpit(model, [quantities.NormTest(), quantities.GradNorm()])
    with cockpit(0):
        loss_of(model).backward()
    assert not cockpit.history.notes
    if change == "unfrozen":
        model[0].requires_grad_(True)
    else:
        model[0] = nn.Linear(model[0].in_features, model[0].out_features)
    model.zero_grad()
    with warnings.catch_warnings(), cockpit(1):
        warnings.simplefilter("ignore")
        loss_of(model).backward()
    expected = "0.weight, 0.bias need a gradient and are not tracked"
    assert any(expected in note.text for note in cockpit.history.notes)
    cockpit.close()
    model.zero_grad()
    later = Cockpit(model, [quantities.GradNorm()])
    with later(2):
        loss_of(model).backward()
    assert "0.weight" in later.history["GradNorm"][2]
    assert not later.history.notes


# Steps ------------------------------------------------------------------------------------------


def step_of_a_context(cockpit: Cockpit, step: Any) -> None:
    with cockpit(step):
        loss_of(cockpit.model).backward()


def step_of_a_forward_pass(cockpit: Cockpit, step: Any) -> None:
    with cockpit.forward(step):
        loss = loss_of(cockpit.model)
    with cockpit(step):
        loss.backward()


def step_of_an_evaluation(cockpit: Cockpit, step: Any) -> None:
    with cockpit.evaluation(step):
        loss_of(cockpit.model)


TAKE_A_STEP: dict[str, Callable[[Cockpit, Any], None]] = {
    "context": step_of_a_context,
    "forward": step_of_a_forward_pass,
    "evaluation": step_of_an_evaluation,
    "log": lambda cockpit, step: cockpit.log(step, valid_loss=1.0),
}
WHOLE: list[Callable[[int], Any]] = [np.uint64, int, torch.tensor, np.array, np.int64]
NO_STEPS: list[tuple[Any, type[Exception]]] = [
    *((n, ValueError) for n in (2**53, 2**62, 10**300, -1, -(2**53), -(2**70), 10**400, 10**9000)),
    *((n, ValueError) for n in (np.int32(-1), torch.tensor(-1), torch.tensor(2**60))),
    *((n, TypeError) for n in (0.0, 1.5, math.nan, np.float32(2), 1j)),
    *((n, TypeError) for n in (None, "1", b"1", [1], (1,), {})),
    *((n, TypeError) for n in (torch.tensor(1.0), torch.arange(2), np.arange(2))),
    (torch.tensor(1, device="meta"), TypeError),
]


def stepped(model: nn.Module, **options: Any) -> Cockpit:
    return Cockpit(model, [quantities.GradNorm(), quantities.OutputNorm()], **options)


@pytest.mark.parametrize("taken", TAKE_A_STEP)
def test_steps_from_0_to_the_largest_are_read_as_they_were_written(
    model: nn.Module, tmp_path: Path, taken: str
) -> None:
    steps = [0, 1, 7, 2**31, 2**53 - 1]
    cockpit = stepped(model, run=tmp_path / "run.jsonl")
    for step, kind in zip(steps, WHOLE, strict=True):
        TAKE_A_STEP[taken](cockpit, kind(step))
    cockpit.close()
    read = gradlens.load_run(tmp_path / "run.jsonl")
    assert [*read.steps] == [*cockpit.history.steps] == steps
    assert all([*read[name]] in ([], steps) for name in read.names)


@pytest.mark.parametrize("taken", TAKE_A_STEP)
def test_other_steps_are_refused_in_one_sentence_with_a_remedy(
    model: nn.Module, tmp_path: Path, taken: str
) -> None:
    cockpit = stepped(model, run=tmp_path / "run.jsonl")
    for step, kind in NO_STEPS:
        what = "is not a whole number" if kind is TypeError else r"is not from 0 to 2\*\*53 - 1"
        words = f"^global_step=.{{1,90}} {what}: pass the number of the train"
        with pytest.raises(kind, match=words):
            TAKE_A_STEP[taken](cockpit, step)
    TAKE_A_STEP[taken](cockpit, 3)
    cockpit.close()
    assert gradlens.load_run(tmp_path / "run.jsonl").steps == (3,)


# Contexts that aren't entered -------------------------------------------------------------------


def entered(cockpit: Cockpit, step: int) -> None:
    with cockpit(step):
        loss_of(cockpit.model).backward()


def entered_later(cockpit: Cockpit, step: int) -> None:
    context, loss = cockpit(step), loss_of(cockpit.model)
    with context:
        loss.backward()


def left_by_an_exception(cockpit: Cockpit, step: int) -> None:
    with suppress(KeyError), cockpit(step):
        raise KeyError


def called_alone(cockpit: Cockpit, step: int) -> None:
    cockpit(step)
    loss_of(cockpit.model).backward()


ENTERED = (entered, entered_later, left_by_an_exception)


@pytest.mark.parametrize("enter", ENTERED)
def test_a_context_that_was_not_entered_is_noted_once(model: nn.Module, enter: Any) -> None:
    cockpit = Cockpit(model, [quantities.GradNorm()])
    enter(cockpit, 0)
    with pytest.warns(UserWarning, match="step 2: .* hasn't been entered") as said:
        for step in (2, 4):
            called_alone(cockpit, step)
    enter(cockpit, 6)
    assert len(said) == 1
    assert [note.step for note in cockpit.history.notes if "entered" in note.text] == [2]
    cockpit.close()


def test_a_cockpit_keeps_no_graph_of_a_context_that_is_over(model: nn.Module) -> None:
    cockpit, loss = Cockpit(model, []), loss_of(model)
    tracked_backward(cockpit, 0, loss)
    gone = weakref.ref(loss)
    del loss
    assert gone() is None
