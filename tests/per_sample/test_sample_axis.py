"""What is known of one graph is used for others only where no number can change it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradlens
from gradlens.graph.graph import Graph
from gradlens.samples.count import BatchEvidence
from gradlens.samples.planner import plan_of
from tests.cases.changing_cases import ROUTES, STEPS, ChangingCase
from tests.cases.references import assert_covered, right_gradients
from tests.cases.row_cases import Batch, Net

N = 4


UNCERTAIN = (
    *("largest of the batch", "graphs by block-diagonal matrices", "packed texts"),
    "hinge between neighbours",
)
"""Routes after which nothing says whose rows the loss is computed from, or samples meet."""


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ROUTES)
def test_routes_that_change(name: str) -> None:
    """At each step, what is given is right; at one at least, something is given."""
    torch.manual_seed(0)
    case = ROUTES[name]
    model = gradlens.extend(case.build())
    gradients = gradlens.per_sample_gradients(model)
    most = 0
    for step in range(STEPS):
        batch = case.batch(step)
        losses = case.losses(model(*batch[:-1]), batch)
        right_gradients(model, losses, order_of(case, model, batch), context=gradients)
        most = max(most, len(gradients))
    assert bool(most) == (name not in UNCERTAIN)


def order_of(case: ChangingCase, model: Any, batch: Batch) -> Tensor:
    """The loss of each row of the batch, if each depends on one row; otherwise, all in order."""
    inputs = batch[0].clone().requires_grad_()
    losses = case.losses(model(inputs, *batch[1:-1]), batch)
    rows = [torch.autograd.grad(each, inputs, retain_graph=True)[0] for each in losses]
    depends = torch.stack([row.flatten(1).abs().sum(1) > 0 for row in rows])
    is_one_to_one = depends.shape[0] == depends.shape[1] and bool(
        (depends.sum(0) == 1).all() & (depends.sum(1) == 1).all()
    )
    return depends.long().argmax(0) if is_one_to_one else torch.arange(len(losses))


def images(*shape: int) -> Tensor:
    return torch.randn(N, *shape)


def low() -> nn.Module:
    """A linear layer that stays as it is, and a product of low rank beside it."""
    return Net(
        lambda net, x: net.linear(x) + 0.5 * net.up(net.down(x)),
        linear=nn.Linear(8, 8).requires_grad_(False),
        down=nn.Linear(8, 2, bias=False),
        up=nn.Linear(2, 8, bias=False),
    )


def block() -> nn.Module:
    first, second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    branch = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second)
    return Net(lambda net, x: (x + net.branch(x)).relu(), branch=branch)


def last(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layers(x)[0][:, -1])


def last_by_index(net: Any, x: Tensor) -> Tensor:
    places = torch.randint(5, (len(x),))
    return net.head(net.layers(x)[0][torch.arange(len(x)), places])


def mean(net: Any, x: Tensor) -> Tensor:
    return net.head(net.layers(x).mean(1))


def recurrent(kind: Any, compute: Any = last) -> nn.Module:
    return Net(compute, layers=kind(8, 8, 2, batch_first=True), head=nn.Linear(8, 3))


def transformer(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return Net(
        mean,
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 3),
    )


def two_views(net: Any, x: Tensor) -> Tensor:
    first, second = net.layers(torch.cat([x, x + 1])).chunk(2)
    return net.head(first * second)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        block(),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.InstanceNorm2d(4, affine=True),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


STATIC: dict[str, tuple[nn.Module, Tensor]] = {
    "MLP": (nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), images(8)),
    "convolutions": (convolutions(), images(3, 8, 8)),
    "LSTM": (recurrent(nn.LSTM), images(5, 8)),
    "GRU": (recurrent(nn.GRU), images(5, 8)),
    "transformer": (transformer(), images(5, 8)),
    "transformer in eval mode": (transformer(norm_first=True).eval(), images(5, 8)),
    "LoRA": (nn.Sequential(low(), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)), images(8)),
    "positions picked": (recurrent(nn.RNN, last_by_index), images(5, 8)),
    "two views": (Net(two_views, layers=nn.Linear(8, 6), head=nn.Linear(6, 3)), images(8)),
}


@pytest.mark.parametrize("name", STATIC)
def test_plans_of_static_networks_hold(name: str) -> None:
    """So that labels needn't be read at each step."""
    torch.manual_seed(0)
    model, inputs = STATIC[name]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = {id(parameter): name for name, parameter in parameters.items()}
    first, second = (
        Graph(F.cross_entropy(model(x), torch.arange(N) % 3))
        for x in (inputs, images(*inputs.shape[1:]))
    )
    plan = plan_of(first, parameters, BatchEvidence(batch_size=N))
    assert plan.uses.keys() == parameters.keys()
    assert first.key(names) == second.key(names)
    assert plan.holds_for(second)
    assert not plan.read


def test_parts_without_elements() -> None:
    """A prefix of no tokens, which is cut off and put in front again, has no axis of samples."""

    def compute(net: Any, x: Tensor) -> Tensor:
        tokens = net.embed(x)
        prefix, rest = tokens[:, :0], tokens[:, 0:]
        return net.head(torch.cat([prefix * 2, rest.tanh()], 1).mean(1))

    model = gradlens.extend(Net(compute, embed=nn.Linear(3, 5), head=nn.Linear(5, 2))).double()
    context = gradlens.per_sample_gradients(model)
    for _ in range(3):
        assert_covered(model, model(images(6, 3).double()).square().sum(1), context=context)
