"""Curvature and per-sample gradients of PyTorch networks, seen from inside the backward pass.

Names are imported when they are first used (PEP 562), so that plotting recorded runs and the
command line don't wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradlens._version import __version__

if TYPE_CHECKING:
    from gradlens import (
        curvature,
        instruments,
        landscape,
        quantities,
        recorders,
        reductions,
        schedules,
        signals,
        sinks,
    )
    from gradlens.cockpit.aggregation import Aggregate
    from gradlens.cockpit.cockpit import Cockpit
    from gradlens.compat.taiyi import from_taiyi
    from gradlens.coordinates.check import coordinate_check
    from gradlens.curvature.influence import influence
    from gradlens.diagnosis.diagnose import diagnose
    from gradlens.diagnosis.rule import Rule, Sign
    from gradlens.gradients.per_sample_gradients import per_sample_gradients
    from gradlens.graph.layer_rules import register_layer_rule
    from gradlens.graph.model_calls import extend
    from gradlens.history.finding import Finding
    from gradlens.history.history import History
    from gradlens.history.undefined import Undefined
    from gradlens.history.view import View
    from gradlens.messages import GradlensWarning
    from gradlens.plotting.loading import load_run
    from gradlens.plotting.plotter import CockpitPlotter
    from gradlens.quantities.presets import configuration
    from gradlens.quantities.step import Step

__all__ = [
    "Aggregate",
    "Cockpit",
    "CockpitPlotter",
    "Finding",
    "GradlensWarning",
    "History",
    "Rule",
    "Sign",
    "Step",
    "Undefined",
    "View",
    "__version__",
    "configuration",
    "coordinate_check",
    "curvature",
    "diagnose",
    "extend",
    "from_taiyi",
    "influence",
    "instruments",
    "landscape",
    "load_run",
    "per_sample_gradients",
    "quantities",
    "recorders",
    "reductions",
    "register_layer_rule",
    "schedules",
    "signals",
    "sinks",
]

_DEFINED_IN = {
    "Aggregate": "gradlens.cockpit.aggregation",
    "Cockpit": "gradlens.cockpit.cockpit",
    "CockpitPlotter": "gradlens.plotting.plotter",
    "Finding": "gradlens.history.finding",
    "GradlensWarning": "gradlens.messages",
    "History": "gradlens.history.history",
    "Rule": "gradlens.diagnosis.rule",
    "Sign": "gradlens.diagnosis.rule",
    "Step": "gradlens.quantities.step",
    "Undefined": "gradlens.history.undefined",
    "View": "gradlens.history.view",
    "configuration": "gradlens.quantities.presets",
    "coordinate_check": "gradlens.coordinates.check",
    "diagnose": "gradlens.diagnosis.diagnose",
    "extend": "gradlens.graph.model_calls",
    "from_taiyi": "gradlens.compat.taiyi",
    "influence": "gradlens.curvature.influence",
    "load_run": "gradlens.plotting.loading",
    "per_sample_gradients": "gradlens.gradients.per_sample_gradients",
    "register_layer_rule": "gradlens.graph.layer_rules",
}
"""The module that defines each public name; the other public names are modules themselves."""


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        return getattr(import_module(_DEFINED_IN[name]), name)
    if name in __all__:
        return import_module(f"gradlens.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
