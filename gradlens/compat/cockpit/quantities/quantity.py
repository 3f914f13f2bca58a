"""Base classes of cockpit's quantities; those of a quantity of one's own have another interface."""

from typing import Any

from gradlens.compat.cockpit.output import OWN_QUANTITY
from gradlens.compat.cockpit.replaced import replaced
from gradlens.quantities import Quantity, SingleStepQuantity

__all__ = ["Quantity", "SingleStepQuantity"]

REPLACED = {
    "ByproductQuantity": f"gradlens's own classes: {OWN_QUANTITY}",
    "TwoStepQuantity": "gradlens.quantities.UpdateQuantity (docs/own-quantity.rst)",
}
"""Names of the module, with what takes their places."""


def __getattr__(name: str) -> Any:
    raise replaced(__name__, name, REPLACED)
