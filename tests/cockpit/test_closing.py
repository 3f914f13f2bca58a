"""Nothing of gradlens is left: after an interrupt no mode, after closing no trace."""

from __future__ import annotations

import copy
import dis
import gc
import inspect
import io
import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from backpack.context import CTX
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit
from gradlens.graph.torch_private import function_mode_depth
from gradlens.quantities import InputCovariance, OutputNorm, Quantity
from gradlens.quantities.presets import configuration

PACKAGE = str(Path(gradlens.__file__).parent)


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
        loss = self.loss(model)
        with cockpit(number, loss=loss, optimizer=self.optimizer):
            loss.backward()
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
        loss = alone.loss()
        if step:
            with other(step, loss=loss, optimizer=alone.optimizer):
                loss.backward()
        else:
            loss.backward()
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model() -> None:
    training = Training()
    compiled: Any = torch.compile(training.model, backend="eager")
    cockpit = Cockpit(compiled, quantities("economy"))
    for step in range(2):
        training.step(cockpit, step, compiled)
    cockpit.close()
    assert not training.traces()


# Interrupts ---------------------------------------------------------------------------------


def leaves_with(frame: FrameType) -> bool:
    """Whether the line that begins is the call of ``__exit__`` behind a ``with`` block."""
    code = (i for i in dis.get_instructions(frame.f_code) if i.offset >= frame.f_lasti)
    first, second = next(code), next(code, None)
    # Its arguments are three times None, which Python 3.10 copies.
    is_none = first.opname == "LOAD_CONST" and first.argval is None
    return is_none and second is not None and second.opname in ("LOAD_CONST", "DUP_TOP")


def begins_exit(frame: FrameType) -> bool:
    """Whether the line that begins is the first of ``__exit__``, where nothing is caught yet."""
    code = frame.f_code
    if code.co_name != "__exit__":
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return frame.f_lineno == min(line for line in lines if line > code.co_firstlineno)


class Interrupt:
    """Raises ``KeyboardInterrupt`` at the n-th line of gradlens that is run, or at the next one.

    Python raises no interrupt between the end of a ``with`` block and the call of ``__exit__``,
    which is a line of its own for a trace function.
    """

    def __init__(self, line: int) -> None:
        self.lines = 0
        self.line = line
        self.where = ""

    def __enter__(self) -> None:
        sys.settrace(self._of_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _of_frame(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._of_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _of_line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.lines += event == "line"
        if event == "line" and self.lines == self.line:
            if leaves_with(frame) or begins_exit(frame):
                self.line += 1
                return self._of_line
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            raise KeyboardInterrupt
        return self._of_line


def interrupted(preset: str, line: int) -> Interrupt:
    """A step that is interrupted at a line; asserts that nothing is left of it."""
    training, interrupt = Training(), Interrupt(line)
    cockpit = training.cockpit(preset)
    for step in range(2):
        training.step(cockpit, step)
    loss, parameters = training.loss(), [*training.model.parameters()]
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    random_state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in training.model.buffers()]
    with torch.autocast("cpu", enabled=False):
        try:
            with interrupt, cockpit(2, loss=loss, optimizer=training.optimizer):
                loss.backward()
        except KeyboardInterrupt:
            gc.collect()
        assert torch.is_grad_enabled(), interrupt.where
    assert not torch.is_autocast_enabled("cpu"), interrupt.where
    assert torch.equal(torch.get_rng_state(), random_state), interrupt.where
    assert not CTX.get_active_exts(), interrupt.where
    assert not CTX.get_retain_graph(), interrupt.where
    assert function_mode_depth() == 0, interrupt.where
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is None or torch.equal(parameter.grad, gradient), interrupt.where
    for buffer, before in zip(training.model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before), interrupt.where
    cockpit.close()
    assert not training.traces(), interrupt.where
    return interrupt


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["economy", "full"])
def test_interrupts(preset: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = interrupted(preset, -1).lines
        assert lines > 1000
        random.seed(0)
        for line in random.sample(range(1, lines), 30):
            assert interrupted(preset, line).where
