"""A per-sample gradient belongs to the row that the model was called with."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.testing import assert_close

import gradlens
from gradlens.graph.model_calls import tensors_of
from tests.cases.references import per_sample_gradients_of_losses
from tests.cases.row_cases import Net

N, D, H, C = 6, 4, 5, 3
PERM = torch.tensor([3, 0, 5, 1, 4, 2])


class Rows(nn.Module):
    """A network that may take a weight for each sample ``apart``, as the reference."""

    def __init__(self, between: Callable[[Tensor], Tensor], before: Any = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, D))
        self.head = nn.Parameter(torch.randn(C, H))
        self.between = between
        self.before = before

    def forward(self, x: Tensor, apart: Tensor | None = None) -> Tensor:
        x = self.before(x)
        if apart is None:
            features = x @ self.weight.T
        else:
            features = torch.einsum("nd,nhd->nh", x, self.before(apart))
        return self.between(features.tanh()) @ self.head.T


def single(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


class Permuted(torch.autograd.Function):
    """Rows in another order, which only its backward function shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradients[0][order.argsort()], None


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in order": lambda o, y: single(o, y).mean(),
    "sorted": lambda o, y: single(o, y).sort().values.mean(),
    "sorted, weighted by rank": lambda o, y: (single(o, y).sort().values * torch.arange(N)).sum(),
    "small losses": lambda o, y: single(o, y)[single(o, y).argsort()].mean(),
    "the largest trimmed": lambda o, y: single(o, y).sort().values[:-2].mean(),
    "flipped": lambda o, y: single(o, y).flip(0).mean(),
    "rolled": lambda o, y: single(o, y).roll(2, 0).mean(),
    "gathered": lambda o, y: single(o, y).gather(0, PERM).mean(),
    "index_select": lambda o, y: single(o, y).index_select(0, PERM).mean(),
    "take": lambda o, y: single(o, y).take(PERM).mean(),
    "top-k of all": lambda o, y: single(o, y).topk(N).values.mean(),
    "top-k of some": lambda o, y: single(o, y).topk(2).values.mean(),
    "the median": lambda o, y: single(o, y).median(),
    "a mask": lambda o, y: single(o, y)[y != 0].mean(),
    "outputs permuted by a function": lambda o, y: single(Permuted.apply(o, PERM), y).mean(),
    "outputs and targets permuted": lambda o, y: single(o[PERM], y[PERM]).mean(),
    "halves in the other order": lambda o, y: single(
        torch.cat([o[3:], o[:3]]), torch.cat([y[3:], y[:3]])
    ).mean(),
    "written into other rows": lambda o, y: single(
        torch.zeros(N, C, dtype=o.dtype).index_add(0, PERM, o), y
    ).mean(),
    "mixed targets": lambda o, y: 0.7 * single(o, y).mean() + 0.3 * single(o, y[PERM]).mean(),
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "permuted": lambda x: x[PERM],
    "permuted and back": lambda x: x[PERM].exp()[PERM.argsort()],
    "reversed": lambda x: x.flip(0),
    "permuted by a function": lambda x: Permuted.apply(x, PERM),
    "shuffled in halves": lambda x: x.view(2, N // 2, H).transpose(0, 1).reshape(N, H),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_of_the_batch(loss: str, between: str) -> None:
    for before in (lambda x: x, lambda x: x[PERM]):
        torch.manual_seed(0)
        model = Rows(BETWEEN[between], before).double()
        x, y = torch.randn(N, D).double(), torch.arange(N) % C
        apart = model.weight.detach().expand(N, H, D).clone().requires_grad_()
        (expected,) = torch.autograd.grad(LOSSES[loss](model(x, apart), y), apart)
        gradlens.extend(model)
        with gradlens.per_sample_gradients(model, loss_reduction="sum") as gradients:
            LOSSES[loss](model(x), y).backward()
        assert_close(gradients["weight"].dense(), expected)


def test_calls_in_turn() -> None:
    """Samples are numbered in the order of the calls, not of the rows of the loss."""
    torch.manual_seed(0)
    model = gradlens.extend(nn.Linear(D, C).double())
    x, y = torch.randn(N, D).double(), torch.arange(N) % C
    with gradlens.per_sample_gradients(model, loss_reduction="sum") as gradients:
        first, second = model(x[:2]), model(x[2:])
        single(torch.cat([second, first]), torch.cat([y[2:], y[:2]])).sum().backward()
    delta = model(x).softmax(1) - F.one_hot(y, C)
    assert_close(gradients["weight"].dense(), delta[:, :, None] * x[:, None])


class Counted(torch.autograd.Function):
    """Reverses rows; its backward counts, so that it can't be asked what it does to them."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Counted.calls += 1
        return gradients[0].flip(0)


@pytest.mark.parametrize("batch_size", [None, N])
def test_rows_behind_code_that_cannot_be_run_may_be_in_any_order(batch_size: int | None) -> None:
    torch.manual_seed(0)
    model = gradlens.extend(Rows(Counted.apply).double())
    with gradlens.per_sample_gradients(model, batch_size=batch_size) as gradients:
        single(model(torch.randn(N, D).double()), torch.arange(N) % C).mean().backward()
    with pytest.raises(KeyError, match="Counted would have to run once more"):
        gradients["head"]


def test_another_order_at_each_step() -> None:
    """What code of others does to rows is looked at anew."""
    torch.manual_seed(0)
    orders = iter([PERM, torch.arange(N), PERM.flip(0), torch.arange(N).flip(0), PERM])
    model = gradlens.extend(Rows(lambda x: Permuted.apply(x, next(orders))).double())
    gradients = gradlens.per_sample_gradients(model, loss_reduction="sum")
    for order in (PERM, torch.arange(N), PERM.flip(0), torch.arange(N).flip(0), PERM):
        x, y = torch.randn(N, D).double(), torch.arange(N) % C
        with gradients:
            single(model(x), y).sum().backward()
        features = (x @ model.weight.detach().T).tanh()[order]
        logits = (features @ model.head.detach().T).requires_grad_()
        (delta,) = torch.autograd.grad(single(logits, y).sum(), logits)
        rows = torch.einsum("nc,nh->nch", delta, features)[order.argsort()]
        assert_close(gradients["head"].dense(), rows)


class Shuffled(nn.Module):
    """It puts rows in the order ``PERM`` unseen, and returns that ``[N]`` in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(D, C), form

    def forward(self, x: Tensor, order: Tensor = PERM) -> Any:
        noisy = (x[order] @ torch.ones(D, D)).cos() + torch.randn(N, D)
        return self.form(self.layer(noisy), order)


@dataclass(slots=True)
class Result:
    logits: Tensor
    rest: Any


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "a vector": (lambda x, o: (x, o), True),
    "short integers, as a column": (lambda x, o: (x, o.to(torch.uint16)[:, None]), True),
    "real numbers": (lambda x, o: (x, o.double()), True),
    "an array": (lambda x, o: (x, o.numpy()[::-1].astype("int32")), True),
    "a list, beside a number": (lambda x, o: {"logits": x, "rest": (o.tolist(), 7)}, True),
    "single tensors": (lambda x, o: (x, tuple(o)), True),
    "in fields": (lambda x, o: Result(x, SimpleNamespace(order=[o.tolist()])), True),
    "as an argument alone": (lambda x, o: x, True),
    "lengths": (lambda x, o: (x, [4, 2, 3, 3, 1, 2], [True, False], o[1:]), False),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_order_that_the_model_says(name: str) -> None:
    form, is_order = FORMS[name]
    model = Shuffled(form)
    x, y = torch.randn(N, D), torch.arange(N) % C
    with gradlens.per_sample_gradients(model) as gradients:
        output = model(x, PERM) if "argument" in name else model(x)
        single(next(tensors_of(output)), y).mean().backward()
    assert is_order == ("layer.weight" not in gradients)


def test_orders_after_none() -> None:
    """What is found where a model leaves rows in their order isn't taken for other orders."""
    model, found = Shuffled(lambda x, _: x), []
    gradients = gradlens.per_sample_gradients(model)
    for order in (torch.arange(N), PERM, torch.arange(N)):
        with gradients:
            single(model(torch.randn(N, D), order), order % C).mean().backward()
        found.append("layer.weight" in gradients)
    assert found == [True, False, True]


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a dataclass": lambda x: Result(x, None),
    "a namespace": lambda x: SimpleNamespace(logits=x),
    "an object with items, as of a tokenizer": lambda x: UserDict({"data": x}),
    "fields and containers": lambda x: Result({"all": [SimpleNamespace(logits=x)]}, None),  # type: ignore[arg-type]
    "an array": lambda x: x.numpy(),
    "an array in a dict": lambda x: {"data": x.numpy()},
    "a view of an array that can't be written": lambda x: np.broadcast_to(x.numpy()[::-1], x.shape),
}


class Holding(nn.Module):
    """A layer of what is in a container, by rows in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, C)

    def forward(self, held: Any) -> Tensor:
        while not isinstance(held, (Tensor, np.ndarray)):
            values = held.values() if isinstance(held, (dict, UserDict)) else held
            is_container = isinstance(held, (dict, UserDict, list))
            held = next(iter(values)) if is_container else held.logits
        rows = held.copy() if isinstance(held, np.ndarray) else held
        return self.layer(torch.as_tensor(rows)[PERM])


@pytest.mark.parametrize("name", HOLDERS)
def test_rows_in_containers(name: str) -> None:
    torch.manual_seed(0)
    model, given = Holding().double(), HOLDERS[name](torch.randn(N, D).double())
    expected = per_sample_gradients_of_losses(single(model(given), PERM % C)[PERM.argsort()], model)
    with gradlens.per_sample_gradients(model) as gradients:
        single(model(given), PERM % C).mean().backward()
    assert_close(gradients["layer.weight"].dense(), expected["layer.weight"])


def test_objects_that_refer_to_each_other() -> None:
    model, given = Holding(), SimpleNamespace(logits=torch.randn(N, D))
    given.itself = [given]
    with gradlens.per_sample_gradients(model) as gradients:
        single(model(given), torch.arange(N) % C).mean().backward()
    assert "layer.weight" in gradients


AS_MANY_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "medians of the batch": lambda h: [torch.nanmedian(h, 0).values],
    "transposed": lambda h: [torch.transpose_copy(h, 0, 1)],
    "one row repeated": lambda h: [h[1:2].expand(N, N)],
    "one row interleaved": lambda h: [h[1:2].tanh().repeat_interleave(N, 0)],
    "each row by itself": torch.unbind_copy,
}


@pytest.mark.parametrize("name", AS_MANY_ROWS)
def test_as_many_rows_are_no_samples(name: str) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(N) + 0.5)
    model = Net(lambda net, x: AS_MANY_ROWS[name](x * net.weight), weight=weight).double()
    x = torch.randn(N, N).double()
    with gradlens.per_sample_gradients(model) as gradients:
        sum(each.square().mean() for each in model(x)).backward()
    assert "weight" not in gradients


class Members(nn.Module):
    """N networks, whose outputs for N samples come ``[network, sample]``."""

    def __init__(self, features: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, D, H))
        self.bias = nn.Parameter(torch.randn(N, 1, H))
        self.head = nn.Parameter(torch.randn(N, H, 1))
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        if self.features == "scaled":
            features = (self.weight[:, :, 0] @ x.T).unsqueeze(-1) + 0.5 * self.bias
        elif self.features == "noisy":
            features = (x + torch.randn(N, 1, D)) @ self.weight[0] + self.bias[0]
        elif self.features == "folded":
            features = (x + torch.randn(N, 1, D)).flatten(0, 1) @ self.weight[0]
            return (features.tanh() @ self.head[0]).view(N, N)
        else:
            features = x @ self.weight + self.bias
        return (features.tanh() @ self.head).squeeze(-1)


@pytest.mark.parametrize("features", ["scaled", "noisy", "folded", "plain", "stacked"])
def test_as_many_networks_are_no_samples(features: str) -> None:
    model = Members(features)
    with gradlens.per_sample_gradients(model) as gradients:
        errors = (model(torch.randn(N, D)) - torch.randn(N)).square()
        single = [each.mean() for each in errors]
        (torch.stack(single) if features == "stacked" else errors.mean(1)).sum().backward()
    assert not gradients
