"""What the callbacks of both trainers need: the backward pass to track, and the latest numbers."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch.utils.data import Sampler

from gradlens.history.histograms import Histogram
from gradlens.messages import GradlensWarning
from gradlens.sinks.sink import Sink

HOW_TO_PASS = "by context_arguments of a CockpitCallback of your own"
"""What messages add behind "to the context"."""


@contextmanager
def arguments_of_callback() -> Iterator[None]:
    """A context in which exceptions about what a context needs say where a callback gives it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error} ({HOW_TO_PASS})") from error


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


class RecordedSampler(Sampler[int]):
    """A data loader's sampler, which keeps the numbers that it has given until they are taken.

    All else is the sampler's own. A data loader may be several batches ahead of the training.
    Numbers of an epoch are unknown if batches of it are ``skipped``.
    """

    def __init__(self, sampler: Sampler[int] | Iterable[int], skipped: bool = False) -> None:
        self.sampler = sampler
        self._epochs_to_skip = int(skipped)
        self._given: deque[int] = deque()

    def __iter__(self) -> Iterator[int]:
        self._given.clear()
        is_known = not self._epochs_to_skip
        self._epochs_to_skip = 0
        for number in self.sampler:
            if is_known:
                self._given.append(number)
            yield number

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # of a copy that isn't complete
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def take(self, count: int) -> list[int]:
        """The numbers of the next batch, which has at most ``count`` samples."""
        return [self._given.popleft() for _ in range(min(count, len(self._given)))]


SEVERAL = (
    "gradlens: a batch has several backward passes, of which the first one alone is tracked: pass "
    "its number to the callback to track another one (backward_pass=1), or backward_pass=0 to keep "
    "the first one without this warning"
)


@final
class LatestNumbers(Sink):
    """Keeps the latest number of each name until they are taken.

    ``only`` names the series that are kept, without their prefix; all of them without it.
    """

    def __init__(self, only: Collection[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._only = None if only is None else {f"{self.prefix}/{name}" for name in only}
        self._latest: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """The numbers since the last call, by name."""
        found, self._latest = self._latest, {}
        return found

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        kept = scalars.keys() if self._only is None else self._only & scalars.keys()
        self._latest |= {name: scalars[name] for name in kept}

    def note(self, step: int, text: str) -> None:
        """It is no number."""

    def close(self) -> None:
        """What wasn't taken is left."""
