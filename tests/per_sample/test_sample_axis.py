"""What is known of one graph is used for others only where no number can change it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens.graph.graph import Graph
from gradlens.samples.count import BatchEvidence
from gradlens.samples.planner import plan_of
from tests.cases.changing_cases import ROUTES, STEPS, ChangingCase
from tests.cases.networks import NETWORKS
from tests.cases.references import assert_covered, right_gradients
from tests.cases.row_cases import Batch, Net

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


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "data-dependent branch"])
def test_plans_of_static_networks_hold(name: str) -> None:
    """So that labels needn't be read at each step."""
    torch.manual_seed(0)
    model, inputs = NETWORKS[name].build().double(), NETWORKS[name].inputs
    parameters, samples = dict(model.named_parameters()), 11  # no other axis has as many entries
    names = {id(parameter): name for name, parameter in parameters.items()}
    first, second = (
        Graph(model(inputs(samples)).square().flatten(1).sum(1).mean()) for _ in range(2)
    )
    plan = plan_of(first, parameters, BatchEvidence(batch_size=samples))
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
        assert_covered(model, model(torch.randn(4, 6, 3).double()).square().sum(1), context=context)
