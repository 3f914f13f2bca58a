"""Quantities of a user's own, and what is refused of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gradlens import Cockpit, Step
from gradlens.quantities import OutputNorm, Phase, Quantity, SingleStepQuantity
from gradlens.reductions import SquaredNorms
from gradlens.schedules import Schedule, linear
from tests.cases.steps import tracked_backward


class Plain(SingleStepQuantity):
    reductions = (SquaredNorms(),)

    def compute(self, step: Step) -> float:
        return float(step.total(SquaredNorms()).max())


class WithInit(Plain):
    def __init__(self, scale: float, track_schedule: Schedule) -> None:
        super().__init__(track_schedule, name=f"times {scale}")
        self.scale = scale

    def compute(self, step: Step) -> float:
        return self.scale * super().compute(step)


@dataclass(eq=False)
class WithField(Plain):
    scale: float = 3.0

    def compute(self, step: Step) -> float:
        return self.scale * super().compute(step)


class WithReductionsOfItsOwn(SingleStepQuantity):
    def __init__(self) -> None:
        super().__init__()
        self.reductions = (SquaredNorms(),)

    def compute(self, step: Step) -> float:
        return float(step.total(SquaredNorms()).max())


class Layers(OutputNorm):
    def __init__(self, layers: str) -> None:
        super().__init__(linear(1), normalize=True, layers=layers)


def train(tracked: Sequence[Quantity], steps: int = 3) -> Cockpit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, tracked)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        optimizer.step()
    return cockpit


def test_options_are_stated_by_a_field_or_an_init() -> None:
    own_init, field = WithInit(2.0, linear(2)), WithField(linear(1), True)
    tracked = [Plain(), own_init, field, WithReductionsOfItsOwn()]
    history = train(tracked).history
    plain = history["Plain"]
    assert list(plain) == [0, 1, 2]
    assert history["times 2.0"] == {step: 2 * plain[step] for step in (0, 2)}
    assert history["WithField"] == {step: 3 * plain[step] for step in plain}
    assert history["WithReductionsOfItsOwn"] == plain
    assert list(train([Layers("1")]).history["Layers"][0]["layers"]) == ["1"]
    assert len(set(tracked)) == 4


def test_options_are_in_the_representation() -> None:
    found = repr(WithField(linear(5), scale=2.0, name="own"))
    assert found == (
        "WithField(track_schedule=Linear(interval=5, offset=0), verbose=False, name='own', "
        "scale=2.0)"
    )


@pytest.mark.parametrize(
    "phases", [(), (Phase.AFTER_UPDATE, Phase.AFTER_BACKWARD), (Phase.AFTER_UPDATE,) * 2]
)
def test_phases_are_listed_in_their_order(phases: tuple[Phase, ...]) -> None:
    kind = type("Mine", (Quantity,), {"phases": phases})
    with pytest.raises(TypeError, match=r"Mine: phases=.*list one Phase or more, in their order"):
        kind()


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_without_its_method_names_both(phase: Phase) -> None:
    kind = type("Mine", (Quantity,), {"phases": (phase,), "needs": ("loss",)})
    with pytest.raises(TypeError, match=rf"Mine lists {phase}.*method {phase.value}"):
        kind()
