"""Losses of single samples that are passed say which sample is which, in any network and order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import gradlens
from gradlens.quantities import NormTest
from tests.cases import references
from tests.cases.references import right_gradients
from tests.cases.row_cases import Net

N = 6
LossesOf = Callable[[nn.Module], Tensor]
"""The losses of single samples, from a network."""


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Shuffled(nn.Module):
    """A network that changes its rows without a graph, and computes with them in another order."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.change = change
        self.order = torch.arange(N)

    def forward(self, x: Tensor) -> Tensor:
        self.order = torch.randperm(len(x))
        return self.layers(self.change(x[self.order]))


def _recurrent(batch_first: bool) -> nn.Module:
    """An LSTM with an output for each position."""
    lstm = nn.LSTM(4, 5, batch_first=batch_first)
    return Net(lambda net, x: net.head(net.lstm(x)[0]), lstm=lstm, head=nn.Linear(5, 3))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _rows() -> Tensor:
    return torch.randn(N, 4)


def _labels(*shape: int) -> Tensor:
    return torch.randint(3, shape)


def _put_back(model: nn.Module) -> Tensor:
    outputs = model(_rows())
    return cross_entropy(outputs[model.order.argsort()], _labels(N), reduction="none")


def _losses_put_back(model: nn.Module) -> Tensor:
    return cross_entropy(model(_rows()), _labels(N), reduction="none")[model.order.argsort()]


def _of_positions(axis: int) -> LossesOf:
    def losses(model: nn.Module) -> Tensor:
        outputs = model(torch.randn(N, N, 4)).flatten(0, 1)
        return cross_entropy(outputs, _labels(N * N), reduction="none").view(N, N).mean(axis)

    return losses


def _of_pairs(model: nn.Module) -> Tensor:
    one, other = model(torch.cat([_rows(), _rows()])).chunk(2)
    return (one - other).square().sum(1)


def _of_two_calls(model: nn.Module) -> Tensor:
    return sum(cross_entropy(model(_rows()), _labels(N), reduction="none") for _ in range(2))


def _of_single_calls(model: nn.Module) -> Tensor:
    return torch.stack([model(torch.randn(length, 4)).square().mean() for length in (3, 5, 2, 6)])


def _of_points(model: nn.Module) -> Tensor:
    inside = torch.randn(7, 4, requires_grad=True)
    outputs = model(inside)[:, 0]
    (slopes,) = torch.autograd.grad(outputs.sum(), inside, create_graph=True)
    boundary = model(torch.randn(3, 4))[:, 0]
    return torch.cat([(slopes.sum(1) - outputs).square(), boundary.square()])


def _of_packed(model: nn.Module) -> Tensor:
    lengths = torch.tensor([6, 5, 5, 3, 2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(N, N, 4), lengths)
    hidden, _ = nn.utils.rnn.pad_packed_sequence(model.lstm(packed)[0])
    return model.head(hidden).square().sum((0, 2))


def _weighted() -> nn.Module:
    """A network with a weight of its loss, which is learned."""
    weight = nn.Parameter(torch.tensor(0.3))
    return Net(lambda net, x: net.layers(x), layers=_mlp(), weight=weight)


def _of_learned_weight(model: nn.Module) -> Tensor:
    losses = [cross_entropy(model(_rows()[:1]), _labels(1)) for _ in range(N)]
    return torch.stack([(-model.weight).exp() * each + model.weight for each in losses])


def _documents(net: Net, words: Tensor, mask: Tensor) -> Tensor:
    """Attention inside the documents of one packed sequence."""
    mixed = net.mix(net.words(words)).unflatten(2, (6, 2)).transpose(1, 2)
    query, key, value = mixed.chunk(3, 1)
    heads = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return net.head(heads.transpose(1, 2).flatten(2))


def _of_documents(model: nn.Module) -> Tensor:
    document = torch.arange(N).repeat_interleave(torch.tensor([3, 2, 5, 4, 2, 3]))
    words = torch.randint(9, (1, len(document)))
    mask = (document[:, None] == document).tril()
    tokens = cross_entropy(model(words, mask)[0], words[0].roll(-1), reduction="none")
    return torch.zeros(N).index_add(0, document, tokens)


def _graphs(net: Net, data: SimpleNamespace) -> Tensor:
    """Sums over neighbours, and over the nodes of each graph, of an object with index vectors."""
    hidden = net.first(data.x)
    hidden = torch.zeros_like(hidden).index_add(0, data.edges[1], hidden[data.edges[0]])
    return net.last(torch.zeros(N, 5).index_add(0, data.graph, hidden.tanh()))


def _of_graphs(model: nn.Module) -> Tensor:
    graph = torch.arange(N).repeat_interleave(torch.tensor([3, 2, 5, 4, 2, 3]))
    edges = (graph[:, None] == graph).nonzero().T
    data = SimpleNamespace(x=torch.randn(len(graph), 4), edges=edges, graph=graph)
    return cross_entropy(model(data), _labels(N), reduction="none")


def _of_crops(model: nn.Module) -> Tensor:
    image = torch.tensor([0, 0, 1, 3, 4, 4])
    crops = model(torch.randn(5, 4)[image]).square().sum(1)
    return torch.zeros(5, dtype=crops.dtype).index_add(0, image, crops)


CASES: dict[str, tuple[Callable[[], nn.Module], LossesOf]] = {
    "squared, shuffled, put back": (lambda: Shuffled(torch.square), _put_back),
    "spectrum, shuffled, put back": (lambda: Shuffled(lambda x: torch.fft.fft(x).abs()), _put_back),
    "noisy, shuffled": (lambda: Shuffled(lambda x: x + 3 * torch.randn_like(x)), _losses_put_back),
    "as many positions as samples": (lambda: _recurrent(batch_first=True), _of_positions(1)),
    "positions first, as many": (lambda: _recurrent(batch_first=False), _of_positions(0)),
    "pairs": (_mlp, _of_pairs),
    "sum over two calls": (_mlp, _of_two_calls),
    "a call for each sample": (_mlp, _of_single_calls),
    "points inside and on the boundary": (_mlp, _of_points),
    "packed sequences": (lambda: _recurrent(batch_first=False), _of_packed),
    "crops of images": (_mlp, _of_crops),
    "a learned weight, a loss at a time": (_weighted, _of_learned_weight),
    "documents in one sequence": (
        lambda: Net(
            _documents, words=nn.Embedding(9, 4), mix=nn.Linear(4, 12), head=nn.Linear(4, 9)
        ),
        _of_documents,
    ),
    "graphs in one": (
        lambda: Net(_graphs, first=nn.Linear(4, 5), last=nn.Linear(5, 3)),
        _of_graphs,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_losses_that_are_passed(name: str) -> None:
    build, losses_of = CASES[name]
    torch.manual_seed(0)
    model = gradlens.extend(build())
    losses = losses_of(model)
    gradients = right_gradients(model, losses, individual_losses=losses)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert gradients.batch_size == len(losses)


def test_a_cockpit_takes_losses_that_are_passed() -> None:
    torch.manual_seed(0)
    model = _mlp()
    cockpit = gradlens.Cockpit(model, [NormTest(10)])
    losses = _of_single_calls(model)
    loss = losses.mean()
    with cockpit(0, loss=loss, individual_losses=losses):
        loss.backward(retain_graph=True)
    flat = references.flat(references.per_sample_gradients_of_losses(losses, model))
    cockpit.close()
    mean = flat.mean(0)
    variance = (flat - mean).square().sum() / (len(flat) * (len(flat) - 1))
    expected = float((variance / mean.square().sum()).sqrt())
    assert cockpit.history["NormTest"][0] == pytest.approx(expected)


def test_losses_in_another_order_than_the_inputs_are_refused() -> None:
    model = gradlens.extend(_mlp())
    losses = cross_entropy(model(_rows()), _labels(N), reduction="none").flip(0)
    with gradlens.per_sample_gradients(model, individual_losses=losses) as g:
        losses.mean().backward()
    assert not g
    with pytest.raises(KeyError, match="individual_losses"):
        g["0.weight"]


def test_samples_that_meet_are_refused_with_losses_too() -> None:
    model = gradlens.extend(_mlp())
    outputs = model(_rows())
    losses = cross_entropy(outputs @ outputs.detach().T, torch.arange(N), reduction="none")
    others = cross_entropy(outputs @ outputs.T, torch.arange(N), reduction="none")
    for each, is_given in ((losses, True), (others, False)):
        with gradlens.per_sample_gradients(model, individual_losses=each) as g:
            each.mean().backward(retain_graph=True)
        assert bool(g) is is_given


COMPARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean square": nn.functional.mse_loss,
    "Huber": nn.functional.smooth_l1_loss,
    "cross-entropy": lambda one, other: nn.functional.binary_cross_entropy_with_logits(
        one, other.sigmoid()
    ),
    "product": lambda one, other: torch.dot(one.flatten(), other.flatten()),
}


@pytest.mark.parametrize("name", COMPARED)
def test_samples_that_one_function_compares_are_refused(name: str) -> None:
    """Whose value is a single number, so that no tensor has a row for each pair."""
    model = gradlens.extend(_mlp())
    for others in (
        lambda rows: rows.roll(1, 0),
        lambda rows: rows[torch.tensor([1, 0, 3, 2, 5, 4])],
    ):
        outputs = model(_rows())
        with gradlens.per_sample_gradients(model) as g:
            COMPARED[name](outputs, others(outputs)).backward()
        assert not g
