"""Compiled models: tracked forward passes run uncompiled, the others as without gradlens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from gradlens import Cockpit, History, schedules
from gradlens.history.undefined import Undefined
from gradlens.quantities import (
    Alpha,
    Distance,
    GradHist1d,
    GradNorm,
    HessMaxEV,
    Loss,
    NormTest,
    OutputNorm,
    Quantity,
    UpdateSize,
)
from tests.cases.records import assert_same_histories, assert_same_records, unnamed
from tests.cases.steps import tracked_backward

STEPS, EVERY = 6, 3
UNCOMPILED = {0, 1, 3, 4}  # Alpha needs the steps after those that are tracked, too.

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def tracked() -> list[Quantity]:
    schedule = schedules.linear(EVERY)
    of_samples = [NormTest(schedule), GradHist1d(schedule), Alpha(schedule)]
    others = [GradNorm(schedule), Loss(schedule), UpdateSize(schedule), Distance(schedule)]
    return [*of_samples, *others, OutputNorm(schedule), HessMaxEV(schedule)]


class Block(nn.Module):
    """A layer that counts the calls in which it runs uncompiled and with gradients."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear, self.eager_calls = nn.Linear(rows, columns), 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.eager_calls += 1
        return self.linear(x).tanh()  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.front, self.middle, self.behind = Block(4, 6), Block(6, 6), nn.Linear(6, 3)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        inside = self.middle
        x = checkpoint(inside, x, use_reentrant=False) if self.checkpoints else inside(x)
        return self.behind(x)  # type: ignore[no-any-return]


@dataclass
class Compiler:
    """Compiles with a backend that counts the graphs that it gets."""

    backend: str = "aot_eager"
    options: Mapping[str, Any] = field(default_factory=dict)
    graphs: int = 0

    def __call__(self, compiled: Any) -> Any:
        return torch.compile(compiled, backend=self._compile, **self.options)

    def in_place(self, module: nn.Module) -> nn.Module:
        module.compile(backend=self._compile, **self.options)
        return module

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


@dataclass
class Setup:
    """What is trained: ``model`` is for the cockpit, ``loss`` for the loop."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    predict: Callable[[Tensor], Tensor]
    loss_function: nn.Module


def of_model(model: nn.Module, loss_function: nn.Module | None = None) -> Setup:
    criterion = nn.CrossEntropyLoss() if loss_function is None else loss_function
    return Setup(model, lambda x, y: criterion(model(x), y), model, criterion)


def with_parts(model: nn.Module, **compiled: Callable[[Any], Any]) -> nn.Module:
    """The model, some parts of which are compiled."""
    for name, compiler in compiled.items():
        setattr(model, name, compiler(getattr(model, name)))
    return model


def function(compiler: Compiler) -> Setup:
    setup = of_model(Network())
    return Setup(setup.model, compiler(setup.loss), setup.model, setup.loss_function)


def loss_function(compiler: Compiler) -> Setup:
    model, criterion, compiled = Network(), nn.CrossEntropyLoss(), compiler(F.cross_entropy)
    return Setup(model, lambda x, y: compiled(model(x), y), model, criterion)


def another_wrapper(compiler: Compiler) -> Setup:
    model, criterion = Network(), nn.CrossEntropyLoss()
    compiled = compiler(model)
    return Setup(model, lambda x, y: criterion(compiled(x), y), compiled, criterion)


UNKNOWN: dict[str, Callable[[Compiler], Setup]] = {
    "function": function, "loss function": loss_function, "another wrapper": another_wrapper
}  # fmt: skip
FORESEEN: dict[str, Callable[[Compiler], Setup]] = {
    "whole": lambda c: of_model(c(Network())),
    "in place": lambda c: of_model(c.in_place(Network())),
    "a block": lambda c: of_model(with_parts(Network(), middle=c)),
    "blocks in place": lambda c: of_model(
        with_parts(Network(), front=c.in_place, middle=c.in_place)
    ),
    "inside each other": lambda c: of_model(c(with_parts(Network(), front=c.in_place, middle=c))),
    "with checkpoint": lambda c: of_model(c(Network(checkpoints=True))),
    "inside checkpoint": lambda c: of_model(with_parts(Network(checkpoints=True), middle=c)),
    "with loss module": lambda c: of_model(c(Network()), c(nn.CrossEntropyLoss())),
    "loss alone": lambda c: of_model(Network(), c(nn.CrossEntropyLoss())),
}
SETUPS = {"uncompiled": lambda _: of_model(Network()), **FORESEEN, **UNKNOWN}


@dataclass
class Training:
    numbers: list[Tensor]
    graphs: int
    breaks: int
    cockpit: Cockpit | None
    eager_steps: set[int]

    @property
    def history(self) -> History:
        assert self.cockpit is not None
        return self.cockpit.history


def train(
    make: str,
    compiler: Compiler | None = None,
    quantities: Sequence[Quantity] | None = None,
    forward: bool = False,
    optimizer_step: Callable[[Compiler, Any], Any] = lambda compiler, step: step,
) -> Training:
    """Train for some steps with validations, with a cockpit if there are ``quantities``."""
    compiler = Compiler() if compiler is None else compiler
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    setup = SETUPS[make](compiler)
    optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1, momentum=0.9)
    update = optimizer_step(compiler, optimizer.step)
    cockpit = None
    if quantities is not None:
        cockpit = Cockpit(setup.model, quantities, loss_function=setup.loss_function)
    eager_steps = set()
    blocks = [m for m in setup.model.modules() if isinstance(m, Block)]
    for step in range(STEPS):
        torch.manual_seed(step)
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        optimizer.zero_grad()
        before = sum(block.eager_calls for block in blocks)
        forward_context: AbstractContextManager[Any] = nullcontext()
        if forward and cockpit is not None:
            forward_context = cockpit.forward(step)
        with forward_context:
            loss = setup.loss(x, y)
        assert_default_stance()
        if sum(block.eager_calls for block in blocks) > before:
            eager_steps.add(step)
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        assert_default_stance()
        update()
        if step % 2:
            with torch.no_grad():
                setup.predict(x)
    if cockpit is not None:
        cockpit.close()
    breaks = sum(counters["graph_break"].values())
    numbers = [each.detach().clone() for each in setup.model.parameters()]
    return Training(numbers, compiler.graphs, breaks, cockpit, eager_steps)


@cache
def plainly(make: str) -> Training:
    """Without a cockpit."""
    return train(make)


def assert_default_stance() -> None:
    assert torch._dynamo.eval_frame._stance.stance == "default"


def assert_same_training(one: Training, other: Training) -> None:
    assert all(torch.equal(*each) for each in zip(one.numbers, other.numbers, strict=True))


@pytest.fixture(scope="module")
def expected() -> Training:
    return train("uncompiled", quantities=tracked())


NODES_STAY = Compiler("eager")
FULL_GRAPH = Compiler("aot_eager", {"fullgraph": True})
DYNAMIC = Compiler("aot_eager", {"dynamic": True})
CASES = [
    *((make, Compiler()) for make in FORESEEN),
    *(("whole", NODES_STAY), ("whole", DYNAMIC), ("with checkpoint", FULL_GRAPH)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "compiler"), CASES)
def test_tracked_steps_run_uncompiled_by_themselves(
    make: str, compiler: Compiler, expected: Training
) -> None:
    """Training, the graphs that are compiled and graph breaks are those without a cockpit."""
    plain = plainly(make) if compiler == Compiler() else train(make, replace(compiler))
    found = train(make, replace(compiler), tracked())
    assert_same_training(found, plain)
    curvature = {"HessMaxEV"} if make in ("with checkpoint", "inside checkpoint") else set[str]()
    for name in {*expected.history.names} - curvature:
        # The names of compiled modules are longer.
        values = (unnamed(each.history[name]) for each in (found, expected))
        assert_same_records(*values)
    for name in curvature:  # which would recompute the checkpoint once more
        assert all("recomputed" in each.reason for each in found.history[name].values())
    assert (found.graphs, found.breaks) == (plain.graphs, 0)
    if make not in ("a block", "inside checkpoint", "loss alone"):
        assert found.eager_steps == UNCOMPILED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens.*Alpha")  # no loss module is called
@pytest.mark.parametrize("make", UNKNOWN)
def test_a_forward_context_runs_anything_uncompiled(make: str, expected: Training) -> None:
    plain = plainly(make)
    found = train(make, quantities=tracked(), forward=True)
    assert_same_training(found, plain)
    for name in {*expected.history.names} - {"Alpha"}:
        assert_same_records(found.history[name], expected.history[name])
    # Hooks on layers come and go with tracked steps where it is unknown that a model is compiled.
    assert found.graphs <= plain.graphs * (2 if make == "another wrapper" else 1)
    assert found.breaks == 0
    assert found.eager_steps == (UNCOMPILED if make != "loss function" else set(range(STEPS)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens")
@pytest.mark.parametrize("make", UNKNOWN)
def test_what_ran_compiled_has_no_value_and_says_what_to_do(make: str, expected: Training) -> None:
    found = train(make, quantities=tracked())
    assert_same_training(found, plainly(make))
    for name in ("NormTest", "HessMaxEV"):
        for value in found.history[name].values():
            assert isinstance(value, Undefined)
            assert "cockpit.forward(step)" in value.reason
    for name in ("GradNorm", "Loss", "UpdateSize", "Distance"):
        assert_same_records(found.history[name], expected.history[name])


@pytest.mark.slow
def test_quantities_without_samples_leave_everything_compiled() -> None:
    without = [GradNorm(), Loss(), UpdateSize(), Distance()]
    plain, found = plainly("whole"), train("whole", quantities=without)
    assert_same_training(found, plain)
    assert (found.graphs, found.breaks, found.eager_steps) == (plain.graphs, 0, set())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_update(expected: Training) -> None:
    def compiled(compiler: Compiler, step: Any) -> Any:
        return compiler(step)

    plain = train("whole", optimizer_step=compiled)
    found = train("whole", quantities=tracked(), optimizer_step=compiled)
    assert_same_training(found, plain)
    assert_same_histories(found.history, expected.history)
    assert found.graphs == plain.graphs
    assert found.breaks <= plain.breaks


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler of C++")
def test_inductor(expected: Training) -> None:
    """Rounding differs, in training and in values."""
    found = train("whole", Compiler("inductor"), tracked())
    assert found.graphs == train("whole", Compiler("inductor")).graphs
    values = found.history["NormTest"]
    assert dict(values) == pytest.approx(dict(expected.history["NormTest"]), rel=1e-3)


# Steps in one function, contexts in odd places --------------------------------------------------


def norm_tests(
    loop: Callable[[Cockpit, Network, Compiler], None], backend: str = "aot_eager"
) -> tuple[History, int]:
    """The values of a loop, and the numbers of compiled graphs."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, compiler = Network(), Compiler(backend)
    cockpit = Cockpit(model, [NormTest(schedules.linear(EVERY)), GradNorm()])
    loop(cockpit, model, compiler)
    return cockpit.history, compiler.graphs


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(5, 4), torch.randint(3, (5,))


def by_hand(cockpit: Cockpit, model: Network, compiler: Compiler) -> None:
    for step in range(STEPS):
        model.zero_grad()
        with cockpit(step):
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()


def training_step(cockpit: Cockpit, model: Network, compiler: Compiler) -> None:
    @compiler
    def train_step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    for step in range(STEPS):
        model.zero_grad()
        with cockpit(step):
            train_step(*batch(step))
        assert_default_stance()


def context_inside(cockpit: Cockpit, model: Network, compiler: Compiler) -> None:
    @compiler
    def train_step(step: int, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        with cockpit(step, loss=loss):
            loss.backward()

    for step in (0, 1, 3):  # Compiling gradlens, which was not meant to be, takes seconds.
        model.zero_grad()
        train_step(step, *batch(step))
        assert_default_stance()


@pytest.mark.slow
@pytest.mark.parametrize("autograd", [False, True], ids=["", "compiled autograd"])
def test_a_compiled_training_step_inside_the_context(autograd: bool) -> None:
    expected, _ = norm_tests(by_hand)
    with torch._dynamo.config.patch(compiled_autograd=autograd):
        found, graphs = norm_tests(training_step)
    assert_same_histories(found, expected)
    # Hooks on layers come and go with tracked steps where it is unknown that a model is compiled.
    assert graphs <= 2 * (1 + autograd)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens")
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")  # it meets the context
def test_a_context_inside_compiled_code_says_so() -> None:
    found, _ = norm_tests(context_inside, "eager")
    assert found["NormTest"].keys() == {0, 3}
    assert all("compiled" in each.reason for each in found["NormTest"].values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")  # hooks are in its graph
def test_compiled_autograd_around_the_context() -> None:
    expected, _ = norm_tests(by_hand)

    def loop(cockpit: Cockpit, model: Network, compiler: Compiler) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            by_hand(cockpit, model, compiler)

    found, _ = norm_tests(loop)
    assert_same_histories(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_that_was_not_foreseen(checkpoints: bool, passed: bool) -> None:
    """Training is that without gradlens; checkpoints compute again what they have computed."""
    steps, due = [0, 1, 2, 7, 8, 9, 20], {0, 7, 20}

    def run(with_cockpit: bool) -> tuple[list[Tensor], Cockpit | None]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Network(checkpoints)
        model.front, model.middle = Compiler()(model.front), Compiler()(model.middle)
        quantities = [NormTest(lambda step: step in due), OutputNorm(lambda step: step in due)]
        cockpit = Cockpit(model, quantities) if with_cockpit else None
        for step in steps:
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y)
            given = {"loss": loss} if passed else {}
            with nullcontext() if cockpit is None else cockpit(step, **given):
                loss.backward()
            assert_default_stance()
        return [p.grad for p in model.parameters() if p.grad is not None], cockpit

    expected, _ = run(with_cockpit=False)
    with pytest.warns(match=r"cockpit.forward\(step\)"):
        found, cockpit = run(with_cockpit=True)
    assert cockpit is not None
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert cockpit.history.coverage("NormTest", 0).missing == {}
    missing = cockpit.history.coverage("NormTest", 7).missing
    assert set(cockpit.parameters) - set(missing) == {"behind.weight", "behind.bias"}
    assert all("cockpit.forward(step)" in reason for reason in missing.values())
    norms = cockpit.history["OutputNorm"][7]["layers"]
    assert all("cockpit.forward(7)" in each.reason for each in norms.values())


@pytest.mark.slow
def test_models_that_are_compiled_in_place_later() -> None:
    """The first step is too early to notice that."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, compiler = Network(), Compiler()
    cockpit = Cockpit(model, [NormTest()])
    compiler.in_place(model)
    for step in range(3):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        said = pytest.warns(match="cover 0 %.*what torch.compile has made")
        with said if step == 0 else nullcontext(), cockpit(step, loss=loss):
            loss.backward()
    values = cockpit.history["NormTest"]
    assert [isinstance(values[step], Undefined) for step in range(3)] == [True, False, False]


@pytest.mark.slow
def test_evaluations_of_compiled_models() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    compiler, (x, _) = Compiler(), batch(0)
    model = compiler(Network())
    cockpit = Cockpit(model, [OutputNorm(schedules.linear(EVERY))])
    for _ in range(2):
        with torch.no_grad():
            model(x)
            with cockpit.evaluation(0):
                output = model(x)
    assert compiler.graphs == 1
    found = cockpit.history["OutputNorm (evaluation)"][0]["layers"]["behind"]
    assert found == pytest.approx(float(output.norm(dim=1).mean()))
