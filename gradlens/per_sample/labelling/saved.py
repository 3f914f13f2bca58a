"""Looking at what nodes have saved, also inside activation checkpoints.

A checkpoint that isn't reentrant computes what its nodes have saved anew when it is asked for, and
hands out each tensor once in a backward pass. Inside a group of its own, the same region can be
computed once more for somebody else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradlens.hooks.torch_private import checkpoint_group, saved


def recomputation() -> AbstractContextManager[Any]:
    """A context in which checkpointed regions are computed once for all that is asked in it.

    It can be entered several times.
    """
    return checkpoint_group() or nullcontext()


def is_recomputed(node: Any) -> bool:
    """Whether what a normalisation has saved is made when it is asked for, by a checkpoint."""
    if saved(node, "running_mean") is None:
        return False
    first, second = saved(node, "result1"), saved(node, "result1")
    return bool(first.data_ptr() != second.data_ptr())
