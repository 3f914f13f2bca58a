"""What is compiled runs uncompiled where that is needed, and the compiler's stance is restored."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlens.graph.uncompiled import EagerCalls, uncompiled_calls

STANCES = ["default", "force_eager", "eager_on_recompile", "fail_on_recompile"]


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.fixture(autouse=True)
def default_stance() -> Iterator[None]:
    torch.compiler.reset()
    yield
    assert stance() == "default"


class Layer(nn.Linear):
    """A layer that keeps the stance in its uncompiled calls, and may fail in them."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(2, 2)
        self.stances: list[str] = []
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.stances.append(stance())
            if self.error is not None:
                raise self.error
        return super().forward(x)


def compiled(layer: nn.Module, in_place: bool) -> Any:
    if in_place:
        layer.compile(backend="eager")
        return layer
    return torch.compile(layer, backend="eager")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("users", STANCES)
def test_the_users_stance_is_restored(users: str, in_place: bool) -> None:
    layer = Layer()
    model = compiled(layer, in_place)
    calls = EagerCalls([model])
    calls.run_if(True)
    with torch.compiler.set_stance(users):
        before = torch._dynamo.eval_frame._stance
        model(torch.ones(1, 2))
        assert torch._dynamo.eval_frame._stance is before
    assert layer.stances == ["force_eager"]
    calls.run_if(False)
    model(torch.ones(1, 2))
    calls.run_if(True)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert layer.stances == ["force_eager"]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("error", [ValueError("of the user"), KeyboardInterrupt()])
def test_exceptions_in_forward(error: BaseException, in_place: bool) -> None:
    model = compiled(Layer(error), in_place)
    EagerCalls([model]).run_if(True)  # deleted at once
    calls = EagerCalls([model])
    calls.run_if(True)
    with pytest.raises(type(error)):
        model(torch.ones(1, 2))
    assert stance() == "default"


def test_contexts_of_several_threads_may_overlap() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with uncompiled_calls():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with uncompiled_calls():
        thread.start()
        entered.wait(10)
    assert stance() == "force_eager"
    left.set()
    thread.join()
    assert stance() == "default"


def test_contexts_inside_each_other() -> None:
    with uncompiled_calls(), uncompiled_calls():
        assert stance() == "force_eager"
    with suppress(ValueError), uncompiled_calls():
        raise ValueError
    assert stance() == "default"


@pytest.mark.parametrize("in_place", [False, True])
def test_closing_undoes_it_all(in_place: bool) -> None:
    model = compiled(Layer(), in_place)
    before = vars(model).get("_compiled_call_impl")
    first, second = EagerCalls([model]), EagerCalls([nn.Sequential(model)])
    first.run_if(True)
    second.run_if(True)
    for copied in (copy.deepcopy(model), copy.copy(model)):
        assert "_compiled_call_impl" not in vars(copied)
    assert b"gradlens" not in pickle.dumps(model.state_dict())
    first.close()
    first.close()
    model(torch.ones(1, 2))
    assert vars(model).get("_compiled_call_impl") is not before
    second.close()
    assert vars(model).get("_compiled_call_impl") is before
