"""Reading the tensors that nodes have saved, also inside activation checkpoints.

A checkpoint that isn't reentrant recomputes the tensors that its nodes have saved when they are
read, and returns each of them once in a backward pass. Inside another ``GraphExecGroup``, the same
region can be recomputed once more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils import checkpoint

_GROUP: Any = getattr(checkpoint, "GraphExecGroup", None)
"""Older versions of torch have no such groups."""


def recomputation() -> AbstractContextManager[Any]:
    """A context in which each checkpointed region is recomputed once, for all reads in it.

    It can be entered several times.
    """
    if _GROUP is None or _GROUP._get_current_group() is not None:
        return nullcontext()
    group: AbstractContextManager[Any] = _GROUP()
    return group


def is_recomputed(node: Any) -> bool:
    """Whether a checkpoint recomputes the tensors that a normalisation has saved."""
    if node._saved_running_mean is None:
        return False
    first, second = node._saved_result1, node._saved_result1
    return bool(first.data_ptr() != second.data_ptr())
