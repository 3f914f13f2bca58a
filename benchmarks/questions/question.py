"""A question, or a healthy loop: what was asked, where, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .training import Watch

Form = Callable[[bool, Watch], float]


@dataclass(frozen=True)
class Question:
    """``train(fixed, watch)`` trains the twin or the faulty form, and returns how bad it is.

    The twin is at most as bad as ``limit``, the faulty form more than 1.5 times that, or NaN.
    The docstring of ``train`` says what the mistake is. A healthy loop has only the fixed form.
    """

    source: str
    limit: float
    train: Form

    @property
    def name(self) -> str:
        return self.train.__name__

    @property
    def cause(self) -> str:
        return " ".join((self.train.__doc__ or "").split())

    def hurts(self, faulty: float, fixed: float) -> bool:
        """Whether the mistake does harm, and the twin trains."""
        return fixed <= self.limit and not faulty <= 1.5 * self.limit


QUESTIONS: list[Question] = []
LOOPS: list[Question] = []


def question(source: str, limit: float) -> Callable[[Form], Form]:
    """Adds a function to the questions."""

    def add(train: Form) -> Form:
        QUESTIONS.append(Question(source, limit, train))
        return train

    return add


def healthy(limit: float) -> Callable[[Callable[[Watch], float]], Callable[[Watch], float]]:
    """Adds a function to the healthy loops."""

    def add(train: Callable[[Watch], float]) -> Callable[[Watch], float]:
        def form(fixed: bool, watch: Watch) -> float:
            return train(watch)

        form.__name__, form.__doc__ = train.__name__, train.__doc__
        form.__module__ = train.__module__
        LOOPS.append(Question("", limit, form))
        return train

    return add


def github(place: str) -> str:
    """The address of an issue: ``owner/name#number``."""
    repository, number = place.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def pull(place: str) -> str:
    """The address of a pull request: ``owner/name#number``."""
    return github(place).replace("/issues/", "/pull/")
