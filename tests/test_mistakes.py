"""Mistakes that users make, and what they are told.

Each case is a program that must say a reason and a remedy: as the message of an exception, a note,
or the reason of a NaN. Another table has programs that look like mistakes and are none.
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


class Forgetful(sinks.Sink):
    """A sink that keeps nothing."""

    def record(self, step: int, scalars: Any, histograms: Any) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


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
        never_the_last_part, used_after_close, logged_after_close,
    ),
    **{program.__name__: program for program in (
        replaced_for_updates, two_contexts_of_one_forward_pass, functions_of_weights,
        nothing_for_the_budget, curvature_of_micro_batches, root_of_a_mean,
        parameters_without_model,
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
    r"|(add|call|choose|close|end|enter|give|join|list|make|pass|return|run|set|track|use) \S+)",
    re.DOTALL | re.IGNORECASE,
)
"""A reason, and behind it what to do instead."""


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_has_a_reason_and_a_remedy(name: str, tmp_path: Path) -> None:
    text = said(CASES[name], tmp_path)
    assert REMEDY.search(text), text
    if name in AT_ONCE:
        assert re.match(r"\w+Error: ", text)


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
