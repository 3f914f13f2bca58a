"""Modules by which several processes train one model, each with samples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from gradlens.torch_private import is_joined

Replica: TypeAlias = nn.parallel.DistributedDataParallel


def replicas_of(model: nn.Module | None) -> tuple[Replica, ...]:
    """All ``DistributedDataParallel`` that a model consists of: itself, or parts of it."""
    modules = () if model is None else model.modules()
    return tuple(module for module in modules if isinstance(module, Replica))


def may_end_alone(replicas: Sequence[Replica]) -> bool:
    """Whether a process may have fewer steps than others, since ``join`` was entered."""
    return any(map(is_joined, replicas))
