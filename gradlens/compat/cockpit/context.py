"""cockpit's functions that read what the latest context was given: they have no counterpart.

gradlens has no global state: a quantity gets the step.
"""

from typing import Any

from gradlens.compat.cockpit.replaced import replaced

REPLACED = {
    "get_batch_size": "step.samples in a quantity's compute(step)",
    "get_individual_losses": "step.individual_losses in a quantity's compute(step)",
    "get_loss": "step.loss in a quantity's compute(step)",
    "get_optimizer": "step.optimizer in a quantity's compute(step)",
}
"""Names of the module, with what takes their places."""


def __getattr__(name: str) -> Any:
    raise replaced(__name__, name, REPLACED)
