"""What gradlens takes private names of torch's ``fully_shard`` to mean.

These tests fail where torch changes it. They run in one process, a group of its own; several
processes are tested with their values, in ``tests/cockpit/test_fully_sharded.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradlens.graph import fully_shard as private
from gradlens.graph.graph import Graph
from gradlens.graph.passes import reason_not_to_run
from gradlens.torch_private import hands_gradients_on

pytestmark = pytest.mark.skipif(not private.IS_KNOWN, reason="this torch is too old")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def sharded(**options: Any) -> Any:
    """Two layers with a group each, of which the second belongs to the model itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    return model


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 2)).square().sum()


def test_groups_have_all_parameters() -> None:
    model = sharded()
    shards = [shard for group in private.param_groups(model) for shard, _ in private.pairs(group)]
    assert {*map(id, shards)} == {*map(id, model.parameters())}
    assert all(isinstance(shard, DTensor) for shard in shards)
    assert [private.mesh_of(group).size() for group in private.param_groups(model)] == [1, 1]
    assert private.param_groups(nn.Linear(1, 1)) == []


def test_unsharded_parameters_are_the_leaves_of_the_graph() -> None:
    model = sharded()
    pairs = [pair for group in private.param_groups(model) for pair in private.pairs(group)]
    assert all(whole is None for _, whole in pairs)
    graph = Graph(loss_of(model))
    pairs = [pair for group in private.param_groups(model) for pair in private.pairs(group)]
    assert {id(whole) for _, whole in pairs} == {*graph.leaves}
    assert [whole.shape for _, whole in pairs if whole is not None] == [p.shape for p, _ in pairs]


def test_shards_are_gathered_anew_after_they_have_changed() -> None:
    model = sharded()
    shards = [*model.parameters()]
    with torch.no_grad():
        before = loss_of(model)
        for parameter in shards:
            parameter.data.to_local().zero_()
        assert loss_of(model) > 0  # the root's parameters are as they were
        private.reshard(model)
        assert loss_of(model) == 0 < before


def test_nodes_whose_memory_is_freed_are_not_run() -> None:
    model = sharded()
    x = torch.ones(4, 2, requires_grad=True)
    graph = Graph(model(x).square().sum())
    products = [node for node in graph.nodes if type(node).__name__ == "AddmmBackward0"]
    first, last = map(reason_not_to_run, products)
    assert "fully_shard has freed the parameters" in first
    assert not last  # the root's parameters are kept until the backward pass


def test_nodes_in_front_of_modules_hand_gradients_on() -> None:
    model = sharded()
    x = torch.ones(4, 2, requires_grad=True)
    nodes = Graph(model(x).sum()).nodes
    found = [node for node in nodes if hands_gradients_on(node)]
    assert len(found) == 2  # in front of the model, and of its first layer
    gradient = torch.randn(4, 2)
    for node in found:
        assert torch.equal(node.apply(gradient)[-1], gradient)
    assert not any(map(hands_gradients_on, Graph(nn.Linear(2, 1)(x).sum()).nodes))
