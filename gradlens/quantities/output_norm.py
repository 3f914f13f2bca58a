"""Norms of the inputs and outputs of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.explained import EMPTY
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.signals.reductions import Norms, Size
from gradlens.signals.signal import Signal


@dataclass(eq=False)
class OutputNorm(LayerQuantity):
    """Mean over samples of ‖outₙ‖₂ for each layer, over all features and positions.

    With ``normalize``, it is the mean over samples of the root mean square of their elements.
    """

    signal = Signal.OUTPUT
    reduction = Size()
    view = View("Output norm", group="layers", yscale="log", label="‖output‖")

    normalize: bool = False
    # Norms don't depend on which axis is that of the features.
    channel_last: bool | None = field(default=None, init=False, repr=False)

    def layer_value(self, layer: str, module: nn.Module, reduced: Norms) -> Any:
        if not reduced.count:
            return Undefined(EMPTY)
        return (reduced.sample_rms if self.normalize else reduced.sample_norms) / reduced.count


class InputNorm(LayerQuantity):
    """‖x‖₂ of each layer's whole input, all samples together."""

    signal = Signal.INPUT
    reduction = Size()
    view = View("Input norm", group="layers", yscale="log", label="‖input‖")

    def layer_value(self, layer: str, module: nn.Module, reduced: Norms) -> Tensor:
        return reduced.norm
