"""How signals are captured: which calls count, for which step, and that training doesn't notice."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens import Cockpit, History, quantities, schedules
from gradlens.quantities import InputNorm, OutputGradientGeometry, OutputNorm, Quantity
from gradlens.signals import Moments, Size
from gradlens.signals.axes import find_axes
from gradlens.signals.signal import first_tensor
from tests.cases.references import numbers
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward
from tests.cockpit.test_cockpit import tensors_alive
from tests.quantities.test_layer_quantities import everything


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def step(cockpit: Cockpit, number: int, inputs: Tensor) -> None:
    assert cockpit.model is not None
    tracked_backward(cockpit, number, cockpit.model(inputs).square().mean())


def norms(history: History, number: int, name: str = "OutputNorm") -> dict[str, Any]:
    return history[name][number]["layers"]


def mean_norm(outputs: Tensor) -> float:
    return outputs.flatten(1).norm(dim=1).mean().item()


# Which layers, and which of their tensors -------------------------------------------------------


def odd_layers() -> nn.Module:
    """Layers that return dicts, numbers, or aren't called at all."""

    def compute(net: Any, x: Tensor) -> Tensor:
        found = net.dictionary(net.linear(x))["states"][0]
        return found / net.length(found)

    return Net(
        compute,
        linear=nn.Linear(4, 3),
        dictionary=Net(lambda _, x: {"places": torch.arange(len(x)), "states": [2 * x, x]}),
        length=Net(lambda _, x: len(x)),
        idle=nn.Linear(3, 3),
    )


def test_the_first_tensor_of_a_dict_counts_and_odd_layers_are_noted() -> None:
    model, inputs = odd_layers(), torch.randn(5, 4)
    cockpit = Cockpit(model, [OutputNorm()])
    with pytest.warns(UserWarning, match="no values|no floating-point") as caught:
        step(cockpit, 0, inputs)
    step(cockpit, 1, inputs)
    assert set(norms(cockpit.history, 0)) == {"linear", "dictionary"}
    expected = mean_norm(2 * model.linear(inputs))
    assert norms(cockpit.history, 0)["dictionary"] == pytest.approx(expected)
    texts = [note.text for note in cockpit.history.notes]
    assert texts == [
        "layers that were not called have no values: idle",
        "there are no floating-point tensors in the output of length",
    ]
    assert len(caught) == 2


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.arange(3),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.as_nested_tensor([torch.ones(2)]),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: None,
        lambda: "text",
        lambda: {"a": ()},
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_dense_tensor_is_looked_past(build: Callable[[], Any]) -> None:
    odd, tensor = build(), torch.ones(2)
    assert first_tensor(odd) is None
    assert first_tensor((odd, {"b": [odd, tensor]})) is tensor


def test_keyword_arguments_are_inputs() -> None:
    inputs = torch.randn(3, 4)
    model = Net(lambda net, x: net.inner(input=x), inner=nn.Linear(4, 2))
    cockpit = Cockpit(model, [InputNorm()])
    step(cockpit, 0, inputs)
    assert norms(cockpit.history, 0, "InputNorm")["inner"] == pytest.approx(inputs.norm().item())


IMAGES = nn.Sequential(nn.Conv2d(2, 7, 1), nn.ReLU(), nn.MaxPool2d(1), nn.Flatten())
WORDS = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.GELU(), nn.Dropout())
SIGNALS = nn.Sequential(nn.Conv1d(2, 7, 1), nn.ReLU(), nn.Flatten())


@pytest.mark.parametrize(
    ("model", "place", "shape", "places"),
    [
        (nn.Linear(6, 4), "", (3, 5, 4), (3, 5, 4)),
        (nn.Linear(6, 4), "", (4,), (1, 1, 4)),
        (nn.Conv1d(2, 4, 1), "", (3, 4, 5), (3, 5, 4)),
        (nn.Conv2d(2, 4, 1), "", (3, 4, 2, 5), (3, 10, 4)),
        (nn.Conv2d(2, 4, 1), "", (4, 2, 5), (1, 10, 4)),
        (nn.Conv3d(2, 4, 1), "", (3, 4, 2, 5, 2), (3, 20, 4)),
        (nn.BatchNorm1d(4), "", (3, 4), (3, 1, 4)),
        (nn.LayerNorm(4), "", (3, 5, 2, 4), (3, 10, 4)),
        (nn.LSTM(2, 4), "", (5, 3, 4), (3, 5, 4)),
        (nn.LSTM(2, 4, batch_first=True), "", (3, 5, 4), (3, 5, 4)),
        (nn.MultiheadAttention(4, 2), "", (5, 3, 4), (3, 5, 4)),
        (nn.TransformerEncoderLayer(4, 2, batch_first=True), "", (3, 5, 4), (3, 5, 4)),
        (nn.Embedding(9, 4), "", (3, 5, 4), (3, 5, 4)),
        (nn.ReLU(), "", (3, 4, 5), (3, 5, 4)),
        (nn.ReLU(), "", (3,), (3, 1, 1)),
        (nn.LSTM(2, 4), "", (5, 4), (1, 5, 4)),
        (nn.GRU(2, 4, batch_first=True), "", (5, 4), (1, 5, 4)),
        (nn.GRUCell(2, 4), "", (3, 4), (3, 1, 4)),
        (nn.MultiheadAttention(4, 2), "", (5, 4), (1, 5, 4)),
        (nn.TransformerEncoderLayer(4, 2), "", (5, 3, 4), (3, 5, 4)),
        # A single sample is known behind convolutions, but for a matrix, which is a batch.
        (IMAGES, "1", (7, 2, 3), (1, 6, 7)),
        (IMAGES, "2", (7, 2, 3), (1, 6, 7)),
        (IMAGES, "1", (3, 7, 2), (3, 2, 7)),
        (IMAGES, "1", (3, 7, 2, 5), (3, 10, 7)),
        (IMAGES, "1", (7, 7, 2), (7, 2, 7)),
        (IMAGES, "3", (3, 14), (3, 1, 14)),
        (SIGNALS, "2", (7, 14), (7, 1, 14)),
        # Activations have their features where the layer before them has these.
        (IMAGES, "", (3, 4, 5), (3, 5, 4)),
        (WORDS, "", (3, 5, 4), (3, 5, 4)),
        (WORDS, "0", (3, 5, 4), (3, 5, 4)),
        (WORDS, "2", (3, 5, 4), (3, 5, 4)),
        (WORDS, "3", (3, 5, 4), (3, 5, 4)),
    ],
)
def test_samples_positions_and_features(
    model: nn.Module, place: str, shape: tuple[int, ...], places: tuple[int, ...]
) -> None:
    axes = find_axes(model)[model.get_submodule(place)]
    assert axes.samples(torch.zeros(shape)).shape == places


@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)], ids=["features", "sequences"])
def test_a_vector_has_one_number_for_each_sample(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one_number = Net(lambda _, x: x.flatten(1).sum(1))
    model = nn.Sequential(nn.Linear(4, 5), one_number, nn.ReLU())
    outputs = dict[str, Tensor]()
    for name, module in model.named_children():
        keep = lambda *given, name=name: outputs.update({name: given[2].detach().double()})  # noqa: E731
        module.register_forward_hook(keep)
    active = quantities.OutputActivation(layers=("1", "2"))
    cockpit = Cockpit(model, [active, OutputNorm(), quantities.ActivationOutliers()])
    step(cockpit, 0, torch.randn(shape))
    for name in ("1", "2"):
        values = outputs[name]
        found = {key: cockpit.history[key][0]["layers"][name] for key in cockpit.history.names}
        assert found["OutputActivation"]["active"] == pytest.approx(
            float((values != 0).double().mean())
        )
        assert found["OutputActivation"]["dead"] == 0
        assert found["OutputNorm"] == pytest.approx(mean_norm(values[:, None]))
        places = found["ActivationOutliers"]["channel"], found["ActivationOutliers"]["position"]
        assert places == (0, 0)


def test_a_vector_has_the_features_of_a_single_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    cockpit = Cockpit(model, [quantities.OutputActivation(layers="1")])
    model[0].bias.data = torch.tensor([9.0, 9.0, -9.0, -9.0, -9.0])
    step(cockpit, 0, torch.zeros(4))
    assert cockpit.history["OutputActivation"][0]["layers"]["1"]["dead"] == pytest.approx(0.6)


def time_first(is_turned: bool = False) -> nn.Module:
    def compute(net: Any, x: Tensor) -> Tensor:
        states = net.activation(net.rnn(net.front(x))[0])
        return net.head(states.transpose(0, 1) if is_turned else states)

    layers = {"front": nn.Linear(4, 4), "rnn": nn.GRU(4, 3), "activation": nn.ReLU()}
    return Net(compute, **layers, head=nn.Linear(3, 2))


def turning() -> nn.Module:
    """A convolution has samples first, and the layers behind it are called with positions first."""
    layers = {"front": nn.Conv1d(4, 4, 1), "head": nn.Linear(4, 2), "rnn": nn.GRU(2, 3)}
    return Net(lambda net, x: net.rnn(net.head(net.front(x).permute(2, 0, 1)))[0], **layers)


def turning_inside(axis: int) -> nn.Module:
    """No layer defines its axis of samples, which is first or second in what the model computes."""

    def compute(net: Any, x: Tensor) -> Tensor:
        return net.out(net.activation(net.head(x.transpose(0, axis))).mean(1 - axis))

    return Net(compute, head=nn.Linear(4, 4), activation=nn.GELU(), out=nn.Linear(4, 3))


def scaled() -> nn.Module:
    """No layer defines an axis: features are assumed in axis 1, where samples may be, too."""
    factor = nn.Parameter(torch.ones(()))
    return nn.Sequential(Net(lambda net, x: x * net.factor, factor=factor))


Axes = dict[str, int]
PLACES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[int, ...]], Axes]] = {
    "around time first": (time_first, lambda n: (7, n, 4), {"front": 1, "rnn": 1, "head": 1}),
    "behind time first": (lambda: time_first(True), lambda n: (7, n, 4), {"head": 0}),
    "in front of time first": (turning, lambda n: (n, 4, 7), {"head": 1}),
    "positions first inside": (lambda: turning_inside(1), lambda n: (n, 7, 4), {"head": 1}),
    "samples first": (lambda: turning_inside(0), lambda n: (n, 7, 4), {"head": 0}),
    "no axis is defined": (scaled, lambda n: (n, 4, 3), {"0": 0}),
}
"""Networks, their inputs, and which axis of a layer's output has the samples."""


@pytest.mark.parametrize("samples", [5, 7], ids=["5 of 7 positions", "as many as positions"])
@pytest.mark.parametrize(("build", "shape", "axes"), PLACES.values(), ids=PLACES)
def test_norms_are_of_samples_wherever_these_are(
    build: Callable[[], nn.Module],
    shape: Callable[[int], tuple[int, ...]],
    axes: Axes,
    samples: int,
) -> None:
    torch.manual_seed(0)
    model, outputs = build(), dict[str, Tensor]()
    for name in axes:
        keep = lambda _, args, out, name=name: outputs.update({name: first_tensor(out)})  # noqa: E731
        model.get_submodule(name).register_forward_hook(keep)
    cockpit = Cockpit(model, [OutputNorm()])
    step(cockpit, 0, torch.randn(shape(samples)))
    for name, axis in axes.items():
        expected = mean_norm(outputs[name].movedim(axis, 0))
        assert norms(cockpit.history, 0)[name] == pytest.approx(expected)
    assert not cockpit.history.notes


def classified_texts(net: Any, x: Tensor) -> Tensor:
    """From the last states of sequences that are packed inside, and from all rows of these."""
    packed, last = net.rnn(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False))
    rows: Tensor = net.rows(packed.data)
    return net.head(last[0]) + rows.mean()


LENGTHS = torch.tensor([2, 4, 3])


def test_the_rows_of_packed_sequences_are_no_samples() -> None:
    layers = {"rnn": nn.GRU(4, 3, batch_first=True), "rows": nn.Linear(3, 2)}
    model = Net(classified_texts, **layers, head=nn.Linear(3, 2))
    tracked = [OutputNorm(), quantities.ActivationOutliers(layers="rnn"), quantities.InputMean()]
    cockpit = Cockpit(model, tracked)
    step(cockpit, 0, torch.randn(3, 4, 4))
    found = norms(cockpit.history, 0)
    assert "packed sequence" in found["rnn"].reason
    assert "packed sequence" in norms(cockpit.history, 0, "ActivationOutliers")["rnn"].reason
    assert "isn't certain which axis" in found["rows"].reason
    assert found["head"] > 0
    assert all(map(math.isfinite, norms(cockpit.history, 0, "InputMean").values()))


def test_norms_in_an_evaluation_are_of_the_axis_that_the_last_step_had() -> None:
    model = turning_inside(1)
    cockpit = Cockpit(model, [OutputNorm()])
    step(cockpit, 0, torch.randn(5, 7, 4))
    for number, samples in enumerate((4, 7)):
        with cockpit.evaluation(number, "validation"):
            model(inputs := torch.randn(samples, 7, 4))
        found = norms(cockpit.history, number, "OutputNorm (validation)")["head"]
        if samples == 7:  # no graph tells the two axes apart
            assert "two axes" in found.reason
        else:
            output = model.head(inputs.transpose(0, 1))
            assert found == pytest.approx(mean_norm(output.movedim(1, 0)))


def test_channel_last_is_what_the_user_says() -> None:
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU())
    inputs = torch.randn(2, 3, 5)
    for channel_last, features in ((None, 3), (False, 3), (True, 5)):
        quantity = quantities.InputMean(by_feature=True, channel_last=channel_last, layers="1")
        cockpit = Cockpit(copy.deepcopy(model), [quantity])
        step(cockpit, 0, inputs)
        assert len(norms(cockpit.history, 0, "InputMean")["1"]) == features


# Which calls count ------------------------------------------------------------------------------


Draw = Callable[[int], Tensor]
Counted = Callable[[Cockpit, Any, int, Draw], list[Tensor]]
"""Takes a step with the cockpit, the model and batches, and returns those that count."""


def loss_on(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def two_passes(cockpit: Cockpit, model: Any, number: int, draw: Draw) -> list[Tensor]:
    counted = [draw(5), draw(3)]
    tracked_backward(cockpit, number, loss_on(model, counted[0]) + loss_on(model, counted[1]))
    return counted


def passes_without_backward(cockpit: Cockpit, model: Any, number: int, draw: Draw) -> list[Tensor]:
    model(draw(100))
    with torch.no_grad():
        model(draw(100))
    tracked_backward(cockpit, number, loss_on(model, batch := draw(5)))
    return [batch]


def layers_called_by_themselves(
    cockpit: Cockpit, model: Any, number: int, draw: Draw
) -> list[Tensor]:
    needs_gradients = model[0].weight.requires_grad
    with contextlib.nullcontext() if needs_gradients else torch.no_grad():
        model[2](model[0](draw(50)))
    loss = model[2](model[1](model[0](batch := draw(5)))).square().sum()
    with cockpit(number, loss=loss):
        loss.backward()
        model[2](model[0](batch))
    return [batch]


def a_layer_beside_the_model(cockpit: Cockpit, model: Any, number: int, draw: Draw) -> list[Tensor]:
    model[0](draw(50))
    loss = loss_on(model, batch := draw(5))
    with cockpit(number, loss=loss):
        loss.backward()
        model[0](draw(50))
    return [batch]


def evaluated_before_backward(
    cockpit: Cockpit, model: Any, number: int, draw: Draw
) -> list[Tensor]:
    loss = loss_on(model, batch := draw(5))
    with cockpit.evaluation(number):
        model(draw(50))
    tracked_backward(cockpit, number, loss)
    return [batch]


def announced(inside: bool) -> Counted:
    def take(cockpit: Cockpit, model: Any, number: int, draw: Draw) -> list[Tensor]:
        with cockpit(number):
            with cockpit.forward(number) if inside else contextlib.nullcontext():
                loss = loss_on(model, batch := draw(5))
            loss.backward()
        return [batch]

    return take


def several_passes(in_turn: bool) -> Counted:
    def take(cockpit: Cockpit, model: Any, number: int, draw: Draw) -> list[Tensor]:
        parts, losses = [draw(5), draw(5)], []
        for place, part in enumerate(parts):
            with cockpit.forward(number):
                losses.append(loss_on(model, part))
            if in_turn:
                tracked_backward(cockpit, number, losses[-1], accumulating=place == 0)
        if not in_turn:
            tracked_backward(cockpit, number, losses[0] + losses[1])
        return parts

    return take


COUNTED: dict[str, tuple[Counted, tuple[int, ...]]] = {
    "two passes": (two_passes, (0, 1, 2)),
    "without a backward pass": (passes_without_backward, (0, 1, 2)),
    "layers by themselves": (layers_called_by_themselves, (0,)),
    "a layer beside the model": (a_layer_beside_the_model, (0, 1)),
    "an evaluation": (evaluated_before_backward, (0, 1)),
    "in the context": (announced(False), (0,)),
    "in the context, announced": (announced(True), (0,)),
    # Of a quantity that is computed at every tenth step, which no forward pass can tell.
    "passes first": (several_passes(False), (0, 1, 10)),
    "in turn": (several_passes(True), (0, 1, 10)),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_which_calls_count(model: nn.Sequential, name: str, frozen: bool) -> None:
    take, numbers = COUNTED[name]
    model[0].requires_grad_(not frozen)
    schedule = schedules.linear(10 if 10 in numbers else 1)
    geometry = OutputGradientGeometry(schedule, correlation=False)
    cockpit = Cockpit(model, [OutputNorm(schedule), geometry])
    for number in numbers:
        counted = take(cockpit, model, number, lambda n: torch.randn(n, 4))
        if not schedule(number):
            continue
        outputs = nn.functional.linear(torch.cat(counted), *model[0].parameters())
        assert norms(cockpit.history, number)["0"] == pytest.approx(mean_norm(outputs))
        found = norms(cockpit.history, number, "OutputGradientGeometry")["0"]
        if frozen:
            assert found.reason == "the output needs no gradient"
        else:
            plain = copy.deepcopy(model[1:])
            (gradient,) = torch.autograd.grad(loss_on(plain, outputs.clone()), outputs)
            assert found["norm"] == pytest.approx(gradient.norm().item())


@pytest.mark.parametrize("shapes", [[(2, 4), (2, 5)], [(2, 5), (2, 5)], [(2, 5), (9, 5)]], ids=str)
def test_calls_that_do_not_fit_together_are_undefined(shapes: list[tuple[int, int]]) -> None:
    """They have other numbers of features, or so few samples that products of these are kept."""
    model = nn.Sequential(nn.PReLU())
    tracked = [
        kind(layers="0")
        for kind in (
            quantities.OutputActivation,
            quantities.DeadNeurons,
            quantities.InputStd,
            quantities.InputCovariance,
        )
    ]
    cockpit = Cockpit(model, [*tracked, OutputNorm()])
    tracked_backward(cockpit, 0, sum(model(torch.randn(shape)).square().sum() for shape in shapes))
    several = shapes[0][1] != shapes[1][1]
    found = [norms(cockpit.history, 0, each.name)["0"] for each in tracked]
    for value in found if several else ():
        assert re.search("different numbers of features.*its own ReLU", value.reason)
    assert several or "larger batches" in found[-1].reason
    assert norms(cockpit.history, 0)["0"] > 0


def test_empty_batches_have_no_values() -> None:
    empty = torch.zeros(0, 1, 3)
    assert Moments().merge([Moments().reduce(empty), Moments().reduce(empty + 1)]).count == 0
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    cockpit = Cockpit(model, [OutputNorm(), quantities.OutputActivation(), quantities.InputStd()])
    tracked_backward(cockpit, 0, model(torch.zeros(0, 3)).sum())
    for name in cockpit.history.names:
        assert all("empty" in value.reason for value in norms(cockpit.history, 0, name).values())


def test_a_branch_without_influence_has_no_gradient() -> None:
    layers = {"used": nn.Linear(2, 2), "ignored": nn.Linear(2, 2)}
    model = Net(lambda net, x: (net.ignored(x), net.used(x))[1], **layers)
    cockpit = Cockpit(model, [OutputNorm(), OutputGradientGeometry()])
    step(cockpit, 0, torch.randn(3, 2))
    found = norms(cockpit.history, 0, "OutputGradientGeometry")["ignored"]
    assert found.reason == "the loss doesn't depend on the output"
    assert norms(cockpit.history, 0)["ignored"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layers", ["rest.0", "rest.1", ("rest.0", "rest.2"), "rest.end"])
def test_layers_inside_a_checkpoint_count_once(layers: Any, reentrant: bool) -> None:
    def network(checkpointed: bool) -> nn.Module:
        def compute(net: Any, x: Tensor) -> Tensor:
            x = net.first(x)
            for _ in range(2):
                x = x.repeat(1, 2)[:, :4]
                run = partial(checkpoint, net.rest, use_reentrant=reentrant)
                x = run(x) if checkpointed else net.rest(x)
            return net.last(x)

        rest = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        rest.register_module("end", nn.Tanh())
        return Net(compute, first=nn.Linear(4, 4), rest=rest, last=nn.Linear(2, 2))

    inputs, histories = torch.randn(5, 4), []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        tracked = [
            OutputNorm(layers=layers),
            InputNorm(layers=layers),
            quantities.InputMean(layers=layers),
            OutputGradientGeometry(layers=layers, correlation=False),
        ]
        cockpit = Cockpit(network(checkpointed), tracked)
        step(cockpit, 0, inputs)
        histories.append(cockpit.history)
    for name in histories[0].names:
        found, expected = (dict(numbers(history[name][0])) for history in histories)
        assert found
        assert found == pytest.approx(expected, rel=1e-5), name


def test_layers_that_run_without_gradients_say_so() -> None:
    layers = {"teacher": nn.Linear(4, 3), "student": nn.Linear(4, 3)}
    model = Net(lambda net, x: net.student(x) - torch.no_grad()(net.teacher)(x), **layers)
    cockpit, inputs = Cockpit(model, [OutputNorm()]), torch.randn(5, 4)
    step(cockpit, 0, inputs)
    assert "cockpit.evaluation" in norms(cockpit.history, 0)["teacher"].reason
    assert norms(cockpit.history, 0)["student"] > 0
    assert not cockpit.history.notes


def test_several_backward_passes_through_one_call_are_to_be_one(model: nn.Sequential) -> None:
    tracked = [
        OutputGradientGeometry(),
        OutputGradientGeometry(correlation=False, name="reduced at once"),
        OutputNorm(),
    ]
    cockpit, inputs = Cockpit(model, tracked), torch.randn(5, 4)
    outputs = model(inputs)
    first, second = outputs.square().mean(), outputs.sum()
    with cockpit(0, loss=first):
        first.backward(retain_graph=True)
        second.backward()
    for name in ("OutputGradientGeometry", "reduced at once"):
        assert "sum of the losses" in norms(cockpit.history, 0, name)["2"].reason
    assert norms(cockpit.history, 0)["2"] == pytest.approx(mean_norm(outputs))


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_pass_that_makes_the_loss_is_not_the_steps(
    model: nn.Sequential, inside: bool
) -> None:
    cockpit = Cockpit(model, [OutputGradientGeometry(), OutputNorm()])
    inputs = torch.randn(5, 4, requires_grad=True)

    def penalised(outputs: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return outputs.square().sum() + slope.square().sum()

    outputs = model(inputs)
    loss = None if inside else penalised(outputs)
    with cockpit(0):
        (penalised(outputs) if loss is None else loss).backward()
    found = norms(cockpit.history, 0, "OutputGradientGeometry")["2"]
    if inside:
        assert "several backward passes" in found.reason
    else:
        assert found["norm"] == pytest.approx(2 * outputs.norm().item())
    assert norms(cockpit.history, 0)["2"] == pytest.approx(mean_norm(outputs))


def test_other_quantities_do_not_disturb() -> None:
    """Per-sample gradients run layers again, curvature runs further backward passes."""
    others: list[Callable[[], Quantity]] = [
        quantities.NormTest, quantities.HessMaxEV, quantities.GradHist1d, quantities.Alpha
    ]  # fmt: skip
    histories = []
    for besides in ([], others):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))
        loss_function = gradlens.extend(nn.MSELoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cockpit = Cockpit(model, [*everything(), *(build() for build in besides)])
        for number in range(4):
            optimizer.zero_grad()
            loss = loss_function(model(torch.randn(5, 4)), torch.randn(5, 2))
            tracked_backward(cockpit, number, loss, optimizer=optimizer)
            optimizer.step()
        histories.append(cockpit.history)
    for quantity in everything():
        alone, together = (history[quantity.name] for history in histories)
        assert repr(alone) == repr(together), quantity.name


# For which step ---------------------------------------------------------------------------------


def whole(steps: Iterable[int]) -> list[tuple[int, bool]]:
    return [(number, False) for number in steps]


CONTEXTS: dict[str, tuple[int, list[tuple[int, bool]], tuple[int, ...]]] = {
    "all": (10, whole(range(7)), ()),
    "every fifth": (10, whole(range(5, 40, 5)), ()),
    "resumed": (10, whole(range(1000, 1020, 2)), ()),
    "from the third": (10, whole([3, 4, 5, 6]), ()),
    "unexpected": (10, whole([0, 1, 10]), (10,)),
    "unexpected parts": (10, [(n, more) for n in (0, 1, 10) for more in (True, False)], (10,)),
    # A micro-batch that is left over looked for nothing, and is no reason.
    "left over": (2, [(0, False), (1, True), *whole([2, 3, 4])], (2,)),
}
"""The interval of a schedule, steps and whether they go on, and those that weren't foreseen."""


@pytest.mark.parametrize("case", CONTEXTS)
def test_schedules_are_met_by_forward_passes_before_the_context(
    model: nn.Sequential, case: str
) -> None:
    interval, contexts, unforeseen = CONTEXTS[case]
    sparse = (
        OutputNorm(schedules.linear(interval)),
        OutputGradientGeometry(schedules.linear(interval)),
    )
    cockpit = Cockpit(model, [*sparse, *([] if unforeseen else [InputNorm()])])
    for number, accumulating in contexts:
        loss = model(torch.randn(20, 4)).square().mean()
        tracked_backward(cockpit, number, loss, accumulating=accumulating)
    for name in ("OutputNorm", "OutputGradientGeometry"):
        found = {number: value["layers"]["0"] for number, value in cockpit.history[name].items()}
        assert [*found] == sorted({number for number, _ in contexts if number % interval == 0})
        for number, value in found.items():
            if number in unforeseen:
                assert f"with cockpit.forward({number}):" in value.reason
            else:
                assert (value if name == "OutputNorm" else value["norm"]) > 0
    if not unforeseen:
        assert all(norms(cockpit.history, number, "InputNorm")["0"] > 0 for number, _ in contexts)
    assert not cockpit.history.notes


@pytest.mark.parametrize("announced", [False, True])
def test_micro_batches_that_are_left_over_belong_to_no_step(
    model: nn.Sequential, announced: bool
) -> None:
    tracked = [OutputNorm(), OutputGradientGeometry(correlation=False)]
    cockpit, parts = Cockpit(model, tracked), torch.randn(6, 5, 4)

    def backward(number: int, part: Tensor, accumulating: bool) -> None:
        with cockpit.forward(number) if announced else contextlib.nullcontext():
            loss = model(part).square().mean()
        tracked_backward(cockpit, number, loss, accumulating=accumulating)

    backward(0, parts[0], accumulating=False)
    backward(1, parts[1], accumulating=True)
    backward(1, parts[2], accumulating=True)
    with pytest.warns(UserWarning, match="2 micro-batches of step 1 have no values"):
        backward(2, parts[3], accumulating=True)
    backward(2, parts[4], accumulating=False)
    backward(3, parts[5], accumulating=False)
    assert [*cockpit.history["OutputNorm"]] == [0, 2, 3]
    linear = model[0](parts[3:5].flatten(0, 1))
    assert norms(cockpit.history, 2)["0"] == pytest.approx(mean_norm(linear))
    loss = 2 * model[1:](linear.clone()).square().mean()
    gradient = torch.autograd.grad(loss, linear)[0]
    found = norms(cockpit.history, 2, "OutputGradientGeometry")["0"]["norm"]
    assert found == pytest.approx(gradient.norm().item())
    assert norms(cockpit.history, 3)["0"] == pytest.approx(mean_norm(model[0](parts[5])))


def test_a_table_may_end_with_the_training(model: nn.Sequential) -> None:
    table = [True, False, True]
    cockpit = Cockpit(model, [OutputNorm(lambda number: table[number])])
    for number in range(3):
        step(cockpit, number, torch.randn(5, 4))
    assert [*cockpit.history["OutputNorm"]] == [0, 2]
    with pytest.warns(UserWarning, match="OutputNorm's schedule failed: IndexError"):
        step(cockpit, 3, torch.randn(5, 4))


def test_a_step_may_have_several_contexts_of_which_the_last_one_counts(
    model: nn.Sequential, tmp_path: Path
) -> None:
    run = tmp_path / "run.jsonl"
    cockpit = Cockpit(model, [OutputNorm(schedules.linear(4))], run=run)
    expected = []
    with pytest.warns(UserWarning, match="give each context a step of its own|keeps both") as said:
        for number in range(9):
            for _ in range(2):
                inputs = torch.randn(5, 4)
                step(cockpit, number, inputs)
                if number % 4 == 0:
                    expected.append(pytest.approx(mean_norm(model[0](inputs))))
    cockpit.close()
    assert len(said) == 1
    found = [norms(cockpit.history, number)["0"] for number in (0, 4, 8)]
    assert found == expected[1::2]
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    written = [line["values"]["OutputNorm"]["layers"]["0"] for line in lines if "values" in line]
    assert written == expected


def test_two_networks_in_turn_have_a_cockpit_each() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    sparse = schedules.linear(2)
    cockpits = [
        Cockpit(net, [OutputNorm(sparse), InputNorm(sparse)]) for net in (generator, critic)
    ]
    for number in range(5):
        noise, real = torch.randn(5, 3), torch.randn(6, 4)
        fake = generator(noise)
        loss = critic(real).mean() - critic(fake.detach()).mean()
        with cockpits[1](number, loss=loss):
            loss.backward()
        loss = critic(fake).mean()
        with cockpits[0](number, loss=loss):
            loss.backward()
        if number % 2 == 0:
            found = [norms(c.history, number, "InputNorm") for c in cockpits]
            assert found[0]["Linear"] == pytest.approx(noise.norm().item())
            both = torch.cat([real, fake]).norm().item()
            assert found[1]["Linear"] == pytest.approx(both)
            assert norms(cockpits[0].history, number)["Linear"] == pytest.approx(mean_norm(fake))


def test_a_step_without_a_forward_pass_is_noted(model: nn.Sequential) -> None:
    cockpit = Cockpit(model, [OutputNorm()])
    with pytest.warns(UserWarning, match="call the model itself"), cockpit(0):
        nn.functional.linear(torch.ones(2, 4), model[0].weight).sum().backward()
    assert norms(cockpit.history, 0) == {}


def test_without_a_backward_pass_there_is_no_value(model: nn.Sequential) -> None:
    cockpit = Cockpit(model, [OutputNorm()])
    with cockpit(0):
        model(torch.ones(2, 4))
    assert "no backward pass" in norms(cockpit.history, 0)["0"].reason


def test_evaluations_have_series_of_their_own(model: nn.Sequential, tmp_path: Path) -> None:
    inputs = torch.randn(30, 4)
    tracked = [
        OutputNorm(schedules.linear(2)),
        quantities.InputCovariance(lambda _: False),
        OutputGradientGeometry(),
    ]
    cockpit = Cockpit(model, tracked, run=tmp_path / "run.jsonl")
    for number in range(4):
        step(cockpit, number, torch.randn(5, 4))
        with torch.no_grad(), cockpit.evaluation(number):
            for batch in inputs.split(10):
                model(batch)
    cockpit.close()
    for history in (cockpit.history, History.load(tmp_path / "run.jsonl")):
        assert set(history.names) == {*(q.name for q in tracked), "OutputNorm (evaluation)",
                                      "InputCovariance (evaluation)"}  # fmt: skip
        evaluated = history["OutputNorm (evaluation)"]
        assert [*evaluated] == [0, 1, 2, 3]
        assert evaluated[3]["layers"]["0"] == pytest.approx(mean_norm(model[0](inputs)))
        found = history["InputCovariance (evaluation)"][3]["layers"]["0"]["trace"]
        assert found == pytest.approx(inputs.double().var(0).sum().item())
        assert [*history["OutputNorm"]] == [0, 2]
        source = history.sources["OutputNorm (evaluation)"]
        assert (source.kind, source.view.title) == ("OutputNorm", "Output norm (evaluation)")


def test_evaluations_of_one_step_count_together(model: nn.Sequential) -> None:
    tracked = [OutputNorm(), quantities.InputCovariance(), quantities.RankMe()]
    cockpit, batches = Cockpit(model, tracked), torch.randn(3, 9, 4)
    for number in range(2):
        with cockpit.evaluation(number), torch.no_grad():
            for batch in batches:
                model(batch)
        names = [f"{quantity.name} (evaluation)" for quantity in tracked]
        together = {name: cockpit.history[name][number] for name in names}
        step(cockpit, number + 10, torch.randn(2, 4))
        for batch in batches:
            with torch.inference_mode(), cockpit.evaluation(number):
                model(batch)
            with cockpit.evaluation(number, "test"):
                model(torch.zeros(2, 4))
        for name, record in together.items():
            found = dict(numbers(cockpit.history[name][number]))
            assert found == pytest.approx(dict(numbers(record))), name
    zeros = mean_norm(model[0](torch.zeros(2, 4)))
    assert norms(cockpit.history, 1, "OutputNorm (test)")["0"] == pytest.approx(zeros)
    source = cockpit.history.sources["OutputNorm (test)"]
    assert source.view.title == "Output norm (test)"


def test_an_evaluation_has_notes_and_a_name_of_its_own() -> None:
    cockpit = Cockpit(odd_layers(), [OutputNorm(layers="idle")])
    with pytest.warns(UserWarning, match="validation: no layer was called in this context"):
        with cockpit.evaluation(3, "validation"):
            pass
    assert [note.step for note in cockpit.history.notes] == [3]
    for name in ("epoch", "window"):
        with pytest.raises(ValueError, match="aggregates"), cockpit.evaluation(0, name):
            pass


def test_an_evaluation_of_nothing_says_what_to_track(model: nn.Sequential) -> None:
    for tracked in ([quantities.GradNorm()], [OutputGradientGeometry()]):
        cockpit = Cockpit(copy.deepcopy(model), tracked)
        with pytest.raises(ValueError, match="such as OutputNorm"), cockpit.evaluation(0):
            pass


# What training must not notice -------------------------------------------------------------------


@pytest.mark.usefixtures("no_other_objects")
def test_a_step_keeps_no_tensor_but_those_for_correlations(model: nn.Sequential) -> None:
    kept = {"OutputGradientGeometry", "InputGradientGeometry", "GradientGeometry",
            "UpdateGeometry", "WeightSignFlips"}  # fmt: skip
    chosen = [q for q in everything() if type(q).__name__ not in kept]
    cockpit = Cockpit(model, [q for q in chosen if "OutputActivation" not in q.name], facts=False)
    losses = []
    for number in range(6):
        loss = model(torch.randn(5, 4)).square().mean()
        tracked_backward(cockpit, number, loss)
        model.zero_grad()
        losses.append(loss)  # with its graph, as some users do
        if number == 2:
            before = tensors_alive()
    assert tensors_alive() == before + 3


def test_nothing_is_reduced_on_other_steps(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = []
    reduce = Size.reduce
    monkeypatch.setattr(
        Size, "reduce", lambda self, x: (reduced.append(len(x)), reduce(self, x))[1]
    )
    cockpit = Cockpit(model, [OutputNorm(schedules.linear(3)), InputNorm(schedules.linear(3))])
    counts = []
    for number in range(7):
        step(cockpit, number, torch.ones(2, 4))
        counts.append(len(reduced))
        reduced.clear()
    # The first step may be any, and the second one tells how far they are apart.
    assert counts == [6, 6, 0, 6, 0, 0, 6]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_without_quantities_of_layers_there_are_no_hooks(model: nn.Sequential) -> None:
    gradlens.extend(model)
    before = hooks(model)
    Cockpit(model, [quantities.GradNorm()], facts=False)
    assert hooks(model) == before
