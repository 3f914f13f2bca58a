"""Every private name of torch's ``fully_shard`` (FSDP2) that gradlens uses, and what it is for.

``fully_shard`` splits each parameter among processes. The optimizer has the shards, as a
``DTensor``; a loss's graph has the unsharded parameters, which exist as objects from the first
forward pass on and whose memory is allocated and filled, group by group, where a layer needs it.
Torch promises nothing about these names: ``tests/fully_shard/test_torch_private.py`` checks what
each of them means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradlens.graph.torch_private import storage_number

Group: TypeAlias = Any
"""``FSDPParamGroup``: parameters that are gathered together."""

AllGather: TypeAlias = Any
"""What fills the memory of a group: the public protocol behind ``set_custom_all_gather``."""


IS_KNOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether this torch's ``fully_shard`` has these names, as it does from 2.12 on."""


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with the model, or with a part of it."""
    return bool(_states(model))


def _states(model: nn.Module) -> list[Any]:
    """The states of all modules that ``fully_shard`` was called with."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules = [each for each in model.modules() if isinstance(each, fsdp.FSDPModule)]
    return list(dict.fromkeys(each._get_fsdp_state() for each in modules))


def param_groups(model: nn.Module) -> list[Group]:
    """The groups of a model's parameters, in the same order in all processes."""
    return [group for state in _states(model) for group in state._fsdp_param_groups]


def mesh_of(group: Group) -> DeviceMesh:
    """The processes among which a group's samples are divided, with all replicas."""
    mesh: DeviceMesh = group.mesh_info.mesh
    return mesh


def pairs(group: Group) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
    """The sharded and the unsharded parameters; the latter are made by the first forward pass."""
    for each in group.fsdp_params:
        yield each.sharded_param, getattr(each, "_unsharded_param", None)


def has_own_gathering(group: Group) -> bool:
    """Whether tensors of the group define themselves what is gathered, as those in float8 do."""
    locals_ = [each._sharded_local_tensor for each in group.fsdp_params]
    return any(hasattr(each, "fsdp_pre_all_gather") for each in locals_)


def is_split_among_fewer(group: Group) -> bool:
    """Whether the group is split among fewer processes now (``reshard_after_forward=2``)."""
    return bool(group.is_sharded_post_forward)


def device_of(group: Group) -> torch.device:
    """Where the unsharded parameters are; the shards may lie on the CPU meanwhile."""
    device: torch.device = group.device
    return device


def own_bytes(group: Group) -> Tensor:
    """What this process contributes when the group is gathered, as bytes."""
    parts = []
    for each in group.fsdp_params:
        data = each._sharded_param_data.to(each.device)
        cast = data if each.param_dtype is None else data.to(each.param_dtype)
        parts.append(cast.contiguous().view(torch.uint8))
    return torch.cat(parts)


def gathering_processes(group: Group) -> dist.ProcessGroup:
    """The processes that have the shards of a group."""
    processes: dist.ProcessGroup = group._all_gather_process_group
    return processes


def groups_by_storage(groups: Sequence[Group]) -> Mapping[int, Group]:
    """The groups that fill memory, by its ``storage_number``."""
    return {
        storage_number(tensor): group
        for group in groups
        for each in group.fsdp_params
        for tensor in each.all_gather_outputs
    }


def unshard(group: Group) -> None:
    """Fill the memory of a group's unsharded parameters, if it isn't."""
    group.unshard()
    group.wait_for_unshard()


_OF_STATES = ("_training_state", "_modules_to_run_forward")
_OF_GROUPS = (
    "_training_state", "_post_forward_indices", "_all_gather_comm", "_all_gather_result",
    "reduce_grads", "reshard_after_backward",
)  # fmt: skip
_OF_CONTEXTS = ("iter_forward_root", "is_last_backward", "post_backward_final_callback_queued")
_OF_COMMUNICATION = ("post_forward_order", "all_gather_state", "reduce_scatter_states")


@contextmanager
def own_passes(model: nn.Module, gathering: Callable[[int, Group], AllGather]) -> Iterator[None]:
    """A context for backward passes besides the user's, after which all is as before.

    Groups are filled by ``gathering``, by their numbers in ``param_groups``. Those that have been
    filled stay so, and others are freed again. No gradients are reduced. The order in which the
    user's backward pass gathers parameters in advance is kept, which must be the same in all
    processes.
    """
    states, groups = _states(model), param_groups(model)
    for group in groups:
        group.wait_for_unshard()  # if the user has begun to gather it
    contexts = [each._state_ctx for each in states]
    kept = [
        *(_Kept(each, _OF_STATES) for each in states),
        *(_Kept(each, _OF_GROUPS) for each in groups),
        *(_Kept(each, _OF_CONTEXTS) for each in contexts),
        *(_Kept(each._comm_ctx, _OF_COMMUNICATION) for each in states),
    ]
    freed = [group for group in groups if not group.is_unsharded]
    try:
        for context in contexts:
            context.is_last_backward = True  # what was gathered in advance and not used is dropped
        for number, group in enumerate(groups):
            group._all_gather_comm = gathering(number, group)
            group.reshard_after_backward = group in freed
            # With gradients to keep, a group must have been gathered once.
            group.reduce_grads = any(whole is None for _, whole in pairs(group))
        yield
    finally:
        for group in freed:
            group._to_sharded()
        for each in kept:
            each.restore()


class _Kept:
    """Attributes of an object, to be restored: lists and sets themselves and what is in them."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self._owner = owner
        self._values = {name: getattr(owner, name) for name in names}
        self._contents = {
            name: value.copy()
            for name, value in self._values.items()
            if isinstance(value, (list, set))
        }

    def restore(self) -> None:
        for name, value in self._values.items():
            setattr(self._owner, name, value)
        for name, content in self._contents.items():
            self._values[name].clear()
            getattr(self._values[name], "update" if isinstance(content, set) else "extend")(content)
