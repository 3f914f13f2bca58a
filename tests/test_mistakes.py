"""Mistakes that users make, and what they are told.

Each case is a program and a pattern of what it must say: as the message of an exception, a note, or
the reason of a NaN. Another table has programs that look like mistakes and are none.
"""

from __future__ import annotations

import copy
import math
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

import gradlens
from gradlens import (
    Cockpit,
    CockpitPlotter,
    configuration,
    instruments,
    quantities,
    schedules,
    sinks,
)
from gradlens.quantities import Quantity
from gradlens.quantities.bin_adaptation import GradAbsMax

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
        loss = loss_of(model)
        with cockpit(step, loss=loss, **given):
            loss.backward()
        optimizer.step()
    return cockpit


def called(*arguments: Any, loss: Any = None, **given: Any) -> Cockpit:
    """One step whose context is called with certain arguments."""
    model = net()
    cockpit, own = Cockpit(model, some()), loss_of(model)
    with cockpit(*(arguments or (0,)), loss=own if loss is None else loss, **given):
        own.backward()
    return cockpit


def tracked(change: Callable[[Cockpit, nn.Module], None]) -> Cockpit:
    """A cockpit after a step, or more, of a user's own."""
    model = net()
    cockpit = Cockpit(model, some())
    change(cockpit, model)
    return cockpit


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


def misspelt_import(_: Path) -> None:
    from gradlens.quantities import GradNrom  # type: ignore[attr-defined]  # noqa: F401


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


class Forgetful(sinks.Sink):
    """A sink that keeps nothing."""

    def record(self, step: int, scalars: Any, histograms: Any) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


AT_ONCE: dict[str, tuple[Program, str]] = {
    # Quantities.
    "a setting in the place of verbose": (
        lambda _: Cockpit(net(), [quantities_.HessEigenvalues(schedules_.linear(2), 5)]),
        "TypeError: HessEigenvalues: verbose=5 is neither True nor False: pass other settings by",
    ),
    "a misspelt preset of a cockpit": (
        lambda _: cockpit_of(net(), "econmy"),
        r"ValueError: no preset is called 'econmy': did you mean economy\?",
    ),
    "a writer as a sink": (
        lambda _: cockpit_of(net(), sinks=[object()]),
        r"TypeError: object object is not a sink: .*sinks=\[gradlens.sinks.TensorBoard\(writer\)\]",
    ),
    "a library's name as sinks": (
        lambda _: cockpit_of(net(), sinks="wandb"),
        r"TypeError: sinks='wandb' is not a list of sinks: pass a list of instances.*WandB, or of",
    ),
    "one sink": (
        lambda _: cockpit_of(net(), sinks=Forgetful()),
        r"TypeError: sinks=Forgetful object is not a list of sinks: pass a list",
    ),
    "a misspelt layer of a sink": (
        lambda _: cockpit_of(net(), sinks=[Forgetful(layers=["0.wieght"])]),
        r"ValueError: the network has no layer or parameter '0.wieght': did you mean 0.weight",
    ),
    "a misspelt preset": (
        lambda _: configuration("ecnomy") and None,
        r"ValueError: no preset is called 'ecnomy': did you mean economy\?",
    ),
    "a preset that is no string": (
        lambda _: gradlens_.configuration(None),
        r"ValueError: no preset is called None \(there is economy, business, full\)",
    ),
    "one quantity": (
        lambda _: cockpit_of(net(), quantities.Loss()),
        r"TypeError: Loss object is not a list of quantities: pass a list, as in \[Loss\(",
    ),
    "one class": (
        lambda _: cockpit_of(net(), quantities.Loss),
        r"TypeError: the class Loss is not a list .*pass instances in a list, as in \[Loss\(\)\]",
    ),
    "a class": (
        lambda _: cockpit_of(net(), [quantities.Loss]),
        r"TypeError: the class Loss is not a quantity: pass instances",
    ),
    "a quantity's name": (
        lambda _: cockpit_of(net(), ["Loss"]),
        r"TypeError: 'Loss' is not a quantity: pass a list of instances, such as .*Loss\(\)\]",
    ),
    "a dict of quantities": (
        lambda _: cockpit_of(net(), {"Loss": quantities.Loss()}),
        r"TypeError: 'Loss' is not a quantity: pass a list of instances",
    ),
    "a preset inside a list": (
        lambda _: cockpit_of(net(), [configuration("economy"), quantities.Parameters()]),
        r"TypeError: \[.*is not a quantity: join the lists, as in \[\*gradlens.configuration",
    ),
    "a BackPACK extension as a quantity": (
        lambda _: cockpit_of(net(), [BatchGrad()]),
        r"TypeError: BatchGrad object is not a quantity: pass a list of instances",
    ),
    "the optimizer as quantities": (
        lambda _: cockpit_of(net(), sgd(net())),
        r"TypeError: SGD .* is not a list of quantities: pass a list of instances",
    ),
    "the loss module as quantities": (
        lambda _: cockpit_of(net(), nn.MSELoss()),
        r"TypeError: MSELoss object is not a list of quantities: pass a list of instances",
    ),
    "two quantities of one name": (
        lambda _: cockpit_of(net(), [quantities.Loss(), quantities.Loss()]),
        r"ValueError: two quantities are called 'Loss': give one of them another name",
    ),
    "quantities in two cockpits": (
        shared_quantities,
        r"ValueError: Loss is in another cockpit.*make new quantities for each cockpit",
    ),
    "a misspelt quantity": (
        lambda _: quantities_.GradNrom,
        r"AttributeError: module 'gradlens.quantities' has no .*did you mean GradNorm",
    ),
    "a misspelt quantity that is imported": (
        misspelt_import,
        r"ImportError: cannot import name 'GradNrom' from 'gradlens.quantities'",
    ),
    "a misspelt name of gradlens": (
        lambda _: gradlens_.Cokpit,
        r"AttributeError: module 'gradlens' has no attribute 'Cokpit': did you mean Cockpit",
    ),
    "a misspelt instrument": (
        lambda _: instruments.LossInstrumnt,
        r"AttributeError: module 'gradlens.instruments' has no .*did you mean LossInstrument",
    ),
    "a misspelt argument": (
        lambda _: quantities_.GradHist1d(bin=10),
        r"TypeError: GradHist1d.*unexpected keyword argument 'bin'",
    ),
    "an aggregate of a class": (
        lambda _: gradlens_.Aggregate(quantities.Loss),
        r"TypeError: .*Loss.* is not a quantity: pass one, as in Aggregate\(Loss\(\)\)",
    ),
    "a misspelt layer": (
        lambda _: cockpit_of(net(), [quantities.InputNorm(layers="Liner")]),
        r"ValueError: InputNorm: no layer matches 'Liner': did you mean Linear\?",
    ),
    # Models and parameters.
    "parameters that are used up": (
        used_up_parameters,
        r"ValueError: there are no parameters.*empty after its first use, so pass the model",
    ),
    "named parameters": (
        lambda _: cockpit_of(net().named_parameters()),
        r"TypeError: param_0 is a tuple: pass the model, or an iterable of its parameters",
    ),
    "a state dict": (
        lambda _: cockpit_of(net().state_dict()),
        r"TypeError: param_0 is a str: pass the model",
    ),
    "an optimizer as the model": (
        lambda _: cockpit_of(sgd(net())),
        r"TypeError: params is SGD: pass the model itself",
    ),
    "no model": (
        lambda _: cockpit_of(None),
        r"TypeError: params is NoneType: pass the model itself",
    ),
    "a model's class": (
        lambda _: cockpit_of(nn.Linear),
        r"TypeError: params is the class Linear: pass the model itself",
    ),
    "a model's file": (
        lambda _: cockpit_of("model.pt"),
        r"TypeError: params is str: pass the model itself",
    ),
    "several models": (
        lambda _: cockpit_of([net(), net()]),
        r"TypeError: param_0 is a Sequential: pass the model",
    ),
    "one parameter": (
        lambda _: cockpit_of(net()[0].weight),
        r"TypeError: params is Parameter: pass the model itself",
    ),
    "tensors that are computed": (
        lambda _: cockpit_of([net()[0].weight * 2]),
        r"TypeError: param_0 is computed from other tensors.*pass the model",
    ),
    "a lazy module": (
        lambda _: cockpit_of(nn.Sequential(nn.LazyLinear(3))),
        r"ValueError: 0.weight has no shape yet: run the lazy module once",
    ),
    "frozen parameters": (
        lambda _: cockpit_of(net().requires_grad_(False)),
        r"ValueError: no parameter needs a gradient, since all are frozen.*requires_grad_\(True\)",
    ),
    "a scripted model": (
        lambda _: cockpit_of(scripted(net())),
        r"TypeError: the model was compiled by torch.jit.script.*track the model that it was made",
    ),
    "quantities before the model": (
        lambda _: cockpit_of(some(), net()),
        r"TypeError: Linear object is not a quantity",
    ),
    # Other arguments of a cockpit.
    "a misspelt argument of a cockpit": (
        lambda _: cockpit_of(net(), loss_func=nn.MSELoss()),
        r"TypeError: Cockpit.* has no argument 'loss_func': use loss_function",
    ),
    "a schedule of a cockpit": (
        lambda _: cockpit_of(net(), interval=10),
        r"TypeError: Cockpit.* has no argument 'interval': use those of the quantities, as in",
    ),
    "an argument of a cockpit that is of no kind": (
        lambda _: cockpit_of(net(), steps_in_memry=10),
        r"TypeError: Cockpit.* has no argument 'steps_in_memry': did you mean steps_in_memory",
    ),
    "a misspelt reduction": (
        lambda _: cockpit_of(net(), loss_reduction="avg"),
        r"ValueError: loss_reduction='avg' is unknown: use \"mean\" if .* \"sum\" if",
    ),
    "a loss that is a function": (
        lambda _: cockpit_of(net(), loss_function=functional.cross_entropy),
        r"TypeError: loss_function=.*is not a module: .*nn.CrossEntropyLoss\(\).*individual_losses",
    ),
    "a class of losses": (
        lambda _: cockpit_of(net(), loss_function=nn.CrossEntropyLoss),
        r"TypeError: loss_function=the class CrossEntropyLoss is not a module: pass one such as",
    ),
    "a sum loss without loss_reduction": (
        lambda _: Cockpit(net(), loss_function=summing()),
        r"ValueError: .*is a sum, which contradicts loss_reduction='mean': .*loss_reduction='sum'",
    ),
    "a mean loss as a sum": (
        lambda _: Cockpit(net(), loss_function=nn.MSELoss(), loss_reduction="sum"),
        r"ValueError: .*is a mean, which contradicts loss_reduction='sum': .*='mean'",
    ),
    "a run that exists": (
        existing_run,
        r"FileExistsError: .*run.jsonl exists and is kept: choose another path, .*resume=True",
    ),
    "a folder as the run": (
        lambda folder: Cockpit(net(), run=folder),
        r"IsADirectoryError: .* is a directory: choose another path, such as .*run.jsonl",
    ),
    "run=True": (
        lambda _: cockpit_of(net(), run=True),
        r"TypeError: run=True is no path: pass that of a file, such as run=\"run.jsonl\"",
    ),
    "a budget in percent": (
        lambda _: Cockpit(net(), budget=5),
        r"ValueError: budget=5: give the share of training time, such as 0.05",
    ),
    "a budget that is text": (
        lambda _: cockpit_of(net(), budget="5%"),
        r"TypeError: budget='5%': give the share of training time, such as 0.05",
    ),
    "a misspelt policy for batchnorm": (
        lambda _: cockpit_of(net(), batchnorm="freeze"),
        r"ValueError: batchnorm='freeze' is unknown: use one of coupled, frozen, skip",
    ),
    # Schedules.
    "a number as schedule": (
        lambda _: quantities_.Loss(10),
        r"TypeError: Loss: track_schedule=10 is not callable.*such as gradlens.schedules.linear\(",
    ),
    "a schedule that isn't called": (
        lambda _: quantities_.Loss(schedules.linear),
        r"TypeError: Loss: track_schedule=linear .*call it, as in gradlens.schedules.linear\(10\)",
    ),
    "a schedule without an argument": (
        lambda _: quantities_.Loss(lambda: True),
        r"TypeError: Loss: .*is not callable with a step alone: pass a function from the global",
    ),
    "linear(0)": (lambda _: schedules_.linear(0), r"ValueError: interval=0 tracks nothing: use 1"),
    "linear(-2)": (lambda _: schedules_.linear(-2), r"ValueError: interval=-2 tracks nothing"),
    "linear(2.5)": (lambda _: schedules_.linear(2.5), r"TypeError: interval=2.5 is not a whole"),
    "linear('10')": (lambda _: schedules_.linear("10"), r"TypeError: interval='10' is not a whole"),
    "linear with a broken offset": (
        lambda _: schedules_.linear(10, 0.5),
        r"TypeError: offset=0.5 is not a whole number",
    ),
    "epochs of no length": (
        lambda _: schedules_.epochs(2, 0),
        r"ValueError: interval=2, length=0 track nothing: use 1 or more",
    ),
    "epochs of broken length": (
        lambda _: schedules_.epochs(1, 2.5),
        r"TypeError: length=2.5 is not a whole number",
    ),
    "logarithmic without points": (
        lambda _: schedules_.logarithmic(0, 4, steps=0),
        r"ValueError: steps=0 tracks nothing: use 1 or more",
    ),
    "logarithmic by steps and not exponents": (
        lambda _: schedules_.logarithmic(0, 1000),
        r"ValueError: start=0, end=1000 are exponents of base=10.0",
    ),
    # Histograms.
    "adapt=linear(3)": (
        lambda _: quantities_.GradHist1d(adapt=schedules.linear(3)),
        r"TypeError: GradHist1d: adapt=Linear.* no policy.* adapt=.*GradAbsMax\(\)",
    ),
    "a policy's class": (
        lambda _: quantities_.GradHist1d(adapt=GradAbsMax),
        r"TypeError: GradHist1d: adapt=.* pass an instance of one, as in adapt=",
    ),
    "one policy for two axes": (
        lambda _: quantities_.GradHist2d(adapt=GradAbsMax()),
        r"TypeError: GradHist2d: adapt=.* give a pair",
    ),
    "one number of bins for two axes": (
        lambda _: quantities_.GradHist2d(bins=40),
        r"TypeError: GradHist2d: bins=40: give a pair",
    ),
    "one range for two axes": (
        lambda _: quantities_.GradHist2d(range=(-1, 1)),
        r"TypeError: GradHist2d: range=-1 is not a pair: give \(low, high\)",
    ),
    "no bins": (lambda _: quantities_.GradHist1d(bins=0), r"ValueError: GradHist1d: bins=0: use 1"),
    "bins that are text": (
        lambda _: quantities_.GradHist1d(bins="auto"),
        r"TypeError: GradHist1d: bins='auto' is not a whole number",
    ),
    "a range that is a number": (
        lambda _: quantities_.GradHist1d(range=5),
        r"TypeError: GradHist1d: range=5 is not a pair: give \(low, high\)",
    ),
    "a range from high to low": (
        lambda _: quantities_.GradHist1d(range=(2, -2)),
        r"ValueError: GradHist1d: range=\(2, -2\) is empty: give .* low < high",
    ),
}


# What is passed to a context ---------------------------------------------------------------------


def half_of_the_batch_size(_: Path) -> Cockpit:
    model = net()
    cockpit, loss = Cockpit(model, some()), loss_of(model, 16)
    with cockpit(0, loss=loss, batch_size=8):
        loss.backward()
    return cockpit


IN_CONTEXTS: dict[str, tuple[Program, str]] = {
    "the loss as the step": (
        lambda _: called(torch.ones(())),
        r"TypeError: global_step=a tensor.*pass the number of the training step, and the loss by",
    ),
    "a broken step": (
        lambda _: called(1.5),
        r"TypeError: global_step=1.5 is not a whole number: pass the number of the training step",
    ),
    "no step": (lambda _: called(None), r"TypeError: global_step=None is not a whole number"),
    "several steps": (
        lambda _: called(torch.arange(3)),
        r"TypeError: global_step=a tensor of shape \[3\].* is not a whole number",
    ),
    "a step that is text": (lambda _: called("3"), r"TypeError: global_step='3' is not a whole"),
    "the loss without its name": (
        lambda _: called(0, torch.ones(())),
        r"TypeError: a tensor .* is no BackpropExtension.*all else by name, as in .*loss=loss\)",
    ),
    "an extension's class": (
        lambda _: called(0, BatchGrad),
        r"TypeError: the class BatchGrad is no BackpropExtension: pass instances",
    ),
    "a quantity in a context": (
        lambda _: called(0, quantities.Loss()),
        r"TypeError: Loss object is no BackpropExtension",
    ),
    "a misspelt argument of a context": (
        lambda _: called(0, los=1.0),
        r"TypeError: Cockpit.* has no argument 'los': did you mean loss\?",
    ),
    "individual losses by name": (
        lambda _: called(0, individual_losses=torch.ones(8)),
        r"TypeError: Cockpit.* has no argument 'individual_losses': use info, as in info=",
    ),
    "loss.item()": (
        lambda _: called(loss=1.5),
        r"ValueError: loss= must be a tensor with one element, got float.*without .item\(\)",
    ),
    "losses in a list": (
        lambda _: called(loss=[torch.ones(())]),
        r"ValueError: loss= must be a tensor with one element, got list",
    ),
    "a loss for each sample": (
        lambda _: called(loss=torch.ones(5)),
        r"ValueError: loss= must be .*shape \[5\]: pass the loss that backward .*loss.mean\(\)",
    ),
    "a broken batch size": (
        lambda _: called(batch_size=16.0),
        r"TypeError: batch_size=16.0 is not a whole number: pass the number of samples",
    ),
    "the batch as its size": (
        lambda _: called(batch_size=torch.ones(5, 4)),
        r"TypeError: batch_size=a tensor of shape \[5, 4\].*pass the number of samples",
    ),
    "the optimizer's name": (
        lambda _: called(optimizer="sgd"),
        r"TypeError: optimizer='sgd' is no torch.optim.Optimizer: pass the instance",
    ),
    "the optimizer's class": (
        lambda _: called(optimizer=torch.optim.SGD),
        r"TypeError: optimizer=the class SGD is no torch.optim.Optimizer: pass the instance",
    ),
    "the learning rate's scheduler": (
        lambda _: called(optimizer=torch.optim.lr_scheduler.StepLR(sgd(net()), 3)),
        r"TypeError: optimizer=StepLR object is no torch.optim.Optimizer: .* whose step",
    ),
    "the loss's scale": (
        lambda _: called(scaler=1024.0),
        r"TypeError: scaler=1024.0 is no torch.amp.GradScaler: pass that of the loop",
    ),
    "the loss as info": (
        lambda _: called(info=torch.ones(())),
        r"TypeError: info=a tensor.* is not a dict: pass the loss as loss=",
    ),
    "losses of samples in a list": (
        lambda _: called(info={"individual_losses": [1.0, 2.0]}),
        r"TypeError: individual_losses=\[1.0, 2.0\] is no tensor: pass the losses of single",
    ),
    "misspelt keys of info": (
        lambda _: called(info={"optimiser": 1}),
        r"note: .*step 0: info has the key 'optimiser'.*did you mean 'optimizer'\?",
    ),
    "another model's optimizer": (
        lambda _: called(optimizer=sgd(net())),
        r"note: .*step 0: the optimizer that was passed has none of the cockpit's parameters",
    ),
    "half of the batch size": (
        half_of_the_batch_size,
        r"note: .*N = 8 by batch_size=, but the loss is .* of shape .16, 2.*one row",
    ),
    "log without a step": (
        lambda _: cockpit_of(net()).log(valid_loss=1.0),
        r"TypeError: .*log\(\) missing 1 required positional argument: 'global_step'",
    ),
    "log of a dict": (
        lambda _: cockpit_of(net()).log(3, {"valid_loss": 1.0}),
        r"TypeError: log\(step, \{'valid_loss': 1.0\}\): pass values by name",
    ),
    "log under a quantity's name": (
        lambda _: cockpit_of(net(), some()).log(3, Loss=1.0),
        r"ValueError: log\(Loss=...\): there is a quantity's series 'Loss'.*another name",
    ),
    "log of an object": (
        lambda _: cockpit_of(net(), some()).log(3, valid_loss=object()),
        r"TypeError: log\(valid_loss=...\): a object can't be recorded: return a number",
    ),
    "log at a loss": (
        lambda _: cockpit_of(net(), some()).log(torch.ones(()), valid_loss=1.0),
        r"TypeError: global_step=a tensor.* is not a whole number",
    ),
}


# Training loops ----------------------------------------------------------------------------------


def forgotten_zero_grad(cockpit: Cockpit, model: nn.Module) -> None:
    optimizer = sgd(model)
    for step in range(3):
        loss = loss_of(model)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
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


def loss_without_grad(cockpit: Cockpit, model: nn.Module) -> None:
    with torch.no_grad():
        loss = loss_of(model)
    with cockpit(0, loss=loss):
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
    with cockpit(0, loss=loss):
        loss.backward()
    return cockpit


def nothing_for_the_budget(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), [quantities.NormTest()], budget=0.1)
    train(cockpit, model).close()
    return cockpit


def curvature_of_micro_batches(_: Path) -> Cockpit:
    model = net()
    cockpit, optimizer = Cockpit(model, [quantities.TICTrace(samples=2)]), sgd(model)
    for part in range(2):
        loss = loss_of(model)
        with cockpit(0, loss=loss, optimizer=optimizer, accumulating=part == 0):
            loss.backward()
    return cockpit


def root_of_a_mean(_: Path) -> Cockpit:
    cockpit = Cockpit(model := net(), [quantities.Alpha()])
    loss = loss_of(model).sqrt()
    with cockpit(0, loss=loss):
        loss.backward()
    return cockpit


def parameters_without_model(_: Path) -> Cockpit:
    model = net()
    return train(Cockpit(model.parameters(), some()), model)


LOOPS: dict[str, tuple[Program, str]] = {
    "zero_grad is forgotten": (
        lambda _: tracked(forgotten_zero_grad),
        r"note: .*step 1: .*added to gradients that the optimizer had used.*\.zero_grad\(\)",
    ),
    "steps begin anew in each epoch": (
        lambda _: tracked(steps_of_epochs),
        r"note: .*step 0: the step has had a context before.*counted through all epochs",
    ),
    "a context is entered twice": (
        lambda _: tracked(context_entered_twice),
        r"RuntimeError: a context is entered once.*call the cockpit anew for each step",
    ),
    "no backward pass": (
        lambda _: tracked(no_backward),
        r"NaN of NormTest: .*no gradient has come to it: the backward pass was outside",
    ),
    "a backward pass before the context": (
        lambda _: tracked(backward_before),
        r"NaN of NormTest: .*backward has run already when the context was entered: call it inside",
    ),
    "two backward passes": (
        lambda _: tracked(two_backwards),
        r"got gradients from two backward passes.*add the losses and call backward once",
    ),
    "another loss's backward pass": (
        lambda _: tracked(another_loss),
        r"NaN of NormTest: .*pass what backward is called on as loss=",
    ),
    "a detached loss": (
        lambda _: tracked(detached_loss),
        r"NaN of NormTest: .*the loss needs no gradient: it was detached.*Pass the tensor that",
    ),
    "no_grad": (
        lambda _: tracked(loss_without_grad),
        r"does not require grad|the loss needs no gradient: .*computed under no_grad",
    ),
    "another model's loss": (
        lambda _: tracked(another_model),
        r"NaN of NormTest: .*none of the tracked parameters.*computed by another model or a copy",
    ),
    "a copy's loss": (
        lambda _: tracked(copied_model),
        r"NaN of NormTest: .*none of the tracked parameters.*computed by another model or a copy",
    ),
    "a model whose parameters were replaced": (
        lambda _: tracked(parameters_replaced),
        r"NaN of NormTest: .*or were the parameters frozen or replaced since\?",
    ),
    "an optimizer of replaced parameters": (
        lambda _: tracked(optimizer_from_before),
        r"note: .*has none of the cockpit's parameters.*made of the parameters that the model has",
    ),
    "a layer that was replaced": (
        lambda _: tracked(layer_replaced),
        r"note: .*Missing are 2.weight, 2.bias: the model doesn't have this parameter any more.*"
        r"make a new one, which continues the run's file with resume=True",
    ),
    "a layer that was replaced, without per-sample gradients": (
        replaced_for_updates,
        r"note: .*2.weight, 2.bias: the model doesn't have this parameter any more.*resume=True",
    ),
    "a loss that is missing": (
        lambda _: tracked(loss_is_missing),
        r"Loss needs the loss: pass loss=... to the context",
    ),
    "two contexts of one forward pass": (
        two_contexts_of_one_forward_pass,
        r"NaN of OutputNorm: backward went through a forward pass that ran before an earlier "
        r"context was left.*call backward once",
    ),
    "a model that only holds layers": (
        functions_of_weights,
        r"note: .*no layer was called.*call the layers themselves, instead of functions",
    ),
    "a budget in a short run": (
        nothing_for_the_budget,
        r"note: .*step 2: budget=0.1 wasn't enough to track NormTest in 3 steps.*first 10 steps",
    ),
    "curvature of micro-batches": (
        curvature_of_micro_batches,
        r"NaN of TICTrace: .*A micro-batch with a step of its own.*has a value of its own",
    ),
    "no last part of a batch": (
        lambda _: tracked(never_the_last_part),
        r"note: .*micro-batches of step 0 have no values.*accumulating=False",
    ),
    "steps after close": (
        lambda _: tracked(used_after_close),
        r"note: .*the cockpit has been closed.*aren't written.*resume=True",
    ),
    "log after close": (
        lambda _: tracked(logged_after_close),
        r"note: .*step 9: the cockpit has been closed",
    ),
    "Alpha of the root of a mean": (
        root_of_a_mean,
        r"note: .*Alpha can't be found without per-sample losses.*SqrtBackward.*individual_l",
    ),
    "parameters without a model": (
        parameters_without_model,
        r"note: .*no recorded call of the model .*gradlens.extend.*pass .* batch_size=",
    ),
}


# Plots, runs and the rest ------------------------------------------------------------------------


def plotted(source: Any, **options: Any) -> None:
    CockpitPlotter().plot(source, show_plot=False, **options)


def plotted_text(folder: Path) -> None:
    (folder / "notes.txt").write_text("hello")
    plotted(folder / "notes.txt")


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


ELSEWHERE: dict[str, tuple[Program, str]] = {
    "a plot into a file": (
        lambda _: plotted_with(gradlens.History(), "plot.png"),
        r"TypeError: show_plot='plot.png' is no bool: .*savefig\(path\)",
    ),
    "a plot by other names": (
        lambda _: plotter_of().plot(gradlens.History(), show=False),
        r"TypeError: CockpitPlotter.plot has no argument 'show': use show_plot",
    ),
    "a plotter of a cockpit": (
        lambda _: plotter_of(cockpit_of(net())),
        r"TypeError: secondary_screen=Cockpit.* is no bool: .*CockpitPlotter\(\).plot\(cockpit\)",
    ),
    "a size by its name": (
        lambda _: plotter_of().plot(gradlens.History(), size="column"),
        r"TypeError: size='column': pass inches, .*size=3.3, or size=\(6.75, 2.5\)",
    ),
    "a group of one's own": (
        lambda _: gradlens_.View("Mine", group="mine"),
        r"ValueError: there is no group 'mine' \(there is step size, .*other\)",
    ),
    "a misspelt scale": (
        lambda _: gradlens_.View("Mine", yscale="logarithmic"),
        r"ValueError: there is no yscale 'logarithmic'.*linear.*log",
    ),
    "cockpit's figure": (
        lambda _: plotter_of().fig,
        r"AttributeError: 'CockpitPlotter' object has no attribute 'fig': use plotter.figure",
    ),
    "a plot by the cockpit": (
        lambda _: cockpit_of(net()).plot(),
        r"AttributeError: 'Cockpit' .* 'plot': use gradlens.CockpitPlotter\(\).plot\(cockpit\)",
    ),
    "a misspelt method": (
        lambda _: cockpit_of(net()).get_outputs(),
        r"AttributeError: 'Cockpit' .* 'get_outputs': did you mean get_output\?",
    ),
    "a history's table": (
        lambda _: cockpit_of(net()).history.df,
        r"AttributeError: 'History' .* 'df': use history.to_dataframe\(\)",
    ),
    "a series as an attribute": (
        lambda _: cockpit_of(net(), some()).history.Loss,
        r"AttributeError: 'History' .* 'Loss': use history\['Loss'\]",
    ),
    "the last step": (
        lambda _: cockpit_of(net(), some()).history[-1],
        r"KeyError: .*nothing was recorded at step -1.*history\[history.steps\[-1\]\]",
    ),
    "a quantity's values": (
        lambda _: quantities_.Loss(name="mine").output,
        r"AttributeError: 'Loss' .* 'output': use cockpit.history\['mine'\]",
    ),
    "another library's name": (
        lambda _: gradlens_.watch(net()),
        r"AttributeError: module 'gradlens' .* 'watch': use gradlens.Cockpit\(model\)",
    ),
    "a plot of a missing file": (
        lambda folder: plotted(folder / "run.jsonl"),
        r"FileNotFoundError: .*run.jsonl",
    ),
    "a plot of a text": (plotted_text, r"ValueError: .*notes.txt is not a gradlens run"),
    "a plot of a folder": (
        plotted,
        r"ValueError: .* is a directory, not a run: pass the file that the run was written to",
    ),
    "a plot of a model": (
        lambda _: plotted(net()),
        r"TypeError: a Sequential can't be plotted: pass a cockpit, a History, or a run's path",
    ),
    "names of instruments": (
        lambda _: plotter_of(instruments=["Loss"]),
        r"TypeError: 'Loss' is not an instrument: pass instances, as in CockpitPlotter\(",
    ),
    "one name of an instrument": (
        lambda _: plotter_of(instruments="Loss"),
        r"TypeError: instruments='Loss': pass a list of instances, as in CockpitPlotter\(",
    ),
    "one instrument": (
        lambda _: plotter_of(instruments=instruments.LossInstrument()),
        r"TypeError: instruments=LossInstrument.*pass a list of instances, as in CockpitPlotter\(",
    ),
    "an instrument's class": (
        lambda _: plotter_of(instruments=[instruments.LossInstrument]),
        r"TypeError: <class .*LossInstrument'> is not an instrument: pass instances",
    ),
    "a misspelt series": (
        lambda _: cockpit_of(net(), some()).history["Los"],
        r"KeyError: .*no series 'Los' in this history: did you mean Loss\?",
    ),
    "per-sample gradients of parameters": (
        lambda _: per_sample_(net().parameters()),
        r"TypeError: a generator is not a model: pass the nn.Module",
    ),
    "extending a function": (
        lambda _: gradlens_.extend(functional.cross_entropy),
        r"TypeError: a function is not a model: pass the nn.Module",
    ),
    "a misspelt parameter": (
        misspelt_gradient,
        r"KeyError: .*no trainable parameter '0.weigth' \(there are: 0.weight, 0.bias",
    ),
}

CASES = AT_ONCE | IN_CONTEXTS | LOOPS | ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_explained(name: str, tmp_path: Path) -> None:
    program, pattern = CASES[name]
    assert re.search(pattern, said(program, tmp_path), re.DOTALL), said(program, tmp_path)


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
        loss = loss_of(model)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def accumulated(cockpit: Cockpit, model: nn.Module) -> None:
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model)
            with cockpit(step, loss=loss, optimizer=optimizer, accumulating=part == 0):
                loss.backward()
        optimizer.step()


def two_optimizers(cockpit: Cockpit, model: nn.Module) -> None:
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model)
        with cockpit(step, loss=loss, optimizer=sgd(model.get_submodule("2"))):
            loss.backward()


def steps_inside(cockpit: Cockpit, model: nn.Module) -> None:
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
            optimizer.step()


def info_of_the_users_own(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model, info={"losses": 1, "output_size": 2, "batch": 3, "scale": 4, "step": 5})


def forward_inside(_: Path) -> Cockpit:
    model = net()
    cockpit = Cockpit(model, [quantities.NormTest(), quantities.GradNorm()])
    with cockpit(0):
        loss_of(model).backward()
    return cockpit


def resumed_before_its_end(folder: Path) -> Cockpit:
    train(Cockpit(model := net(), some(), run=folder / "run.jsonl"), model, 5).close()
    return train(Cockpit(model, some(), run=folder / "run.jsonl", resume=True), model)


def after_an_exception(cockpit: Cockpit, model: nn.Module) -> None:
    loss = loss_of(model)
    with pytest.raises(ZeroDivisionError), cockpit(0, loss=loss):
        raise ZeroDivisionError
    train(cockpit, model)


def closed_twice(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model).close()
    cockpit.close()


def on_two_cockpits(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model)
    train(Cockpit(model, some()), model)


def in_eval_mode(cockpit: Cockpit, model: nn.Module) -> None:
    train(cockpit, model.eval())


def tied_weights(_: Path) -> Cockpit:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.get_submodule("2").weight = model.get_submodule("0").weight
    return train(Cockpit(model, some()), model)


def on_one_device(_: Path) -> Cockpit:
    model = nn.DataParallel(net())
    return train(Cockpit(model, some()), model)


def scripted_inside(_: Path) -> Cockpit:
    model = nn.Sequential(nn.Linear(4, 3), scripted(nn.Tanh()), nn.Linear(3, 2))
    return train(Cockpit(model, [*some(), quantities.InputNorm()]), model, 1)


def in_a_new_folder(folder: Path) -> Cockpit:
    cockpit = train(Cockpit(model := net(), some(), run=folder / "a" / "b" / "run.jsonl"), model)
    assert gradlens.load_run(folder / "a" / "b" / "run.jsonl").steps == (0, 1, 2)
    return cockpit


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
    "micro-batches with steps of their own": lambda _: tracked(
        micro_batches_with_steps_of_their_own
    ),
    "accumulation": lambda _: tracked(accumulated),
    "an optimizer of some parameters": lambda _: tracked(two_optimizers),
    "an optimizer that steps inside": lambda _: tracked(steps_inside),
    "info of the user's own": lambda _: tracked(info_of_the_users_own),
    "a forward pass inside": forward_inside,
    "a run that is resumed before its end": resumed_before_its_end,
    "an exception": lambda _: tracked(after_an_exception),
    "close twice": lambda _: tracked(closed_twice),
    "two cockpits": lambda _: tracked(on_two_cockpits),
    "eval mode": lambda _: tracked(in_eval_mode),
    "a layer that is frozen": lambda _: tracked(frozen_later),
    "tied weights": tied_weights,
    "DataParallel on one device": on_one_device,
    "a part that is scripted": scripted_inside,
    "a run in a new folder": in_a_new_folder,
    "values of any name": lambda _: tracked(logged_under_any_name),
    "no quantities": lambda _: train(Cockpit(model := net(), []), model),
}


@pytest.mark.parametrize("name", INTENDED)
def test_what_may_be_intended_is_no_mistake(name: str, tmp_path: Path) -> None:
    assert not said(INTENDED[name], tmp_path)
