"""What receives the records of a run while it is recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from gradlens.history.histograms import Histogram

PREFIX = "gradlens"

HISTOGRAMS_EVERY = 50
"""A histogram at each step makes gigabytes of a long run (wandb#2292 has 6 GB)."""


class Sink(ABC):
    """Receives the numbers, histograms and notes of a run, each with its step.

    Names are ``prefix/series`` or ``prefix/series_part``, in ASCII letters, digits and ``/_-.``.
    ``every`` is the least number of steps between two numbers of the same name, and
    ``histograms_every`` that between two histograms. Numbers and histograms of single parameters
    and layers are those of ``layers``, which are names of parameters, or of modules with all that
    is inside them. ``ValueError`` unless ``every`` and ``histograms_every`` are 1 or more.

    A sink that raises an exception is left out from then on, and a note says so.
    """

    every: int = 1
    histograms_every: int = HISTOGRAMS_EVERY
    layers: tuple[str, ...] = ()
    prefix: str = PREFIX

    def __init__(
        self,
        *,
        every: int = 1,
        histograms_every: int = HISTOGRAMS_EVERY,
        layers: Sequence[str] = (),
        prefix: str = PREFIX,
    ) -> None:
        for name, count in {"every": every, "histograms_every": histograms_every}.items():
            if type(count) is not int or count < 1:
                raise ValueError(f"{name}={count!r}: pass a number of steps, 1 or more")
        self.every = every
        self.histograms_every = histograms_every
        self.layers = (layers,) if isinstance(layers, str) else tuple(layers)
        self.prefix = prefix

    @abstractmethod
    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Take in numbers and histograms of one dimension, by name.

        There may be several records of a step, and one may come after those of later steps: Alpha
        of a step is known when the next one has begun. A number that doesn't exist is left out; one
        that is NaN since training has diverged is not.
        """

    @abstractmethod
    def note(self, step: int, text: str) -> None:
        """Take in a message for the user about a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left; nothing comes after it. Called at the end of the program at last."""


def library(module: str, extra: str) -> Any:
    """A module of the library that a sink needs; ``ImportError`` with the extra without it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{extra} is missing: pip install 'gradlens[{extra}]'") from error
