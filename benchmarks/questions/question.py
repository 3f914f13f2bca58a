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
    ``cause`` says what the mistake is. A fault of those that are ``right`` names it, and the ones
    that are ``true`` are so without being the cause: that nothing is learnt, for example. Where no
    rule has a name for the cause, none is right, and an alarm about something else is wrong. A
    healthy loop has only the fixed form.
    """

    name: str
    source: str
    limit: float
    right: tuple[str, ...]
    true: tuple[str, ...]
    cause: str
    train: Form

    def hurts(self, faulty: float, fixed: float) -> bool:
        """Whether the mistake does harm, and the twin trains."""
        return fixed <= self.limit and not faulty <= 1.5 * self.limit


QUESTIONS: list[Question] = []
LOOPS: list[Question] = []

DIVERGES = "lr_too_high lr_edge"
FLAT = "labels_random constant_output"
DEAD = f"{FLAT} dead_units no_gradient lr_too_low"
NAN = "nonfinite_loss nonfinite_gradient"


def ask(
    name: str, source: str, limit: float, right: str, true: str, cause: str, train: Form
) -> None:
    """Adds a question."""
    rights, trues = tuple(right.split()), tuple(true.split())
    QUESTIONS.append(Question(name, source, limit, rights, trues, cause, train))


def question(source: str, limit: float, right: str, true: str) -> Callable[[Form], Form]:
    """Adds a function to the questions, whose docstring is the cause."""

    def add(train: Form) -> Form:
        cause = " ".join((train.__doc__ or "").split())
        ask(train.__name__, source, limit, right, true, cause, train)
        return train

    return add


def healthy(limit: float) -> Callable[[Callable[[Watch], float]], Callable[[Watch], float]]:
    """Adds a function to the healthy loops."""

    def add(train: Callable[[Watch], float]) -> Callable[[Watch], float]:
        run(train.__name__, limit, train)
        return train

    return add


def run(name: str, limit: float, train: Callable[[Watch], float]) -> None:
    """Adds a healthy loop."""
    LOOPS.append(Question(name, "", limit, (), (), "", lambda fixed, watch: train(watch)))


def github(place: str) -> str:
    """The address of an issue: ``owner/name#number``."""
    repository, number = place.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def pull(place: str) -> str:
    """The address of a pull request: ``owner/name#number``."""
    return github(place).replace("/issues/", "/pull/")
