"""cockpit's gauges, which draw on a part of a grid: instruments take their place."""

from functools import partial
from typing import Any

from gradlens.compat.cockpit.replaced import add_modules, replaced

REPLACED = {
    f"{gauge}_gauge": f"gradlens.instruments.{instrument}Instrument().plot(cockpit.history, ax)"
    for gauge, instrument in {
        "alpha": "Alpha",
        "cabs": "BatchSize",
        "distance": "Distance",
        "early_stopping": "EarlyStopping",
        "grad_norm": "GradNorm",
        "gradient_tests": "GradientTests",
        "histogram_1d": "Histogram1d",
        "histogram_2d": "Histogram2d",
        "hyperparameter": "LearningRate",
        "max_ev": "HessMaxEV",
        "mean_gsnr": "MeanGSNR",
        "performance": "Losses",
        "tic": "TIC",
        "trace": "HessTrace",
    }.items()
}
"""Names of the module, with what takes their places."""


def __getattr__(name: str) -> Any:
    raise replaced(__name__, name, REPLACED)


def _of_module(module: str, name: str) -> Any:
    raise replaced(f"{__name__}.{module}", name, REPLACED)


add_modules(__name__, {module: partial(_of_module, module) for module in REPLACED})
