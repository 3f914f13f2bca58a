"""The size of what goes into layers and comes out of them."""

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
    """Mean over samples of ‖out_n‖₂ for each layer, all features and positions flattened.

    With ``normalize``, it is the root mean square of each sample's elements instead.
    """

    signal = Signal.OUTPUT
    reduction = Size()
    view = View("Output norm", group="layers", yscale="log", label="‖output‖")

    normalize: bool = False
    # Norms don't depend on which axis is that of the features.
    channel_last: bool | None = field(default=None, init=False, repr=False)

    def layer_value(self, layer: str, module: nn.Module, seen: Norms) -> Any:
        if not seen.count:
            return Undefined(EMPTY)
        return (seen.sample_rms if self.normalize else seen.sample_norms) / seen.count


class InputNorm(LayerQuantity):
    """‖x‖₂ of each layer's whole input, all samples together."""

    signal = Signal.INPUT
    reduction = Size()
    view = View("Input norm", group="layers", yscale="log", label="‖input‖")

    def layer_value(self, layer: str, module: nn.Module, seen: Norms) -> Tensor:
        return seen.norm
