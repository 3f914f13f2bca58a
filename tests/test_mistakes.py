"""Mistakes that users make, and what they are told.

A line is a program that must say a reason and a remedy: as the message of an exception, a note, or
the reason of a NaN. An indented line below does what the message says, and must say nothing. Loops
of more than one line are functions.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backpack.extensions import BatchGrad
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import gradlens
from gradlens import (
    Cockpit,
    CockpitPlotter,
    configuration,
    curvature,
    instruments,
    quantities,
    recorders,
    schedules,
    signals,
    sinks,
)
from gradlens.quantities import Quantity
from gradlens.quantities.bin_adaptation import GradAbsMax
from tests.cases.steps import tracked_backward

Program = Callable[[Path], Any]
OF_LINES = (
    *(BatchGrad, TensorDataset, configuration, curvature, instruments, recorders, schedules),
    *(functional, GradAbsMax, copy),
)
"""Names that the lines use."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def some() -> list[Quantity]:
    return [quantities.Loss(), quantities.NormTest(), quantities.UpdateSize()]


def loss_of(model: nn.Module, n: int = 5) -> Tensor:
    loss: Tensor = model(torch.randn(n, 4)).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(cockpit: Cockpit, model: nn.Module, steps: int = 3, **given: Any) -> Cockpit:
    """A training loop without mistakes, but for what is ``given`` to the context."""
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        tracked_backward(cockpit, step, loss_of(model), **given)
        optimizer.step()
    return cockpit


def called(*arguments: Any, loss: Any = None, rows: int = 5, **given: Any) -> Cockpit:
    """One step whose context is called with certain arguments."""
    model = net()
    cockpit, own = Cockpit(model, some()), loss_of(model, rows)
    with cockpit(*(arguments or (0,)), loss=own if loss is None else loss, **given):
        own.backward()
    return cockpit


def of_loops(*loops: Callable[[Cockpit, nn.Module], None]) -> dict[str, Program]:
    """Programs by the names of functions that take a step, or more, of a user's own."""

    def program(loop: Callable[[Cockpit, nn.Module], None]) -> Cockpit:
        model = net()
        cockpit = Cockpit(model, some())
        loop(cockpit, model)
        return cockpit

    return {loop.__name__: lambda _, loop=loop: program(loop) for loop in loops}


def said(program: Program, folder: Path) -> str:
    """All that a program says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = program(folder)
            lines = [*reasons(found)] if isinstance(found, Cockpit) else []
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
    return "\n".join([*lines, *(f"note: {warning.message}" for warning in caught)])


def used(found: Any) -> Any:
    """What a program has made, after a step if it is a quantity, or a cockpit that had none."""
    cockpit = Cockpit(net(), [found]) if isinstance(found, Quantity) else found
    if isinstance(cockpit, Cockpit) and not cockpit.history.steps and cockpit.model is not None:
        train(cockpit, cockpit.model, 1)
    return cockpit


def reasons(cockpit: Cockpit) -> Iterator[str]:
    """The reasons of a cockpit's NaN."""
    for name in cockpit.history.names:
        for value in cockpit.history[name].values():
            layers = value.get("layers", {}).values() if isinstance(value, dict) else ()
            for number in (value, *layers):
                if isinstance(number, float) and math.isnan(number):
                    yield f"NaN of {name}: {getattr(number, 'reason', '')}"


def evaluated(line: str) -> Program:
    return lambda folder: eval(line, {**globals(), "folder": folder})


# Lines -------------------------------------------------------------------------------------------


def used_up(values: Iterator[Any]) -> Iterator[Any]:
    assert [*values]
    return values


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
        return torch.jit.script(model)


def existing(folder: Path) -> Path:
    (folder / "run.jsonl").write_text("precious")
    return folder / "run.jsonl"


def initialised(model: nn.Module) -> nn.Module:
    model(torch.randn(5, 4))
    return model


def partly_frozen() -> nn.Module:
    model = net().requires_grad_(False)
    model[2].requires_grad_(True)
    return model


def with_loss(loss_function: nn.Module, **given: Any) -> Cockpit:
    """A cockpit that knows the loss module."""
    model = net()
    cockpit = Cockpit(model, some(), loss_function=loss_function, **given)
    loss = loss_function(model(torch.randn(5, 4)), torch.randn(5, 2).softmax(1))
    tracked_backward(cockpit, 0, loss, optimizer=sgd(model))
    return cockpit


class Forgetful(sinks.Sink):
    """A sink that keeps nothing."""

    def record(self, step: int, scalars: Any, histograms: Any) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


def aggregate(**given: Any) -> Any:
    return gradlens.Aggregate(quantities.Loss(), **given)


def chosen(selection: Any) -> None:
    signals.select(net(), selection)


def probe_of(data: Any, **given: Any) -> Any:
    return curvature.Probe(data, nn.CrossEntropyLoss(), **given)


def losses_stacked() -> Cockpit:
    cockpit = Cockpit(model := net(), [quantities.Loss(), quantities.NormTest()])
    losses = torch.stack([model(torch.randn(1, 4)).square().mean() for _ in range(5)])
    tracked_backward(cockpit, 0, losses.mean(), individual_losses=losses)
    return cockpit


def logged(**values: Any) -> Cockpit:
    """Values that are logged behind a loop."""
    cockpit = train(Cockpit(model := net(), some()), model)
    cockpit.log(2, **values)
    return cockpit


def resumed(state: Any) -> Cockpit:
    cockpit = Cockpit(net(), [quantities.Loss()])
    cockpit.load_state_dict(state)
    return cockpit


def gradients(model: nn.Module) -> gradlens.per_sample_gradients:
    with gradlens.per_sample_gradients(model) as found:
        loss_of(model).backward()
    return found


def plotted(*source: Any, plotter: Any = None, **options: Any) -> None:
    """A figure of a run, or of something else."""
    history = train(Cockpit(model := net(), some()), model).history
    (plotter or CockpitPlotter()).plot(*(source or (history,)), show_plot=False, **options)


def within(work: Callable[[nn.Module, Tensor], object], *passed: Any) -> Cockpit:
    """A step whose context gets what functions make of the loss, and in which something happens."""
    cockpit, loss = Cockpit(model := net(), some()), loss_of(model)
    with cockpit(0, **({"loss": passed[0](loss)} if passed else {})):
        work(model, loss)
    return cockpit


def stepped(cockpit: Cockpit, loss: Tensor) -> Cockpit:
    tracked_backward(cockpit, 0, loss)
    return cockpit


def after_backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def itself(loss: Tensor) -> Tensor:
    return loss


def scaled(loss: Tensor) -> Tensor:
    return torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss)


def scaled_before_it_was_passed(scaler: Any) -> Cockpit:
    cockpit, loss = Cockpit(model := net(), some()), scaler.scale(loss_of(model))
    with cockpit(0, loss=loss, scaler=scaler):
        loss.backward()
    return cockpit


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "run.jsonl")
    return folder / "run.jsonl"


AT_ONCE = """
Cockpit(net(), [quantities.HessEigenvalues(schedules.linear(2), 5)])
Cockpit(net(), diagnose=[quantities.Loss()])
    Cockpit(net(), some(), diagnose=True)
Cockpit(net(), facts="no")
    Cockpit(net(), some(), facts=False)
Cockpit(net(), "econmy")
Cockpit(net(), sinks=[object()])
Cockpit(net(), sinks="wandb")
Cockpit(net(), sinks=[Forgetful(layers=["0.wieght"])])
    Cockpit(net(), some(), sinks=[Forgetful(layers=["0.weight"])])
configuration("ecnomy")
configuration(None)
Cockpit(net(), [quantities.Loss])
Cockpit(net(), quantities.Loss())
Cockpit(net(), {"Loss": quantities.Loss()})
    Cockpit(net(), [quantities.Loss()])
Cockpit(net(), ["NormTst"])
    Cockpit(net(), ["NormTest"])
Cockpit(net(), ["Quantity"])
Cockpit(net(), [configuration("economy"), quantities.Parameters()])
    Cockpit(net(), [*configuration("economy")[:2], quantities.Parameters()])
Cockpit(net(), [BatchGrad()])
Cockpit(net(), [quantities.Loss(), quantities.Loss()])
    Cockpit(net(), [quantities.Loss(), quantities.Loss(name="other")])
[Cockpit(net(), shared) for shared in [some()] * 2]
    [Cockpit(net(), some()) for _ in range(2)][1]
called(batch_size="5")
    called(batch_size=5)
gradlens.Aggregate(quantities.Loss)
    Cockpit(net(), [gradlens.Aggregate(quantities.Loss())])
gradlens.Aggregate("Loss")
aggregate(over=0)
aggregate(over="batch")
aggregate(over=True)
aggregate(over=2.0)
aggregate(statistics=("average",))
aggregate(statistics="mean")
aggregate(statistics=())
aggregate(statistics=5)
Cockpit(net(), [quantities.Loss(), gradlens.Aggregate(quantities.Time(), name="Loss")])
Cockpit(net(), [quantities.Loss(), aggregate()])
signals.selection(depth=0)
signals.selection(depth=-1)
signals.selection(depth=True)
signals.selection(depth="1")
signals.selection(True)
signals.selection(exclude=3.5)
signals.selection(["Linear", 1.5])
signals.selection(exclude=[None])
signals.selection([signals.Selection()])
signals.selection(torch.zeros(2, 2))
signals.selection([])
quantities.OutputNorm(layers=set())
quantities.ParameterNorm(layers={})
chosen(signals.selection("2", exclude="Linear"))
chosen(signals.selection(lambda each: each.width > 2))
chosen(signals.selection(nn.Linear(8, 3)))
chosen(signals.selection(net(), leaf=True))
Cockpit(net(), [quantities.ParameterNorm(layers=1)])
Cockpit(net(), [quantities.ParameterNorm(parameters="wieght")])
Cockpit(net().parameters(), [quantities.OutputNorm()])
Cockpit(net().parameters(), [quantities.ParameterNorm(layers="Linear")])
Cockpit(net(), [quantities.InputNorm(layers="Liner")])
    Cockpit(net(), [quantities.InputNorm(layers="Linear")])
recorders.ForwardPre().children(net(), indices=3)
recorders.ForwardPre().modules(net(), indices=-1)
recorders.ForwardPre().modules(net(), indices=())
recorders.ForwardPre().modules(net(), types=nn.Conv2d)
recorders.ForwardPre().children(net(), types=nn.Tanh, indices=(0, 2))
recorders.ForwardPre().layers(net(), [])
recorders.ForwardPre().layers(net(), "Linaer")
recorders.ForwardPre().children(net())[3]
recorders.ForwardPre().remove(0)
gradlens.register_layer_rule(net()[0], print)
probe_of(iter([(torch.randn(3, 4), torch.randn(3, 2))]))
probe_of(TensorDataset(torch.randn(3, 4)))
probe_of([], loss_reduction="none")
Cockpit(net().parameters(), [quantities.HessMaxEV(on=probe_of([]))])
Cockpit(net(), [quantities.HessMaxEV(on=[])])
gradlens.from_taiyi({"Linear": ["InputSndNrom"]})
gradlens.from_taiyi({"Linear": ["GradNoise"]})
gradlens.from_taiyi({"Linear": [["WeightNorm", "linear"]]})
gradlens.from_taiyi({"Linear": [["WeightNorm", "linear(1,0)", "x"]]})
gradlens.from_taiyi({"Linear": [[], "WeightNorm"]})
gradlens.from_taiyi({"Linear": [None]})
gradlens.from_taiyi({"Linear": 3})
gradlens.from_taiyi({"Linear": []})
gradlens.from_taiyi(None)
gradlens.from_taiyi({"Linear": ["WeightNorm", "linear(5,2)"]})
gradlens.from_taiyi({"Linear": [["WeightNorm", "linear(-1,0)"]]})
gradlens.from_taiyi({3: ["WeightNorm"]})
gradlens.from_taiyi({functional.relu: ["WeightNorm"]})
Cockpit(used_up(net().parameters()))
Cockpit(net().named_parameters())
Cockpit(net().state_dict())
Cockpit(sgd(net()))
Cockpit(some(), net())
    Cockpit(net(), some())
Cockpit(None)
Cockpit(nn.Linear)
Cockpit("model.pt")
Cockpit([net(), net()])
Cockpit(net()[0].weight)
Cockpit([net()[0].weight * 2])
Cockpit(nn.Sequential(nn.LazyLinear(3)))
    Cockpit(initialised(nn.Sequential(nn.LazyLinear(3))), some())
Cockpit(nn.ReLU())
Cockpit([])
Cockpit(net().requires_grad_(False))
    Cockpit(partly_frozen(), [quantities.Loss(), quantities.GradNorm()])
Cockpit(scripted(net()))
Cockpit(net(), loss_reduction="avg")
    Cockpit(net(), some(), loss_reduction="mean")
Cockpit(net(), loss_function=functional.cross_entropy)
Cockpit(net(), loss_function=nn.CrossEntropyLoss)
    with_loss(nn.CrossEntropyLoss())
Cockpit(net(), loss_function=nn.CrossEntropyLoss(reduction="sum"))
    with_loss(nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
Cockpit(net(), loss_function=nn.MSELoss(), loss_reduction="sum")
    with_loss(nn.CrossEntropyLoss(), loss_reduction="mean")
Cockpit(net(), run=existing(folder))
    Cockpit(net(), some(), run=existing(folder).with_name("other.jsonl"))
Cockpit(net(), run=folder)
Cockpit(net(), budget=5)
Cockpit(net(), budget=0)
Cockpit(net(), budget=1)
Cockpit(net(), budget="5%")
Cockpit(net(), max_bytes=1.5)
Cockpit(net(), max_bytes="1")
Cockpit(net(), max_bytes=None)
Cockpit(net(), max_bytes=-1)
Cockpit(net(), batchnorm="freeze")
    Cockpit(net(), some(), batchnorm="frozen")
resumed(None)
resumed(Cockpit(net()).state_dict() | {"gradlens_state": 2})
resumed(Cockpit(net(), [quantities.Loss(name="b")]).state_dict())
resumed(Cockpit(nn.Linear(4, 2)).state_dict())
resumed(Cockpit(net().append(nn.Linear(2, 2))).state_dict())
resumed(Cockpit(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))).state_dict())
resumed(Cockpit(net(), loss_reduction="sum").state_dict())
resumed(train(Cockpit(model := net(), [quantities.HessMaxEV(name="Loss")]), model, 1).state_dict())
resumed(net().state_dict())
    resumed(train(Cockpit(model := net(), [quantities.Loss()]), model, 1).state_dict())
quantities.Loss(0)
    quantities.Loss(1)
quantities.Loss(0.5)
    quantities.Loss(2)
quantities.Loss(schedules.linear)
    quantities.Loss(schedules.linear(2))
quantities.Loss(lambda: True)
    quantities.Loss(lambda step: step < 9)
schedules.linear(0)
    quantities.Loss(schedules.linear(1))
schedules.linear(-2)
schedules.linear(2.5)
schedules.linear("10")
schedules.linear(10, 0.5)
    quantities.Loss(schedules.linear(10, 0))
schedules.epochs(2, 0)
    quantities.Loss(schedules.epochs(2, 3))
schedules.epochs(1, 2.5)
schedules.logarithmic(0, 4, steps=0)
schedules.logarithmic(0, 1000)
    quantities.Loss(schedules.logarithmic(0, 3))
quantities.GradHist1d(adapt=schedules.linear(3))
quantities.GradHist1d(adapt=GradAbsMax)
    quantities.GradHist1d(adapt=GradAbsMax())
quantities.GradHist2d(adapt=GradAbsMax())
quantities.GradHist2d(bins=40)
    quantities.GradHist2d(bins=(4, 4))
quantities.GradHist2d(range=(-1, 1))
quantities.GradCovariance(k=0)
quantities.GradHist2d(range=((0, 1), (0, math.inf)))
quantities.GradHist1d(bins=0)
    quantities.GradHist1d(bins=5)
quantities.GradHist1d(bins="auto")
quantities.GradHist1d(range=5)
    quantities.GradHist1d(range=(-5, 5))
quantities.GradHist1d(range=(2, -2))
    quantities.GradHist1d(range=(-2, 2))
"""
LATER = """
called(torch.ones(()))
called(1.5)
called(None)
called(torch.arange(3))
called("3")
called(-1)
called(0, torch.ones(()))
called(loss=1.5)
called(loss=[torch.ones(())])
called(loss=torch.ones(5))
    called()
called(0, BatchGrad)
called(0, quantities.Loss())
called(individual_losses=[torch.ones((), requires_grad=True)])
    losses_stacked()
called(optimizer="sgd")
called(optimizer=torch.optim.SGD)
called(optimizer=torch.optim.lr_scheduler.StepLR(sgd(net()), 3))
called(optimizer=sgd(net()))
called(rows=16, batch_size=8)
    called(rows=16, batch_size=16)
called(scaler="amp")
called(accumulating="no")
called(info=[1])
    called(info={"own": 1})
called(info={"ids": {1, 2}})
called(closure=3.0)
    called(closure=lambda: torch.zeros(()))
called(loss_scale=0)
    called(loss_scale=1.0)
called(loss_scale=math.inf)
called(loss_scale=math.nan)
called(loss_scale="half")
called(batch_size=0)
Cockpit(net(), some()).evaluation(0, "epoch")
Cockpit(net(), some()).push(metric={"train": 1.0})
Cockpit(net()).log(3, {"valid_loss": 1.0})
    logged(valid_loss=1.0)
logged(Loss=1.0)
    logged(logged_Loss=1.0)
Cockpit(net(), some()).log(3, valid_loss=object())
Cockpit(net(), some()).log(torch.ones(()), valid_loss=1.0)
CockpitPlotter().plot(gradlens.History(), "plot.png")
    plotted()
CockpitPlotter(Cockpit(net()))
plotted(size="column")
    plotted(size=5)
gradlens.View("Mine", group="mine")
gradlens.View("Mine", yscale="logarithmic")
    gradlens.View("Mine", yscale="log")
Cockpit(net(), some()).history[-1]
    (history := called().history)[history.steps[-1]]
plotted(folder)
plotted(net())
CockpitPlotter(instruments=["Loss"])
CockpitPlotter(instruments="Loss")
CockpitPlotter(instruments=instruments.LossInstrument())
    plotted(plotter=CockpitPlotter(instruments=[instruments.LossInstrument()]))
CockpitPlotter(instruments=[instruments.LossInstrument])
Cockpit(net(), some()).history["Los"]
gradlens.per_sample_gradients(net().parameters())
gradlens.extend(functional.cross_entropy)
within(lambda model, loss: None, itself)
within(lambda model, loss: None, Tensor.detach)
within(lambda model, loss: None, after_backward)
within(lambda model, loss: [loss.backward(retain_graph=True) for _ in range(2)], itself)
within(lambda model, loss: loss_of(model).backward(), itself)
within(lambda model, loss: loss_of(model).backward())
within(lambda model, loss: loss.backward(), Tensor.detach)
within(lambda model, loss: scaled(loss).backward(), itself)
    within(lambda model, loss: loss.backward(), itself)
scaled_before_it_was_passed(torch.amp.GradScaler("cpu", init_scale=1024.0))
train(Cockpit(net(), some()), net())
train(Cockpit(model := net(), some()), copy.deepcopy(model))
train(Cockpit(model := net(), some()), model, optimizer=sgd(copy.deepcopy(model)))
train(Cockpit(model := net(), some()), model, accumulating=True)
train(Cockpit((model := net()).parameters(), some()), model)
train(Cockpit(model := net(), [quantities.GradNorm(lambda step: None)]), model)
    quantities.GradNorm(lambda step: step % 10 == 0)
stepped(loss=loss_of(model := net()), cockpit=Cockpit(model, some()))
stepped(Cockpit(model := net(), [quantities.Alpha()]), loss_of(model).sqrt())
Cockpit(net(), run=pipe(folder), resume=True)
Cockpit(net(), run=os.devnull)
gradlens.load_run(pipe(folder))
gradients(net())["0.weigth"]
    gradients(net())["0.weight"]
gradients(nn.Linear(4, 3)).gram(gradients(nn.Linear(4, 6)))
gradients(nn.Linear(4, 3))["weight"].gram(gradients(nn.Linear(4, 6))["weight"])
gradients(nn.Linear(4, 3)).gram(nn.Linear(4, 3))
gradients(nn.Linear(4, 3))["weight"].gram(torch.zeros(3, 4))
gradients(nn.Linear(4, 3)).dot({"wieght": torch.zeros(3, 4)})
    gradients(nn.Linear(4, 3)).dot({"weight": torch.zeros(3, 4)})
gradients(nn.Linear(4, 3)).dot({"weight": torch.zeros(4, 3)})
gradients(nn.Linear(4, 3)).dot({"weight": None})
gradients(nn.Linear(4, 3)).dot({})
gradients(nn.Linear(4, 3)).dot([torch.zeros(4, 3)])
gradlens.per_sample_gradients(nn.Linear(4, 3)).norms()
"""


# Training loops ----------------------------------------------------------------------------------


def forgotten_zero_grad(cockpit: Cockpit, model: nn.Module) -> None:
    optimizer = sgd(model)
    for step in range(3):
        tracked_backward(cockpit, step, loss_of(model), optimizer=optimizer)
        optimizer.step()


def steps_of_epochs(cockpit: Cockpit, model: nn.Module) -> None:
    for _ in range(2):
        train(cockpit, model)


def context_entered_twice(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    context = cockpit(0, loss=loss)
    for _ in range(2):
        with context:
            loss.backward(retain_graph=True)


def parameters_replaced(cockpit: Cockpit, model: nn.Module) -> None:
    model.to("meta")
    model.to_empty(device="cpu")
    train(cockpit, model)


def layer_replaced(cockpit: Cockpit, model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    model[2] = nn.Linear(3, 2)
    train(cockpit, model)


def replaced_for_updates(_: Path) -> Cockpit:
    model = net()
    cockpit = Cockpit(model, [quantities.UpdateSize()])
    layer_replaced(cockpit, model)
    return cockpit


def frozen_later(cockpit: Cockpit, model: nn.Module) -> None:
    model.get_submodule("0").requires_grad_(False)
    train(cockpit, model)


def used_after_close(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model).close()
    train(cockpit, model)


def logged_after_close(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model).close()
    cockpit.log(9, test_accuracy=0.5)


def called_without_with(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    cockpit(0, loss=loss)
    loss.backward()
    gc.collect()


def steps_out_of_order(cockpit: Cockpit, model: nn.Module) -> None:
    for step in (5, 3, 4):
        model.zero_grad()
        tracked_backward(cockpit, step, loss_of(model))


def two_contexts_of_one_forward_pass(_: Path) -> Cockpit:
    model = net()
    cockpit = Cockpit(model, [quantities.OutputNorm()])
    output = model(torch.randn(5, 4))
    for step, loss in enumerate((output.square().mean(), output.abs().mean())):
        with cockpit(step, loss=loss):
            loss.backward(retain_graph=True)
    assert cockpit.history["OutputNorm"][0]["layers"]["0"] > 0
    return cockpit


def functions_of_weights(_: Path) -> Cockpit:
    model = nn.ModuleDict({"only": nn.Linear(4, 3)})
    cockpit = Cockpit(model, [quantities.OutputNorm()])
    loss = functional.linear(torch.randn(5, 4), model["only"].weight).square().mean()
    tracked_backward(cockpit, 0, loss)
    return cockpit


def nothing_for_the_budget(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), [quantities.NormTest()], budget=0.1)
    train(cockpit, model).close()
    return cockpit


def curvature_of_micro_batches(_: Path) -> Cockpit:
    model = net()
    cockpit, optimizer = Cockpit(model, [quantities.TICTrace(samples=2)]), sgd(model)
    for part in range(2):
        tracked_backward(cockpit, 0, loss_of(model), optimizer=optimizer, accumulating=part == 0)
    return cockpit


LOOPS: dict[str, Program] = {
    **of_loops(
        forgotten_zero_grad, steps_of_epochs, context_entered_twice, parameters_replaced,
        layer_replaced, used_after_close, logged_after_close, called_without_with,
        steps_out_of_order,
    ),
    **{program.__name__: program for program in (
        replaced_for_updates, two_contexts_of_one_forward_pass, functions_of_weights,
        nothing_for_the_budget, curvature_of_micro_batches,
    )},
}  # fmt: skip

REMEDY = re.compile(
    r".{12,}\b(did you mean|there is|there are|as in|is saved by|has a value|is history"
    r"|(add|call|choose|close|end|enter|exclude|give|join|leave|list|load|make|pass|return|run|set|track"
    r"|use|write) \S+)",
    re.DOTALL | re.IGNORECASE,
)
"""A reason, and behind it what to do instead."""


LINES = [line for line in (AT_ONCE + LATER).splitlines() if line]
MISTAKES = {line: evaluated(line) for line in LINES if line[0] != " "} | LOOPS


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_a_reason_and_a_remedy(name: str, tmp_path: Path) -> None:
    text = said(MISTAKES[name], tmp_path)
    assert REMEDY.search(text), text
    if name in AT_ONCE.splitlines():
        assert re.match(r"\w+Error: ", text)


# What is no mistake ------------------------------------------------------------------------------


def scaled_with_scaler(cockpit: Cockpit, model: nn.Module) -> None:
    scaler, loss = torch.amp.GradScaler("cpu"), loss_of(model)
    with cockpit(0, loss=loss, scaler=scaler):
        scaler.scale(loss).backward()


def counted(cockpit: Cockpit, model: nn.Module) -> None:
    step = 0
    for _epoch in range(2):
        for _batch in range(2):
            model.zero_grad()
            tracked_backward(cockpit, step, loss_of(model), optimizer=sgd(model))
            step += 1


def last_part_said(cockpit: Cockpit, model: nn.Module) -> None:
    optimizer = sgd(model)
    for part in range(2):
        loss = loss_of(model)
        tracked_backward(cockpit, 0, loss, optimizer=optimizer, accumulating=part == 0)


def another_cockpit(folder: Path) -> Cockpit:
    model, run = net(), folder / "run.jsonl"
    kinds = quantities.Loss, quantities.NormTest
    train(Cockpit(model, [kind() for kind in kinds], run=run), model).close()
    cockpit = Cockpit(model, [kind() for kind in kinds], run=run, resume=True)
    model.zero_grad()
    tracked_backward(cockpit, 3, loss_of(model))
    return cockpit


def zeroed(zero: Callable[[torch.optim.Optimizer], None], inside: bool = False) -> Cockpit:
    """A loop that sets gradients to zero in one of the usual ways."""
    model = net()
    cockpit, optimizer = Cockpit(model, some()), sgd(model)
    for step in range(4):
        if not inside:
            zero(optimizer)
        loss = loss_of(model)
        with cockpit(step, loss=loss, optimizer=optimizer):
            if inside:
                zero(optimizer)
            loss.backward()
        optimizer.step()
    return cockpit


def by_data(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.data.zero_()


def micro_batches_with_steps_of_their_own(cockpit: Cockpit, model: nn.Module) -> None:
    optimizer = sgd(model)
    for step in range(6):
        tracked_backward(cockpit, step, loss_of(model), optimizer=optimizer)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def two_optimizers(cockpit: Cockpit, model: nn.Module) -> None:
    for step in range(3):
        model.zero_grad()
        tracked_backward(cockpit, step, loss_of(model), optimizer=sgd(model.get_submodule("2")))


def info_of_the_users_own(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model, info={"losses": 1, "output_size": 2, "batch": 3, "scale": 4, "step": 5})


def closed_twice(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model).close()
    cockpit.close()


def on_one_device(_: Path) -> Cockpit:
    model = nn.DataParallel(net())
    return train(Cockpit(model, some()), model)


def scripted_inside(_: Path) -> Cockpit:
    model = nn.Sequential(nn.Linear(4, 3), scripted(nn.Tanh()), nn.Linear(3, 2))
    return train(Cockpit(model, [*some(), quantities.InputNorm()]), model, 1)


def logged_under_any_name(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model)
    cockpit.log(2, 1, perplexity=3.0, by_class={"cat": 0.5}, valid_loss=torch.tensor(2.0))
    assert cockpit.history["perplexity"][2] == 3.0
    assert cockpit.history["by_class"][2] == {"cat": 0.5}
    assert cockpit.history["epoch_count"][2] == 1


RIGHT: dict[str, Program] = {
    **{line.strip(): evaluated(line.strip()) for line in LINES if line[0] == " "},
    "zero_grad": lambda _: zeroed(lambda optimizer: optimizer.zero_grad()),
    "zero_grad to zeros": lambda _: zeroed(lambda o: o.zero_grad(set_to_none=False)),
    "zero_grad inside the context": lambda _: zeroed(lambda o: o.zero_grad(), inside=True),
    "zeros inside the context": lambda _: zeroed(lambda o: o.zero_grad(False), inside=True),
    "zeros by grad.data": lambda _: zeroed(by_data),
    **of_loops(
        scaled_with_scaler, counted, last_part_said, micro_batches_with_steps_of_their_own,
        two_optimizers, info_of_the_users_own, closed_twice, frozen_later, logged_under_any_name,
    ),
    "another cockpit": another_cockpit,
    "DataParallel on one device": on_one_device,
    "a part that is scripted": scripted_inside,
    "no quantities": lambda _: Cockpit(net(), []),
}  # fmt: skip
"""Remedies that are followed, and what looks like a mistake and is none."""


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_says_nothing(name: str, tmp_path: Path) -> None:
    assert not said(lambda folder: used(RIGHT[name](folder)), tmp_path)
