"""Networks in which it isn't obvious which sample a row belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

N, T, D, H, C = 4, 3, 5, 6, 3
"""Samples, positions, features, hidden features and classes."""

Batch: TypeAlias = tuple[Tensor, ...]


class Net(nn.Module):
    """Computes ``compute(self, *inputs)`` with the modules and parameters that it is given."""

    def __init__(self, compute: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = compute

    def forward(self, *inputs: Tensor) -> Any:
        return self.compute(self, *inputs)


def one(batch: Batch, n: int) -> Batch:
    """A batch of one of the samples."""
    return tuple(part[n : n + 1] for part in batch)


@dataclass(frozen=True)
class RowCase:
    """A network, how to draw a batch, and its mean loss.

    ``alone`` is N times the part of the loss that sample n has, by default the loss of the sample
    as a batch of its own. ``refused`` are the parameters that have no per-sample gradients, by the
    beginning of their names, and ``reason`` says why, as a pattern. ``batch_size`` is what has to
    be passed, if anything.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Batch], Tensor]
    alone: Callable[[Any, Batch, int], Tensor] | None = None
    samples: int = N
    batch_size: int | None = None
    refused: tuple[str, ...] = ()
    reason: str = ""

    def of_sample(self, model: nn.Module, batch: Batch, n: int) -> Tensor:
        """N times the part of the loss that one sample has."""
        if self.alone is None:
            return self.loss(model, one(batch, n))
        return self.alone(model, batch, n)

    def model(self) -> nn.Module:
        """In float64."""
        return self.build().double()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def classes(*shape: int) -> Tensor:
    return torch.randint(C, shape)


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape)


def vectors() -> Batch:
    return randn(N, D), classes(N)


def sequences() -> Batch:
    return randn(N, T, D), classes(N)


def words() -> Batch:
    return tokens(N, T), classes(N)


def signals() -> Batch:
    return randn(N, 2, 8), classes(N)


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    *inputs, targets = batch
    return F.cross_entropy(model(*inputs), targets)


def of_all(model: Any, batch: Batch, n: int) -> Tensor:
    """The loss of one sample in the batch of all."""
    *inputs, targets = batch
    return F.cross_entropy(model(*inputs)[n : n + 1], targets[n : n + 1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, C))


def linears(compute: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Net(compute, inner=nn.Linear(D, H), head=nn.Linear(H, C))


def embedding(compute: Callable[..., Any], **parts: int) -> Callable[[], nn.Module]:
    """With a table of words, one of other things, and a head."""
    tables = {name: nn.Embedding(size, D) for name, size in parts.items()}
    return lambda: Net(compute, words=nn.Embedding(7, D), head=nn.Linear(D, C), **tables)


# Parts of the batch, one after the other.


def in_chunks(net: Any, x: Tensor) -> Tensor:
    return torch.cat([net.head(net.inner(part).relu()) for part in x.split(2)])


def row_by_row(net: Any, x: Tensor) -> Tensor:
    return torch.stack([net.head(net.inner(row).relu()) for row in x])


def of_chunks(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(torch.cat([model(part) for part in batch[0].split(2)]), batch[1])


def of_rows(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(torch.stack([model(row) for row in batch[0]]), batch[1])


def sum_over_samples(model: Any, batch: Batch) -> Tensor:
    """A loss for each sample, of a vector without an axis of samples."""
    losses = [F.cross_entropy(model(x), y) for x, y in zip(*batch, strict=True)]
    return torch.stack(losses).sum() / len(losses)


def added_up(model: Any, batch: Batch) -> Tensor:
    """The same, but that losses are added to each other."""
    return sum(F.cross_entropy(model(x), y) for x, y in zip(*batch, strict=True)) / len(batch[0])


def two_halves(model: Any, batch: Batch) -> Tensor:
    halves = zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)
    return sum(F.cross_entropy(model(x), y) for x, y in halves) / 2


def of_trees(model: Any, batch: Batch) -> Tensor:
    """Layers that are called for each node; the first tree of several is a leaf."""

    def node(*children: Tensor) -> Tensor:
        return model["join"](torch.cat(children, 1)).tanh()

    roots = []
    for place, row in enumerate(batch[0]):
        leaves = [model["table"](word[None]) for word in row]
        is_leaf = place == 0 < len(batch[0]) - 1
        roots.append(leaves[0] if is_leaf else node(node(*leaves[:2]), node(*leaves[2:])))
    return F.cross_entropy(model["head"](torch.cat(roots)), batch[1])


CHUNKS = {
    "trees, by calls for each node": RowCase(
        lambda: nn.ModuleDict(
            {"table": nn.Embedding(7, D), "join": nn.Linear(2 * D, D), "head": nn.Linear(D, C)}
        ),
        lambda: (tokens(N, 4), classes(N)),
        of_trees,
        refused=("",),
        reason=r"called \d+ times, with 1 rows.*batch_size=",
    ),
    "chunks": RowCase(linears(in_chunks), vectors, cross_entropy),
    "calls on chunks": RowCase(mlp, vectors, of_chunks),
    "row by row": RowCase(linears(row_by_row), vectors, cross_entropy),
    "calls on rows": RowCase(mlp, vectors, of_rows),
    "losses of rows, stacked": RowCase(mlp, vectors, sum_over_samples),
    "losses of rows, batch size passed": RowCase(mlp, vectors, added_up, batch_size=N),
    "losses of rows, added up": RowCase(
        mlp, vectors, added_up, refused=("",), reason="called 4 times, with 1 rows.*batch_size="
    ),
    "losses of halves, batch size passed": RowCase(mlp, vectors, two_halves, of_all, batch_size=N),
    "losses of halves": RowCase(
        mlp, vectors, two_halves, refused=("",), reason="called 2 times, with 2 rows.*batch_size="
    ),
}


# Some of the samples, or of their positions.


def two_heads(net: Any, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net.inner(x).tanh()
    return net.one(hidden[first]), net.other(hidden[~first])


def with_two_heads() -> nn.Module:
    heads = {name: nn.Linear(H, 2) for name in ("one", "other")}
    return Net(two_heads, inner=nn.Linear(D, H), **heads)


def of_two_heads(model: Any, batch: Batch) -> Tensor:
    x, first, y = batch
    one, other = model(x, first)
    found = F.cross_entropy(one, y[first], reduction="sum")
    return (found + F.cross_entropy(other, y[~first], reduction="sum")) / len(x)


def of_one_head(model: Any, batch: Batch, n: int) -> Tensor:
    x, first, y = one(batch, n)
    head = model.one if bool(first) else model.other
    return F.cross_entropy(head(model.inner(x).tanh()), y)


def halves() -> Batch:
    return randn(N, D), torch.tensor([True, False, True, False]), torch.randint(2, (N,))


def shares() -> Batch:
    """Of any size."""
    first = torch.rand(N) < 0.5
    first[0] = True
    return randn(N, D), first, torch.randint(2, (N,))


def masked_words() -> Batch:
    mask = torch.rand(N, T) < 0.5
    mask[0, 0] = True
    return tokens(N, T), mask, classes(N, T)


def masked(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    return net.head(net.words(x).tanh()[mask])


def of_masked(model: Any, batch: Batch) -> Tensor:
    x, mask, y = batch
    return F.cross_entropy(model(x, mask), y[mask])


def of_one_masked(model: Any, batch: Batch, n: int) -> Tensor:
    x, mask, y = one(batch, n)
    found = F.cross_entropy(model(x, mask), y[mask], reduction="sum")
    return N * found / batch[1].sum()


def in_bags(net: Any, x: Tensor, offsets: Tensor) -> Tensor:
    return net.head(net.bags(x, offsets))


def bags() -> Batch:
    return tokens(9), torch.tensor([0, 2, 2, 6]), classes(N)


def of_one_bag(model: Any, batch: Batch, n: int) -> Tensor:
    x, offsets, y = batch
    end = [*offsets.tolist(), len(x)][n + 1]
    return F.cross_entropy(model(x[offsets[n] : end], torch.tensor([0])), y[n : n + 1])


def packed(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    return net.head(net.layer(rows)[1][-1])


SELECTED = {
    "two heads, half of the batch each": RowCase(with_two_heads, halves, of_two_heads, of_one_head),
    "two heads": RowCase(with_two_heads, shares, of_two_heads, of_one_head),
    "a head on masked positions": RowCase(
        embedding(masked), masked_words, of_masked, of_one_masked
    ),
    "bags with offsets, one empty": RowCase(
        lambda: Net(in_bags, bags=nn.EmbeddingBag(7, D), head=nn.Linear(D, C)),
        bags,
        cross_entropy,
        of_one_bag,
    ),
    "packed sequences": RowCase(
        lambda: Net(packed, layer=nn.GRU(D, H, batch_first=True), head=nn.Linear(H, C)),
        lambda: (randn(N, T, D), torch.randint(1, T + 1, (N,)), classes(N)),
        cross_entropy,
    ),
}


# What all samples share.


def with_prompt(net: Any, x: Tensor) -> Tensor:
    prompt = net.prompt(torch.arange(2)[None]).expand(len(x), -1, -1)
    return net.head(torch.cat([prompt, net.words(x)], 1).tanh().mean(1))


def with_computed_prompt(net: Any, x: Tensor) -> Tensor:
    prompt = net.up(net.down(net.prompt(torch.arange(2)[None])).tanh())
    both = torch.cat([prompt.expand(len(x), -1, -1), net.words(x)], 1)
    return net.head(both.tanh().mean(1))


def computed_prompt() -> nn.Module:
    layers = {"down": nn.Linear(D, 4), "up": nn.Linear(4, D), "prompt": nn.Embedding(2, D)}
    return Net(with_computed_prompt, words=nn.Embedding(7, D), head=nn.Linear(D, C), **layers)


def with_class_token(net: Any, x: Tensor) -> Tensor:
    tokens = torch.cat([net.token.expand(len(x), -1, -1), x], 1)
    return net.head(tokens.tanh().mean(1))


def class_token() -> nn.Module:
    return Net(with_class_token, token=nn.Parameter(torch.randn(1, 1, D)), head=nn.Linear(D, C))


def language(net: Any, x: Tensor) -> Tensor:
    return net.head(net.words(x) + net.places[None, : x.shape[1]])


def language_model() -> nn.Module:
    places = nn.Parameter(torch.randn(9, D))
    return Net(language, words=nn.Embedding(7, D), places=places, head=nn.Linear(D, 7))


def of_words(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def of_next_words(model: Any, batch: Batch) -> Tensor:
    (x,) = batch
    return F.cross_entropy(model(x)[:, :-1].reshape(-1, 7), x[:, 1:].flatten())


def with_positions(net: Any, x: Tensor) -> Tensor:
    places = net.places(torch.arange(x.shape[1]))
    return net.head((net.inner(x) + places).tanh().mean(1))


def positions() -> nn.Module:
    return Net(
        with_positions, inner=nn.Linear(D, H), places=nn.Embedding(8, H), head=nn.Linear(H, C)
    )


def with_position_bias(net: Any, x: Tensor) -> Tensor:
    """A network of positions alone, whose output is added for every sample."""
    places = torch.arange(x.shape[1], dtype=x.dtype)
    table = (places[:, None] - places)[..., None]
    hidden = net.inner(x)
    scores = hidden @ hidden.mT + net.bias(table).tanh()[..., 0]
    return net.head((scores.softmax(-1) @ hidden).mean(1))


def position_bias() -> nn.Module:
    layers = {"inner": nn.Linear(D, H), "bias": nn.Linear(1, 1), "head": nn.Linear(H, C)}
    return Net(with_position_bias, **layers)


SHARED = {
    "prompts": RowCase(embedding(with_prompt, prompt=2), words, cross_entropy),
    "prompts that are computed": RowCase(computed_prompt, words, cross_entropy),
    "class token": RowCase(class_token, sequences, cross_entropy),
    "class token of one sample": RowCase(
        class_token, lambda: (randn(1, T, D), classes(1)), cross_entropy, samples=1
    ),
    "language model": RowCase(language_model, lambda: (tokens(N, T), tokens(N, T)), of_words),
    "language model, T = N": RowCase(
        language_model, lambda: (tokens(N, N), tokens(N, N)), of_words
    ),
    "language model, shifted": RowCase(language_model, lambda: (tokens(N, T + 1),), of_next_words),
    "positions": RowCase(positions, sequences, cross_entropy),
    "positions, T = N": RowCase(positions, lambda: (randn(N, N, D), classes(N)), cross_entropy),
    "position bias": RowCase(position_bias, sequences, cross_entropy),
    "position bias, T = N": RowCase(
        position_bias, lambda: (randn(N, N, D), classes(N)), cross_entropy
    ),
}


# Samples in another order, or several rows of each.


def flipped(net: Any, x: Tensor) -> Tensor:
    return net.head(net.inner(x).tanh() + net.inner(x.flip(0)).tanh().flip(0))


def flipped_directly(net: Any, x: Tensor) -> Tensor:
    return net.inner(x) + 2 * net.inner(x.flip(0)).flip(0)


def in_order_of_size(net: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return net.head(net.inner(x[order]).tanh())[order.argsort()]


def inside_in_order_of_size(net: Any, x: Tensor) -> Tensor:
    order = x.sum(1).argsort()
    return net.head(net.inner(x[order]).tanh()[order.argsort()])


def choices(net: Any, x: Tensor) -> Tensor:
    return net.head(net.words(x.flatten(0, 1)).tanh().mean(1)).view(len(x), -1)


def multiple_choice() -> nn.Module:
    return Net(choices, words=nn.Embedding(7, D), head=nn.Linear(D, 1))


def windows(net: Any, x: Tensor) -> Tensor:
    parts = x.unfold(2, 4, 2).permute(0, 2, 1, 3)
    found = net.convolution(parts.flatten(0, 1)).relu().mean(2)
    return net.head(found.view(len(x), -1, H).mean(1))


def of_pairs(model: Any, batch: Batch) -> Tensor:
    one, other = model(torch.cat(batch)).chunk(2)
    return (one - other).square().sum(1).mean()


def triplet(net: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    return net.layers(torch.cat(inputs)).chunk(3)


def of_triplets(model: Any, batch: Batch) -> Tensor:
    return F.triplet_margin_loss(*model(*batch), margin=5.0)


def experts(net: Any, x: Tensor) -> Tensor:
    """Each token goes to the best of four."""
    tokens = net.words(x)
    rows = tokens.flatten(0, 1)
    weights, chosen = net.gate(rows).softmax(-1).max(-1)
    found = torch.zeros_like(rows)
    for number, expert in enumerate(net.experts):
        own = (chosen == number).nonzero()[:, 0]
        found = found.index_add(0, own, expert(rows[own]) * weights[own, None])
    return net.head(found.view_as(tokens).mean(1))


def switch() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
    gate, head = nn.Linear(D, 4), nn.Linear(D, C)
    return Net(experts, words=nn.Embedding(7, D), gate=gate, experts=layers, head=head)


def halves_of_tokens(net: Any, x: Tensor) -> Tensor:
    """The first of two experts gets as many tokens as there are samples."""
    tokens = net.inner(x).flatten(0, 1)
    first = torch.arange(len(tokens)) % 3 == 0
    first &= first.cumsum(0) <= len(x)
    found = torch.zeros_like(tokens)
    for expert, chosen in zip(net.experts, (first, ~first), strict=True):
        found = found.index_add(0, chosen.nonzero()[:, 0], expert(tokens[chosen]).tanh())
    return net.head((tokens + found).unflatten(0, x.shape[:2]).mean(1))


def two_experts() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
    return Net(halves_of_tokens, inner=nn.Linear(D, H), experts=layers, head=nn.Linear(H, C))


ORDERS = {
    "also flipped": RowCase(linears(flipped), vectors, cross_entropy),
    "also flipped, at once": RowCase(
        lambda: Net(flipped_directly, inner=nn.Linear(D, C)), vectors, cross_entropy
    ),
    "sorted": RowCase(linears(in_order_of_size), vectors, cross_entropy),
    "sorted inside": RowCase(linears(inside_in_order_of_size), vectors, cross_entropy),
    "multiple choice": RowCase(
        multiple_choice, lambda: (tokens(N, C, T), classes(N)), cross_entropy
    ),
    "windows": RowCase(
        lambda: Net(windows, convolution=nn.Conv1d(2, H, 3), head=nn.Linear(H, C)),
        signals,
        cross_entropy,
    ),
    "pairs in one call": RowCase(
        mlp,
        lambda: (randn(N, D), randn(N, D)),
        of_pairs,
        refused=("",),
        reason="samples meet in the loss.*if N = 8 is wrong, pass batch_size=",
    ),
    "pairs in one call, batch size passed": RowCase(
        mlp, lambda: (randn(N, D), randn(N, D)), of_pairs, batch_size=N
    ),
    "triplets": RowCase(
        lambda: Net(triplet, layers=mlp()),
        lambda: (randn(N, D), randn(N, D), randn(N, D)),
        of_triplets,
    ),
    "experts": RowCase(switch, lambda: (tokens(2, 2), classes(2)), cross_entropy, samples=2),
    "experts of which one gets N tokens": RowCase(
        two_experts, lambda: (randn(N, 6, D), classes(N)), cross_entropy, of_all
    ),
}


# Layers with an order of axes of their own.


def cell_by_cell(net: Any, x: Tensor) -> Tensor:
    hidden = state = x.new_zeros(len(x), H)
    found = []
    for t in range(x.shape[1]):
        hidden, state = net.cell(x[:, t], (hidden, state))
        found.append(hidden)
    return net.head(torch.stack(found)).mean(0)


def last_state(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layer(x)[0][:, -1])


def positions_first(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layer(x)[0]).transpose(0, 1)


def of_sequences(model: Any, batch: Batch) -> Tensor:
    found = model(batch[0].transpose(0, 1)) - batch[1]
    return found.square().sum((1, 2)).mean()


def of_alignments(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    lengths = torch.full((len(x),), 6), torch.full((len(x),), 2)
    return F.ctc_loss(model(x), y, *lengths, reduction="sum") / len(x)


def log_probabilities(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layer(x)[0]).log_softmax(-1).transpose(0, 1)


def heads_by_einsum(net: Any, x: Tensor) -> Tensor:
    hidden = torch.einsum("ntd,kdh->ntkh", x, net.weight).mean(2)
    return torch.einsum("nth,hc->nc", hidden, net.values)


class Scaled(torch.autograd.Function):
    """A product, with arguments that aren't tensors or need no gradient in front and between."""

    @staticmethod
    def forward(
        ctx: Any, factor: float, x: Tensor, shift: Tensor, name: str, weight: Tensor, bias: Tensor
    ) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x, weight)
        return factor * (x @ weight + bias) + shift

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = ctx.factor * gradients[0]
        return None, gradient @ weight.T, None, None, x.T @ gradient, gradient.sum(0)


def with_function(net: Any, x: Tensor) -> Tensor:
    hidden = net.inner(x).tanh()
    return Scaled.apply(2.0, hidden, torch.ones(C).to(x), "name", net.weight, net.bias)


def of_function() -> nn.Module:
    weight, bias = nn.Parameter(torch.randn(H, C)), nn.Parameter(torch.randn(C))
    return Net(with_function, inner=nn.Linear(D, H), weight=weight, bias=bias)


def columns(net: Any, x: Tensor) -> Tensor:
    return (net.weight @ x.T + net.bias[:, None]).T


def instances(net: Any, x: Tensor) -> Tensor:
    return net.head(net.norm(net.convolution(x)).relu().mean(2))


AXES = {
    "cell by cell, T = N": RowCase(
        lambda: Net(cell_by_cell, cell=nn.LSTMCell(D, H), head=nn.Linear(H, C)),
        lambda: (randn(N, N, D), classes(N)),
        cross_entropy,
    ),
    "recurrent, two layers and directions": RowCase(
        lambda: Net(
            last_state,
            layer=nn.LSTM(D, H, 2, batch_first=True, bidirectional=True),
            head=nn.Linear(2 * H, C),
        ),
        sequences,
        cross_entropy,
    ),
    "positions first": RowCase(
        lambda: Net(positions_first, layer=nn.GRU(D, H), head=nn.Linear(H, C)),
        lambda: (randn(N, T, D), randn(N, T, C)),
        of_sequences,
    ),
    "positions first, T = N": RowCase(
        lambda: Net(positions_first, layer=nn.GRU(D, H), head=nn.Linear(H, C)),
        lambda: (randn(N, N, D), randn(N, N, C)),
        of_sequences,
        batch_size=N,
    ),
    "alignments": RowCase(
        lambda: Net(log_probabilities, layer=nn.GRU(D, H, batch_first=True), head=nn.Linear(H, 4)),
        lambda: (randn(N, 6, D), torch.randint(1, 4, (N, 2))),
        of_alignments,
    ),
    "heads by einsum": RowCase(
        lambda: Net(
            heads_by_einsum,
            weight=nn.Parameter(torch.randn(2, D, H)),
            values=nn.Parameter(torch.randn(H, C)),
        ),
        sequences,
        cross_entropy,
    ),
    "function with arguments that aren't tensors": RowCase(of_function, vectors, cross_entropy),
    "samples are columns": RowCase(
        lambda: Net(
            columns, weight=nn.Parameter(torch.randn(C, D)), bias=nn.Parameter(torch.randn(C))
        ),
        vectors,
        cross_entropy,
    ),
    "instance normalisation": RowCase(
        lambda: Net(
            instances,
            convolution=nn.Conv1d(2, H, 3),
            norm=nn.InstanceNorm1d(H, affine=True),
            head=nn.Linear(H, C),
        ),
        signals,
        cross_entropy,
    ),
    "as many channels as samples": RowCase(
        lambda: nn.Sequential(nn.Conv1d(2, N, 2), nn.Tanh(), nn.Flatten(), nn.Linear(7 * N, C)),
        signals,
        cross_entropy,
    ),
}


# Losses that aren't a mean over the rows of outputs.


def regularised(model: Any, batch: Batch) -> Tensor:
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return cross_entropy(model, batch) + 0.1 * penalty


def without_penalty(model: Any, batch: Batch, n: int) -> Tensor:
    return cross_entropy(model, one(batch, n))


def near_its_start(model: Any, batch: Batch) -> Tensor:
    """With penalties on what has changed since, as in L2-SP, EWC and FedProx."""
    penalties = [(0.3 * (p - 0.1).square()).sum() for p in model.parameters()]
    return cross_entropy(model, batch) + torch.stack(penalties).sum()


def adapted(net: Any, x: Tensor, y: Tensor, others: Tensor, labels: Tensor) -> Tensor:
    """The losses of as many tasks as each has rows, after a step on rows of the same task."""
    losses = []
    for task in zip(x, y, others, labels, strict=True):
        loss = F.cross_entropy(task[0] @ net.weight, task[1])
        (step,) = torch.autograd.grad(loss, net.weight, create_graph=True)
        losses.append(F.cross_entropy(task[2] @ (net.weight - step), task[3]))
    return torch.stack(losses)


def of_tasks(model: Any, batch: Batch) -> Tensor:
    found: Tensor = model(*batch).mean()
    return found


def to_fixed_targets(model: Any, batch: Batch) -> Tensor:
    normal = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(normal @ normal.detach().T, torch.arange(len(normal)))


def to_one_fixed_target(model: Any, batch: Batch, n: int) -> Tensor:
    normal = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(normal[n : n + 1] @ normal.detach().T, torch.tensor([n]))


def by_class(model: Any, batch: Batch) -> Tensor:
    """The axis of classes comes last, and may be as long as the batch."""
    return model(batch[0]).square().mean(0).sum()


def transposed(model: Any, batch: Batch) -> Tensor:
    return model(batch[0]).T.contiguous().square().sum(0).mean()


def of_square(model: Any, batch: Batch, n: int) -> Tensor:
    return model(batch[0][n : n + 1]).square().sum()


LOSSES = {
    "regulariser": RowCase(mlp, vectors, regularised, without_penalty),
    "penalty on changes": RowCase(mlp, vectors, near_its_start, without_penalty),
    "penalty on changes, as many samples as hidden features": RowCase(
        mlp,
        lambda: (randn(H, D), classes(H)),
        near_its_start,
        without_penalty,
        samples=H,
        refused=("",),
        reason="of the same shape, or a constant: use a batch of another size",
    ),
    "a step on each of as many tasks as these have rows": RowCase(
        lambda: Net(adapted, weight=nn.Parameter(torch.randn(D, C))),
        lambda: (randn(N, N, D), classes(N, N), randn(N, N, D), classes(N, N)),
        of_tasks,
        batch_size=N,
    ),
    "contrastive, with fixed targets": RowCase(
        mlp, lambda: (randn(N, D),), to_fixed_targets, to_one_fixed_target
    ),
    "mean of each class": RowCase(
        mlp,
        lambda: (randn(N, D),),
        by_class,
    ),
    "mean of each class, as many as samples": RowCase(
        mlp,
        lambda: (randn(C, D),),
        by_class,
        samples=C,
    ),
    "as many classes as samples, transposed": RowCase(
        mlp, lambda: (randn(C, D),), transposed, of_square, samples=C
    ),
}


# Samples that meet.


def neighbours(net: Any, x: Tensor) -> Tensor:
    """A layer of a graph network: nodes are the samples."""
    ring = torch.eye(len(x), dtype=x.dtype).roll(1, 0) + torch.eye(len(x), dtype=x.dtype)
    return net.head(ring @ net.inner(x).tanh())


def centred(net: Any, x: Tensor) -> Tensor:
    hidden = net.inner(x)
    return net.head(hidden - hidden.mean(0))


def normalised_by_hand(net: Any, x: Tensor) -> Tensor:
    x = net.inner(x)
    x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    return net.head((x * net.weight).tanh())


def handwritten_norm() -> nn.Module:
    weight = nn.Parameter(torch.ones(H))
    return Net(normalised_by_hand, inner=nn.Linear(D, H), weight=weight, head=nn.Linear(H, C))


def contrastive(model: Any, batch: Batch) -> Tensor:
    """Each of two views among all."""
    return F.cross_entropy(*among_all(model, batch))


def of_one_view(model: Any, batch: Batch, n: int) -> Tensor:
    scores, targets = among_all(model, batch)
    return F.cross_entropy(scores[n : n + 1], targets[n : n + 1])


def among_all(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    normal = F.normalize(model(torch.cat([batch[0], 1.1 * batch[0]])), dim=1)
    scores = normal @ normal.T - 1e9 * torch.eye(len(normal))
    return scores, torch.arange(len(normal)).roll(len(batch[0]))


def scores_of_pairs(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two towers at a learned temperature, as CLIP has them."""
    first, second = F.normalize(net.images(x)), F.normalize(net.texts(y))
    return first @ second.T * net.temperature.exp()


def towers() -> nn.Module:
    temperature = nn.Parameter(torch.tensor(0.3))
    layers = {"images": nn.Linear(D, H), "texts": nn.Linear(T, H)}
    return Net(scores_of_pairs, temperature=temperature, **layers)


def both_ways(model: Any, batch: Batch) -> Tensor:
    scores, targets = model(*batch), torch.arange(N)
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


MEET = r"samples meet between it and head\.\w+"

MEETING = {
    "neighbours": RowCase(
        linears(neighbours), vectors, cross_entropy, of_all, refused=("inner",), reason=MEET
    ),
    "centred": RowCase(
        linears(centred), vectors, cross_entropy, of_all, refused=("inner",), reason=MEET
    ),
    "handwritten normalisation": RowCase(
        handwritten_norm,
        vectors,
        cross_entropy,
        of_all,
        refused=("inner",),
        reason="samples meet between it and weight",
    ),
    "contrastive": RowCase(
        mlp,
        vectors,
        contrastive,
        of_one_view,
        samples=2 * N,
        batch_size=2 * N,
        refused=("",),
        reason="samples meet in the loss",
    ),
    "contrastive, two towers": RowCase(
        towers,
        lambda: (randn(N, D), randn(N, T)),
        both_ways,
        refused=("",),
        reason="samples meet in the loss",
        batch_size=N,
    ),
}


# What is computed from one sample, beside data of all.


def added_to_all(net: Any, x: Tensor) -> Tensor:
    return net.head(x + net.inner(x[2]))


def put_in_place(net: Any, x: Tensor) -> Tensor:
    """The first positions of the sample, so that positions have names along an axis of theirs."""
    some = x[2:3].clone()
    some[:, :2] = net.inner(x[2:3, :2])
    return net.head(x.index_copy(0, torch.tensor([2]), some))


def put_where_it_is_positive(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.where(x > 0, net.inner(x[2]), x))


def of_positions(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def of_own_positions(model: Any, batch: Batch, n: int) -> Tensor:
    return F.cross_entropy(model(batch[0])[n], batch[1][n])


BESIDE_DATA = {
    f"{compute.__name__}, batch_size={batch_size}": RowCase(
        lambda compute=compute: Net(compute, inner=nn.Linear(D, D), head=nn.Linear(D, C)),
        lambda: (randn(N, T, D), classes(N, T)),
        of_positions,
        of_own_positions,
        batch_size=batch_size,
    )
    for compute in (added_to_all, put_in_place, put_where_it_is_positive)
    for batch_size in (None, N)
}

# The axis or the calls that count the samples.


def recurrent(net: Any, x: Tensor, state: Tensor) -> Tensor:
    return net.head(net.layer(x, state)[0].mean(1))


def tagger(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layer(x)[0])[..., 0]


def of_tags(model: Any, batch: Batch) -> Tensor:
    """Losses ``[T, N]``."""
    x, y = batch
    return F.mse_loss(model(x.transpose(0, 1)), y.T)


def own_recurrence(net: Any, x: Tensor) -> Tensor:
    hidden, found = x.new_zeros(x.shape[1], H), []
    for row in x:
        hidden = (net.inner(row) + net.again(hidden)).tanh()
        found.append(hidden)
    return net.head(torch.stack(found))[..., 0]


def own_tagger() -> nn.Module:
    layers = {"inner": nn.Linear(D, H), "again": nn.Linear(H, H), "head": nn.Linear(H, 1)}
    return Net(own_recurrence, **layers)


def exits(net: Any, x: Tensor) -> list[Tensor]:
    hidden = net.inner(x / 255.0).tanh()
    return [head(hidden) for head in net.heads]


def with_exits() -> nn.Module:
    heads = nn.ModuleList(nn.Linear(H, C) for _ in range(N))
    return Net(exits, inner=nn.Linear(D, H), heads=heads)


def of_exits(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    return torch.stack([F.cross_entropy(outputs, y) for outputs in model(x)]).sum()


def of_passes(model: Any, batch: Batch) -> Tensor:
    """Losses ``[K, N]`` of several calls."""
    x, y = batch
    calls = [F.cross_entropy((k + 1) * model(x), y, reduction="none") for k in range(2)]
    return torch.stack(calls).mean()


def of_stacked_halves(model: Any, batch: Batch) -> Tensor:
    halves = zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)
    return torch.stack([F.cross_entropy(model(x), y) for x, y in halves]).mean()


def of_crops(model: Any, batch: Batch) -> Tensor:
    """Two views of each sample, in one call."""
    x, y = batch
    parts = model(torch.cat([x, x.sin()])).chunk(2)
    return sum(F.cross_entropy(part, y) for part in parts)


def of_scored(model: Any, batch: Batch) -> Tensor:
    """Some of the losses ``[N, T]``."""
    x, mask = batch
    return model(x).square().sum(-1)[mask].mean()


def of_one_scored(model: Any, batch: Batch, n: int) -> Tensor:
    x, mask = one(batch, n)
    return N * model(x).square().sum(-1)[mask].sum() / batch[1].sum()


def scored() -> Batch:
    mask = torch.rand(N, T) < 0.5
    mask[0, 0] = True
    return randn(N, T, D), mask


def of_texts_in_one_list(model: Any, batch: Batch) -> Tensor:
    """One loss for each sample, of its own positions among those of all."""
    x, y = batch
    parts = zip(model(x.flatten(0, 1)).split(x.shape[1]), y, strict=True)
    return torch.stack([F.cross_entropy(part, own) for part, own in parts]).mean()


def of_matched(model: Any, batch: Batch) -> Tensor:
    """Of some of the sample's positions, sample by sample."""
    x, y = batch
    found = model(x)
    losses = [(found[n][:2].flip(0) - y[n]).abs().sum() for n in range(len(x))]
    return torch.stack(losses).mean()


def two_calls(model: Any, batch: Batch) -> Tensor:
    return model(batch[0]).square().sum(1).mean() + model(batch[1]).sin().sum(1).mean()


def of_far_pairs(model: Any, batch: Batch) -> Tensor:
    """Zero for all pairs but one."""
    x, other, far = batch
    return (F.relu((model(x) - model(other)).square().sum(1)) * far).mean()


def critic(net: Any, x: Tensor) -> Tensor:
    return net.head(net.inner(x).tanh())[..., 0]


def of_next_states(model: Any, batch: Batch) -> Tensor:
    """Of all states ``[T, N]`` but the last, whose value is the next one's target."""
    x, rewards = batch
    values = model(x)
    return (rewards + values[1:].detach() - values[:-1]).square().mean()


def of_one_next(model: Any, batch: Batch, n: int) -> Tensor:
    return of_next_states(model, (batch[0][:, n : n + 1], batch[1][:, n : n + 1]))


def states(length: int) -> Callable[[], Batch]:
    return lambda: (randn(length, N, D), randn(length - 1, N))


def of_all_crops(model: Any, batch: Batch) -> Tensor:
    """Two crops of each sample with its three others, crops first."""
    (x,) = batch
    crops = model(torch.cat([x, x.sin(), x.cos(), x.exp(), -x])).view(5, len(x), -1)
    return (crops[:2].detach()[:, None] * crops[2:].tanh()).sum(-1).mean()


def attending(net: Any, x: Tensor, ends: Tensor) -> Tensor:
    """To the positions of the same sample, in one list of all samples' positions."""
    hidden = net.inner(x)
    starts = [0, *ends.tolist()]
    found = []
    for start, end in pairwise(starts):
        own = hidden[start:end]
        found.append((own @ own.T).softmax(1) @ own)
    return net.head(torch.cat(found))[ends - 1]


def of_one_end(model: Any, batch: Batch, n: int) -> Tensor:
    x, ends, y = batch
    start = int(ends[n - 1]) if n else 0
    own = x[start : ends[n]]
    return F.cross_entropy(model(own, torch.tensor([len(own)])), y[n : n + 1])


def of_tag_groups(model: Any, batch: Batch) -> Tensor:
    """Several texts for each sample, folded into rows."""
    (x,) = batch
    return model(x.flatten(0, 1))[:, :-1].square().mean()


def of_uneven_pairs(model: Any, batch: Batch) -> Tensor:
    """Texts of which the first one alone has all positions."""
    x, other = batch
    mask = torch.tensor([[1.0] * T, [1.0] * (T - 1) + [0.0]])[..., None]
    scores = [(model(each) * mask).sum((1, 2)) for each in (x, other)]
    return F.softplus(scores[0] - scores[1]).mean()


def of_one_pair(model: Any, batch: Batch, n: int) -> Tensor:
    length = T - n
    first, second = (model(each[n : n + 1])[:, :length].sum() for each in batch)
    return F.softplus(first - second)


def step_by_step(net: Any, x: Tensor) -> Tensor:
    hidden, found = x.new_zeros(len(x), H), []
    for t in range(x.shape[1]):
        hidden = (net.inner(x[:, t]) + net.again(hidden)).tanh()
        found.append(net.head(hidden))
    return torch.stack(found, 1)


def own_steps() -> nn.Module:
    layers = {"inner": nn.Linear(D, H), "again": nn.Linear(H, H), "head": nn.Linear(H, C)}
    return Net(step_by_step, **layers)


COUNTED = {
    "recurrent, with a state": RowCase(
        lambda: Net(recurrent, layer=nn.GRU(D, H, batch_first=True), head=nn.Linear(H, C)),
        lambda: (randn(N, T, D), randn(1, N, H), classes(N)),
        cross_entropy,
        lambda model, batch, n: F.cross_entropy(
            model(batch[0][n : n + 1], batch[1][:, n : n + 1]), batch[2][n : n + 1]
        ),
    ),
    "tags [T, N]": RowCase(
        lambda: Net(tagger, layer=nn.GRU(D, H), head=nn.Linear(H, 1)),
        lambda: (randn(N, T, D), randn(N, T)),
        of_tags,
    ),
    "tags [T, N], T = N": RowCase(
        lambda: Net(tagger, layer=nn.GRU(D, H), head=nn.Linear(H, 1)),
        lambda: (randn(N, N, D), randn(N, N)),
        of_tags,
        batch_size=N,
    ),
    "own recurrence, positions first": RowCase(
        own_tagger,
        lambda: (randn(N, T, D), randn(N, T)),
        of_tags,
        refused=("",),
        reason="if N = 3 is wrong, pass batch_size=",
    ),
    "own recurrence, positions first, batch size passed": RowCase(
        own_tagger, lambda: (randn(N, T, D), randn(N, T)), of_tags, batch_size=N
    ),
    "as many exits as samples, bytes": RowCase(
        with_exits, lambda: (torch.randint(256, (N, D)).double(), classes(N)), of_exits
    ),
    "as many exits as samples, batch size passed": RowCase(
        with_exits,
        lambda: (torch.randint(256, (N, D)).double(), classes(N)),
        of_exits,
        batch_size=N,
    ),
    "passes": RowCase(mlp, vectors, of_passes),
    "passes, batch size passed": RowCase(mlp, vectors, of_passes, batch_size=N),
    "losses of halves, stacked": RowCase(
        mlp,
        vectors,
        of_stacked_halves,
        refused=("",),
        reason="called 2 times, with 2 rows.*batch_size=",
    ),
    "losses of halves, stacked, batch size passed": RowCase(
        mlp, vectors, of_stacked_halves, of_all, batch_size=N
    ),
    "crops in one call": RowCase(
        mlp, vectors, of_crops, refused=("",), reason="equal parts.*batch_size="
    ),
    "crops in one call, batch size passed": RowCase(mlp, vectors, of_crops, batch_size=N),
    "as many texts in one list as they have positions, batch size passed": RowCase(
        mlp,
        lambda: (randn(N, N, D), classes(N, N)),
        of_texts_in_one_list,
        batch_size=N,
    ),
    "matched positions, as many as samples": RowCase(
        lambda: Net(
            lambda net, x: net.head((x.sin()[:, None] + net.places).tanh()),
            places=nn.Parameter(torch.randn(N, D)),
            head=nn.Linear(D, C),
        ),
        lambda: (randn(N, D), randn(N, 2, C)),
        of_matched,
    ),
    "two calls on one sample, batch size passed": RowCase(
        mlp, lambda: (randn(1, D), randn(1, D)), two_calls, samples=1, batch_size=1
    ),
    "two calls, one sample of which has a loss": RowCase(
        mlp, lambda: (randn(N, D), randn(N, D), torch.eye(N)[1]), of_far_pairs
    ),
    "values of states [T, N] but the last": RowCase(
        linears(critic),
        states(T + 1),
        of_next_states,
        of_one_next,
        refused=("",),
        reason="leaves out some of them.*batch_size=",
    ),
    "values of states [T, N] but the last, batch size passed": RowCase(
        linears(critic), states(T + 1 + (T + 1 == N)), of_next_states, of_one_next, batch_size=N
    ),
    "values of states [T, N] but the last, T = N": RowCase(
        linears(critic),
        states(N),
        of_next_states,
        batch_size=N,
        refused=("",),
        reason="two axes have 4 entries",
    ),
    "texts folded into rows, with as many positions as samples": RowCase(
        lambda: Net(
            tagger,
            layer=nn.GRU(D, H, batch_first=True),
            head=nn.Linear(H, 1),
        ),
        lambda: (randn(N, 3, N, D),),
        of_tag_groups,
        batch_size=N,
        refused=("",),
        reason="entries of several of the 4 samples",
    ),
    "two calls on pairs, of which one is longer": RowCase(
        own_steps, lambda: (randn(2, T, D), randn(2, T, D)), of_uneven_pairs, of_one_pair, samples=2
    ),
    "crops first, as many as samples": RowCase(
        mlp,
        lambda: (randn(3, D),),
        of_all_crops,
        samples=3,
        batch_size=3,
        refused=("",),
        reason="samples meet between it and the loss",
    ),
    "positions in one list, the last ones' loss": RowCase(
        linears(attending),
        lambda: (randn(N * N, D), N * torch.arange(1, N + 1), classes(N)),
        cross_entropy,
        of_one_end,
        batch_size=N,
        refused=("",),
        reason="can't be followed which sample",
    ),
    "calls on vectors of words": RowCase(
        lambda: nn.Sequential(nn.Embedding(7, D), nn.Linear(D, C)),
        lambda: (tokens(N), classes(N)),
        lambda model, b: F.cross_entropy(torch.cat([model(b[0][:1]), model(b[0][1:])]), b[1]),
        of_all,
    ),
    "two calls, each with as many words as both have texts": RowCase(
        lambda: nn.Sequential(nn.Embedding(7, D), nn.Linear(D, C)),
        lambda: (tokens(N, 2), tokens(N, 2)),
        lambda model, b: sum(model(x).flatten(0, 1).square().sum(1).mean() for x in b),
        refused=("",),
        reason="called 2 times, with 4 rows.*batch_size=",
    ),
    "some of the losses [N, T]": RowCase(mlp, scored, of_scored, of_one_scored),
}

ROW_CASES = CHUNKS | SELECTED | SHARED | ORDERS | AXES | LOSSES | COUNTED | MEETING | BESIDE_DATA
