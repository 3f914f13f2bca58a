"""Curvature and per-sample gradients of PyTorch networks, seen from inside the backward pass."""

from gradlens import quantities, recorders, schedules, signals
from gradlens._version import __version__
from gradlens.aggregation import Aggregate
from gradlens.cockpit import Cockpit
from gradlens.history import History
from gradlens.individual.context import individual_gradients
from gradlens.individual.extension import IndividualGradients
from gradlens.individual.tap import extend
from gradlens.plotter import CockpitPlotter
from gradlens.presets import configuration
from gradlens.taiyi import from_taiyi
from gradlens.undefined import Undefined
from gradlens.view import View

__all__ = [
    "Aggregate",
    "Cockpit",
    "CockpitPlotter",
    "History",
    "IndividualGradients",
    "Undefined",
    "View",
    "__version__",
    "configuration",
    "extend",
    "from_taiyi",
    "individual_gradients",
    "quantities",
    "recorders",
    "schedules",
    "signals",
]
