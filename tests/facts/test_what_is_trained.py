"""Loops in which something isn't trained, or trained wrongly, and healthy ones like them."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from gradlens import Cockpit, diagnose
from gradlens.facts.network import Network
from gradlens.graph.graph import Graph
from tests.cases.steps import tracked_backward

CLASSES = 4
Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Layers(nn.Module):
    """Layers that a module holds in some way."""

    def __init__(self, hold: Callable[[list[nn.Module]], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 4)
        self.middle = hold([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        middle: Any = self.middle() if isinstance(self.middle, FunctionType) else self.middle
        x = self.first(x).relu()
        for layer in middle.values() if isinstance(middle, dict) else middle:
            x = layer(x).relu()
        return self.last(x)  # type: ignore[no-any-return]


def cross_entropy(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), labels)


def bootstrapped(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(
        model(x).gather(1, labels[:, None]), 1 + 0.9 * model(x).amax(1, True)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))


TEACHER = mlp()


def distilled(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(model(x), TEACHER(x).detach())


def through_a_teacher(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(TEACHER(model(x).repeat(1, 5)), labels)


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return Adam(parameters, 1e-3)


def fast(parameters: list[nn.Parameter]) -> Optimizer:
    return Adam(parameters, 0.03)


def momentum(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, 0.01, momentum=0.9)


def found(
    model: nn.Module,
    loss_of: Losses = cross_entropy,
    make: Callable[[list[nn.Parameter]], Optimizer] = adam,
    anew: bool = False,
    decay: float = 1.0,
    others: tuple[nn.Module, ...] = (),
    after: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> dict[str, bool]:
    """The faults that are found, and whether each is an alarm."""
    torch.manual_seed(0)
    parameters = [p for each in (model, *others) for p in each.parameters()]
    cockpit, optimizer = Cockpit(model, []), make(parameters)
    schedule = ExponentialLR(optimizer, decay)
    inputs, labels = torch.randn(64, 20), torch.randint(4, (64,))
    for step in range(60):
        batch = torch.randint(64, (16,))
        optimizer = make(parameters) if anew else optimizer
        loss = loss_of(model, inputs[batch], labels[batch])
        optimizer.zero_grad()
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        optimizer.step()
        after(model, step)
        if not anew:
            schedule.step()
    cockpit.close()
    return {each.fault: each.is_alarm for each in diagnose(cockpit) if each.fault in FAULTS}


FAULTS = {"unregistered_layers", "optimizer_anew", "lr_decayed", "target_trained", "loss_of_scores",
          "target_scale", "softmax_axis", "weights_overwritten", "scores_reshaped", "target_seen",
          "posterior_collapse", "constant_output", "one_element"}  # fmt: skip


def anew(layers: list[nn.Module]) -> object:
    return lambda: [nn.Linear(16, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("hold", [list, tuple, lambda each: dict(enumerate(each)), anew])
def test_layers_that_are_no_part_of_the_model(hold: Callable[[list[nn.Module]], object]) -> None:
    assert found(Layers(hold)) == {"unregistered_layers": True}


@pytest.mark.slow
def test_layers_that_are_trained() -> None:
    assert found(Layers(nn.ModuleList)) == {}
    held = Layers(list)
    assert found(held, others=tuple(held.middle)) == {}  # type: ignore[arg-type]


@pytest.mark.slow
def test_weights_of_another_network() -> None:
    assert found(mlp(), distilled) == {}
    assert found(mlp(), through_a_teacher) == {"unregistered_layers": False}


@pytest.mark.slow
@pytest.mark.parametrize("make", [adam, momentum])
def test_an_optimizer_that_is_made_anew(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    assert found(mlp(), make=make, anew=True) == {"optimizer_anew": True}
    assert found(mlp(), make=make) == {}


@pytest.mark.slow
def test_what_needs_no_state() -> None:
    assert found(mlp(), make=lambda parameters: SGD(parameters, 0.01), anew=True) == {}


@pytest.mark.slow
def test_a_schedule_of_epochs_that_is_called_for_each_batch() -> None:
    assert found(mlp(), decay=0.7) == {"lr_decayed": True}
    assert found(mlp(), decay=0.95) == {}


@pytest.mark.slow
def test_targets_that_are_trained() -> None:
    assert found(mlp(), bootstrapped) == {"target_trained": True}


@pytest.mark.slow
@pytest.mark.parametrize("probabilities", [False, True])
def test_losses_of_scores(probabilities: bool) -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return functional.nll_loss(model(x).softmax(1) if probabilities else model(x) + 1, labels)

    assert found(mlp(), loss) == {"loss_of_scores": True}


@pytest.mark.slow
@pytest.mark.parametrize("probabilities", [False, True])
def test_divergences(probabilities: bool) -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        targets = functional.one_hot(labels, CLASSES) * 0.9 + 0.01
        outputs = model(x).softmax(1) if probabilities else model(x).log_softmax(1)
        return functional.kl_div(outputs, targets, reduction="batchmean")

    assert found(mlp(), loss) == ({"loss_of_scores": True} if probabilities else {})


@pytest.mark.slow
@pytest.mark.parametrize("error", [functional.mse_loss, lambda out, y: (out - y).square().mean()])
@pytest.mark.parametrize("last", [torch.sigmoid, torch.tanh, torch.relu, nn.Identity()])
def test_targets_that_an_activation_cannot_reach(
    error: Callable[[Tensor, Tensor], Tensor], last: Callable[[Tensor], Tensor]
) -> None:
    def loss(scale: float) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        return lambda model, x, labels: error(
            last(model(x)), scale * functional.one_hot(labels, CLASSES).float()
        )

    bounded = not isinstance(last, nn.Identity)
    assert found(mlp(), loss(-3.0)) == ({"target_scale": True} if bounded else {})
    assert found(mlp(), loss(1.0)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_over_as_many_samples_as_classes(axis: int) -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        scores = model(x[:CLASSES]).log_softmax(axis)
        return functional.nll_loss(scores, labels[:CLASSES])

    assert found(mlp(), loss) == ({} if axis else {"softmax_axis": True})


@pytest.mark.slow
@pytest.mark.parametrize("last", [torch.relu, torch.tanh, nn.Identity()])
def test_probabilities_that_an_activation_cannot_reach(last: Callable[[Tensor], Tensor]) -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        targets = functional.one_hot(labels, CLASSES).float()
        return functional.binary_cross_entropy_with_logits(last(model(x)), targets)

    expected = {} if isinstance(last, nn.Identity) else {"target_scale": True}
    assert found(mlp(), loss) == expected


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("axis", "divided"), [(-1, False), (-2, False), (2, True)])
def test_attention_over_queries(heads: int, axis: int, divided: bool) -> None:
    """Slots compete for inputs in the same way, and take means over what they get."""
    layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, CLASSES)])

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        h = layers[0](x.view(len(x), 5, 4))
        h = h.view(len(x), 5, heads, -1).transpose(1, 2)
        weights = (h @ h.transpose(2, 3)).softmax(axis)
        weights = weights / weights.sum(-1, keepdim=True) if divided else weights
        mixed = (weights @ h).transpose(1, 2).reshape(len(x), 5, 8)
        return functional.cross_entropy(layers[1](mixed).mean(1), labels)

    is_wrong = axis == -2 and not divided
    assert found(layers, loss) == ({"softmax_axis": True} if is_wrong else {})


FIRST = mlp().state_dict()


@torch.no_grad()
def draw(model: nn.Module, step: int) -> None:
    for layer in model.modules() if step % 15 == 14 else ():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


@torch.no_grad()
def bound(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-1, 1)


@pytest.mark.slow
def test_weights_that_something_else_writes_to() -> None:
    written = {"weights_overwritten": True}
    assert found(mlp(), after=lambda model, _: model.load_state_dict(FIRST)) == written
    assert found(mlp(), after=draw, make=fast) == written
    assert found(mlp(), after=bound).get("weights_overwritten") is not True


Axes = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("rows", "is_wrong"),
    [
        (lambda scores: scores.permute(0, 2, 1).reshape(-1, CLASSES), False),
        (lambda scores: scores.reshape(-1, CLASSES), True),
    ],
)
def test_scores_of_several_places(rows: Axes, is_wrong: bool) -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(rows(model(x[:, None])), labels.repeat_interleave(20))

    layers = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, CLASSES, 1))
    assert found(layers, loss) == ({"scores_reshaped": True} if is_wrong else {})


@pytest.mark.parametrize(
    ("rows", "is_wrong"),
    [
        (lambda scores: scores.transpose(1, 2).reshape(-1, 16), True),
        (lambda scores: scores.permute(0, 2, 1).contiguous().view(-1, 16), True),
        (lambda scores: scores.transpose(0, 1).reshape(-1, 16), False),
        (lambda scores: scores.reshape(-1, 16), False),
    ],
)
def test_scores_of_tokens(rows: Axes, is_wrong: bool) -> None:
    model = nn.Linear(5, 16)
    scores = rows(model(torch.randn(4, 12, 5)))
    loss = functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert Network(Graph(loss), names).rows_of_several == is_wrong


class Text(nn.Module):
    """A model of texts of 6 tokens, whose attention is written out, fused, or a recurrent layer."""

    def __init__(self, way: str, masked: bool) -> None:
        super().__init__()
        self.way, self.masked = way, masked
        self.tokens, self.out = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)
        self.layer = nn.GRU(
            8, 4 if way == "both" else 8, batch_first=True, bidirectional=way == "both"
        )

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens)
        if self.way == "fused":
            h = functional.scaled_dot_product_attention(h, h, h, is_causal=self.masked)
        elif self.way == "mask":
            mask = torch.ones(6, 6).tril().bool() if self.masked else None
            h = functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], mask)[
                :, 0
            ]
        elif self.way == "written out":
            hidden = torch.full((6, 6), -1e9 if self.masked else 0.0).triu(1)
            h = (h @ h.mT + hidden).softmax(-1) @ h
        else:
            h = self.layer(h)[0]
        return self.out(h)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "masked"),
    [("fused", True), ("fused", False), ("mask", True), ("written out", True),
     ("written out", False)],
)  # fmt: skip
def test_texts_that_see_their_labels(way: str, masked: bool) -> None:
    def loss_at(shift: int) -> Losses:
        def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
            text = (x[:, :7] > 0).long() + (x[:, 7:14] > 0).long()
            tokens, targets = text[:, :6], text[:, shift : shift + 6]
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

        return loss

    assert found(Text(way, masked), loss_at(1)) == ({} if masked else {"target_seen": True})
    assert found(Text(way, masked), loss_at(0)) == {"target_seen": masked}


@pytest.mark.slow
def test_recurrent_layers_that_see_their_labels() -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        text = (x[:, :7] > 0).long() + (x[:, 7:14] > 0).long()
        return functional.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())

    assert found(Text("both", False), loss) == {"target_seen": True}


@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_codes_that_say_nothing(factor: float) -> None:
    layers = nn.ModuleList([nn.Linear(20, 8), nn.Linear(4, 20)])
    with torch.no_grad():
        layers[0].weight.mul_(factor)
        layers[0].bias.mul_(factor)

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        mean, log_variance = layers[0](x).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return (layers[1](code) - x).square().sum(1).mean() + divergence

    faults = found(layers, loss, make=lambda p: Adam(p, 1e-5))
    assert faults == ({"posterior_collapse": True} if factor < 1 else {})


@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_vectors_of_one_direction(factor: float) -> None:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return 1 - functional.cosine_similarity(model(x), model(x.flip(0))).mean()

    layer = nn.Linear(20, 4)
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]) * (1 - factor))
    faults = found(layer, loss, make=lambda p: Adam(p, 1e-5))
    assert faults == ({"constant_output": True} if factor < 1 else {})


@pytest.mark.parametrize("groups", [2, 16])
def test_groups_of_one(groups: int) -> None:
    layers = nn.Sequential(nn.Linear(20, 16), nn.GroupNorm(groups, 16), nn.ReLU(), nn.Linear(16, 4))
    assert ("one_element" in found(layers)) == (groups == 16)
