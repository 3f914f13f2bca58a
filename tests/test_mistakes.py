"""Mistakes that users make, and what they are told.

Each case is a program that must say a reason and a remedy: as the message of an exception, a note,
or the reason of a NaN. Another table has programs that look like mistakes and are none.
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

Program = Callable[[Path], Cockpit | None]


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


def called(*arguments: Any, loss: Any = None, **given: Any) -> Cockpit:
    """One step whose context is called with certain arguments."""
    model = net()
    cockpit, own = Cockpit(model, some()), loss_of(model)
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
            cockpit = program(folder)
            lines = [] if cockpit is None else [*reasons(cockpit)]
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
    return "\n".join([*lines, *(f"note: {warning.message}" for warning in caught)])


def reasons(cockpit: Cockpit) -> Iterator[str]:
    """The reasons of a cockpit's NaN."""
    for name in cockpit.history.names:
        for value in cockpit.history[name].values():
            layers = value.get("layers", {}).values() if isinstance(value, dict) else ()
            for number in (value, *layers):
                if isinstance(number, float) and math.isnan(number):
                    yield f"NaN of {name}: {getattr(number, 'reason', '')}"


# What is passed to a cockpit, to quantities and to schedules -------------------------------------


def used_up_parameters(_: Path) -> None:
    parameters = net().parameters()
    torch.optim.SGD(parameters, lr=0.1)
    Cockpit(parameters)


def shared_quantities(_: Path) -> None:
    shared = some()
    Cockpit(net(), shared)
    Cockpit(net(), shared)


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
        return torch.jit.script(model)


def existing_run(folder: Path) -> None:
    (folder / "run.jsonl").write_text("precious")
    Cockpit(net(), run=folder / "run.jsonl")


def summing() -> nn.Module:
    return nn.CrossEntropyLoss(reduction="sum")


cockpit_of: Any = Cockpit
quantities_: Any = quantities
schedules_: Any = schedules
gradlens_: Any = gradlens
signals_: Any = signals
recorder_of: Any = recorders.ForwardPre


class Forgetful(sinks.Sink):
    """A sink that keeps nothing."""

    def record(self, step: int, scalars: Any, histograms: Any) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


def aggregate(**given: Any) -> None:
    gradlens_.Aggregate(quantities.Loss(), **given)


def chosen(selection: Any) -> None:
    signals.select(net(), selection)


def probe_of(data: Any, **given: Any) -> Any:
    return curvature.Probe(data, nn.CrossEntropyLoss(), **given)


AT_ONCE: dict[str, Program] = {
    "a setting in the place of verbose": lambda _: Cockpit(
        net(), [quantities_.HessEigenvalues(schedules_.linear(2), 5)]
    ),
    "a quantity as a rule": lambda _: cockpit_of(net(), diagnose=[quantities.Loss()]),
    "an option as a text": lambda _: cockpit_of(net(), facts="no"),
    "a misspelt preset of a cockpit": lambda _: cockpit_of(net(), "econmy"),
    "a writer as a sink": lambda _: cockpit_of(net(), sinks=[object()]),
    "a library's name as sinks": lambda _: cockpit_of(net(), sinks="wandb"),
    "a misspelt layer of a sink": lambda _: cockpit_of(
        net(), sinks=[Forgetful(layers=["0.wieght"])]
    ),
    "a misspelt preset": lambda _: configuration("ecnomy") and None,
    "a preset that is no string": lambda _: gradlens_.configuration(None),
    "a class": lambda _: cockpit_of(net(), [quantities.Loss]),
    "a quantity that is in no list": lambda _: cockpit_of(net(), quantities.Loss()),
    "a batch size as a text": lambda _: called(batch_size="5"),
    "a misspelt name of a quantity": lambda _: cockpit_of(net(), ["NormTst"]),
    "the name of a base class": lambda _: cockpit_of(net(), ["Quantity"]),
    "a dict of quantities": lambda _: cockpit_of(net(), {"Loss": quantities.Loss()}),
    "a preset inside a list": lambda _: cockpit_of(
        net(), [configuration("economy"), quantities.Parameters()]
    ),
    "a BackPACK extension as a quantity": lambda _: cockpit_of(net(), [BatchGrad()]),
    "two quantities of one name": lambda _: cockpit_of(
        net(), [quantities.Loss(), quantities.Loss()]
    ),
    "quantities in two cockpits": shared_quantities,
    "an aggregate of a class": lambda _: gradlens_.Aggregate(quantities.Loss),
    "an aggregate of a name": lambda _: gradlens_.Aggregate("Loss"),
    "an aggregate over nothing": lambda _: aggregate(over=0),
    "an aggregate over a text": lambda _: aggregate(over="batch"),
    "an aggregate over a bool": lambda _: aggregate(over=True),
    "an aggregate over real numbers": lambda _: aggregate(over=2.0),
    "an unknown statistic": lambda _: aggregate(statistics=("average",)),
    "a statistic in no list": lambda _: aggregate(statistics="mean"),
    "no statistics": lambda _: aggregate(statistics=()),
    "a number of statistics": lambda _: aggregate(statistics=5),
    "an aggregate with another's name": lambda _: Cockpit(
        net(), [quantities.Loss(), gradlens.Aggregate(quantities.Time(), name="Loss")]
    ),
    "an aggregate beside its quantity": lambda _: Cockpit(
        net(), [quantities.Loss(), gradlens.Aggregate(quantities.Loss())]
    ),
    "a depth of nothing": lambda _: signals_.selection(depth=0),
    "a depth below nothing": lambda _: signals_.selection(depth=-1),
    "a depth that is true": lambda _: signals_.selection(depth=True),
    "a depth as a text": lambda _: signals_.selection(depth="1"),
    "a bool as a layer": lambda _: signals_.selection(True),
    "a real number as a layer": lambda _: signals_.selection(exclude=3.5),
    "a real number among layers": lambda _: signals_.selection(["Linear", 1.5]),
    "nothing among layers": lambda _: signals_.selection(exclude=[None]),
    "a selection among layers": lambda _: signals_.selection([signals.Selection()]),
    "a tensor as a layer": lambda _: signals_.selection(torch.zeros(2, 2)),
    "an empty list of layers": lambda _: signals_.selection([]),
    "an empty set of layers": lambda _: quantities_.OutputNorm(layers=set()),
    "an empty dict of layers": lambda _: quantities_.ParameterNorm(layers={}),
    "layers that are all left out": lambda _: chosen(signals.selection("2", exclude="Linear")),
    "a predicate that fails": lambda _: chosen(signals.selection(lambda each: each.width > 2)),
    "a layer of another model": lambda _: chosen(signals.selection(nn.Linear(8, 3))),
    "a layer below the depth": lambda _: chosen(signals.selection(net(), leaf=True)),
    "layers without weights": lambda _: cockpit_of(net(), [quantities.ParameterNorm(layers=1)]),
    "a misspelt name of a parameter": lambda _: cockpit_of(
        net(), [quantities.ParameterNorm(parameters="wieght")]
    ),
    "layers without a model": lambda _: cockpit_of(net().parameters(), [quantities.OutputNorm()]),
    "layers of parameters": lambda _: cockpit_of(
        net().parameters(), [quantities.ParameterNorm(layers="Linear")]
    ),
    "a module of a recorder that isn't there": lambda _: recorder_of().children(net(), indices=3),
    "a module before the first": lambda _: recorder_of().modules(net(), indices=-1),
    "no modules for a recorder": lambda _: recorder_of().modules(net(), indices=()),
    "types that no module has": lambda _: recorder_of().modules(net(), types=nn.Conv2d),
    "no type at an index": lambda _: recorder_of().children(net(), types=nn.Tanh, indices=(0, 2)),
    "no layers for a recorder": lambda _: recorder_of().layers(net(), []),
    "a misspelt layer of a recorder": lambda _: recorder_of().layers(net(), "Linaer"),
    "a slot of a recorder that isn't there": lambda _: recorder_of().children(net())[3],
    "a slot to remove that isn't there": lambda _: recorder_of().remove(0),
    "a layer rule for a layer": lambda _: gradlens_.register_layer_rule(net()[0], print),
    "a probe of an iterator": lambda _: probe_of(iter([(torch.randn(3, 4), torch.randn(3, 2))])),
    "a probe of a data set": lambda _: probe_of(TensorDataset(torch.randn(3, 4))),
    "a probe that isn't reduced": lambda _: probe_of([], loss_reduction="none"),
    "a probe without the model": lambda _: cockpit_of(
        net().parameters(), [quantities.HessMaxEV(on=probe_of([]))]
    ),
    "data as a probe": lambda _: cockpit_of(net(), [quantities_.HessMaxEV(on=[])]),
    "a misspelt quantity of Taiyi": lambda _: gradlens_.from_taiyi({"Linear": ["InputSndNrom"]}),
    "no quantity of Taiyi": lambda _: gradlens_.from_taiyi({"Linear": ["GradNoise"]}),
    "half a schedule of Taiyi": lambda _: gradlens_.from_taiyi(
        {"Linear": [["WeightNorm", "linear"]]}
    ),
    "more than a schedule of Taiyi": lambda _: gradlens_.from_taiyi(
        {"Linear": [["WeightNorm", "linear(1,0)", "x"]]}
    ),
    "an empty quantity of Taiyi": lambda _: gradlens_.from_taiyi({"Linear": [[], "WeightNorm"]}),
    "nothing as a quantity of Taiyi": lambda _: gradlens_.from_taiyi({"Linear": [None]}),
    "a number as quantities of Taiyi": lambda _: gradlens_.from_taiyi({"Linear": 3}),
    "an empty list of Taiyi": lambda _: gradlens_.from_taiyi({"Linear": []}),
    "no configuration of Taiyi": lambda _: gradlens_.from_taiyi(None),
    "a schedule of Taiyi in no list": lambda _: gradlens_.from_taiyi(
        {"Linear": ["WeightNorm", "linear(5,2)"]}
    ),
    "a negative schedule of Taiyi": lambda _: gradlens_.from_taiyi(
        {"Linear": [["WeightNorm", "linear(-1,0)"]]}
    ),
    "a number as a layer of Taiyi": lambda _: gradlens_.from_taiyi({3: ["WeightNorm"]}),
    "a function as a layer of Taiyi": lambda _: gradlens_.from_taiyi(
        {functional.relu: ["WeightNorm"]}
    ),
    "a misspelt layer": lambda _: cockpit_of(net(), [quantities.InputNorm(layers="Liner")]),
    "parameters that are used up": used_up_parameters,
    "named parameters": lambda _: cockpit_of(net().named_parameters()),
    "a state dict": lambda _: cockpit_of(net().state_dict()),
    "an optimizer as the model": lambda _: cockpit_of(sgd(net())),
    "no model": lambda _: cockpit_of(None),
    "a model's class": lambda _: cockpit_of(nn.Linear),
    "a model's file": lambda _: cockpit_of("model.pt"),
    "several models": lambda _: cockpit_of([net(), net()]),
    "one parameter": lambda _: cockpit_of(net()[0].weight),
    "tensors that are computed": lambda _: cockpit_of([net()[0].weight * 2]),
    "a lazy module": lambda _: cockpit_of(nn.Sequential(nn.LazyLinear(3))),
    "a model without parameters": lambda _: cockpit_of(nn.ReLU()),
    "no parameters": lambda _: cockpit_of([]),
    "frozen parameters": lambda _: cockpit_of(net().requires_grad_(False)),
    "a scripted model": lambda _: cockpit_of(scripted(net())),
    "quantities before the model": lambda _: cockpit_of(some(), net()),
    "a misspelt reduction": lambda _: cockpit_of(net(), loss_reduction="avg"),
    "a loss that is a function": lambda _: cockpit_of(
        net(), loss_function=functional.cross_entropy
    ),
    "a class of losses": lambda _: cockpit_of(net(), loss_function=nn.CrossEntropyLoss),
    "a sum loss without loss_reduction": lambda _: Cockpit(net(), loss_function=summing()),
    "a mean loss as a sum": lambda _: Cockpit(
        net(), loss_function=nn.MSELoss(), loss_reduction="sum"
    ),
    "a run that exists": existing_run,
    "a folder as the run": lambda folder: Cockpit(net(), run=folder),
    "a budget in percent": lambda _: Cockpit(net(), budget=5),
    "a budget of nothing": lambda _: Cockpit(net(), budget=0),
    "a budget of all": lambda _: Cockpit(net(), budget=1),
    "bytes of which there is a half": lambda _: cockpit_of(net(), max_bytes=1.5),
    "bytes as a text": lambda _: cockpit_of(net(), max_bytes="1"),
    "no number of bytes": lambda _: cockpit_of(net(), max_bytes=None),
    "less than no bytes": lambda _: cockpit_of(net(), max_bytes=-1),
    "a budget that is text": lambda _: cockpit_of(net(), budget="5%"),
    "a misspelt policy for batchnorm": lambda _: cockpit_of(net(), batchnorm="freeze"),
    "zero as schedule": lambda _: quantities_.Loss(0),
    "a fraction as schedule": lambda _: quantities_.Loss(0.5),  # type: ignore[arg-type]
    "a schedule that isn't called": lambda _: quantities_.Loss(schedules.linear),
    "a schedule without an argument": lambda _: quantities_.Loss(lambda: True),
    "linear(0)": lambda _: schedules_.linear(0),
    "linear(-2)": lambda _: schedules_.linear(-2),
    "linear(2.5)": lambda _: schedules_.linear(2.5),
    "linear('10')": lambda _: schedules_.linear("10"),
    "linear with a broken offset": lambda _: schedules_.linear(10, 0.5),
    "epochs of no length": lambda _: schedules_.epochs(2, 0),
    "epochs of broken length": lambda _: schedules_.epochs(1, 2.5),
    "logarithmic without points": lambda _: schedules_.logarithmic(0, 4, steps=0),
    "logarithmic by steps and not exponents": lambda _: schedules_.logarithmic(0, 1000),
    "adapt=linear(3)": lambda _: quantities_.GradHist1d(adapt=schedules.linear(3)),
    "a policy's class": lambda _: quantities_.GradHist1d(adapt=GradAbsMax),
    "one policy for two axes": lambda _: quantities_.GradHist2d(adapt=GradAbsMax()),
    "one number of bins for two axes": lambda _: quantities_.GradHist2d(bins=40),
    "one range for two axes": lambda _: quantities_.GradHist2d(range=(-1, 1)),
    "no singular values": lambda _: quantities_.GradCovariance(k=0),
    "a range that isn't finite": lambda _: quantities_.GradHist2d(range=((0, 1), (0, math.inf))),
    "no bins": lambda _: quantities_.GradHist1d(bins=0),
    "bins that are text": lambda _: quantities_.GradHist1d(bins="auto"),
    "a range that is a number": lambda _: quantities_.GradHist1d(range=5),
    "a range from high to low": lambda _: quantities_.GradHist1d(range=(2, -2)),
}


# What is passed to a context ---------------------------------------------------------------------


def half_of_the_batch_size(_: Path) -> Cockpit:
    model = net()
    cockpit, loss = Cockpit(model, some()), loss_of(model, 16)
    tracked_backward(cockpit, 0, loss, batch_size=8)
    return cockpit


IN_CONTEXTS: dict[str, Program] = {
    "the loss as the step": lambda _: called(torch.ones(())),
    "a broken step": lambda _: called(1.5),
    "no step": lambda _: called(None),
    "several steps": lambda _: called(torch.arange(3)),
    "a step that is text": lambda _: called("3"),
    "the loss without its name": lambda _: called(0, torch.ones(())),
    "an extension's class": lambda _: called(0, BatchGrad),
    "a quantity in a context": lambda _: called(0, quantities.Loss()),
    "loss.item()": lambda _: called(loss=1.5),
    "losses in a list": lambda _: called(loss=[torch.ones(())]),
    "a loss for each sample": lambda _: called(loss=torch.ones(5)),
    "losses of samples in a list": lambda _: called(
        individual_losses=[torch.ones((), requires_grad=True)]
    ),
    "the optimizer's name": lambda _: called(optimizer="sgd"),
    "the optimizer's class": lambda _: called(optimizer=torch.optim.SGD),
    "the learning rate's scheduler": lambda _: called(
        optimizer=torch.optim.lr_scheduler.StepLR(sgd(net()), 3)
    ),
    "another model's optimizer": lambda _: called(optimizer=sgd(net())),
    "half of the batch size": half_of_the_batch_size,
    "a scaler's name": lambda _: called(scaler="amp"),
    "parts as a text": lambda _: called(accumulating="no"),
    "info that is a list": lambda _: called(info=[1]),
    "a set of ids": lambda _: called(info={"ids": {1, 2}}),
    "a closure that was called": lambda _: called(closure=3.0),
    "a loss scale of zero": lambda _: called(loss_scale=0),
    "an infinite loss scale": lambda _: called(loss_scale=math.inf),
    "a loss scale that is no number": lambda _: called(loss_scale=math.nan),
    "a loss scale that is text": lambda _: called(loss_scale="half"),
    "a negative step": lambda _: called(-1),
    "a batch size of zero": lambda _: called(batch_size=0),
    "an aggregate's name": lambda _: cockpit_of(net(), some()).evaluation(0, "epoch"),
    "push of a dict": lambda _: cockpit_of(net(), some()).push(metric={"train": 1.0}),
    "a state dict of the model": lambda _: cockpit_of(net(), some()).load_state_dict(
        net().state_dict()
    ),
    "log of a dict": lambda _: cockpit_of(net()).log(3, {"valid_loss": 1.0}),
    "log under a quantity's name": lambda _: cockpit_of(net(), some()).log(3, Loss=1.0),
    "log of an object": lambda _: cockpit_of(net(), some()).log(3, valid_loss=object()),
    "log at a loss": lambda _: cockpit_of(net(), some()).log(torch.ones(()), valid_loss=1.0),
}


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


def no_backward(cockpit: Cockpit, model: nn.Module) -> None:
    with cockpit(0, loss=loss_of(model)):
        pass


def backward_before(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward()
    with cockpit(0, loss=loss):
        pass


def two_backwards(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    with cockpit(0, loss=loss):
        loss.backward(retain_graph=True)
        loss.backward()


def another_loss(cockpit: Cockpit, model: nn.Module) -> None:
    with cockpit(0, loss=loss_of(model)):
        loss_of(model).backward()


def detached_loss(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    with cockpit(0, loss=loss.detach()):
        loss.backward()


def another_model(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, net())


def copied_model(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, copy.deepcopy(model))


def parameters_replaced(cockpit: Cockpit, model: nn.Module) -> None:
    model.to("meta")
    model.to_empty(device="cpu")
    train(cockpit, model)


def optimizer_from_before(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model, optimizer=sgd(copy.deepcopy(model)))


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


def loss_is_missing(cockpit: Cockpit, model: nn.Module) -> None:
    with cockpit(0):
        loss_of(model).backward()


def never_the_last_part(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model, accumulating=True)


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


def forward_inside(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), some())
    with cockpit(0):
        loss_of(model).backward()
    return cockpit


def steps_out_of_order(cockpit: Cockpit, model: nn.Module) -> None:
    for step in (5, 3, 4):
        model.zero_grad()
        tracked_backward(cockpit, step, loss_of(model))


def scaled_without_scaler(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    with cockpit(0, loss=loss):
        torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss).backward()


def scaled_before_it_was_passed(cockpit: Cockpit, model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = scaler.scale(loss_of(model))
    with cockpit(0, loss=loss, scaler=scaler):
        loss.backward()


def loss_without_gradient(cockpit: Cockpit, model: nn.Module) -> None:
    with torch.no_grad():
        loss = loss_of(model)
    with cockpit(0, loss=loss):
        pass


def cockpit_after_the_forward_pass(_: Path) -> Cockpit:
    loss = loss_of(model := net())
    cockpit = Cockpit(model, some())
    tracked_backward(cockpit, 0, loss)
    return cockpit


def schedule_without_return(_: Path) -> Cockpit:
    schedule: Any = lambda step: None  # noqa: E731
    return train(Cockpit(model := net(), [quantities.GradNorm(schedule)]), model)


def pipe_as_run(folder: Path) -> None:
    os.mkfifo(folder / "run.jsonl")
    Cockpit(net(), run=folder / "run.jsonl", resume=True)


def pipe_as_file(folder: Path) -> None:
    os.mkfifo(folder / "run.jsonl")
    gradlens.load_run(folder / "run.jsonl")


def device_as_run(_: Path) -> None:
    Cockpit(net(), run=os.devnull)


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


def root_of_a_mean(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), [quantities.Alpha()])
    tracked_backward(cockpit, 0, loss_of(model).sqrt())
    return cockpit


def parameters_without_model(_: Path) -> Cockpit:
    model = net()
    return train(Cockpit(model.parameters(), some()), model)


LOOPS: dict[str, Program] = {
    **of_loops(
        forgotten_zero_grad, steps_of_epochs, context_entered_twice, no_backward, backward_before,
        two_backwards, another_loss, detached_loss, another_model, copied_model,
        parameters_replaced, optimizer_from_before, layer_replaced, loss_is_missing,
        never_the_last_part, used_after_close, logged_after_close, called_without_with,
        steps_out_of_order, scaled_without_scaler, scaled_before_it_was_passed,
        loss_without_gradient,
    ),
    **{program.__name__: program for program in (
        replaced_for_updates, two_contexts_of_one_forward_pass, functions_of_weights,
        nothing_for_the_budget, curvature_of_micro_batches, root_of_a_mean,
        parameters_without_model, cockpit_after_the_forward_pass, schedule_without_return,
        forward_inside, pipe_as_run, pipe_as_file, device_as_run,
    )},
}  # fmt: skip


# Plots, runs and the rest ------------------------------------------------------------------------


def plotted(source: Any, **options: Any) -> None:
    CockpitPlotter().plot(source, show_plot=False, **options)


def misspelt_gradient(_: Path) -> None:
    model = net()
    with gradlens.per_sample_gradients(model) as gradients:
        loss_of(model).backward()
    gradients["0.weigth"]


per_sample_: Any = gradlens.per_sample_gradients
plotter_of: Any = CockpitPlotter


def plotted_with(*arguments: Any) -> None:
    """A plot with arguments by their places."""
    plotter_of().plot(*arguments)


AFTERWARDS: dict[str, Program] = {
    "a plot into a file": lambda _: plotted_with(gradlens.History(), "plot.png"),
    "a plotter of a cockpit": lambda _: plotter_of(cockpit_of(net())),
    "a size by its name": lambda _: plotter_of().plot(gradlens.History(), size="column"),
    "a group of one's own": lambda _: gradlens_.View("Mine", group="mine"),
    "a misspelt scale": lambda _: gradlens_.View("Mine", yscale="logarithmic"),
    "the last step": lambda _: cockpit_of(net(), some()).history[-1],
    "a plot of a folder": plotted,
    "a plot of a model": lambda _: plotted(net()),
    "names of instruments": lambda _: plotter_of(instruments=["Loss"]),
    "one name of an instrument": lambda _: plotter_of(instruments="Loss"),
    "one instrument": lambda _: plotter_of(instruments=instruments.LossInstrument()),
    "an instrument's class": lambda _: plotter_of(instruments=[instruments.LossInstrument]),
    "a misspelt series": lambda _: cockpit_of(net(), some()).history["Los"],
    "per-sample gradients of parameters": lambda _: per_sample_(net().parameters()),
    "extending a function": lambda _: gradlens_.extend(functional.cross_entropy),
    "a misspelt parameter": misspelt_gradient,
}

CASES = AT_ONCE | IN_CONTEXTS | LOOPS | AFTERWARDS


REMEDY = re.compile(
    r".{12,}\b(did you mean|there is|there are|as in|is saved by|has a value|is history"
    r"|(add|call|choose|close|end|enter|exclude|give|join|leave|list|make|pass|return|run|set|track"
    r"|use|write) \S+)",
    re.DOTALL | re.IGNORECASE,
)
"""A reason, and behind it what to do instead."""


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_has_a_reason_and_a_remedy(name: str, tmp_path: Path) -> None:
    text = said(CASES[name], tmp_path)
    assert REMEDY.search(text), text
    if name in AT_ONCE:
        assert re.match(r"\w+Error: ", text)


# The remedies, followed --------------------------------------------------------------------------


def made(*arguments: Any, **given: Any) -> Program:
    """A cockpit that is made with arguments and used for a step."""
    return lambda _: train(cockpit_of(model := net(), *arguments, **given), model, 1)


def tracking(build: Callable[[], Quantity]) -> Program:
    """A quantity that is made and tracked."""
    return lambda _: train(Cockpit(model := net(), [build()]), model, 1)


def with_loss(loss_function: nn.Module, **given: Any) -> Program:
    """A cockpit that knows the loss module."""

    def program(_: Path) -> Cockpit:
        model = net()
        cockpit = Cockpit(model, some(), loss_function=loss_function, **given)
        loss = loss_function(model(torch.randn(5, 4)), torch.randn(5, 2).softmax(1))
        tracked_backward(cockpit, 0, loss, optimizer=sgd(model))
        return cockpit

    return program


def used(**given: Any) -> Program:
    """A step whose context is given something."""
    return lambda _: called(**given)


def losses_stacked(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), [quantities.Loss(), quantities.NormTest()])
    losses = torch.stack([model(torch.randn(1, 4)).square().mean() for _ in range(5)])
    tracked_backward(cockpit, 0, losses.mean(), individual_losses=losses)
    return cockpit


def scaled_with_scaler(_: Path) -> Cockpit:
    cockpit, scaler = Cockpit(model := net(), some()), torch.amp.GradScaler("cpu")
    loss = loss_of(model)
    with cockpit(0, loss=loss, scaler=scaler):
        scaler.scale(loss).backward()
    return cockpit


def logged(**values: Any) -> Program:
    """Values that are logged behind a loop."""

    def program(_: Path) -> Cockpit:
        cockpit = train(Cockpit(model := net(), some()), model)
        cockpit.log(2, **values)
        return cockpit

    return program


def other_file(folder: Path) -> Cockpit:
    (folder / "run.jsonl").write_text("precious")
    return train(Cockpit(model := net(), some(), run=folder / "other.jsonl"), model)


def whole_batch_size(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), some())
    tracked_backward(cockpit, 0, loss_of(model, 16), batch_size=16)
    return cockpit


def initialised(_: Path) -> Cockpit:
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.randn(5, 4))
    return train(cockpit_of(model, some()), model, 1)


def partly_frozen(_: Path) -> Cockpit:
    model = net().requires_grad_(False)
    model[2].requires_grad_(True)
    return train(cockpit_of(model, [quantities.Loss(), quantities.GradNorm()]), model, 1)


def each_its_own(_: Path) -> Cockpit:
    Cockpit(net(), some())
    return train(Cockpit(model := net(), some()), model, 1)


def resumed_state(_: Path) -> Cockpit:
    state = train(Cockpit(model := net(), [quantities.Loss()]), model, 1).state_dict()
    cockpit = Cockpit(model, [quantities.Loss()])
    cockpit.load_state_dict(state)
    return cockpit


def counted(_: Path) -> Cockpit:
    cockpit, step = Cockpit(model := net(), some()), 0
    for _epoch in range(2):
        for _batch in range(2):
            model.zero_grad()
            tracked_backward(cockpit, step, loss_of(model), optimizer=sgd(model))
            step += 1
    return cockpit


def last_part_said(_: Path) -> Cockpit:
    cockpit, optimizer = Cockpit(model := net(), some()), sgd(model)
    for part in range(2):
        loss = loss_of(model)
        tracked_backward(cockpit, 0, loss, optimizer=optimizer, accumulating=part == 0)
    return cockpit


def another_cockpit(folder: Path) -> Cockpit:
    model, run = net(), folder / "run.jsonl"
    chosen = [quantities.Loss(), quantities.NormTest()]
    train(Cockpit(model, chosen, run=run), model).close()
    chosen = [quantities.Loss(), quantities.NormTest()]
    cockpit = Cockpit(model, chosen, run=run, resume=True)
    model.zero_grad()
    tracked_backward(cockpit, 3, loss_of(model))
    return cockpit


def drawn(plotter: CockpitPlotter, **options: Any) -> Program:
    """A figure of a run."""

    def program(_: Path) -> None:
        cockpit = train(Cockpit(model := net(), some()), model)
        plotter.plot(cockpit, show_plot=False, **options)

    return program


def gradients_of_weight(_: Path) -> None:
    model = net()
    with gradlens.per_sample_gradients(model) as gradients:
        loss_of(model).backward()
    assert gradients["0.weight"] is not None


def plain(_: Path) -> Cockpit:
    return train(Cockpit(model := net(), some()), model, 1)


def last_step(_: Path) -> None:
    history = plain(_).history
    assert history[history.steps[-1]]


FOLLOWED: dict[str, Program] = {
    "a quantity as a rule": made(some(), diagnose=True),
    "an option as a text": made(some(), facts=False),
    "a misspelt layer of a sink": made(some(), sinks=[Forgetful(layers=["0.weight"])]),
    "a class": made([quantities.Loss()]),
    "a quantity that is in no list": made([quantities.Loss()]),
    "a batch size as a text": used(batch_size=5),
    "a misspelt name of a quantity": made(["NormTest"]),
    "a dict of quantities": made([quantities.Loss()]),
    "a preset inside a list": made([*configuration("economy")[:2], quantities.Parameters()]),
    "two quantities of one name": made([quantities.Loss(), quantities.Loss(name="other")]),
    "quantities in two cockpits": each_its_own,
    "an aggregate of a class": made([gradlens_.Aggregate(quantities.Loss())]),
    "a misspelt layer": made([quantities.InputNorm(layers="Linear")]),
    "parameters that are used up": plain,
    "named parameters": plain,
    "a state dict": plain,
    "an optimizer as the model": plain,
    "a lazy module": initialised,
    "frozen parameters": partly_frozen,
    "quantities before the model": plain,
    "a misspelt reduction": made(some(), loss_reduction="mean"),
    "a loss that is a function": with_loss(nn.CrossEntropyLoss()),
    "a class of losses": with_loss(nn.CrossEntropyLoss()),
    "a sum loss without loss_reduction": with_loss(summing(), loss_reduction="sum"),
    "a mean loss as a sum": with_loss(nn.CrossEntropyLoss(), loss_reduction="mean"),
    "a run that exists": other_file,
    "a misspelt policy for batchnorm": made(some(), batchnorm="frozen"),
    "zero as schedule": tracking(lambda: quantities.Loss(1)),
    "a fraction as schedule": tracking(lambda: quantities.Loss(2)),
    "a schedule that isn't called": tracking(lambda: quantities.Loss(schedules.linear(2))),
    "a schedule without an argument": tracking(lambda: quantities.Loss(lambda step: step < 9)),
    "linear(0)": tracking(lambda: quantities.Loss(schedules.linear(1))),
    "linear with a broken offset": tracking(lambda: quantities.Loss(schedules.linear(10, 0))),
    "epochs of no length": tracking(lambda: quantities.Loss(schedules.epochs(2, 3))),
    "logarithmic by steps and not exponents": tracking(
        lambda: quantities.Loss(schedules.logarithmic(0, 3))
    ),
    "a policy's class": tracking(lambda: quantities.GradHist1d(adapt=GradAbsMax())),
    "one number of bins for two axes": tracking(lambda: quantities.GradHist2d(bins=(4, 4))),
    "no bins": tracking(lambda: quantities.GradHist1d(bins=5)),
    "a range that is a number": tracking(lambda: quantities.GradHist1d(range=(-5, 5))),
    "a range from high to low": tracking(lambda: quantities.GradHist1d(range=(-2, 2))),
    "the loss as the step": used(),
    "a broken step": used(),
    "several steps": used(),
    "a negative step": used(),
    "loss.item()": used(),
    "a loss for each sample": used(),
    "losses of samples in a list": losses_stacked,
    "the optimizer's class": counted,
    "half of the batch size": whole_batch_size,
    "a scaler's name": scaled_with_scaler,
    "scaled_without_scaler": scaled_with_scaler,
    "scaled_before_it_was_passed": scaled_with_scaler,
    "parts as a text": last_part_said,
    "info that is a list": used(info={"own": 1}),
    "a closure that was called": used(closure=lambda: torch.zeros(())),
    "a loss scale of zero": used(loss_scale=1.0),
    "a batch size of zero": used(batch_size=5),
    "a state dict of the model": resumed_state,
    "log of a dict": logged(valid_loss=1.0),
    "log under a quantity's name": logged(logged_Loss=1.0),
    "steps_of_epochs": counted,
    "steps_out_of_order": counted,
    "called_without_with": used(),
    "forward_inside": used(),
    "cockpit_after_the_forward_pass": used(),
    "schedule_without_return": tracking(lambda: quantities.GradNorm(lambda step: step % 10 == 0)),
    "never_the_last_part": last_part_said,
    "used_after_close": another_cockpit,
    "pipe_as_run": other_file,
    "a plot into a file": drawn(CockpitPlotter()),
    "a size by its name": drawn(CockpitPlotter(), size=5),
    "one instrument": drawn(CockpitPlotter(instruments=[instruments.LossInstrument()])),
    "a misspelt scale": lambda _: gradlens_.View("Mine", yscale="log") and None,
    "the last step": last_step,
    "a misspelt parameter": gradients_of_weight,
}
"""Programs that do what the mistakes' messages say, by the names of the mistakes."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_remedy_works_when_it_is_followed(name: str, tmp_path: Path) -> None:
    assert name in CASES
    assert not said(FOLLOWED[name], tmp_path)


# What is no mistake ------------------------------------------------------------------------------


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


INTENDED: dict[str, Program] = {
    "zero_grad": lambda _: zeroed(lambda optimizer: optimizer.zero_grad()),
    "zero_grad to zeros": lambda _: zeroed(lambda o: o.zero_grad(set_to_none=False)),
    "zero_grad inside the context": lambda _: zeroed(lambda o: o.zero_grad(), inside=True),
    "zeros inside the context": lambda _: zeroed(lambda o: o.zero_grad(False), inside=True),
    "zeros by grad.data": lambda _: zeroed(by_data),
    **of_loops(
        micro_batches_with_steps_of_their_own, two_optimizers, info_of_the_users_own, closed_twice,
        frozen_later, logged_under_any_name,
    ),
    "DataParallel on one device": on_one_device,
    "a part that is scripted": scripted_inside,
    "no quantities": lambda _: train(Cockpit(model := net(), []), model),
}  # fmt: skip


@pytest.mark.parametrize("name", INTENDED)
def test_what_may_be_intended_is_no_mistake(name: str, tmp_path: Path) -> None:
    assert not said(INTENDED[name], tmp_path)
