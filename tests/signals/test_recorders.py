"""Recorders: what is in which slot, however modules fire."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import signals
from gradlens.quantities import HessEigenvalues, NormTest
from gradlens.recorders import (
    BackwardInput,
    BackwardOutput,
    ForwardInput,
    ForwardOutput,
    ForwardPre,
    Recorder,
)
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

ALL: list[type[Recorder]] = [ForwardPre, ForwardInput, ForwardOutput, BackwardInput, BackwardOutput]
every_recorder = pytest.mark.parametrize("kind", ALL)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def flow(model: nn.Sequential, inputs: Tensor) -> dict[type[Recorder], list[Tensor]]:
    """What each recorder should have in the slots of the three layers."""
    model = copy.deepcopy(model)
    linear = model[0](inputs)
    active = linear.relu()
    output = model[2](active)
    gradients = torch.autograd.grad(output.square().sum(), (inputs, linear, active, output))
    return {
        ForwardPre: [inputs, linear, active],
        ForwardInput: [inputs, active, active],
        ForwardOutput: [linear, active, output],
        BackwardInput: list(gradients[:3]),
        BackwardOutput: list(gradients[1:]),
    }


def run(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).square().sum().backward()


def batch(n: int = 5) -> Tensor:
    return torch.randn(n, 4, requires_grad=True)


@every_recorder
def test_records_each_layer_in_its_slot(kind: type[Recorder], model: nn.Sequential) -> None:
    inputs = [batch(5), batch(3)]
    expected = [flow(model, one)[kind] for one in inputs]
    recorder = kind().children(model)
    for one in inputs:
        run(model, one)
    assert len(recorder) == 3
    for slot in range(3):
        assert len(recorder[slot]) == 2
        for found, known in zip(
            recorder[slot], [tensors[slot] for tensors in expected], strict=True
        ):
            torch.testing.assert_close(found, known)
            assert not found.requires_grad
    assert [*recorder.iter_samples()] == [8, 8, 8]
    assert recorder.samples(1) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_recorder
def test_reduction(kind: type[Recorder], dtype: torch.dtype, model: nn.Sequential) -> None:
    """In single precision, say, and with nothing kept but the data."""
    inputs = [batch(n).detach().to(dtype).requires_grad_() for n in (5, 3)]
    expected = [flow(model.to(dtype), one)[kind] for one in inputs]
    recorder = kind(reduction=lambda total, new: total.float().sum() + new.float().sum())
    recorder.children(model, indices=(0, 2))
    assert recorder.data == [None, None]
    for one in inputs:
        run(model, one)
    for slot, layer in enumerate((0, 2)):
        sums = [tensors[layer].float().sum() for tensors in expected]
        torch.testing.assert_close(recorder[slot], sums[0] + sums[1])
    assert [*recorder.iter_samples()] == [8, 8]


@every_recorder
def test_condition_skips_without_mixing_slots(kind: type[Recorder], model: nn.Sequential) -> None:
    wanted = iter([False, True] * 3)
    recorder = kind(condition=lambda: next(wanted)).children(model)
    inputs = batch()
    expected = flow(model, inputs)[kind]
    run(model, inputs)
    fired = 1  # the second layer to fire, from either end
    for slot in range(3):
        assert len(recorder[slot]) == (slot == fired)
        assert recorder.samples(slot) == (5 if slot == fired else 0)
    torch.testing.assert_close(recorder[fired][0], expected[fired])


SELECTED: dict[str, tuple[Callable[[Recorder, nn.Module], Recorder], list[str]]] = {
    "all modules": (lambda r, m: r.modules(m), ["Sequential", "Linear", "ReLU", "Linear"]),
    "children": (lambda r, m: r.children(m), ["Linear", "ReLU", "Linear"]),
    "types": (lambda r, m: r.modules(m, types=(nn.ReLU, nn.Tanh)), ["ReLU"]),
    "a type": (lambda r, m: r.modules(m, types=nn.Linear), ["Linear", "Linear"]),
    "indices": (lambda r, m: r.modules(m, indices=[3, 0]), ["Sequential", "Linear"]),
    "an index": (lambda r, m: r.children(m, indices=1), ["ReLU"]),
    "both": (lambda r, m: r.children(m, types=nn.Linear, indices=(1, 2)), ["Linear"]),
    "a chain": (
        lambda r, m: r.children(m, types=nn.ReLU).children(m, indices=0),
        ["ReLU", "Linear"],
    ),
    "a selection": (lambda r, m: r.layers(m, signals.is_activation), ["ReLU"]),
}


@pytest.mark.parametrize("case", SELECTED)
def test_selects(case: str, model: nn.Sequential) -> None:
    select, expected = SELECTED[case]
    recorder = select(ForwardOutput(), model)
    run(model, inputs := batch())
    outputs = flow(model, inputs)[ForwardOutput]
    names = [type(layer).__name__ for layer in model]
    names, outputs = ["Sequential", *names], [outputs[2], *outputs]
    assert len(recorder) == len(expected)
    for (found,), name in zip(recorder, expected, strict=True):
        assert any(torch.equal(found, o) for o, n in zip(outputs, names, strict=True) if n == name)


def test_slots_can_be_read_set_and_mapped(model: nn.Sequential) -> None:
    recorder = ForwardOutput(reduction=torch.Tensor.add).children(model)
    inputs = batch(4)
    run(model, inputs)
    before = list(recorder)
    recorder.apply(lambda data: data.mean()).apply_sample(lambda data, n: (data, n))
    assert [n for _, n in recorder] == [4, 4, 4]
    assert all(torch.equal(v, old.mean()) for (v, _), old in zip(recorder, before, strict=True))
    recorder[1] = "mine"
    assert recorder.data[1] == "mine"


def test_removing_a_slot_moves_the_later_ones_up(model: nn.Sequential) -> None:
    recorder = ForwardOutput().children(model)
    run(model, batch())
    first, last = recorder[0], recorder[2]
    assert recorder.remove(0) is first
    assert len(recorder) == 2
    run(model, batch(2))
    assert recorder[1] is last
    assert [len(data) for data in recorder] == [2, 2]
    assert len(first) == 1
    assert [*recorder.iter_samples()] == [7, 7]
    recorder.remove(-1)
    run(model, batch())
    assert [len(data) for data in recorder] == [3]


def test_save(model: nn.Sequential, tmp_path: Path) -> None:
    recorder = ForwardPre(reduction=lambda total, new: total + new).children(model, indices=(0, 2))
    run(model, batch())
    with pytest.raises(RuntimeError, match="does not exist"):
        recorder.save(tmp_path / "deep" / "folder")
    recorder.save(str(tmp_path / "deep" / "folder"), mkdir=True)
    found = sorted((tmp_path / "deep" / "folder").iterdir())
    assert [path.name for path in found] == ["0.pt", "1.pt"]
    for path, data in zip(found, recorder, strict=True):
        assert torch.equal(torch.load(path), data)


@every_recorder
def test_the_context_ends_recording_and_keeps_the_data(
    kind: type[Recorder], model: nn.Sequential
) -> None:
    with pytest.raises(ZeroDivisionError), kind().children(model) as recorder:
        run(model, batch())
        raise ZeroDivisionError
    run(model, batch())
    assert [len(data) for data in recorder] == [1, 1, 1]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@every_recorder
def test_copies_of_the_model_are_not_recorded(kind: type[Recorder], model: nn.Sequential) -> None:
    recorder = kind().children(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        run(other, batch())
    assert [len(data) for data in recorder] == [0, 0, 0]


def test_a_first_layer_has_no_gradient_at_its_input_and_nobody_warns(model: nn.Sequential) -> None:
    recorder = BackwardInput().children(model)
    run(model, torch.randn(5, 4))
    assert [len(data) for data in recorder] == [0, 1, 1]


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda _, x: (x.long(), x), [torch.float32]),
        (lambda _, x: [None, {"n": 3, "y": x.double()}], [torch.float64]),
        (lambda _, x: (x > 0, "no number"), [torch.bool]),
        (lambda _, x: x.to(torch.complex64), [torch.complex64]),
        (lambda _, x: len(x), []),
    ],
)
def test_the_first_floating_point_tensor_counts_and_else_the_first(
    compute: Callable[..., Any], expected: list[torch.dtype]
) -> None:
    model = nn.Sequential(Net(compute))
    recorder = ForwardOutput().children(model)
    model(torch.randn(5, 4))
    assert [each.dtype for each in recorder[0]] == expected
    assert recorder.samples(0) == 5 * len(expected)


def test_indices_that_go_into_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(7, 3))
    before, gradients = ForwardPre().children(model), BackwardOutput().children(model)
    run(model, torch.tensor([[1, 2], [3, 4]]))
    assert before[0][0].tolist() == [[1, 2], [3, 4]]
    assert gradients[0][0].shape == (2, 2, 3)


def shared(is_same: bool) -> Any:
    """Calls a layer twice, with one tensor or with two."""

    def compute(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.second(hidden) + 2 * net.second(hidden if is_same else hidden.tanh())

    return Net(compute, first=nn.Linear(4, 4), second=nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [ForwardPre, ForwardInput, ForwardOutput, BackwardOutput])
def test_a_layer_that_is_called_several_times(kind: type[Recorder]) -> None:
    model = shared(is_same=False)
    recorder = kind().layers(model, "second")
    for n in (5, 3):
        run(model, batch(n))
    assert [len(tensor) for tensor in recorder[0]] == [5, 5, 3, 3]
    assert recorder.samples(0) == 16
    assert not torch.equal(recorder[0][0], recorder[0][1])


def test_the_gradient_at_a_tensor_that_goes_in_twice_is_recorded_once() -> None:
    model = shared(is_same=True)
    recorder = BackwardInput().layers(model, "second")
    inputs = batch()
    output = model(inputs)
    (output.square().sum()).backward(retain_graph=True)
    output.sum().backward()
    ones = torch.full((5, 2), 3.0)
    assert len(recorder[0]) == 2
    torch.testing.assert_close(recorder[0][0], 6 * output @ model.second.weight)
    torch.testing.assert_close(recorder[0][1], ones @ model.second.weight)


def test_an_input_that_is_there_at_every_step_is_recorded_once_a_step(model: nn.Sequential) -> None:
    recorder = BackwardInput().children(model)
    learned = batch()
    for step in range(3):
        with torch.no_grad():
            model(learned)  # an evaluation
        run(model, learned)
        assert [len(data) for data in recorder] == [step + 1] * 3
    recorder.close()
    assert not learned._backward_hooks


def test_a_tensor_that_is_changed_in_place_goes_in_again() -> None:
    def fourfold(net: Any, x: Tensor) -> Tensor:
        y = x * 1
        net.layer(y)
        return net.layer(y)

    model = Net(fourfold, layer=Net(lambda _, x: x.mul_(2)))
    before, after = BackwardInput().children(model), BackwardOutput().children(model)
    model(batch()).sum().backward()
    assert [float(gradient[0, 0]) for gradient in before[0]] == [2, 4]
    assert [float(gradient[0, 0]) for gradient in after[0]] == [1, 2]


@pytest.mark.parametrize("kind", [BackwardInput, BackwardOutput])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_backward_pass_after_the_context_is_not_recorded(
    kind: type[Recorder], reopened: bool, model: nn.Sequential
) -> None:
    inputs = batch()
    with kind().children(model) as recorder:
        output = model(inputs)
    with recorder if reopened else contextlib.nullcontext():
        output.sum().backward()
    assert [len(data) for data in recorder] == [0, 0, 0]


@every_recorder
def test_a_context_can_be_entered_again(kind: type[Recorder], model: nn.Sequential) -> None:
    with kind().children(model) as recorder:
        run(model, batch())
    run(model, batch())
    with recorder:
        run(model, batch(3))
    assert [[len(tensor) for tensor in data] for data in recorder] == [[5, 3]] * 3
    with pytest.raises(RuntimeError, match="the recorder is closed: add modules before"):
        recorder.children(model)
    recorder.remove(0)
    with recorder:
        run(model, batch(2))
    assert [*recorder.iter_samples()] == [10, 10]


@every_recorder
@pytest.mark.parametrize("argument", ["condition", "reduction"])
def test_what_fails_names_the_module(
    kind: type[Recorder], argument: str, model: nn.Sequential
) -> None:
    def fail(*_: object) -> Any:
        raise KeyError("mine")

    with (
        kind(**{argument: fail}).children(model, indices=2) as recorder,
        pytest.raises(RuntimeError, match=rf"{kind.__name__} failed at 2 \(Linear\): KeyError"),
    ):
        for _ in range(2):
            run(model, batch())
    assert recorder.samples(0) == (5 if argument == "reduction" else 0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    run(model, batch())


def test_what_was_recorded_in_inference_mode_can_be_used_outside(model: nn.Sequential) -> None:
    recorder = ForwardOutput(reduction=Tensor.add_).children(model)
    with torch.inference_mode():
        model(torch.randn(5, 4))
    model(torch.randn(5, 4))
    weight = torch.ones(3, requires_grad=True)
    (recorder[0] * weight).sum().backward()
    torch.testing.assert_close(weight.grad, recorder[0].sum(0))


@every_recorder
def test_recording_goes_on_after_apply(kind: type[Recorder], model: nn.Sequential) -> None:
    recorder = kind().children(model)
    for n in (5, 3, 2):
        run(model, batch(n))
        recorder.apply(torch.cat)
    assert [len(data) for data in recorder] == [10, 10, 10]
    recorder.apply(lambda data: None)
    run(model, batch())
    assert [len(data) for data in recorder] == [1, 1, 1]


def test_apply_leaves_slots_without_data_and_changes_all_or_none(model: nn.Sequential) -> None:
    reduced = ForwardOutput(reduction=torch.maximum).children(model)
    assert reduced.apply(lambda data: data.mean()).data == [None] * 3
    wanted = iter([True, False, False])
    recorder = ForwardOutput(condition=lambda: next(wanted)).children(model)
    model(torch.randn(5, 4))
    with pytest.raises(RuntimeError, match=r"apply failed at 1 \(ReLU\): .*non-empty"):
        recorder.apply(torch.cat)
    assert [len(data) for data in recorder] == [1, 0, 0]


def test_copies_of_a_recorder_are_refused(model: nn.Sequential) -> None:
    recorder = ForwardOutput().children(model)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            copied(recorder)
    run(model, batch())
    assert len(recorder[0]) == 1


def test_training_is_not_changed(model: nn.Sequential) -> None:
    other, inputs = copy.deepcopy(model), torch.randn(5, 4)
    recorders = [kind().modules(other) for kind in ALL]
    for one in (model, other):
        run(one, inputs)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert all(recorders)


def test_passes_of_a_cockpit_are_not_recorded(model: nn.Sequential) -> None:
    recorder = BackwardOutput().modules(model, indices=0)
    cockpit = gradlens.Cockpit(model, [HessEigenvalues(), NormTest()])
    with recorder:
        tracked_backward(cockpit, 0, model(torch.randn(5, 4)).square().mean())
    assert len(recorder[0]) == 1
    assert len(cockpit.history["HessEigenvalues"]) == len(cockpit.history["NormTest"]) == 1
