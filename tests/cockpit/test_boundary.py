"""Exceptions inside gradlens are reasons and notes, and training is the same with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backpack import extend
from backpack.extensions import KFLR
from torch import Tensor, nn

from gradlens import Cockpit, quantities
from gradlens.history.undefined import Undefined
from gradlens.quantities import Quantity
from gradlens.quantities.quantity import Phase
from gradlens.reductions import Reduction, SquaredNorms
from tests.cases.steps import tracked_backward

pytestmark = pytest.mark.filterwarnings("ignore:.*normalisation over the batch")

STEPS = 4


class InjectedError(Exception):
    """What is raised on purpose."""


def inject() -> Any:
    raise InjectedError("on purpose")


@dataclass(eq=False)
class AllPhases(Quantity):
    """Lists what was called, or raises an exception in the method ``failing``, at step 1."""

    phases = tuple(Phase)
    needs = ("loss",)
    retains_gradients = True

    failing: str = ""

    def _at(self, method: str, global_step: int, earlier: Sequence[str] = ()) -> list[str]:
        if method == self.failing and global_step == 1:
            inject()
        return [*earlier, method]

    def should_compute(self, global_step: int) -> bool:
        return bool(self._at("should_compute", global_step))

    def start(self, parameters: Any) -> None:
        self._at("start", 1)

    def adapt_to(self, step: Any) -> None:
        self._at("adapt_to", step.global_step)

    def before_backward(self, curvature: Any) -> Any:
        return self._at("before_backward", curvature.global_step)

    def after_backward(self, step: Any, earlier: Any) -> Any:
        return self._at("after_backward", step.global_step, earlier)

    def before_optimizer(self, step: Any, earlier: Any) -> Any:
        return self._at("before_optimizer", step.global_step, earlier)

    def after_optimizer(self, step: Any, earlier: Any) -> Any:
        return self._at("after_optimizer", step.global_step, earlier)

    def after_update(self, step: Any, update: Any, earlier: Any) -> Any:
        assert update.projections is not None
        return self._at("after_update", step.global_step, earlier)

    def at_next_step(self, start: Any, update: Any, end: Any, earlier: Any) -> Any:
        assert end.global_step == start.global_step + 1
        found = self._at("at_next_step", start.global_step, earlier)
        return object() if self.failing == "recording" and start.global_step == 1 else found

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        self._at("reductions_at", global_step)
        return ()

    def extension_hooks(self, global_step: int) -> list[Callable[[nn.Module], None]]:
        self._at("extension_hooks", global_step)
        return [lambda module: self._at("a hook on a module", global_step) and None]


def network() -> nn.Module:
    """Extended by BackPACK, for hooks of extensions."""
    layers = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )
    return extend(layers)  # type: ignore[no-any-return]


def train(tracked: list[Quantity] | None, **options: Any) -> tuple[list[Tensor], Cockpit | None]:
    """Losses, gradients, weights and buffers of all steps, and the cockpit."""
    torch.manual_seed(0)
    model, loss_function = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    cockpit = None
    if tracked is not None:
        cockpit = Cockpit(model, tracked, loss_function=loss_function, **options)
    numbers = []
    for step in range(STEPS):
        # Without a gradient of the inputs, torch warns of BackPACK's hooks.
        inputs = torch.randn(4, 1, 4, 4, requires_grad=True)
        labels = torch.randint(3, (4,))
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        numbers += [each.clone() for each in model.state_dict().values()]
        numbers.append(torch.get_rng_state())
    return numbers, cockpit


PLAIN, _ = train(None)


def is_same(numbers: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(numbers, PLAIN, strict=True))


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
    "before_optimizer",
    "after_optimizer",
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
    injected = "InjectedError: on purpose (test_boundary.py"
    reason = "can't be recorded" if failing == "recording" else injected
    assert isinstance(values[1], Undefined)
    assert reason in values[1].reason
    assert values[0] == values[2] == [phase.value for phase in Phase]
    assert len(values) == STEPS - 1
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


@pytest.mark.parametrize("preset", ["economy", "full"])
def test_a_graph_that_a_backward_pass_has_freed_is_no_failure(preset: str) -> None:
    model = nn.Linear(4, 2)
    cockpit = Cockpit(model, preset)
    loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 2)
    loss.backward()
    with pytest.warns(UserWarning, match="backward has run already"), cockpit(0, loss=loss):
        pass
    assert not [note.text for note in cockpit.history.notes if "failed" in note.text]
    assert cockpit.history["GradNorm"][0]
