"""Which of a batch's backward passes is tracked, where a framework runs them."""

from __future__ import annotations

import warnings

from gradlens.messages import GradlensWarning


class BackwardPasses:
    """Counts the backward passes of each batch, of which the one with number ``chosen`` is tracked.

    If none is ``chosen``, that is the first one, and a warning says so when a second one comes.
    """

    def __init__(self, chosen: int | None) -> None:
        self._chosen = chosen or 0
        self._warns = chosen is None
        self._latest = -1

    def begin_batch(self) -> None:
        """The next backward pass is the first one of a batch."""
        self._latest = -1

    def begin(self) -> bool:
        """A backward pass begins; whether it is tracked."""
        self._latest += 1
        if self._latest and self._warns:
            self._warns = False
            warnings.warn(SEVERAL, GradlensWarning, stacklevel=2)
        return self.is_tracked

    @property
    def is_tracked(self) -> bool:
        """Whether the latest backward pass of the batch is the one that is tracked."""
        return self._latest == self._chosen


SEVERAL = (
    "gradlens: a batch has several backward passes, of which the first one alone is tracked: pass "
    "its number to the callback to track another one (backward_pass=1), or backward_pass=0 to keep "
    "the first one without this warning"
)
