"""Modules without hooks, to be run once more."""

from __future__ import annotations

import copy
from collections import OrderedDict

from torch import nn


class NotPlainError(Exception):
    """Why a module can't be run once more: it doesn't compute by its class alone."""


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, calls no hook and keeps its state to itself.

    ``NotPlainError`` if the module doesn't compute by its class alone.
    """
    if "forward" in vars(module):
        raise NotPlainError("its forward was replaced on the instance")
    if module._forward_pre_hooks:
        raise NotPlainError("it has forward pre-hooks, which may set what it computes with")
    clone = copy.copy(module)
    state = vars(clone)
    for name, value in list(state.items()):
        if name.endswith("_hooks") or "_hooks_" in name:
            state[name] = OrderedDict()
        elif isinstance(value, (dict, list, set)):
            state[name] = copy.copy(value)
    return clone
