"""Gathers the parameters of ``fully_shard`` in backward passes of gradlens's own.

How many of these passes a process needs depends on its samples, but all processes must take part
whenever parameters are gathered. At each gathering, they therefore exchange the number of the group
of parameters that each of them needs next. One that needs none any more goes on to contribute its
shards until all are done. Groups are gathered where a pass comes to them, and freed behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradlens.fully_shard.torch_private import (
    IS_KNOWN,
    Group,
    device_of,
    gathering_processes,
    groups_by_storage,
    has_own_gathering,
    is_sharded,
    is_split_among_fewer,
    mesh_of,
    own_bytes,
    own_passes,
    pairs,
    param_groups,
    unshard,
)
from gradlens.graph.kinds import Node
from gradlens.graph.torch_private import saved_where_they_are, storage_number

NOTHING = -1
"""Exchanged by a process that needs no group any more."""


@dataclass(frozen=True)
class Sharding:
    """A model that ``fully_shard`` was called with, and the ``processes`` that train it together.

    ``groups`` are those of its parameters that are gathered together.
    """

    model: nn.Module
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

    def unsupported(self) -> str:
        """Why passes of gradlens's own can't gather the parameters; empty if they can."""
        if any(map(is_split_among_fewer, self.groups)):
            return FEWER
        return OWN_GATHERING if any(map(has_own_gathering, self.groups)) else ""

    @contextmanager
    def own_passes(self) -> Iterator[None]:
        """A context for passes of gradlens's own; all processes must enter it at the same steps."""
        gatherer = _Gatherer(self.groups, self.processes)
        with own_passes(self.model, gatherer.gathering):
            yield
            gatherer.finish()

    def prepare(self) -> Callable[[Node], None]:
        """A function that gathers the parameters that a node has saved, before it runs."""
        filled = groups_by_storage(self.groups)

        def fill(node: Node) -> None:
            for storage in map(storage_number, saved_where_they_are(node)):
                if storage in filled:
                    unshard(filled[storage])

        return fill


def sharding_of(model: nn.Module | None) -> Sharding | None:
    """How a model's parameters are sharded; ``None`` if ``fully_shard`` wasn't called with it.

    ``ValueError`` if its parts are sharded among different processes, and ``NotImplementedError``
    if this version of torch is too old.
    """
    if model is None or not is_sharded(model):
        return None
    if not IS_KNOWN:
        raise NotImplementedError(OLD.format(version=torch.__version__))
    groups = param_groups(model)
    if not groups:
        return None
    first, *others = map(mesh_of, groups)
    if any(_ranks(mesh) != _ranks(first) for mesh in others):
        raise ValueError(DIFFERENT)
    return Sharding(model, groups, _process_group(first))


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _process_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        world: Any = dist.group.WORLD
        return world
    return dist.new_group(sorted(_ranks(mesh)), use_local_synchronization=True)


class _Gatherer:
    """Gathers groups of parameters, by their numbers, with all processes taking part."""

    def __init__(self, groups: Sequence[Group], processes: dist.ProcessGroup) -> None:
        self._groups = groups
        self._processes = processes

    def gathering(self, number: int, group: Group) -> _Gathering:
        """What fills a group."""
        return _Gathering(self, number)

    def gather(self, number: int) -> Tensor:
        """The bytes of all shards of a group, while other processes may need other groups."""
        return self._exchange(number)[number]

    def finish(self) -> None:
        """Take part until no process needs a group any more."""
        while self._exchange(NOTHING):
            pass

    def _exchange(self, number: int) -> Mapping[int, Tensor]:
        """The groups that some process needs, each gathered; empty if none does.

        Only the group of this ``number`` is kept in memory.
        """
        own = torch.tensor([number], device=device_of(self._groups[0]))
        needed = [torch.empty_like(own) for _ in range(dist.get_world_size(self._processes))]
        dist.all_gather(needed, own, group=self._processes)
        found = {}
        for each in sorted({int(one) for one in needed} - {NOTHING}):
            gathered = self._gathered(self._groups[each])
            found[each] = gathered if each == number else gathered[:0]
        return found

    @staticmethod
    def _gathered(group: Group) -> Tensor:
        own, processes = own_bytes(group), gathering_processes(group)
        parts = own.new_empty(dist.get_world_size(processes), len(own))
        dist.all_gather([*parts], own, group=processes)
        return parts.flatten()


class _Gathering:
    """Fills one group of parameters; torch's protocol for ``set_custom_all_gather``."""

    def __init__(self, gatherer: _Gatherer, number: int) -> None:
        self._gatherer = gatherer
        self._number = number

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        output_tensor.view(torch.uint8).copy_(self._gatherer.gather(self._number))


DIFFERENT = (
    "fully_shard was called with different meshes for parts of the model, so that it isn't certain "
    "which processes have samples of their own: use one mesh for all of them"
)
FEWER = (
    "reshard_after_forward is a number, so that parameters are split in another way between "
    "forward and backward: pass True or False to fully_shard"
)
OLD = (
    "models that fully_shard was called with can be tracked from torch 2.12 on, and this is torch "
    "{version}: install a newer one"
)
OWN_GATHERING = (
    "its parameters are of a class that defines itself how fully_shard gathers them, such as one "
    "in float8"
)
