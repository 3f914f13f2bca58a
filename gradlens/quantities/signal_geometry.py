"""Norms of the inputs and outputs of layers, and of the gradients at them, with correlations."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.consecutive import ComparesSteps, geometries, mean_correlation
from gradlens.quantities.explained import EMPTY
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.signals.predicates import is_no_activation
from gradlens.signals.reductions import Copies, Norms, Size
from gradlens.signals.selection import Selection
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


@dataclass(eq=False)
class _SignalGeometry(ComparesSteps, LayerQuantity, ABC):
    normalize: bool = False
    correlation: bool = True
    # Norms and correlations don't depend on which axis is that of the features.
    channel_last: bool | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduction = Copies() if self.correlation else Size()

    def layer_value(self, layer: str, module: nn.Module, reduced: Tensor | Norms) -> dict[str, Any]:
        if isinstance(reduced, Tensor):
            return geometries({layer: reduced}, self.normalize, self.steps)[layer]
        size = reduced.norm / max(reduced.elements, 1) ** 0.5 if self.normalize else reduced.norm
        return {"rms" if self.normalize else "norm": size}

    def summary(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        return mean_correlation(layers)


class OutputGradientGeometry(_SignalGeometry):
    """‖∂L/∂out‖₂ of each layer, and its correlation with that of the step tracked before.

    For each layer, ``"norm"`` is that of the gradient at the whole output, or with ``normalize``
    ``"rms"``, the root mean square of its elements. ``"correlation"`` is ⟨a, b⟩/(‖a‖·‖b‖) of the
    gradients a and b at two consecutive tracked steps, or a NaN with the reason: at the first step,
    after a batch of another size, or if one of the two is zero. It needs the gradients of one step
    to be kept until the next one; ``correlation=False`` leaves it out. A record also has the mean
    ``"correlation"`` over layers. By default, all layers but activations have values.
    """

    signal = Signal.OUTPUT_GRADIENT
    default_layers = Selection((is_no_activation,))
    view = View("Output gradient", group="layers", yscale="log", label="‖∂L/∂output‖")


class InputGradientGeometry(_SignalGeometry):
    """‖∂L/∂in‖₂ of each layer, and its correlation, as in ``OutputGradientGeometry``.

    It is the whole gradient at the layer's input, including the parts from other uses of this
    tensor, such as a residual branch.
    """

    signal = Signal.INPUT_GRADIENT
    default_layers = Selection((is_no_activation,))
    view = View("Input gradient", group="layers", yscale="log", label="‖∂L/∂input‖")
