"""Half the width of a confidence interval, in standard errors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit


def t_quantile(degrees_of_freedom: float | NDArray[np.float64], level: float) -> NDArray[Any]:
    """What Student's t stays within, in absolute value, with probability ``level``.

    Of the shape of the degrees of freedom. Raises ``ValueError`` for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"the level is {level}: pass a probability between 0 and 1")
    return np.asarray(stdtrit(degrees_of_freedom, (1 + level) / 2))
