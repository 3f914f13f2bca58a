"""Recorders: what is in which slot, however modules fire."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlens import signals
from gradlens.recorders import (
    BackwardInput,
    BackwardOutput,
    ForwardInput,
    ForwardOutput,
    ForwardPre,
    Recorder,
)

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


@every_recorder
def test_reduction(kind: type[Recorder], model: nn.Sequential) -> None:
    inputs = [batch(), batch()]
    expected = [flow(model, one)[kind] for one in inputs]
    recorder = kind(reduction=lambda total, new: total + new).children(model, indices=(0, 2))
    assert recorder.data == [None, None]
    for one in inputs:
        run(model, one)
    for slot, layer in enumerate((0, 2)):
        torch.testing.assert_close(recorder[slot], expected[0][layer] + expected[1][layer])


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
def test_selects(case: str, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    select, expected = SELECTED[case]
    watched: list[str] = []
    register = ForwardOutput._register

    def note(self: ForwardOutput, module: nn.Module, slot: Any) -> Any:
        watched.append(type(module).__name__)
        return register(self, module, slot)

    monkeypatch.setattr(ForwardOutput, "_register", note)
    assert len(select(ForwardOutput(), model)) == len(expected)
    assert watched == expected


@pytest.mark.parametrize(
    ("select", "words"),
    [
        (lambda r, m: r.modules(m, types=nn.Conv2d), "there is Linear, ReLU, Sequential"),
        (lambda r, m: r.children(m, types=nn.ReLU, indices=(0, 2)), "no module is of types"),
        (lambda r, m: r.children(m, indices=3), "no module 3: there are 3"),
        (lambda r, m: r.layers(m, "Linaer"), "did you mean Linear"),
    ],
)
def test_a_selection_of_nothing_raises(select: Any, words: str, model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match=words):
        select(ForwardOutput(), model)


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
def test_hooks_go_with_the_recorder(kind: type[Recorder], model: nn.Sequential) -> None:
    kind().children(model)
    gc.collect()
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


def test_tuples_keywords_and_what_has_no_tensor() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.length = nn.LSTM(4, 3), Length()

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(input=x)[0] * self.length(x)

    model = Odd()
    before, after = ForwardPre().children(model), ForwardOutput().children(model)
    run(model, torch.randn(5, 2, 4))
    assert before[0][0].shape == (5, 2, 4)
    assert after[0][0].shape == (5, 2, 3)
    assert after[1] == []


class Length(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


def test_training_is_not_changed(model: nn.Sequential) -> None:
    other, inputs = copy.deepcopy(model), torch.randn(5, 4)
    recorders = [kind().modules(other) for kind in ALL]
    for one in (model, other):
        run(one, inputs)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert all(recorders)
