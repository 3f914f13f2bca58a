"""The modules and names of cockpit-for-pytorch 1.0.2, for programs that were written for it.

A program runs once ``cockpit`` is ``gradlens.compat.cockpit`` in its imports. What differs is in
``docs/migrating.rst``. New programs use ``gradlens`` itself.
"""

import sys
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

from gradlens._version import __version__
from gradlens.compat.cockpit import quantities
from gradlens.compat.cockpit.cockpit import Cockpit
from gradlens.compat.cockpit.plotter import CockpitPlotter
from gradlens.compat.cockpit.quantities import CLASSES, NAMES, OWN_QUANTITY, module_of
from gradlens.quantities import Quantity, SingleStepQuantity
from gradlens.quantities.bin_adaptation import BinAdaptation, GradAbsMax, NoAdaptation, ParamAbsMax

__all__ = ["Cockpit", "CockpitPlotter", "__version__", "quantities"]

_PRESENT: Mapping[str, Mapping[str, Any]] = {
    **{
        f"quantities.{module}": {name: CLASSES[name] for name in names}
        for module, names in groupby(NAMES, module_of)
    },
    "quantities.quantity": {"Quantity": Quantity, "SingleStepQuantity": SingleStepQuantity},
    "quantities.bin_adaptation": {
        each.__name__: each for each in (BinAdaptation, GradAbsMax, NoAdaptation, ParamAbsMax)
    },
}
"""Names by module."""

_REPLACED: Mapping[str, str] = {
    "instruments": "gradlens.instruments, as HessMaxEVInstrument().plot(cockpit.history, ax)",
    "context": "step.samples, step.individual_losses, step.loss and step.optimizer in a quantity's "
    "compute(step)",
    "quantities.hooks": "a reduction of your own (docs/own-quantity.rst)",
    "quantities.quantity": f"gradlens.quantities.UpdateQuantity: {OWN_QUANTITY}",
    "quantities.utils_hists": "numpy.histogramdd, or the counts of GradHist1d and GradHist2d",
    "quantities.utils_quantities": f"torch's own functions: {OWN_QUANTITY}",
    "quantities.utils_transforms": "reductions: gradients have no grad_batch_transforms "
    "(docs/own-quantity.rst)",
    "utils.optim": "gradlens.quantities.UpdateQuantity (docs/own-quantity.rst)",
}
"""What takes the places of the names that modules of cockpit have and these don't."""


def _missing(module: str, instead: str, name: str) -> Any:
    """Raise what a module raises for a name that it doesn't have.

    Where something takes the places of its names, it is an ``ImportError`` that says what: Python
    would replace the text of an ``AttributeError``.
    """
    if instead and not name.startswith("__"):  # which Python itself looks for
        raise ImportError(f"{module}.{name} isn't there: use {instead}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


# These modules have no files, and are imported nevertheless.
for _name in {**_PRESENT, **_REPLACED}:
    _module = ModuleType(f"{__name__}.{_name}")
    vars(_module).update(_PRESENT.get(_name, {}))
    vars(_module)["__getattr__"] = partial(_missing, _module.__name__, _REPLACED.get(_name, ""))
    sys.modules[_module.__name__] = _module
