"""Rows that may be the words or steps of a single sample, as in tutorials on sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.testing import assert_close

import gradlens
from gradlens.diagnosis.diagnose import diagnose
from tests.cases.row_cases import Net

WORDS, WIDTH, CLASSES = 12, 10, 5
LSTM = partial(nn.LSTM, WIDTH, WIDTH)


def of_words(
    between: Callable[..., Tensor], width: int = WIDTH, inner: Callable[[], nn.Module] = nn.Identity
) -> Callable[[], nn.Module]:
    """An embedding of words, what the network makes of ``[T, D]``, and a linear layer."""
    return lambda: Net(
        lambda net, x: net.head(between(net, net.embed(x))),
        embed=nn.Embedding(WORDS, WIDTH),
        inner=inner(),
        head=nn.Linear(width, CLASSES),
    )


def by_hand(net: Net, x: Tensor) -> Tensor:
    """A recurrent network by hand, over the first axis ``[T, 1, D]``."""
    state = torch.zeros(1, 8)
    for step in x:
        state = torch.tanh(net.inner(step) + net.state(state))
    return net.head(state)


def lstm(net: Net, x: Tensor) -> Tensor:
    """Over words as a batch of one ``[T, 1, D]``."""
    return net.inner(x.view(len(x), 1, -1))[0]


def words(length: int) -> Tensor:
    return torch.randint(WORDS, (length,))


def labels(length: int) -> Tensor:
    return torch.randint(CLASSES, (length,))


Build = Callable[[], nn.Module]
CASES: dict[str, tuple[Build, Callable[[int], Tensor], bool]] = {
    "context of a word": (of_words(lambda _, x: x[:4].reshape(1, -1), 4 * WIDTH), words, True),
    "mean of words": (of_words(lambda _, x: x.mean(0, keepdim=True)), words, True),
    "names by hand": (
        lambda: Net(
            by_hand, inner=nn.Linear(6, 8), state=nn.Linear(8, 8), head=nn.Linear(8, CLASSES)
        ),
        *(lambda length: torch.randn(length, 1, 6), True),
    ),
    "last state": (*(of_words(lambda net, x: lstm(net, x)[-1], inner=LSTM), words, True),),
    "tagger": (*(of_words(lambda net, x: lstm(net, x)[:, 0], inner=LSTM), words, False),),
    "attention": (
        of_words(
            lambda net, x: net.inner(x, x, x, need_weights=False)[0],
            inner=partial(nn.MultiheadAttention, WIDTH, 2),
        ),
        *(words, False),
    ),
}
"""The network, its inputs by their length, and whether it has one output for all of them."""


@pytest.mark.parametrize("case", CASES)
def test_they_are_refused_with_a_remedy_that_works(case: str) -> None:
    build, data, has_one_output = CASES[case]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cockpit = gradlens.Cockpit(model, "economy", diagnose=True)
        for step in range(9):
            length = 5 + step % 3
            x, y = data(length), labels(1 if has_one_output else length)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            with cockpit(step, loss=loss, optimizer=optimizer):
                loss.backward()
            optimizer.step()
        cockpit.close()
    coverage = cockpit.history.latest("coverage")
    assert coverage.samples is None
    assert all("batch_size=1" in reason for reason in coverage.missing.values())
    assert not {"samples_mixed", "batch_too_small"} & {each.fault for each in diagnose(cockpit)}
    texts = [note.text for note in cockpit.history.notes]
    assert sum("batch_size=1" in text for text in texts) == 1, "one reason for all lengths"

    model.zero_grad()
    x, y = data(6), labels(1 if has_one_output else 6)
    with gradlens.per_sample_gradients(model, batch_size=1) as gradients:
        F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(gradients[name].dense()[0], parameter.grad)
