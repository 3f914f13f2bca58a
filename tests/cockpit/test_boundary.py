"""Exceptions inside gradlens are reasons and notes, and training is the same with them."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backpack.extensions import KFLR
from torch import nn

from gradlens import Cockpit, quantities
from gradlens.history.undefined import Undefined
from gradlens.reductions import Reduction, SquaredNorms
from tests.cases.injected_exceptions import (
    STEPS,
    AllPhases,
    InjectedError,
    functions_called,
    inject,
    is_same,
    problem_with,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*normalisation over the batch")


@dataclass(frozen=True)
class Failing(Reduction):
    """A reduction that fails."""

    def reduce(self, gradients: Any) -> Any:
        return inject()

    def total(self, values: Any) -> Any:
        return 0.0


@dataclass(eq=False)
class OfReduction(quantities.SingleStepQuantity):
    """A quantity whose reduction fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (Failing(), SquaredNorms())

    def compute(self, step: Any) -> Any:
        return step.total(self.reductions[0])


class OfKronecker(quantities.SingleStepQuantity):
    """A quantity with an extension, which needs BackPACK's own hooks."""

    def extensions(self, global_step: int) -> list[Any]:
        return [KFLR()]

    def compute(self, step: Any) -> Any:
        return 0.0


class OfCurvature(quantities.CurvatureQuantity):
    """A quantity of the curvature that doesn't say that it needs the loss."""

    needs = ()

    def compute(self, curvature: Any) -> Any:
        return 0.0


FAILING = (
    "before_backward",
    "after_backward",
    "after_update",
    "at_next_step",
    "recording",
    "a hook on a module",
)
"""What fails for one quantity alone, and gives it a NaN."""


@pytest.mark.parametrize("failing", FAILING)
def test_a_quantity_that_fails_has_a_reason_and_the_others_have_values(failing: str) -> None:
    faulty = AllPhases(failing=failing)
    with pytest.warns(UserWarning, match=r"AllPhases failed: \w+: .*strict=True") as raised:
        numbers, cockpit = train([faulty, quantities.Loss(), quantities.NormTest()])
    assert is_same(numbers)
    assert cockpit is not None
    values = cockpit.history["AllPhases"]
    injected = "InjectedError: on purpose (injected_exceptions.py"
    reason = "can't be recorded" if failing == "recording" else injected
    assert isinstance(values[1], Undefined)
    assert reason in values[1].reason
    assert values[0] == values[2] == 1.0
    assert all(len(cockpit.history[name]) == STEPS for name in ("Loss", "NormTest"))
    assert sum("failed" in str(each.message) for each in raised) == 1


@pytest.mark.parametrize(
    "failing", ["should_compute", "start", "adapt_to", "reductions_at", "extension_hooks"]
)
def test_what_else_a_quantity_may_do_wrong(failing: str) -> None:
    with pytest.warns(UserWarning, match="InjectedError: on purpose"):
        numbers, cockpit = train([AllPhases(failing=failing), quantities.Loss()])
    assert is_same(numbers)
    assert cockpit is not None
    assert cockpit.history["Loss"].keys() == {*range(STEPS)}


def test_a_reduction_that_fails_is_not_that_of_some_parameters() -> None:
    with pytest.warns(UserWarning, match="InjectedError"):
        numbers, cockpit = train([OfReduction(), quantities.NormTest()])
    assert is_same(numbers)
    assert cockpit is not None
    assert all("InjectedError" in value.reason for value in cockpit.history["OfReduction"].values())
    assert all(value > 0 for value in cockpit.history["NormTest"].values())


@pytest.mark.parametrize(
    ("quantity", "reason"),
    [
        (OfKronecker, "KFLR needs BackPACK's hooks on the model"),
        (OfCurvature, "OfCurvature needs the loss: pass loss="),
    ],
)
def test_without_the_loss_only_what_needs_it_is_refused(
    quantity: type[quantities.Quantity], reason: str
) -> None:
    model = nn.Linear(4, 2)
    cockpit = Cockpit(model, [quantity(), quantities.NormTest()])
    loss = model(torch.randn(5, 4)).square().mean()
    with cockpit(0):
        loss.backward()
    assert cockpit.history["NormTest"][0] > 0
    assert reason in cockpit.history[quantity.__name__][0].reason


@pytest.mark.parametrize("failing", [*FAILING[:-2], "should_compute", "adapt_to", "start"])
def test_strict_raises(failing: str) -> None:
    with pytest.raises(InjectedError):
        train([AllPhases(failing=failing)], strict=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
@pytest.mark.parametrize("seed", range(3))
def test_an_exception_anywhere(seed: int) -> None:
    source = random.Random(seed)
    functions = functions_called()
    chosen = source.sample(list(functions.items()), 15)
    found = {code.co_qualname: problem_with(code, source.randint(1, n)) for code, n in chosen}
    assert not {name: problem for name, problem in found.items() if problem}
