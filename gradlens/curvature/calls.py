"""The calls of layers and loss modules that a loss came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from backpack import backpack
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from gradlens.hooks.layer_calls import (
    CallListener,
    LayerCall,
    LossExtension,
    listening,
    stored_inputs,
)


@dataclass(frozen=True)
class LossCall:
    """One call of an extended loss module: its inputs, still in the graph, and ∂L/∂output."""

    module: _Loss
    inputs: tuple[Any, ...]
    grad_output: Tensor


class Calls(CallListener):
    """What one backward pass has gone through, as far as it has been extended.

    ``of`` lists the calls of each layer of the model, ``of_losses`` those of loss modules.
    """

    def __init__(self) -> None:
        self.of: dict[nn.Module, list[LayerCall]] = {}
        self.of_losses: list[LossCall] = []

    def receive(self, call: LayerCall) -> None:
        self.of.setdefault(call.module, []).append(call)


@contextmanager
def recording(model: nn.Module | None) -> Iterator[Calls]:
    """Record the calls that backward passes inside the context go through."""
    calls = Calls()
    with ExitStack() as stack:
        stack.enter_context(backpack(_LossCalls(calls), retain_graph=True))
        if model is not None:
            stack.enter_context(listening(model, calls))
        yield calls


class _LossCalls(LossExtension):
    """BackPACK extension that changes nothing; loss modules needn't belong to the model."""

    def __init__(self, calls: Calls) -> None:
        super().__init__("loss_calls")
        self._calls = calls

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        if isinstance(module, _Loss) and g_out[0] is not None:
            call = LossCall(module, stored_inputs(module), g_out[0].detach())
            self._calls.of_losses.append(call)
