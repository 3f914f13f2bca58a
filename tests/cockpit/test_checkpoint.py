"""A run that continues from a checkpoint has the values of one without, but those that waited."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import isabstract
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradlens
from gradlens import Aggregate, quantities
from gradlens.cockpit.checkpoint import CONTINUED
from gradlens.history.undefined import Undefined
from gradlens.quantities import Quantity
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from gradlens.schedules import linear
from tests.cases.records import assert_identical, pairs

pytestmark = pytest.mark.filterwarnings("ignore:gradlens, step")  # such as of batch normalisation


STEPS, SAMPLES = 6, 8
INPUTS = torch.randn(STEPS, SAMPLES, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (STEPS, SAMPLES), generator=torch.Generator().manual_seed(1))

ROUNDED = ("Alpha", "every third step")
"""Their values differ in the last digits from run to run, also without a checkpoint: LAPACK's least
squares depend on where arrays are in memory. The first ones after a checkpoint are rounded as in
single precision, since gradients aren't also projected on the update before."""


def network() -> nn.Module:
    layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def all_quantities() -> list[Quantity]:
    """One of each class, and one with an option for each state that options lead to."""
    classes = [getattr(quantities, name) for name in quantities.__all__ if name != "Phase"]
    others = (quantities.Time, quantities.CABS, quantities.SpectralDensity)
    others += (quantities.HessEigenvalues, quantities.AttentionEntropy, quantities.AttentionLogits)
    plain = [
        each() for each in classes if not isabstract(each) and each.phases and each not in others
    ]
    return [
        *plain,
        quantities.SpectralDensity(probes=2, steps=5),
        quantities.GradHist1d(name="adapted", bins=5, adapt=GradAbsMax(linear(2))),
        quantities.GradHist2d(name="x, y", bins=(3, 3), adapt=(GradAbsMax(), ParamAbsMax())),
        quantities.HessEigenvalues(name="k = 2", k=2, which="magnitude", by="parameter"),
        quantities.Distance(linear(2), name="every second step"),
        quantities.Alpha(linear(3), name="every third step"),
    ]


class Draws:
    """A schedule with a generator of its own."""

    def __init__(self) -> None:
        self._generator = random.Random(0)

    def __call__(self, global_step: int) -> bool:
        return self._generator.random() < 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.setstate(state["generator"])


def aggregated() -> list[Any]:
    return [
        Aggregate(quantities.Loss(), over=4, raw=True),
        Aggregate(quantities.OutputActivation(), statistics=("min", "median", "iqr")),
        Aggregate(quantities.UpdateSize()),
        Aggregate(quantities.GradNorm(), over=2, statistics=("mean", "std")),
    ]


MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A training loop."""

    tracked: Callable[[], Sequence[Any]]
    optimizer: Callable[..., Optimizer] = MOMENTUM
    optimizers: int = 1
    passed: bool = True
    micro_batches: int = 1
    bfloat16: bool = False
    steps: Sequence[int] = tuple(range(STEPS))
    options: Mapping[str, Any] = field(default_factory=dict)
    forward: bool = False
    epoch: int = 4
    """After this step, an epoch ends."""
    evaluations: bool = False
    cuts: Sequence[int] = (0, 2, 4)


preset = partial(partial, gradlens.configuration)

CASES = {
    "economy": Case(preset("economy"), partial(Adam, lr=0.05), cuts=range(STEPS)),
    "economy, by the context": Case(preset("economy"), passed=False),
    "business": Case(preset("business"), partial(AdamW, lr=0.05, amsgrad=True), cuts=(0, 3)),
    "full": Case(preset("full"), cuts=(1,)),
    "training": Case(preset("training"), micro_batches=2, cuts=(2,)),
    "full, sum": Case(preset("full"), options={"loss_reduction": "sum"}, cuts=(2,)),
    "micro-batches": Case(preset("business"), micro_batches=2, cuts=(0, 3)),
    "micro-batches, by the context": Case(
        preset("economy"), micro_batches=2, passed=False, cuts=(2,)
    ),
    "bfloat16": Case(preset("full"), bfloat16=True, cuts=(4,)),
    "every quantity": Case(all_quantities, cuts=(0, 2)),
    "every quantity, by the context": Case(
        # Correlations and kept vectors would be those of the latest update that was measured.
        lambda: [
            q
            for q in all_quantities()
            if "optimizer" not in q.needs
            and not isinstance(q, (quantities.UpdateGeometry, quantities.UpdateSpectrum))
        ],
        passed=False,
        cuts=(2,),
    ),
    "two optimizers": Case(
        lambda: [*gradlens.configuration("economy"), quantities.UpdateGeometry(correlation=False)],
        optimizers=2,
    ),
    "aggregates": Case(aggregated),
    "frozen statistics": Case(preset("economy"), options={"batchnorm": "frozen"}, cuts=(1,)),
    "random schedules": Case(
        lambda: [
            quantities.Loss(Draws()),
            quantities.Alpha(Draws()),
            quantities.HessMaxEV(Draws()),
            quantities.OutputNorm(Draws()),
        ]
    ),
    "irregular steps": Case(
        lambda: [
            quantities.Alpha(lambda step: step in (2, 3, 17)),
            quantities.OutputGradientGeometry(linear(2)),
            quantities.TICDiag(linear(2)),
        ],
        steps=(0, 2, 3, 9, 16, 17),
    ),
    "irregular steps with forward": Case(
        # Forward passes are recorded for quantities of layers.
        lambda: [q for q in all_quantities() if isinstance(q, quantities.LayerQuantity)],
        steps=(0, 2, 3, 9, 16, 17),
        forward=True,
        cuts=(3,),
    ),
    "steps that repeat": Case(preset("economy"), steps=(0, 0, 1, 1, 2, 2)),
    "evaluations": Case(lambda: [quantities.OutputNorm(), quantities.Loss()], evaluations=True),
}


class Loop:
    """A network in training, of which everything is made anew."""

    def __init__(self, case: Case, **options: Any) -> None:
        torch.manual_seed(2)
        self.case = case
        self.model = network()
        reduction = case.options.get("loss_reduction", "mean")
        self.loss_function = nn.CrossEntropyLoss(reduction=reduction)
        parameters = list(self.model.parameters())
        count = case.optimizers
        self.optimizers = [case.optimizer(parameters[at::count]) for at in range(count)]
        self.cockpit = gradlens.Cockpit(
            self.model,
            case.tracked(),
            loss_function=self.loss_function,
            **{**case.options, **options},
        )

    def step(self, index: int, parts: int | None = None) -> None:
        """All micro-batches of a step, or the first ``parts``, which no update follows."""
        case, step = self.case, self.case.steps[index]
        for each in self.optimizers:
            each.zero_grad()
        all_parts = torch.arange(SAMPLES).chunk(case.micro_batches)
        for part in all_parts[:parts]:
            loss = self._loss(step, INPUTS[index, part], LABELS[index, part])
            optimizer = self.optimizers[0] if case.passed else None
            goes_on = part is not all_parts[-1]
            with self.cockpit(
                step,
                loss=loss,
                optimizer=optimizer,
                accumulating=goes_on,
                closure=partial(self._whole_loss, index),
                info={"groups": [["odd", "even"][int(n) % 2] for n in part]},
            ):
                loss.backward()
        if parts is not None:
            return
        for each in self.optimizers:
            each.step()
        self.cockpit.push(metric=loss.detach())
        if case.evaluations:
            with self.cockpit.evaluation(step), torch.no_grad():
                self.model(INPUTS[index])

    def _whole_loss(self, index: int) -> Tensor:
        """The loss of all micro-batches of a step."""
        parts = torch.arange(SAMPLES).chunk(self.case.micro_batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.bfloat16):
            losses = [
                self.loss_function(self.model(INPUTS[index, part]), LABELS[index, part])
                for part in parts
            ]
        joined = torch.stack(losses)
        is_mean = self.loss_function.reduction == "mean"
        return joined.mean() if is_mean else joined.sum()

    def _loss(self, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.bfloat16):
            if not self.case.forward:
                return self.loss_function(self.model(inputs), labels)
            with self.cockpit.forward(step):
                return self.loss_function(self.model(inputs), labels)

    @property
    def parts(self) -> list[Any]:
        return [self.model, *self.optimizers, self.cockpit]

    def state(self) -> list[dict[str, Any]]:
        return [each.state_dict() for each in self.parts]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of the first parts, or of all of them."""
        for each, state in zip(self.parts, states, strict=False):
            each.load_state_dict(state)

    def train(self, first: int = 0, last: int = STEPS) -> None:
        for index in range(first, last):
            self.step(index)
            if index == self.case.epoch:
                self.cockpit.tick_epoch()


def through_a_file(state: Any) -> Any:
    """A state as it is after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@cache
def unbroken(name: str) -> dict[int, dict[str, Any]]:
    loop = Loop(CASES[name])
    loop.train()
    loop.cockpit.close()
    return loop.cockpit.get_output()


def continued(name: str, cut: int) -> dict[int, dict[str, Any]]:
    """The values of an unbroken loop, without those that waited when it was interrupted."""
    state, _ = interruptions(name)[cut]
    return without_waiting(unbroken(name), state[-1]["unfinished"], CASES[name].steps[cut + 1 :])


def without_waiting(
    values: Mapping[int, Mapping[str, Any]], waiting: Mapping[str, int], later: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Values by step, of which some were still waiting for one of the ``later`` steps."""
    found = {step: dict(each) for step, each in values.items()}
    for name, step in waiting.items():
        if step not in later[:-1]:  # where it is run again, and another one after it
            found[step][name] = Undefined(CONTINUED)
    return found


@cache
def interruptions(name: str) -> dict[int, tuple[list[Any], dict[int, dict[str, Any]]]]:
    """The state of a loop after each of the case's cuts, and the values that it had by then."""
    loop, found = Loop(CASES[name]), {}
    for step in range(STEPS):
        loop.train(step, step + 1)
        if step in loop.case.cuts:
            found[step] = through_a_file(loop.state()), copy.deepcopy(loop.cockpit.get_output())
    return found


def resumed(name: str, cut: int) -> dict[int, dict[str, Any]]:
    """The values of a loop that was interrupted after a step; those before it first."""
    state, before = interruptions(name)[cut]
    after, found = Loop(CASES[name]), dict(before)
    after.load(copy.deepcopy(state))  # an optimizer takes the tensors that it loads over
    after.train(cut + 1)
    after.cockpit.close()
    for step, values in after.cockpit.get_output().items():
        found[step] = found.get(step, {}) | values
    return found


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param(name, cut, marks=() if name == "economy" else pytest.mark.slow)
        for name, case in CASES.items()
        for cut in case.cuts
    ],
)
def test_a_resumed_run_equals_an_unbroken_one(name: str, cut: int) -> None:
    assert_same(continued(name, cut), resumed(name, cut))


@cache
def in_four_parts() -> dict[int, dict[str, Any]]:
    loop = Loop(FOUR_PARTS)
    loop.train()
    loop.cockpit.close()
    return loop.cockpit.get_output()


FOUR_PARTS = replace(CASES["micro-batches"], micro_batches=4)


@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.slow
def test_micro_batches_of_a_step_that_is_not_complete_are_run_again(cut: int, parts: int) -> None:
    """What waits for that step, such as Alpha at the step before, is lost."""
    before, after = Loop(FOUR_PARTS), Loop(FOUR_PARTS)
    before.train(0, cut)
    before.step(cut, parts)
    state = through_a_file(before.state())
    after.load(state)
    after.train(cut)
    after.cockpit.close()
    found, rest = before.cockpit.get_output(), after.cockpit.get_output()
    for step, values in rest.items():
        found[step] = found.get(step, {}) | values
    waiting = state[-1]["unfinished"]
    assert waiting == ({"Alpha": cut - 1} if cut else {})
    assert_same(without_waiting(in_four_parts(), waiting, ()), found)


def assert_same(found: Any, expected: Any) -> None:
    """The same bit for bit, but for times and what is rounded."""
    for path, one, other in pairs(found, expected):
        if {*ROUNDED} & {*path} and isinstance(other, float):
            assert one == pytest.approx(other, rel=1e-7, abs=0, nan_ok=True), path
        elif "Time" not in path:
            assert_identical(one, other)


# Everything that a cockpit keeps from step to step.


# The state itself.


def plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple):
        parts = value if type(value) is not dict else [*value, *value.values()]
        return all(map(plain, parts))
    return type(value) in (type(None), bool, int, float, str, Tensor)


@pytest.mark.slow
def test_later_steps_change_nothing_in_a_state() -> None:
    loop = Loop(CASES["every quantity"])
    loop.train(0, 3)
    state = loop.cockpit.state_dict()
    copy = through_a_file(state)
    loop.train(3)
    assert plain(state)
    assert_same(state, copy)


def test_a_state_before_the_first_step() -> None:
    case = CASES["economy"]
    before, after = Loop(case), Loop(case)
    after.load(through_a_file(before.state()))
    after.train()
    after.cockpit.close()
    assert_same(unbroken("economy"), after.cockpit.get_output())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["economy, by the context", "every quantity", "aggregates"])
def test_the_same_cockpit_goes_back(name: str) -> None:
    loop = Loop(CASES[name])
    loop.train(0, 2)
    states = copy.deepcopy(loop.state())
    loop.train(2, 5)
    loop.load(states)
    loop.train(2)
    loop.cockpit.close()
    expected = without_waiting(unbroken(name), states[-1]["unfinished"], range(2, STEPS))
    assert_same(expected, loop.cockpit.get_output())


# Other quantities.


def test_quantities_that_come_and_go() -> None:
    """Quantities that the state lacks start anew, and others are left out unless it is strict."""
    case = CASES["economy"]
    before = Loop(case)
    before.train(0, 3)
    after = Loop(Case(lambda: [quantities.Distance(), quantities.Distance(name="new")]))
    state = through_a_file(before.cockpit.state_dict())
    state["quantities"].pop("Loss")
    after.model.load_state_dict(before.model.state_dict())
    with pytest.raises(ValueError, match="doesn't track: "):
        after.cockpit.load_state_dict(state)
    with pytest.warns(UserWarning, match="that was loaded start anew: new") as warned:
        after.cockpit.load_state_dict(state, strict=False)
    assert any("not tracked any more" in str(each.message) for each in warned)
    after.step(3)
    values = after.cockpit.get_output()[3]
    assert values["Distance"] == unbroken("economy")[3]["Distance"]
    assert set(values["new"].values()) == {0.0}


class Unsaveable(quantities.SingleStepQuantity):
    """A quantity of a user's own whose state can't be saved."""

    def compute(self, step: Any) -> float:
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": np.random.default_rng(0)}


def test_a_state_that_cannot_be_saved() -> None:
    """It is noted, and the others are saved; ``strict`` raises."""
    loop = Loop(Case(lambda: [Unsaveable(), quantities.Distance()]))
    loop.step(0)
    with pytest.warns(UserWarning, match="saving Unsaveable failed: .*a Generator can't be saved"):
        state = loop.cockpit.state_dict()
    assert state["quantities"].keys() == {"Unsaveable", "Distance"}
    strict = Loop(Case(lambda: [Unsaveable()]), strict=True)
    strict.step(0)
    with pytest.raises(TypeError, match="a Generator can't be saved: use numbers"):
        strict.cockpit.state_dict()


# The run's file.


def written(name: str, path: Path, first: int, last: int, state: Any = None) -> Loop:
    loop = Loop(CASES[name], run=path, resume=first > 0)
    if state is not None:
        loop.load(state)
    loop.train(first, last)
    return loop


def by_step(history: gradlens.History) -> dict[int, dict[str, Any]]:
    """The values of a history by step and name."""
    found: dict[int, dict[str, Any]] = {}
    for name in history.names:
        for step, value in history[name].items():
            found.setdefault(step, {})[name] = value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["economy", "aggregates"])
@pytest.mark.parametrize(("cut", "crash", "closes"), [(2, 3, False), (1, 5, True), (3, 6, False)])
def test_a_crash_after_the_checkpoint(
    name: str, cut: int, crash: int, closes: bool, tmp_path: Path
) -> None:
    """Values from after the checkpoint are taken out or replaced, and notes aren't doubled."""
    path, whole = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    written(name, whole, 0, STEPS).cockpit.close()
    before = written(name, path, 0, cut)
    state = through_a_file(before.state())
    before.train(cut, crash)
    if closes:
        before.cockpit.close()
    del before
    after = written(name, path, cut, STEPS, state)
    after.cockpit.close()
    expected, found, live = gradlens.History.load(whole), gradlens.History.load(path), after.cockpit
    for history in (found, live.history):
        waiting = state[-1]["unfinished"]
        complete = without_waiting(by_step(expected), waiting, range(cut, STEPS))
        assert_same(complete, by_step(history))
        assert [note.text for note in history.notes] == [note.text for note in expected.notes]
        assert history.coverages == expected.coverages


def test_a_run_that_is_continued_without_a_state(tmp_path: Path) -> None:
    written("economy", tmp_path / "run.jsonl", 0, 3).cockpit.close()
    with pytest.warns(UserWarning, match="quantities start at step 3, within a run that is co"):
        written("economy", tmp_path / "run.jsonl", 3, 4)


def test_a_run_that_begins_anew_in_its_file(tmp_path: Path) -> None:
    written("economy", tmp_path / "run.jsonl", 0, 3).cockpit.close()  # killed before it saved
    loop = Loop(CASES["economy"], run=tmp_path / "run.jsonl", resume=True)
    loop.train(0, 4)
    whole = written("economy", tmp_path / "whole.jsonl", 0, 4)
    assert loop.cockpit.history["Distance"] == whole.cockpit.history["Distance"]
    assert loop.cockpit.history.notes == whole.cockpit.history.notes


# Budgets, whose decisions depend on measured times.


def test_what_a_budget_knows_is_kept() -> None:
    loop = Loop(CASES["economy"], budget=0.3)
    loop.train()
    for _ in range(30):
        loop.train()
    state = through_a_file(loop.cockpit.state_dict())
    assert state["costs"]["account"]["plain"]
    assert state["costs"]["account"]["cost"]
    after = Loop(CASES["economy"], budget=0.3)
    after.cockpit.load_state_dict(state)
    assert_same(after.cockpit.state_dict()["costs"], state["costs"])
    after.train()
    other = Loop(Case(lambda: [quantities.Loss()]), budget=0.3)
    with pytest.warns(UserWarning, match="not tracked any more"):
        other.cockpit.load_state_dict(state, strict=False)
    assert not other.cockpit.state_dict()["costs"]["account"]["cost"]
