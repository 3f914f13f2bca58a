"""Reading the tensors that nodes have saved, also inside activation checkpoints.

A checkpoint that isn't reentrant recomputes the tensors that its nodes have saved when they are
read, and returns each of them once in a backward pass. Inside another ``GraphExecGroup``, the same
region can be recomputed once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import nn

from gradlens.hooks.node_kinds import Node
from gradlens.hooks.torch_private import checkpoint_group, saved, saved_names, version
from gradlens.per_sample.labelling.graph import is_python_function


def recomputation() -> AbstractContextManager[Any]:
    """A context in which each checkpointed region is recomputed once, for all reads in it.

    It can be entered several times.
    """
    return checkpoint_group() or nullcontext()


def reading_changes_buffers(nodes: Iterable[Node], model: nn.Module | None) -> bool:
    """Whether a checkpoint changes the model's buffers when it recomputes what nodes have saved.

    Normalisation updates its running statistics again, and spectral norm its singular vectors.
    """
    if model is None or next(model.buffers(), None) is None:
        return False
    before = _states_of_buffers(model)
    with recomputation():
        for node in nodes:
            _read(node)
    return _states_of_buffers(model) != before


def _read(node: Node) -> None:
    # What is missing or was released changes nothing; whoever needs it gives the reason.
    with suppress(Exception):
        if is_python_function(node):
            _ = node.saved_tensors
        else:
            type_: Any = type(node)
            for name in saved_names(type_)[1]:
                saved(node, name)


def _states_of_buffers(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), version(buffer)) for buffer in model.buffers()]
