"""The model that a cockpit is given: the network inside wrappers, and its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from gradlens.gradients.gradients import Setting
from gradlens.graph.data_parallel import Replica
from gradlens.graph.fully_shard import Sharding
from gradlens.graph.hooks import takes_hooks
from gradlens.numerics.shards import is_distributed
from gradlens.torch_private import uncompiled


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside ``DistributedDataParallel`` or ``torch.compile``.

    ``TypeError`` for what ``torch.jit.script`` has compiled.
    """
    if not takes_hooks(model):
        raise TypeError(
            "the model was compiled by torch.jit.script, whose layers take no hooks and whose "
            "graph doesn't show them: track the model that it was made of, or compile that by "
            "torch.compile"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "FullyShardedDataParallel joins the parameters of several layers in one tensor, so "
            "that the layers' own aren't in the loss's graph: use fully_shard, which replaces it"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inner = uncompiled(model)
    return model if inner is model else unwrapped(inner)


def process_group_of(
    replicas: Sequence[Replica], sharding: Sharding | None
) -> dist.ProcessGroup | None:
    """The processes that train a model together, if there are several."""
    if replicas:
        group: dist.ProcessGroup = replicas[0].process_group
        return group if group.size() > 1 else None
    return None if sharding is None else sharding.processes


def processes_apart(setting: Setting) -> int:
    """How many processes there are, if they aren't known to train the model together; 0 if so."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    together = setting.replicas or setting.sharding is not None
    if together or any(map(is_distributed, setting.parameters.values())):
        return 0
    count = dist.get_world_size()
    return count if count > 1 else 0


class ChangedParameters(NamedTuple):
    """How the model's parameters differ from those that the cockpit has found at the start."""

    untracked: list[str]
    """Names of those that need a gradient and have been frozen, or absent, at the start."""
    removed: list[str]
    """Names of tracked ones that the model doesn't have any more."""


def changed_parameters(setting: Setting) -> ChangedParameters:
    """Compare the model's present parameters with those that are tracked."""
    if setting.model is None:
        return ChangedParameters([], [])
    leaves = setting.leaves
    tracked = {id(leaf) for leaf in [*setting.parameters.values(), *leaves.values()]}
    present = dict(setting.model.named_parameters())
    found = {id(parameter) for parameter in present.values()}
    return ChangedParameters(
        [name for name, p in present.items() if p.requires_grad and id(p) not in tracked],
        [name for name, p in setting.parameters.items() if not found & {id(p), id(leaves[name])}],
    )


def trainable_parameters(
    params: Any, sharding: Sharding | None = None
) -> Mapping[str, nn.Parameter]:
    """The parameters that need a gradient by name, ``param_0`` and so on without a model.

    ``params`` is a module or an iterable of parameters; ``TypeError`` for anything else,
    ``ValueError`` if there are none. Sharded parameters are given as the optimizer has them.
    """
    if isinstance(params, nn.Module):
        shards = {} if sharding is None else sharding.shards()
        named = {name: shards.get(id(p), p) for name, p in params.named_parameters()}
    elif isinstance(params, (Tensor, str)) or not isinstance(params, Iterable):
        kind = f"the class {params.__name__}" if isinstance(params, type) else type(params).__name__
        raise TypeError(
            f"params is {kind}: pass the model itself, or an iterable of its parameters"
        )
    else:
        named = {f"param_{index}": parameter for index, parameter in enumerate(params)}
    for name, parameter in named.items():
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"{name} is a {type(parameter).__name__}: pass the model, or an iterable of its "
                "parameters"
            )
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"{name} has no shape yet: run the lazy module once before tracking it"
            )
        if not parameter.is_leaf:
            raise TypeError(
                f"{name} is computed from other tensors, and gets no gradient of its own: pass "
                "the model, or an iterable of its parameters"
            )
    if not named:
        raise ValueError(
            "there are no parameters, and nothing to track: an iterator such as "
            "model.parameters() is empty after its first use, so pass the model instead"
        )
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if not trainable:
        raise ValueError(
            "no parameter needs a gradient, since all are frozen: there is nothing to track "
            "before one has requires_grad_(True)"
        )
    return trainable
