"""Active and dead units of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.host import on_host
from gradlens.quantities.explained import EMPTY, NO_FEATURES
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.signals.predicates import is_activation, is_affine
from gradlens.signals.reductions import Active, FeatureCounts, Maxima
from gradlens.signals.selection import Selection
from gradlens.signals.signal import Signal

NO_OUTPUT = "the batch is empty, or all of its outputs are -inf"


@dataclass(eq=False)
class OutputActivation(LayerQuantity):
    """Share of active outputs and of dead units of each layer, by default of activations.

    A unit is a feature, or a channel of a convolution; an output is active if its absolute value
    is above ``threshold``. A unit's rate is the share of samples and positions at which it is
    active. For each layer, ``"active"`` is the mean rate, ``"dead"`` the share of units whose rate
    is zero, ``"least"`` the smallest rate, and ``"least_unit"`` the index of its unit. With
    ``units``, ``"dead_units"`` are the indices of all units whose rate is zero. A record also has
    the means of the first two over layers, and ``"worst"``, the largest share of dead units in any
    layer.
    """

    signal = Signal.OUTPUT
    default_layers = Selection((is_activation,))
    view = View("Active and dead units", group="layers", label="share")

    threshold: float = 1e-8  # as in monitorch
    _: KW_ONLY
    units: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduction = Active(self.threshold)

    def layer_value(self, layer: str, module: nn.Module, reduced: FeatureCounts) -> Any:
        if not reduced.count:
            return Undefined(EMPTY)
        if not reduced.active.numel():
            return Undefined(NO_FEATURES)
        rates = reduced.active / reduced.count
        found = activation(rates)
        if not self.units or isinstance(found, float):
            return found
        return found | {"dead_units": on_host(rates == 0).nonzero()[:, 0].numpy()}

    def summary(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        return over_parts(layers)


def activation(rates: Tensor) -> dict[str, float] | float:
    """Statistics of units that are active at these ``rates`` ``[F]``, in float64."""
    rates = on_host(rates)
    if bool(rates.isnan().any()):
        return math.nan
    least, unit = rates.min(0)
    return {
        "active": float(rates.mean()),
        "dead": float((rates == 0).double().mean()),
        "least": float(least),
        "least_unit": int(unit),
    }


def over_parts(parts: Mapping[str, Any]) -> dict[str, float]:
    """Statistics over all layers, or all parameters, that have values."""
    known = [part for part in parts.values() if isinstance(part, Mapping)]
    if not known:
        return {}
    dead = [float(part["dead"]) for part in known]
    return {
        "active": sum(float(part["active"]) for part in known) / len(known),
        "dead": sum(dead) / len(dead),
        "worst": max(dead),
    }


@dataclass(eq=False)
class DeadNeurons(LayerQuantity):
    """Share of each layer's features whose outputs are all ≤ ``threshold``, by default all ≤ 0.

    It is meant for layers in front of a ReLU, whose output is zero for such a feature.
    """

    signal = Signal.OUTPUT
    reduction = Maxima()
    default_layers = Selection((is_affine,))
    view = View("Dead neurons", group="layers", label="share of features")

    threshold: float = 0.0

    def layer_value(self, layer: str, module: nn.Module, reduced: Tensor) -> float:
        if bool((reduced == -math.inf).all()):
            return Undefined(NO_OUTPUT if reduced.numel() else NO_FEATURES)
        if bool(reduced.isnan().any()):
            return math.nan
        return float((reduced <= self.threshold).double().mean())
