"""What gradlens takes private names of torch's ``fully_shard`` to mean.

These tests fail where torch changes it. They run in one process, a group of its own; the gathering
of several is tested with their values, in ``tests/cockpit/test_fully_sharded.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gradlens.fully_shard import torch_private as private
from gradlens.graph.graph import Graph
from gradlens.graph.torch_private import hands_gradients_on, storage_number

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


def states(model: Any) -> list[Any]:
    """Everything that a backward pass of FSDP changes besides memory and gradients."""
    found = []
    for module in (model, model[0]):
        state = module._get_fsdp_state()
        (each,) = state._fsdp_param_groups
        context, communication = state._state_ctx, state._comm_ctx
        found += [
            state._training_state,
            each._training_state,
            each._sharded_state,
            each.reduce_grads,
            each.reshard_after_backward,
            each._all_gather_comm,
            each._all_gather_result,
            [*each._post_forward_indices],
            [*communication.post_forward_order],
            context.is_last_backward,
            context.post_backward_final_callback_queued,
            context.iter_forward_root,
        ]
    return found


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


def test_memory_is_freed_and_filled_and_has_the_same_number() -> None:
    model = sharded()
    loss_of(model)
    root, inner = private.param_groups(model)
    ((_, weight), _) = private.pairs(inner)
    assert weight is not None
    storage = storage_number(weight)
    assert not weight.untyped_storage().size()
    assert private.groups_by_storage([root, inner])[storage] is inner
    private.unshard(inner)
    assert weight.untyped_storage().size()
    assert storage_number(weight) == storage
    assert not private.is_split_among_fewer(inner)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_own_bytes_are_those_that_are_gathered(dtype: torch.dtype | None) -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    loss_of(model)
    root, _ = private.param_groups(model)
    wholes = [whole.detach() for _, whole in private.pairs(root) if whole is not None]
    expected = torch.cat([whole.reshape(-1).view(torch.uint8) for whole in wholes])
    assert torch.equal(private.own_bytes(root), expected)
    assert private.gathering_processes(root).size() == 1
    assert not private.has_own_gathering(root)


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


@pytest.mark.parametrize("fails", [False, True])
def test_own_passes_leave_no_trace(fails: bool) -> None:
    model = sharded()
    loss = loss_of(model)
    before = states(model)
    wholes = [whole for group in private.param_groups(model) for _, whole in private.pairs(group)]
    memory = [whole.untyped_storage().size() for whole in wholes if whole is not None]
    asked = []

    def gathering(number: int, group: Any) -> Any:
        asked.append((number, group))
        return group._all_gather_comm

    try:
        with private.own_passes(model, gathering):
            torch.autograd.grad(loss, wholes, retain_graph=True)  # type: ignore[arg-type]
            assert states(model) != before
            if fails:
                wholes[-1].register_hook(_raise)  # type: ignore[union-attr]
                torch.autograd.grad(loss, wholes, retain_graph=True)  # type: ignore[arg-type]
    except ZeroDivisionError:
        assert fails
    assert asked == [*enumerate(private.param_groups(model))]
    assert states(model) == before
    assert memory == [whole.untyped_storage().size() for whole in wholes if whole is not None]
    assert all(parameter.grad is None for parameter in model[0].parameters())


def _raise(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_gradients_are_not_reduced_in_own_passes() -> None:
    model, other = sharded(), sharded()
    for each in (model, other):
        each.set_requires_gradient_sync(False)
        loss_of(each).backward()  # gradients of an earlier micro-batch
        each.set_requires_gradient_sync(True)
    losses = [loss_of(each) for each in (model, other)]
    wholes = [whole for group in private.param_groups(model) for _, whole in private.pairs(group)]
    with private.own_passes(model, lambda number, group: group._all_gather_comm):
        kept = [whole.grad for whole in wholes if whole is not None]
        for whole in wholes:
            assert whole is not None
            whole.grad = None
        torch.autograd.grad(losses[0], wholes, retain_graph=True)  # type: ignore[arg-type]
        for whole, gradient in zip(wholes, kept, strict=True):
            assert whole is not None
            whole.grad = gradient
    for loss in losses:
        loss.backward()
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), same.grad.to_local())
