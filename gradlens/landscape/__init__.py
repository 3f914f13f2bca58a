"""Loss landscapes: the loss along one direction or on the plane of two, and figures of it.

``loss_along`` and ``loss_on_plane`` compute the loss of a ``Probe`` around a model's parameters,
which stay as they are. Directions are random ones (``random_direction``), eigenvectors of a
curvature matrix (``eigenvector_directions``), those from one state dict to another
(``direction_between``) and those of a whole training run (``principal_directions``); any other is a
``Direction`` with a tensor for each parameter that moves.
"""

from gradlens.landscape.directions import (
    Direction,
    direction_between,
    eigenvector_directions,
    principal_directions,
    random_direction,
)
from gradlens.landscape.evaluation import loss_along, loss_on_plane
from gradlens.landscape.figures import LossLine, LossPlane

__all__ = ["Direction", "LossLine", "LossPlane", "direction_between", "eigenvector_directions"]
__all__ += ["loss_along", "loss_on_plane", "principal_directions", "random_direction"]


def __dir__() -> list[str]:
    return list(__all__)
