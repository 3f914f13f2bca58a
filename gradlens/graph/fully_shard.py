"""Models that torch's ``fully_shard`` (FSDP2) was called with, and all of its private names.

``fully_shard`` splits each parameter among processes. The optimizer has the shards, as a
``DTensor``; a loss's graph has the unsharded parameters, which exist as objects from the first
forward pass on and whose memory is allocated and filled where a layer needs it. Torch promises
nothing about these names: ``tests/graph/test_fully_shard.py`` checks what each of them means.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = Any
"""``FSDPParamGroup``: parameters that are put together at once."""

IS_KNOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether this torch's ``fully_shard`` has these names, as it does from 2.12 on."""


@dataclass(frozen=True)
class Sharding:
    """The groups of a sharded model's parameters, and the processes that train it together."""

    groups: Sequence[Group]
    processes: dist.ProcessGroup

    def unsharded(self) -> dict[int, nn.Parameter]:
        """The parameters in a loss's graph, by the ``id`` of those that the optimizer has."""
        found = (pair for group in self.groups for pair in pairs(group))
        return {id(shard): whole for shard, whole in found if whole is not None}

    def shards(self) -> dict[int, nn.Parameter]:
        """The parameters that the optimizer has, by the ``id`` of those in a loss's graph."""
        found = (pair for group in self.groups for pair in pairs(group))
        return {id(whole): shard for shard, whole in found if whole is not None}


def sharding_of(model: nn.Module | None) -> Sharding | None:
    """How a model's parameters are sharded; ``None`` if ``fully_shard`` wasn't called with it.

    ``ValueError`` if its parts are sharded among different processes, and ``NotImplementedError``
    if this version of torch is too old.
    """
    if not _states(model):
        return None
    if not IS_KNOWN:
        raise NotImplementedError(OLD.format(version=torch.__version__))
    groups = param_groups(model)
    if not groups:
        return None
    first, *others = map(mesh_of, groups)
    if any(_ranks(mesh) != _ranks(first) for mesh in others):
        raise ValueError(DIFFERENT)
    return Sharding(groups, _process_group(first))


def param_groups(model: nn.Module | None) -> list[Group]:
    """The groups of a model's parameters, in the same order in all processes."""
    return [group for state in _states(model) for group in state._fsdp_param_groups]


def pairs(group: Group) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
    """The sharded and the unsharded parameters; the latter are made by the first forward pass."""
    for each in group.fsdp_params:
        yield each.sharded_param, getattr(each, "_unsharded_param", None)


def reshard(model: nn.Module | None) -> None:
    """Free unsharded parameters, so that the next forward pass gathers the shards as they are then.

    Those of the outermost group stay after a forward pass, for the backward pass.
    """
    for group in param_groups(model):
        group.reshard()


@contextmanager
def kept_whole(model: nn.Module | None) -> Iterator[None]:
    """All parameters are whole in the context, also behind forward passes that would free them.

    So they are there for passes that torch's hooks don't see. All processes must enter it, and
    exchange nothing in it.
    """
    for state in _states(model):
        state._lazy_init()  # from the outside to the inside, as the first forward pass does
    kept = [(group, group.post_forward_mesh_info) for group in param_groups(model)]
    if all(group.is_unsharded and info is None for group, info in kept):
        yield  # such as inside of another one
        return
    try:
        for group, _ in kept:
            group.post_forward_mesh_info = None
            group.unshard()
            group.wait_for_unshard()
        yield
    finally:
        for group, info in kept:
            group.post_forward_mesh_info = info
        reshard(model)


def mesh_of(group: Group) -> DeviceMesh:
    """The processes among which a group's samples are divided, with all replicas."""
    mesh: DeviceMesh = group.mesh_info.mesh
    return mesh


def _states(model: nn.Module | None) -> list[Any]:
    """The states of all modules that ``fully_shard`` was called with."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or model is None:
        return []
    modules = [each for each in model.modules() if isinstance(each, fsdp.FSDPModule)]
    return list(dict.fromkeys(each._get_fsdp_state() for each in modules))


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _process_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        world: Any = dist.group.WORLD
        return world
    return dist.new_group(sorted(_ranks(mesh)), use_local_synchronization=True)


DIFFERENT = (
    "fully_shard was called with different meshes for parts of the model, so that it isn't certain "
    "which processes have samples of their own: use one mesh for all of them"
)
OLD = (
    "models that fully_shard was called with can be tracked from torch 2.12 on, and this is torch "
    "{version}: install a newer one"
)
