"""Faults of single layers that are planted in small networks, and named by what quantities show."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from gradlens import Cockpit, quantities
from gradlens.diagnosis.diagnose import diagnose
from gradlens.messages import GradlensWarning
from gradlens.quantities import Quantity
from tests.cases.steps import tracked_backward

WIDTH, HEADS, TOKENS = 32, 2, 6
SIX = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
INPUTS, LABELS = SIX.T.contiguous(), SIX[:3].argmax(0)


class Attention(nn.Module):
    """Predicts each token's class from its own and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.queries, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.tokens(tokens)
        parts = (self.queries(found), *self.rest(found).chunk(2, -1))
        heads = [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        outputs: Tensor = self.head(self.hidden(found + mixed).relu())
        return outputs


Change = Callable[[Attention, int], object]


@torch.no_grad()
def large_scores(model: Attention, step: int) -> None:
    model.queries.weight[: WIDTH // HEADS] *= 5 if step < 5 else 1


@torch.no_grad()
def large_channel(model: Attention, step: int) -> None:
    model.hidden.weight[7] *= 100 if step == 0 else 1


def nothing(model: Attention, step: int) -> None:
    """The training is healthy."""


def of_attention(change: Change, rate: float = 1e-3) -> list[tuple[str, tuple[str, ...]]]:
    """What is found in a training with a change; the hidden layer has a rate of its own."""
    torch.manual_seed(0)
    model = Attention()
    own = [model.hidden.weight]
    groups = [{"params": [p for p in model.parameters() if p is not own[0]]}, {"params": own}]
    groups[1] |= {"lr": rate}  # type: ignore[dict-item]
    tracked = [
        quantities.AttentionLogits(by_head=True), quantities.AttentionEntropy(by_head=True),
        quantities.RelativeUpdate(), quantities.ActivationOutliers(), quantities.OutputEntropy(),
    ]  # fmt: skip

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        for step in range(9):
            change(model, step)
            tokens = torch.randint(TOKENS, (8, 10))
            yield tokens, (tokens + 1) % TOKENS

    return train(model, AdamW(groups, lr=1e-3), tracked, batches())


def train(
    model: nn.Module,
    optimizer: AdamW,
    tracked: list[Quantity],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> list[tuple[str, tuple[str, ...]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradlensWarning)
        cockpit = Cockpit(model, tracked)
        for step, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            tracked_backward(cockpit, step, loss, optimizer=optimizer)
            optimizer.step()
        cockpit.close()
    return [(each.fault, each.where) for each in diagnose(cockpit) if not each.explained_by]


@pytest.mark.slow
def test_layers_of_a_small_transformer() -> None:
    assert of_attention(nothing) == []
    assert of_attention(large_scores)[0] == ("attention_logits", ("Attention.head 0",))
    assert ("activation_outlier", ("hidden.channel 7",)) in of_attention(large_channel)
    assert of_attention(nothing, rate=0.3)[0] == ("update_large", ("hidden.weight",))


@pytest.mark.slow
def test_gradients_that_outgrow_the_second_moments() -> None:
    """From a step on, they are a hundred times as large."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    model, scale = nn.Sequential(*layers), [0.01]
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * scale[0])

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        for step in range(76):
            scale[0] = 0.01 if step < 60 else 1.0
            places = torch.randint(256, (256,))
            yield INPUTS[places], LABELS[places]

    optimizer = AdamW(model.parameters(), lr=0.01)
    found = train(model, optimizer, [quantities.OptimizerState()], batches())
    assert found == [("second_moment_old", ("0.weight", "2.weight", "4.weight"))]
