"""Networks in which it isn't obvious which sample a row belongs to, besides those of the zoo."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

import gradlens
from tests.cases.references import per_sample_gradients_of_losses, without_hooks

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


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    *inputs, targets = batch
    return F.cross_entropy(model(*inputs), targets)


def one(batch: Batch, n: int) -> Batch:
    """A batch of one of the samples."""
    return tuple(part[n : n + 1] for part in batch)


@dataclass(frozen=True)
class RowCase:
    """A network, how to draw a batch, and its mean loss, by default of classified vectors.

    ``alone`` is N times the part of the loss that sample n has, by default the loss of the sample
    as a batch of its own. ``refused`` are the parameters that have no per-sample gradients, by the
    beginning of their names, and ``reason`` says why, as a pattern. ``batch_size`` is what has to
    be passed, if anything.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch] = vectors
    loss: Callable[[Any, Batch], Tensor] = cross_entropy
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

    def reference(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """One backward pass for each sample."""
        losses = [self.of_sample(model, batch, n) for n in range(self.samples)]
        return per_sample_gradients_of_losses(torch.stack(losses), model)

    def assert_right(self, steps: int) -> None:
        """What is given is right, and the rest refused with the reason, on new data each time."""
        torch.manual_seed(0)
        model = self.model()
        plain = without_hooks(model)
        gradients = gradlens.per_sample_gradients(
            gradlens.extend(model), batch_size=self.batch_size
        )
        everything = {name for name, _ in model.named_parameters()}
        missing = {name for name in everything if name.startswith(self.refused)}
        for _ in range(steps):
            batch = self.batch()
            with gradients:
                self.loss(model, batch).backward()
            assert set(gradients) == everything - missing
            for name in missing:
                with pytest.raises(KeyError) as raised:
                    gradients[name]
                assert re.search(self.reason, str(raised.value))
            if gradients:
                assert gradients.batch_size == self.samples
                expected = self.reference(plain, batch)
                for name in gradients:
                    found = gradients[name].dense()
                    torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-12)


def words() -> Batch:
    return tokens(N, T), classes(N)


def signals() -> Batch:
    return randn(N, 2, 8), classes(N)


def of_all(model: Any, batch: Batch, n: int) -> Tensor:
    """The loss of one sample in the batch of all."""
    *inputs, targets = batch
    return F.cross_entropy(model(*inputs)[n : n + 1], targets[n : n + 1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, C))


def linears(compute: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Net(compute, inner=nn.Linear(D, H), head=nn.Linear(H, C))


def of_chunks(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(torch.cat([model(part) for part in batch[0].split(2)]), batch[1])


# Axes in an order of their own.


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


def heads_by_einsum(net: Any, x: Tensor) -> Tensor:
    hidden = torch.einsum("ntd,kdh->ntkh", x, net.weight).mean(2)
    return torch.einsum("nth,hc->nc", hidden, net.values)


def columns(net: Any, x: Tensor) -> Tensor:
    return (net.weight @ x.T + net.bias[:, None]).T


AXES = {
    "position bias, T = N": RowCase(position_bias, lambda: (randn(N, N, D), classes(N))),
    "heads by einsum": RowCase(
        lambda: Net(
            heads_by_einsum,
            weight=nn.Parameter(torch.randn(2, D, H)),
            values=nn.Parameter(torch.randn(H, C)),
        ),
        sequences,
    ),
    "samples are columns": RowCase(
        lambda: Net(
            columns, weight=nn.Parameter(torch.randn(C, D)), bias=nn.Parameter(torch.randn(C))
        )
    ),
    "as many channels as samples": RowCase(
        lambda: nn.Sequential(nn.Conv1d(2, N, 2), nn.Tanh(), nn.Flatten(), nn.Linear(7 * N, C)),
        signals,
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


def of_called_tasks(model: Any, batch: Batch) -> Tensor:
    """The same with two calls of the network for each task."""
    losses, before = [], dict(model.named_parameters())
    for x, y, others, labels in zip(*batch, strict=True):
        loss = F.cross_entropy(functional_call(model, before, (x,)), y)
        steps = torch.autograd.grad(loss, [*before.values()], create_graph=True)
        after = {name: p - step for (name, p), step in zip(before.items(), steps, strict=True)}
        losses.append(F.cross_entropy(functional_call(model, after, (others,)), labels))
    return torch.stack(losses).mean()


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
    "two calls for each of as many tasks as these have rows": RowCase(
        mlp,
        lambda: (randn(N, N, D), classes(N, N), randn(N, N, D), classes(N, N)),
        of_called_tasks,
        batch_size=N,
        refused=("",),
        reason=f"two axes have {N} entries",
    ),
    "contrastive, with fixed targets": RowCase(
        mlp, lambda: (randn(N, D),), to_fixed_targets, to_one_fixed_target
    ),
    "mean of each class": RowCase(mlp, lambda: (randn(N, D),), by_class),
    "mean of each class, as many as samples": RowCase(
        mlp, lambda: (randn(C, D),), by_class, samples=C
    ),
    "as many classes as samples, transposed": RowCase(
        mlp, lambda: (randn(C, D),), transposed, of_square, samples=C
    ),
}

ADDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "added": (lambda mean, t: mean + t.square(), 1.0),
    "subtracted and divided": (lambda mean, t: (t.exp() - mean) / -2, 0.5),
    "stacked": (lambda mean, t: torch.stack([mean, t.square()]).sum(), 1.0),
    "of a view": (lambda mean, t: mean.view(1) + t.view(1, 1).sum(1), 1.0),
}
WEIGHING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied": lambda mean, t: mean * t.square(),
    "multiplied by a view": lambda mean, t: (t.view(1, 1) * mean).sum(),
    "divided": lambda mean, t: mean / t.exp() + t,
    "power": lambda mean, t: mean**t,
    "largest": lambda mean, t: torch.maximum(mean, t - 9),
    "product of a stack": lambda mean, t: torch.stack([mean, t]).prod(),
    "added, then as a weight": lambda mean, t: (mean + t) * t,
}
"""Functions of the mean of the losses and of a parameter that each sample's output depends on."""


def tempered() -> nn.Module:
    parts = {"head": nn.Linear(D, C), "t": nn.Parameter(torch.tensor(1.3))}
    return Net(lambda net, x: net.head(x) / net.t, **parts)


def joined(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Batch], Tensor]:
    return lambda model, batch: join(cross_entropy(model, batch), model.t)


LOSSES |= {
    f"mean and parameter: {name}": RowCase(
        tempered,
        loss=joined(join),
        alone=lambda model, batch, n, f=factor: f * without_penalty(model, batch, n),
    )
    for name, (join, factor) in ADDED.items()
} | {
    f"mean and parameter: {name}": RowCase(
        tempered,
        loss=joined(join),
        alone=lambda model, batch, n, join=join: (
            torch.func.grad(lambda mean, t: join(mean, t).sum())(
                cross_entropy(model, batch).detach(), model.t.detach()
            )
            * without_penalty(model, batch, n)
        ),
        refused=("t",),
        reason="before they are averaged",
    )
    for name, join in WEIGHING.items()
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


def added_to_flat_rows(net: Any, x: Tensor) -> Tensor:
    return net.head(x.flatten(0, 1) + net.inner(x[2, 0])).view(N, T, C)


def added_with_positions_first(net: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return net.head(x + net.inner(x[:, 2:3])).transpose(0, 1)


def expanded_for_flat_rows(net: Any, x: Tensor) -> Tensor:
    rows = torch.lerp(x.flatten(0, 1), net.inner(x[2, 1]).expand(N * T, D), 0.3)
    return net.head(rows).view(N, T, C)


def put_where_flat_rows_are_positive(net: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return net.head(torch.where(rows > 0, net.inner(x[1, 1]), rows)).view(N, T, C)


BESIDE_DATA = {
    f"{compute.__name__}, batch_size={batch_size}": RowCase(
        lambda compute=compute: Net(compute, inner=nn.Linear(D, D), head=nn.Linear(D, C)),
        lambda: (randn(N, T, D), classes(N, T)),
        of_positions,
        of_own_positions,
        batch_size=batch_size,
    )
    for compute in (
        added_to_all,
        put_in_place,
        put_where_it_is_positive,
        added_to_flat_rows,
        added_with_positions_first,
        expanded_for_flat_rows,
        put_where_flat_rows_are_positive,
    )
    for batch_size in (None, N)
}


# The axis or the calls that count the samples.


def recurrent(net: Any, x: Tensor, state: Tensor) -> Tensor:
    return net.head(net.layer(x, state)[0].mean(1))


def tagger(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layer(x)[0])[..., 0]


def own_recurrence(net: Any, x: Tensor) -> Tensor:
    hidden, found = x.new_zeros(x.shape[1], H), []
    for row in x:
        hidden = (net.inner(row) + net.again(hidden)).tanh()
        found.append(hidden)
    return net.head(torch.stack(found))[..., 0]


def of_packed(
    axis: int, layer: Callable[[], nn.Module] | None = None, image: bool = False
) -> RowCase:
    """Losses of words one below the other, of texts that are as long as drawn.

    Instead of the first word, there may be an ``image``, which needs no gradient.
    """

    def pack(tensor: Tensor, lengths: Tensor) -> Any:
        options = {"batch_first": axis == 0, "enforce_sorted": False}
        return nn.utils.rnn.pack_padded_sequence(tensor, lengths, **options)

    def compute(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
        embedded = net.embed(x)
        if image:
            embedded = torch.cat([F.one_hot(x[:, :1], H + 1)[..., 1:] * 0.3, embedded[:, 1:]], 1)
        words = pack(embedded, lengths)
        return net.head((words if layer is None else net.layer(words)[0]).data.tanh())

    def losses(model: Any, batch: Batch) -> Tensor:
        x, y, lengths = batch
        targets = pack(y.movedim(0, axis), lengths).data
        return F.cross_entropy(model(x.movedim(0, axis), lengths), targets, reduction="sum")

    def build() -> nn.Module:
        parts = {} if layer is None else {"layer": layer()}
        return Net(compute, embed=nn.Embedding(7, H), head=nn.Linear(H, C), **parts)

    return RowCase(
        build,
        lambda: (tokens(N, T), classes(N, T), torch.randint(1, T + 1, (N,))),
        lambda model, batch: losses(model, batch) / batch[2].sum(),
        lambda model, batch, n: losses(model, one(batch, n)) * N / batch[2].sum(),
    )


def own_tagger() -> nn.Module:
    layers = {"inner": nn.Linear(D, H), "again": nn.Linear(H, H), "head": nn.Linear(H, 1)}
    return Net(own_recurrence, **layers)


def of_tags(model: Any, batch: Batch) -> Tensor:
    """Losses ``[T, N]``."""
    x, y = batch
    return F.mse_loss(model(x.transpose(0, 1)), y.T)


def exits(net: Any, x: Tensor) -> list[Tensor]:
    hidden = net.inner(x / 255.0).tanh()
    return [head(hidden) for head in net.heads]


def with_exits() -> nn.Module:
    heads = nn.ModuleList(nn.Linear(H, C) for _ in range(N))
    return Net(exits, inner=nn.Linear(D, H), heads=heads)


def of_exits(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    return torch.stack([F.cross_entropy(outputs, y) for outputs in model(x)]).sum()


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


def parabola() -> nn.Module:
    numbers = {name: nn.Parameter(torch.rand(())) for name in "ab"}
    return Net(lambda net, x: net.a + net.b * x**2, **numbers)


def two_calls(model: Any, batch: Batch) -> Tensor:
    return model(batch[0]).square().sum(1).mean() + model(batch[1]).sin().sum(1).mean()


def two_folded_calls(model: Any, batch: Batch) -> Tensor:
    """Each on all samples, of which each has several rows; what they lose is added up."""
    scores = [model(x.flatten(0, 1)).view(len(x), -1).sin().sum(1).square() for x in batch]
    return scores[0].mean() + scores[1].mean()


def of_far_pairs(model: Any, batch: Batch) -> Tensor:
    """Zero for all pairs but one."""
    x, other, far = batch
    return (F.relu((model(x) - model(other)).square().sum(1)) * far).mean()


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


def own_steps(compute: Callable[..., Any] = step_by_step) -> nn.Module:
    layers = {"inner": nn.Linear(D, H), "again": nn.Linear(H, H), "head": nn.Linear(H, C)}
    return Net(compute, **layers)


def taught(net: Any, x: Tensor) -> Tensor:
    """Each step gets what the one before it should have been, and the first one zeros."""
    return step_by_step(net, F.pad(x, (0, 0, 1, -1)))


def of_some_steps(model: Any, batch: Batch) -> Tensor:
    inputs, are_some = batch
    return model(inputs)[are_some].sin().square().sum() / len(inputs)


def centred(net: Any, x: Tensor) -> Tensor:
    hidden = net.inner(x)
    return net.head(hidden - hidden.mean(0))


def reshaped_in_another_order(net: Any, x: Tensor) -> Tensor:
    """Positions mix, and come before samples where rows of both are joined."""
    hidden = net.mix(net.inner(x).tanh().mT).permute(2, 0, 1)
    return net.head(hidden.reshape(len(x), -1))


COUNTED = {
    "recurrent, with a state": RowCase(
        lambda: Net(recurrent, layer=nn.GRU(D, H, batch_first=True), head=nn.Linear(H, C)),
        lambda: (randn(N, T, D), randn(1, N, H), classes(N)),
        cross_entropy,
        lambda model, batch, n: F.cross_entropy(
            model(batch[0][n : n + 1], batch[1][:, n : n + 1]), batch[2][n : n + 1]
        ),
    ),
    "recurrent, with two states of two samples": RowCase(
        lambda: Net(recurrent, layer=nn.LSTM(D, H, batch_first=True), head=nn.Linear(H, C)),
        lambda: (randn(2, T, D), (randn(1, 2, H), randn(1, 2, H)), classes(2)),
        cross_entropy,
        lambda model, batch, n: F.cross_entropy(
            model(batch[0][n : n + 1], tuple(each[:, n : n + 1] for each in batch[1])),
            batch[2][n : n + 1],
        ),
        samples=2,
    ),
    "taught steps of two samples": RowCase(
        partial(own_steps, taught),
        lambda: (randn(2, T, D), randn(2, T) > -1),
        of_some_steps,
        samples=2,
    ),
    "packed texts": of_packed(0, lambda: nn.GRU(H, H, batch_first=True)),
    "packed texts behind images": of_packed(0, lambda: nn.GRU(H, H, batch_first=True), image=True),
    "packed texts, without a layer": of_packed(0),
    "packed texts, positions first": of_packed(1, lambda: nn.GRU(H, H)),
    "packed texts, positions first, without a layer": replace(
        of_packed(1), refused=("",), reason="more than one agrees with the network"
    ),
    "own recurrence, positions first": RowCase(
        own_tagger,
        lambda: (randn(N, T, D), randn(N, T)),
        of_tags,
        refused=("",),
        reason="pass batch_size=",
    ),
    "own recurrence, positions first, batch size passed": RowCase(
        own_tagger, lambda: (randn(N, T, D), randn(N, T)), of_tags, batch_size=N
    ),
    "as many exits as samples, bytes": RowCase(
        with_exits, lambda: (torch.randint(256, (N, D)).double(), classes(N)), of_exits
    ),
    "as many texts in one list as they have positions, batch size passed": RowCase(
        mlp,
        lambda: (randn(N, N, D), classes(N, N)),
        of_texts_in_one_list,
        batch_size=N,
        refused=("",),
        reason="individual_losses",
    ),
    "matched positions, as many as samples": RowCase(
        lambda: Net(
            lambda net, x: net.head((x.sin()[:, None] + net.places).tanh()),
            places=nn.Parameter(torch.randn(N, D)),
            head=nn.Linear(D, C),
        ),
        lambda: (randn(N, D), randn(N, 2, C)),
        of_matched,
        refused=("",),
        reason="can't be followed among these",
    ),
    "as many numbers as samples": RowCase(
        parabola,
        lambda: (randn(N),),
        lambda model, b: model(b[0]).sin().square().mean(),
        refused=("",),
        reason="vector of real numbers may be one sample.*batch_size=",
    ),
    "as many numbers as samples, batch size passed": RowCase(
        parabola,
        lambda: (randn(N),),
        lambda model, b: model(b[0]).sin().square().mean(),
        batch_size=N,
    ),
    "two calls on one sample, batch size passed": RowCase(
        mlp, lambda: (randn(1, D), randn(1, D)), two_calls, samples=1, batch_size=1
    ),
    "two calls, one sample of which has a loss": RowCase(
        mlp, lambda: (randn(N, D), randn(N, D), torch.eye(N)[1]), of_far_pairs
    ),
    "texts folded into rows, with as many positions as samples": RowCase(
        lambda: Net(tagger, layer=nn.GRU(D, H, batch_first=True), head=nn.Linear(H, 1)),
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
        reason="two axes have 3 entries",
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
    "a call for each text, one of which has as many words as there are texts": RowCase(
        lambda: Net(
            lambda net, x: net.head(net.inner(x).tanh().mean(0, keepdim=True)),
            inner=nn.Linear(D, H),
            head=nn.Linear(H, C),
        ),
        lambda: (*(randn(words, D) for words in range(2, N + 2)), classes(N)),
        lambda model, b: F.cross_entropy(torch.cat([model(each) for each in b[:-1]]), b[-1]),
        lambda model, b, n: F.cross_entropy(model(b[n]), b[-1][n : n + 1]),
        batch_size=N,
    ),
    "two calls, each with as many words as both have texts": RowCase(
        lambda: nn.Sequential(nn.Embedding(7, D), nn.Linear(D, C)),
        lambda: (tokens(N, 2), tokens(N, 2)),
        lambda model, b: sum(model(x).flatten(0, 1).square().sum(1).mean() for x in b),
        refused=("",),
        reason="called 2 times, with 4 rows.*batch_size=",
    ),
    "as many calls as samples, which are folded into rows": RowCase(
        mlp,
        lambda: (randn(2, 3, D), randn(2, 4, D)),
        two_folded_calls,
        samples=2,
        batch_size=2,
        refused=("",),
        reason="two axes have 2 entries",
    ),
    "as many calls as samples, with as many positions for each": RowCase(
        mlp,
        lambda: (randn(2, 2 * 3, D),),
        lambda model, b: sum(model(x).sin().square().mean() / len(b[0]) for x in b[0]),
        samples=2,
        batch_size=2,
    ),
    "centred": RowCase(
        linears(centred),
        alone=of_all,
        refused=("inner",),
        reason=r"samples meet between it and head\.\w+",
    ),
    "reshaped in another order behind a layer whose elements are apart": RowCase(
        lambda: Net(
            reshaped_in_another_order,
            inner=nn.Linear(D, H),
            mix=nn.Linear(T, T),
            head=nn.Linear(T * H, C),
        ),
        lambda: (randn(N, T, D), classes(N)),
        alone=of_all,
        refused=("inner", "mix.weight"),
        reason=r"samples meet between it and head\.\w+",
    ),
}

ROW_CASES = AXES | LOSSES | COUNTED | BESIDE_DATA
