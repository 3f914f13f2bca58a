"""The factor that a gradient scaler has left in gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.torch_private import fused_scale, scaler_stages, unscaled_optimizers


class GradientScale:
    """The factor of gradients by a ``GradScaler``, from a context's beginning on; 1 without it.

    Inside the context, ``unscale_`` and ``step`` divide it off, and ``update`` changes the
    scaler's own.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler | None = None, optimizer: Optimizer | None = None
    ) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizer = optimizer
        self._stages: Mapping[int, Mapping[str, Any]] = {}
        self._before: set[int] = set()
        if self._scaler is not None:
            self._stages = scaler_stages(self._scaler)
            self._before = unscaled_optimizers(self._stages)

    @cached_property
    def of_backward(self) -> float:
        """The factor of the backward pass, as it is when this is first read."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def after_step(self) -> tuple[GradientScale, Tensor | None]:
        """That of gradients right after the optimizer's step, and whether this was left out.

        A fused optimizer divides gradients itself, or leaves them as they are, and its state, if
        one of them isn't finite. Without such an optimizer, there is no second value.
        """
        divisor, left_out = (None, None) if self._scaler is None else fused_scale(self._optimizer)
        return (self if divisor is None else GradientScale()), left_out

    def of(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """The factor that ``p.grad`` of each parameter has now.

        Optimizers that weren't passed have the other parameters: it isn't known which of them, so
        these are taken for unscaled if the gradients of all these optimizers are.
        """
        if self._scaler is None:
            return dict.fromkeys(parameters, 1.0)
        unscaled = unscaled_optimizers(self._stages) - self._before
        others = self._stages.keys() - self._before - {id(self._optimizer)}
        are_unscaled = {
            True: id(self._optimizer) in unscaled,
            False: bool(others) and others <= unscaled,
        }
        return {
            name: 1.0 if are_unscaled[id(parameter) in self._held] else self.of_backward
            for name, parameter in parameters.items()
        }

    @cached_property
    def _held(self) -> frozenset[int]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return frozenset(id(parameter) for group in groups for parameter in group["params"])
