"""What weights multiply the size of their inputs by, at the start of a run."""

from __future__ import annotations

import math

import numpy as np

from gradlens.diagnosis.evidence import Evidence


def gains(evidence: Evidence) -> dict[str, float]:
    """rms(W)·√fan-in of each weight that is used as it is, if the first step was recorded.

    PyTorch's defaults have 0.58 to 0.71, and He's initialisation has 1.41. Parameters of other
    names, such as tables of positions, are added to what flows through the network.
    """
    sizes = evidence.by_name("weight_rms")
    shapes = evidence.history.parameters
    found = {}
    for name in evidence.weights:
        layer = evidence.layer_of(name)
        known = sizes.values.get(name, np.zeros(0))
        if (
            len(known)
            and sizes.steps[0] == evidence.loss.steps[:1].sum()
            and is_weight(name)
            and not _is_of_inputs(name)
            and name not in evidence.setup.transformed
        ):
            fan_in = (layer.fan_in if layer is not None else 0) or math.prod(shapes[name][1:])
            found[name] = float(known[0]) * math.sqrt(fan_in)
    return found


def is_weight(name: str) -> bool:
    """Whether a parameter has the name of one that inputs are multiplied with."""
    return "weight" in name.rpartition(".")[2]


def _is_of_inputs(name: str) -> bool:
    """Whether it is an input weight of a recurrent layer.

    PyTorch draws these by the number of hidden units rather than by that of inputs.
    """
    return name.rpartition(".")[2].startswith("weight_ih")
