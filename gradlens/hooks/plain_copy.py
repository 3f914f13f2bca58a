"""Copies of modules without hooks, for calling a layer once more."""

from __future__ import annotations

import copy
from collections import OrderedDict

from torch import nn

from gradlens.hooks.torch_private import forward_pre_hooks, hook_tables


class NotPlainError(Exception):
    """A module can't be called once more, since its output doesn't depend on its class alone."""


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, has no hooks, and doesn't change the module's state.

    ``NotPlainError`` if its output might be another one than the module's own.
    """
    if "forward" in vars(module):
        raise NotPlainError("its forward was replaced on the instance")
    if forward_pre_hooks(module):
        raise NotPlainError("it has forward pre-hooks, which may set what it computes with")
    clone = copy.copy(module)
    state = vars(clone)
    for name, value in list(state.items()):
        if isinstance(value, (dict, list, set)):
            state[name] = copy.copy(value)
    for name in hook_tables(clone):
        state[name] = OrderedDict()
    return clone
