"""BackPACK extensions of the user's own, with every way of extending: a result or a message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from backpack import backpack
from backpack import extend as backpack_extend
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.extensions.backprop_extension import FAIL_SILENT, BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.secondorder.diag_ggn import DiagGGN
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit
from gradlens.messages import GradlensWarning
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities import SingleStepQuantity
from gradlens.quantities.step import Step
from tests.cases.steps import tracked_backward

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Residual(nn.Module):
    """A network that isn't sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.activation = nn.Linear(5, 5), nn.Linear(5, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x + self.activation(self.inner(x)))  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


class OwnDiagonal(DiagGGN):
    """A second-order extension of the user's own, under a name of its own."""

    def __init__(self) -> None:
        super().__init__("exact", "own_diagonal")


class Gradients(FirstOrderModuleExtension):
    """The gradient at a layer's output, added up over samples."""

    def __init__(self) -> None:
        super().__init__(params=["bias"])

    def bias(self, extension: Any, module: Any, g_inp: Any, g_out: Any, found: Any) -> Tensor:
        del extension, module, g_inp, found
        total: Tensor = g_out[0].sum(0)
        return total


class OwnBase(BackpropExtension):
    """Of first order, without BackPACK's class for that."""

    def __init__(self) -> None:
        super().__init__("own_base", {nn.Linear: Gradients()}, fail_mode=FAIL_SILENT)

    def expects_backpropagation_quantities(self) -> bool:
        return False


class Failing(OwnBase):
    """Raises in the backward pass."""

    def __call__(self, module: Any, g_inp: Any, g_out: Any) -> None:
        raise RuntimeError("an extension has failed")


def backward(network: Callable[[], nn.Module], extension: BackpropExtension, way: str) -> nn.Module:
    """The network after a backward pass with the extension, which is passed on in one way."""
    torch.manual_seed(0)
    model, loss_function = network(), nn.CrossEntropyLoss()
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    given: Any = model
    if "BackPACK's extend" in way:
        model = backpack_extend(model, use_converter="converter" in way)
        given = model if "the model" in way else list(model.parameters())
        backpack_extend(loss_function)
    if "gradlens.extend" in way:
        gradlens.extend(model)
    if "nothing extended" in way:
        given = list(model.parameters())
    loaded = {"loss_function": loss_function} if "loss function" in way else {}
    cockpit = None if "alone" in way else Cockpit(given, [], **loaded)
    loss = loss_function(model(x), y)
    with ExitStack() as stack:
        if cockpit is None or "around" in way:
            stack.enter_context(backpack(extension))
        if cockpit is not None:
            passed = () if "around" in way else (extension,)
            stack.enter_context(cockpit(0, *passed, loss=loss))
        loss.backward()
    return model


def saved(model: nn.Module, extension: BackpropExtension) -> list[Tensor]:
    return [getattr(p, extension.savefield) for p in model.parameters()]


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, OwnDiagonal])
@pytest.mark.parametrize(
    ("network", "way"),
    [
        (sequential, "BackPACK's extend"),
        (sequential, "BackPACK's extend, the model"),
        (sequential, "BackPACK's extend, backpack() around the cockpit"),
        (Residual, "BackPACK's extend, converter"),
    ],
)
def test_extensions_that_run(network: Any, way: str, extension: Any) -> None:
    found = backward(network, extension(), way)
    alone = "BackPACK's extend, alone" + ", converter" * ("converter" in way)
    expected = backward(network, extension(), alone)
    torch.testing.assert_close(saved(found, extension()), saved(expected, extension()))


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, OwnDiagonal, OwnBase])
@pytest.mark.parametrize("way", ["model and loss function", "model after gradlens.extend"])
def test_extensions_without_backpacks_hooks_are_refused(way: str, extension: Any) -> None:
    with pytest.raises(UnavailableError, match=f"{extension.__name__} needs BackPACK's hooks"):
        backward(sequential, extension(), way)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, OwnDiagonal, OwnBase])
def test_what_nothing_was_extended_for_is_noted(extension: Any) -> None:
    with pytest.warns(GradlensWarning, match=f"{extension.__name__} saved nothing"):
        backward(sequential, extension(), "nothing extended")


def test_results_of_an_earlier_step_are_none_of_this_one() -> None:
    model = sequential()
    for parameter in model.parameters():
        parameter.grad_batch = torch.ones(1)  # type: ignore[attr-defined]
    cockpit = Cockpit(model.parameters(), [])
    loss = model(torch.randn(6, 5)).square().mean()
    with pytest.warns(GradlensWarning, match="BatchGrad saved nothing"), cockpit(0, BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("way", ["BackPACK's extend", "BackPACK's extend, the model"])
def test_an_exception_of_the_users_extension_is_raised(way: str) -> None:
    with pytest.raises(RuntimeError, match="an extension has failed"):
        backward(sequential, Failing(), way)


class OfExtension(SingleStepQuantity):
    """Reads what an extension has saved."""

    def __init__(self, extension: type[BackpropExtension]) -> None:
        super().__init__(name=extension.__name__)
        self._extension = extension

    def extensions(self, global_step: int) -> list[BackpropExtension]:
        return [self._extension()]

    def compute(self, step: Step) -> Any:
        return step.parameters["0.weight"].grad_batch.square().sum()  # type: ignore[attr-defined]


def test_an_exception_of_a_quantitys_extension_is_its_nan_and_the_others_go_on() -> None:
    model = backpack_extend(sequential())
    cockpit = Cockpit(model, [OfExtension(Failing), OfExtension(BatchGrad)])
    loss = model(torch.randn(6, 5)).square().mean()
    with pytest.warns(GradlensWarning, match="an extension has failed"), cockpit(0, loss=loss):
        loss.backward()
    assert "an extension has failed" in cockpit.history["Failing"][0].reason
    assert cockpit.history["BatchGrad"][0] > 0
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())


def test_extensions_run_on_what_was_extended_of_a_model() -> None:
    model = sequential()
    backpack_extend(model[0])  # type: ignore[index]
    cockpit = Cockpit(model, [OfExtension(BatchGrad)])
    tracked_backward(cockpit, 0, model(torch.randn(6, 5)).square().mean())
    assert cockpit.history["BatchGrad"][0] > 0


def test_extensions_of_two_threads_do_not_meet() -> None:
    """BackPACK's state is global: while extensions are active in a thread, others have none."""
    model, other = backpack_extend(sequential()), backpack_extend(sequential())
    first, second = Cockpit(model, []), Cockpit(other, [])
    refused: list[str] = []

    def in_another_thread() -> None:
        loss = other(torch.randn(6, 5)).square().mean()
        with pytest.raises(UnavailableError, match="in processes of their own") as error:
            second(1, BatchGrad(), loss=loss).__enter__()
        refused.append(str(error.value))

    loss = model(torch.randn(6, 5)).square().mean()
    with first(0, BatchGrad(), loss=loss):
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        loss.backward()
    assert refused
    for parameter in model.parameters():
        assert torch.allclose(parameter.grad_batch.sum(0), parameter.grad)  # type: ignore[attr-defined]
