"""Lines as the columns of a pandas ``DataFrame``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradlens.history.lines import Line

if TYPE_CHECKING:
    import pandas


def frame(columns: Mapping[str, Line], steps: Sequence[int]) -> pandas.DataFrame:
    """A row for each step and a column for each line, NaN where it has no number."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("a DataFrame needs pandas: pip install 'gradlens[pandas]'") from error
    index = pandas.Index(steps, dtype=np.int64, name="step")
    found = {
        name: pandas.Series(line.values, line.steps.astype(np.int64))
        for name, line in columns.items()
    }
    return pandas.DataFrame(found, index)
