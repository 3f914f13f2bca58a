"""Who hears of a model's passes, and can be told not to listen for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Pausable:
    """Hears of passes through a model, unless ``paused``."""

    paused = False


class ListeningHook(ABC):
    """A hook on a module that tells somebody what flows by."""

    @property
    @abstractmethod
    def listener(self) -> Pausable | None:
        """Who is told; ``None`` if nobody is any more."""
