"""Finds the tensor that ``backward`` is called on, where the loss isn't passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class BackwardCall(TorchFunctionMode):
    """A context that calls ``begin`` with the tensor whose ``backward`` is called, before it runs.

    Calls of ``torch.autograd.backward`` and ``torch.autograd.grad`` are not intercepted.
    """

    def __init__(self, begin: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._begin = begin

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward and args[0].numel() == 1:
            self._begin(args[0])
        return func(*args, **(kwargs or {}))
