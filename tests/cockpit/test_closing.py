"""Closing leaves what another cockpit needs, and exceptions are raised as they are.

That nothing of gradlens stays after closing or an exception, ``test_random_loops.py`` shows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fuzz.trace import inventory
from gradlens import Cockpit
from gradlens.quantities import InputCovariance, OutputNorm
from gradlens.quantities.presets import configuration
from tests.cases.steps import tracked_backward

pytestmark = pytest.mark.filterwarnings("ignore")


class Training:
    """A network with its optimizer, and steps under a cockpit."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
            nn.Linear(8, 4),
        )  # fmt: skip
        self.loss_function = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.before = self.inventory()

    def cockpit(self, model: nn.Module | None = None) -> Cockpit:
        tracked = [*configuration("full"), OutputNorm(), InputCovariance()]
        return Cockpit(model or self.model, tracked, loss_function=self.loss_function)

    def step(self, cockpit: Cockpit | None, number: int) -> None:
        self.optimizer.zero_grad()
        outputs = self.model(torch.randn(5, 1, 4, 4))
        loss: Tensor = self.loss_function(outputs, torch.randint(4, (5,)))
        tracked_backward(cockpit, number, loss, optimizer=self.optimizer)
        self.optimizer.step()

    def inventory(self) -> dict[str, object]:
        """Attributes and hooks of all modules, parameters and the optimizer."""
        return inventory(self.model, self.loss_function, [self.optimizer])


@pytest.mark.slow
def test_what_another_cockpit_needs_stays() -> None:
    training, alone = Training(), Training()
    closed, cockpit, other = training.cockpit(), training.cockpit(), alone.cockpit()
    torch.manual_seed(1)
    training.step(closed, 0)
    closed.close()
    closed.close()
    for step in range(1, 4):
        training.step(cockpit, step)
    torch.manual_seed(1)
    for step in range(4):
        alone.step(other if step else None, step)
    for name in ("Loss", "NormTest", "GradNorm", "OutputNorm"):
        assert repr(dict(cockpit.history[name])) == repr(dict(other.history[name]))
    assert training.inventory() != training.before
    cockpit.close()
    assert training.inventory() == training.before


def test_a_shared_part_and_a_loss_inside_the_model() -> None:
    training = Training()
    whole = nn.ModuleDict({"net": training.model, "loss": training.loss_function})
    before = inventory(whole, training.loss_function, [])
    first, second = training.cockpit(), training.cockpit(whole)
    for step in range(3):
        training.step(second, step)
    first.close()
    second.close()
    assert inventory(whole, training.loss_function, []) == before
    assert training.inventory() == training.before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_context_is_raised_as_it_is(error: type[BaseException]) -> None:
    cockpit, mine = Cockpit(nn.Linear(2, 2), [OutputNorm()]), error("mine")
    with pytest.raises(error) as caught, cockpit(0):
        raise mine
    assert caught.value is mine
    assert caught.value.__context__ is None
    assert 0 not in cockpit.history.steps
