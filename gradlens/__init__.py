"""Curvature and per-sample gradients of PyTorch networks, seen from inside the backward pass."""

from gradlens import quantities, recorders, schedules, signals
from gradlens._version import __version__
from gradlens.cockpit.aggregation import Aggregate
from gradlens.cockpit.cockpit import Cockpit
from gradlens.compat.taiyi import from_taiyi
from gradlens.history.history import History
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.hooks.layer_calls import extend
from gradlens.per_sample.context import per_sample_gradients
from gradlens.per_sample.extension import PerSampleGradients
from gradlens.per_sample.layer_rules import register_layer_rule
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.quantities.presets import configuration

__all__ = [
    "Aggregate",
    "Cockpit",
    "CockpitPlotter",
    "History",
    "PerSampleGradients",
    "Undefined",
    "View",
    "__version__",
    "configuration",
    "extend",
    "from_taiyi",
    "per_sample_gradients",
    "quantities",
    "recorders",
    "register_layer_rule",
    "schedules",
    "signals",
]
