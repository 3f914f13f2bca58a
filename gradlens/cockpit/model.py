"""The model that a cockpit is given: the network inside wrappers, and its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from gradlens.hooks.gathering import Sharding
from gradlens.hooks.module_hooks import takes_hooks
from gradlens.hooks.torch_private import uncompiled
from gradlens.per_sample.gradients import Setting


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
    model: nn.Module | None, sharding: Sharding | None
) -> dist.ProcessGroup | None:
    """The processes that train a model together, if there are several."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group if group.size() > 1 else None
    inner = None if model is None else uncompiled(model)
    if inner is not model:
        return process_group_of(inner, sharding)
    return None if sharding is None else sharding.processes


def untracked(setting: Setting) -> list[str]:
    """Names of parameters that need a gradient and have been frozen, or absent, at the start."""
    leaves = [*setting.parameters.values(), *setting.leaves.values()]
    tracked = {id(leaf) for leaf in leaves}
    named = [] if setting.model is None else setting.model.named_parameters()
    return [name for name, p in named if p.requires_grad and id(p) not in tracked]


def removed(setting: Setting) -> list[str]:
    """Names of tracked parameters that the model doesn't have any more."""
    if setting.model is None:
        return []
    present = {id(parameter) for parameter in setting.model.parameters()}
    leaves = setting.leaves
    return [n for n, p in setting.parameters.items() if not present & {id(p), id(leaves[n])}]


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
