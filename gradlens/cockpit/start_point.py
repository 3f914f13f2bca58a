"""The parameters at the start of an update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.graph.hooks import OptimizerFollower
from gradlens.history.coverage import few
from gradlens.numerics.checksums import differing, sums_of_bits
from gradlens.numerics.shards import is_distributed
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.held import not_held

LARGE = 64 * 2**20
"""Bytes of parameters above which comparing them twice costs less than memory for one more copy."""


class StartPoint(OptimizerFollower):
    """Copies of the parameters as they are when a step's context is entered.

    Large ones are copied when the context is left, since the update before is freed by then, or
    when the optimizer is about to step inside the context. Meanwhile only the optimizer may change
    them: if something else has, ``copies`` raise ``UnavailableError``.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None, at_once: bool
    ) -> None:
        self._parameters = parameters
        self._copies: dict[str, Tensor] | None = None
        self._sums: Mapping[str, Tensor] = {}
        self.changed: tuple[str, ...] = ()
        if at_once or optimizer is None or not _can_wait(parameters, optimizer):
            self._copy()
            return
        self._sums = sums_of_bits(parameters)
        self.follow(optimizer)

    def finish(self) -> None:
        """Copy the parameters if that isn't done yet: the context is left."""
        self._copy()
        self.close()

    @property
    def copies(self) -> dict[str, Tensor]:
        """The copies by name."""
        if self._copies is None or self.changed:
            raise UnavailableError(CHANGED_INSIDE.format(names=few(self.changed)))
        return self._copies

    def before_step(self) -> None:
        """The optimizer is about to change the parameters: copy them."""
        self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        if self._copies is None:
            if self._sums:
                self.changed = tuple(differing(self._sums, sums_of_bits(self._parameters)))
            self._copies = {name: p.clone() for name, p in self._parameters.items()}


def _can_wait(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> bool:
    size = sum(p.numel() * p.dtype.itemsize for p in parameters.values())
    apart = any(map(is_distributed, parameters.values()))
    return size > LARGE and not apart and not not_held(optimizer, parameters)


CHANGED_INSIDE = (
    "{names} were changed inside the context, and not by the optimizer that was passed, so that "
    "the start of the update isn't known; it is from the next step on"
)
