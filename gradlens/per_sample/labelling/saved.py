"""Reading the tensors that nodes have saved, also inside activation checkpoints.

A checkpoint that isn't reentrant recomputes the tensors that its nodes have saved when they are
read, and returns each of them once in a backward pass. Inside another ``GraphExecGroup``, the same
region can be recomputed once more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradlens.hooks.torch_private import checkpoint_group, saved


def recomputation() -> AbstractContextManager[Any]:
    """A context in which each checkpointed region is recomputed once, for all reads in it.

    It can be entered several times.
    """
    return checkpoint_group() or nullcontext()


def is_recomputed(node: Any) -> bool:
    """Whether a checkpoint recomputes the tensors that a normalisation has saved."""
    if saved(node, "running_mean") is None:
        return False
    first, second = saved(node, "result1"), saved(node, "result1")
    return bool(first.data_ptr() != second.data_ptr())
