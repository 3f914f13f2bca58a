"""cockpit's updates of optimizers, computed from gradients: gradlens reads those that were made."""

from typing import Any

from gradlens.compat.cockpit.replaced import replaced

REPLACED = {"ComputeStep": "gradlens.quantities.UpdateQuantity (docs/own-quantity.rst)"}
"""Names of the module, with what takes their places."""


def __getattr__(name: str) -> Any:
    raise replaced(__name__, name, REPLACED)
