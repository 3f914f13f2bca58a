"""The states of a training run, projected on the plane of two directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from gradlens.curvature.products import float64_device
from gradlens.history.lines import Floats
from gradlens.landscape.neighbourhood import Neighbourhood
from gradlens.landscape.states import StateDict, checked
from gradlens.numerics.norms import products_of_pairs

PARALLEL = 1e-6
"""Largest squared sine of the angle between two directions that don't count as a plane.

It is that of a thousandth of a radian, far above rounding in single precision.
"""

NO_PLANE = "the two directions are parallel in the space of the parameters, so they span no plane"


def projections(
    model: nn.Module, around: Neighbourhood, states: Sequence[StateDict]
) -> tuple[Floats, float]:
    """Coordinates ``[T, 2]`` of the states' projections, and the share of the plane.

    Projections are orthogonal in the space of all parameters; buffers are left out. The share is
    that of the squared distances from the origin that is in the plane, and NaN without distances.
    Raises ``ValueError`` for states that aren't of the model, and for parallel directions.
    """
    like = model.state_dict()
    found = [checked(s, like, f"trajectory[{i}]", "the model") for i, s in enumerate(states)]
    gram = np.zeros((2 + len(found),) * 2)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        start = around.start(parameter)
        device = float64_device(start.device)
        start = start.to(device, torch.float64)
        parts = [around.part(parameter, direction) for direction in range(2)]
        rows = [start.new_zeros(start.shape) if p is None else p.to(start) for p in parts]
        rows += [state[name].to(start) - start for state in found]
        gram += products_of_pairs(torch.stack(rows).flatten(1)).cpu().numpy()
    plane, moves = gram[:2, :2], gram[:2, 2:]
    if np.linalg.det(plane) <= PARALLEL * plane[0, 0] * plane[1, 1]:
        raise ValueError(NO_PLANE)
    path = np.linalg.solve(plane, moves).T.astype(np.float64)
    distances = float(gram.diagonal()[2:].sum())
    return path, float((path * moves.T).sum()) / distances if distances else float("nan")
