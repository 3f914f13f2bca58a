"""Reading the tensors that nodes have saved, whoever stores them.

Hooks may store saved tensors elsewhere, or compute them again. Activation checkpoints recompute a
region where a backward pass first reads something in it, and hand out each tensor once in a pass.
What gradlens reads there is handed back, so that a region is recomputed as often as without
gradlens. Hooks that aren't torch's are the user's own, and never called by gradlens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradlens.graph.kinds import Node, kind, kind_of
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import (
    in_backward_pass,
    is_saved_elsewhere,
    recomputation_key,
    saved,
    saved_tensors,
    stored_tensors,
)


def why_not_to_read(node: Node) -> str:
    """Why what a node has saved can't be read now; empty if it can."""
    return reading(node)[0]


def reading(node: Node) -> tuple[str, bool]:
    """Why what a node has saved can't be read now, if so, and whether hooks store some of it."""
    tensors, is_stored_by_hooks = saved_tensors(node)
    for each in tensors:
        if each.layout == torch.strided and each.numel() and not each.untyped_storage().size():
            return SHARDED, is_stored_by_hooks
    key = recomputation_key() if is_stored_by_hooks else None
    for one in stored_tensors(node) if is_stored_by_hooks else ():
        if one.frame is None:
            return STORED_BY_HOOKS, True
        if key is None or (one.is_recomputed_once and not in_backward_pass()):
            return CHECKPOINTED, True
    return "", is_stored_by_hooks


def read_saved(node: Node, name: str) -> Tensor | None:
    """A tensor that a node has saved, if there is one; ``UnavailableError`` if it can't be read."""
    with read_again(node, name) if is_saved_elsewhere(node) else nullcontext():
        tensor: Tensor | None = saved(node, name, None)
    return tensor


@contextmanager
def read_again(node: Node, *names: str) -> Iterator[None]:
    """A context in which what a node has saved may be read once, and once more afterwards.

    That is all of it, or what it has saved under some ``names``. ``UnavailableError`` if it can't
    be read now.
    """
    if not is_saved_elsewhere(node):
        yield
        return
    reason = why_not_to_read(node)
    if reason:
        raise UnavailableError(reason)
    key = recomputation_key()
    held = [one for one in stored_tensors(node, *names) if one.frame is not None]
    tensors = [one.unpack(one.stored) for one in held]
    for one, tensor in zip(held, tensors, strict=True):
        one.hand_back(key, tensor)
    try:
        yield
    finally:
        for one, tensor in zip(held, tensors, strict=True):
            one.hand_back(key, tensor)


def data_of(node: Node) -> Tensor | None:
    """The data that a node has saved, where its kind has some that can be read."""
    name = kind_of(kind(node)).data
    if not name or why_not_to_read(node):
        return None
    read = read_saved(node, name)
    is_plain = read is not None and read.layout == torch.strided and not isinstance(read, DTensor)
    return read if is_plain else None


def recompute(node: Node) -> None:
    """Let checkpoints compute what a node has saved, as the user's pass that reaches it will.

    Not in gradlens's own work, so that the user's dispatch modes see the operations. What they
    raise, the user's pass raises, too.
    """
    with suppress(Exception):
        if is_saved_elsewhere(node):
            with read_again(node):
                pass


STORED_BY_HOOKS = (
    "hooks of torch.autograd.graph.saved_tensors_hooks store what it needs, and gradlens doesn't "
    "call hooks of others: leave its layer out of their context"
)
SHARDED = "fully_shard has freed the parameters that it needs until the layer's own backward pass"
CHECKPOINTED = (
    "an activation checkpoint would have to be recomputed once more for it: leave its layer out of "
    "the checkpoint"
)
