"""Size and direction of the gradients at a layer's ends."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gradlens.history.view import View
from gradlens.quantities.consecutive import Consecutive, geometry, mean_correlation
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.signals.predicates import is_no_activation
from gradlens.signals.reductions import Copies, Norms, Size
from gradlens.signals.selection import Selection
from gradlens.signals.signal import Signal


@dataclass(eq=False)
class _SignalGeometry(LayerQuantity, ABC):
    normalize: bool = False
    correlation: bool = True
    # Norms and correlations don't depend on which axis is that of the features.
    channel_last: bool | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduction = Copies() if self.correlation else Size()

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._steps = Consecutive()

    def layer_value(self, layer: str, module: nn.Module, seen: Tensor | Norms) -> dict[str, Any]:
        if isinstance(seen, Tensor):
            return geometry(layer, seen, self.normalize, self._steps)
        size = seen.norm / max(seen.elements, 1) ** 0.5 if self.normalize else seen.norm
        return {"rms" if self.normalize else "norm": size}

    def summary(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        return mean_correlation(layers)

    def all_seen(self) -> None:
        self._steps.end_step()


class OutputGradientGeometry(_SignalGeometry):
    """‖∂L/∂out‖₂ of each layer, and how it correlates with that of the step tracked before.

    For each layer, ``"norm"`` is that of the gradient at the whole output, or with ``normalize``
    ``"rms"`` the root mean square of its elements. ``"correlation"`` is ⟨a, b⟩/(‖a‖·‖b‖) of the
    gradients a and b at two consecutive steps, a NaN with its reason where there is none: at the
    first step, after a batch of another size, or if one of the two is zero. For it, the gradients
    of one step are kept until the next one; without ``correlation`` nothing is. Besides, there is
    the mean correlation over layers. By default it looks at all layers but activations.
    """

    signal = Signal.OUTPUT_GRADIENT
    default_layers = Selection((is_no_activation,))
    view = View("Output gradient", group="layers", yscale="log", label="‖∂L/∂output‖")


class InputGradientGeometry(_SignalGeometry):
    """‖∂L/∂in‖₂ of each layer, and its correlation: as ``OutputGradientGeometry``.

    It is the whole gradient at the tensor that goes into the layer, whatever else uses it: that of
    a residual branch is part of it.
    """

    signal = Signal.INPUT_GRADIENT
    default_layers = Selection((is_no_activation,))
    view = View("Input gradient", group="layers", yscale="log", label="‖∂L/∂input‖")
