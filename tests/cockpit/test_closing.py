"""Nothing of gradlens is left: after an exception no mode, after closing no trace."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backpack.context import CTX
from torch import Tensor, nn

from gradlens import Cockpit
from gradlens.quantities import InputCovariance, OutputNorm, Quantity
from gradlens.quantities.presets import configuration
from tests.cases.steps import tracked_backward


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def quantities(preset: Any) -> list[Quantity]:
    return [*configuration(preset), OutputNorm(), InputCovariance()]


class Training:
    """A network with its optimizer, and steps under a cockpit."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.loss_function = network(), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def cockpit(self, preset: str) -> Cockpit:
        return Cockpit(self.model, quantities(preset), loss_function=self.loss_function)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        self.optimizer.zero_grad()
        outputs = (model or self.model)(torch.randn(5, 1, 4, 4))
        loss: Tensor = self.loss_function(outputs, torch.randint(4, (5,)))
        return loss

    def step(self, cockpit: Cockpit, number: int, model: nn.Module | None = None) -> None:
        tracked_backward(cockpit, number, self.loss(model), optimizer=self.optimizer)
        self.optimizer.step()

    def traces(self) -> list[Any]:
        hooks = [
            self.optimizer._optimizer_step_post_hooks,
            self.optimizer._optimizer_step_pre_hooks,
        ]  # type: ignore[attr-defined]
        return [
            *traces(self.model),
            *traces(self.loss_function),
            *(hook for registered in hooks for hook in registered.values()),
        ]


def traces(module: nn.Module) -> list[Any]:
    """What a module has of gradlens and BackPACK, in its memory and once it is saved."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    saved = [buffer.getvalue(), pickle.dumps(copy.deepcopy(module))]
    words = [word for word in (b"gradlens", b"backpack") for data in saved if word in data]
    return [*words, *_attributes(module), *_of_parameters(module)]


def _attributes(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        for name, value in vars(part).items():
            if "gradlens" in f"{name} {inspect.getmodule(type(value))}":
                yield name
            hooks = [hook for _, hook in value.items()] if isinstance(value, dict) else ()
            yield from (h for h in hooks if "gradlens" in f"{inspect.getmodule(type(h))} {h!r}")


def _of_parameters(module: nn.Module) -> Iterator[Any]:
    for parameter in module.parameters():
        yield from (name for name in vars(parameter) if not name.startswith("_dynamo"))
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):  # type: ignore[attr-defined]
            yield from (hooks or {}).values()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["economy", "business", "full"])
def test_a_closed_cockpit_leaves_no_trace(preset: str) -> None:
    training = Training()
    cockpit = training.cockpit(preset)
    for step in range(3):
        training.step(cockpit, step)
    assert training.traces()
    cockpit.close()
    cockpit.close()
    assert not training.traces()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_what_another_cockpit_needs_stays() -> None:
    training, alone = Training(), Training()
    closed, cockpit, other = (
        training.cockpit("full"),
        training.cockpit("full"),
        alone.cockpit("full"),
    )
    torch.manual_seed(1)
    training.step(closed, 0)
    closed.close()
    closed.close()
    for step in range(1, 4):
        training.step(cockpit, step)
    torch.manual_seed(1)
    alone.optimizer.zero_grad()
    for step in range(4):
        cockpit_of_step = other if step else None
        tracked_backward(cockpit_of_step, step, alone.loss(), optimizer=alone.optimizer)
        alone.optimizer.step()
    for name in ("Loss", "NormTest", "GradNorm", "OutputNorm"):
        assert repr(dict(cockpit.history[name])) == repr(dict(other.history[name]))
    assert training.traces()
    cockpit.close()
    assert not training.traces()


@pytest.mark.filterwarnings("ignore")
def test_a_shared_part_and_a_loss_inside_the_model() -> None:
    training = Training()
    whole = nn.ModuleDict({"net": training.model, "loss": training.loss_function})
    first = training.cockpit("economy")
    second = Cockpit(whole, quantities("economy"), loss_function=training.loss_function)
    for step in range(3):
        training.step(second, step)
    first.close()
    second.close()
    assert not training.traces()
    assert not traces(whole)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["economy", "full"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_context_leaves_everything_as_it_was(
    error: type[BaseException], preset: str
) -> None:
    training = Training()
    cockpit = training.cockpit(preset)
    for step in range(2):
        training.step(cockpit, step)
    loss, parameters = training.loss(), [*training.model.parameters()]
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    random_state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in training.model.buffers()]
    mine = error("mine")
    with pytest.raises(error) as caught, cockpit(2, loss=loss, optimizer=training.optimizer):
        loss.backward()
        raise mine
    assert caught.value is mine
    assert caught.value.__context__ is None
    assert 2 not in cockpit.history.steps
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not CTX.get_active_exts()
    assert not CTX.get_retain_graph()
    assert torch.overrides._get_current_function_mode_stack() == []
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    for buffer, before in zip(training.model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before)
    cockpit.close()
    assert not training.traces()
