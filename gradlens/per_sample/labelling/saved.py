"""Looking at what nodes have saved, also inside activation checkpoints.

A checkpoint that isn't reentrant computes what its nodes have saved anew when it is asked for, and
hands out each tensor once in a backward pass. Inside a group of its own, the same region can be
computed once more for somebody else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils import checkpoint

_GROUP: Any = getattr(checkpoint, "GraphExecGroup", None)
"""Older versions of torch have no such groups."""


def recomputation() -> AbstractContextManager[Any]:
    """A context in which checkpointed regions are computed once for all that is asked in it.

    It can be entered several times.
    """
    if _GROUP is None or _GROUP._get_current_group() is not None:
        return nullcontext()
    group: AbstractContextManager[Any] = _GROUP()
    return group


def is_recomputed(node: Any) -> bool:
    """Whether what a normalisation has saved is made when it is asked for, by a checkpoint."""
    if node._saved_running_mean is None:
        return False
    first, second = node._saved_result1, node._saved_result1
    return bool(first.data_ptr() != second.data_ptr())
