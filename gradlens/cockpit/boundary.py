"""Where exceptions of gradlens's own work end, so that the user's training goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from gradlens.history.undefined import Undefined
from gradlens.numerics.unavailable import FREED, UnavailableError, first_line, has_freed
from gradlens.observers.observer import Observer
from gradlens.torch_private import unseen

Refuse = Callable[[str], None]
"""Called with the reason why something has no value."""

PACKAGE: Final = str(Path(__file__).parents[1])


class Boundary:
    """Catches exceptions of gradlens's own work in the user's loop, of quantities above all.

    The work is done without autocast, under which torch rounds norms and products to half
    precision, and dispatch modes of others don't see it.

    The reason why a value can't be had (``UnavailableError``) is its NaN's. Any other exception is
    a defect of gradlens or of a quantity. It is noted once, and its message is the reason; with
    ``strict``, it is raised. Interrupts and warnings that are errors are always raised.
    """

    def __init__(self, note: Callable[[str], None], strict: bool = False) -> None:
        self.strict = strict
        self._note = note

    def contain(self, work: str, refuse: Refuse | None = None) -> AbstractContextManager[None]:
        """A context for a piece of ``work``; ``refuse`` is called with the reason if it fails."""
        return _Contained(self, work, refuse)

    def tell(self, observers: Iterable[Observer], what: Callable[[Observer], None]) -> None:
        """Tell several observers something; where one fails, the others go on.

        To be called inside of ``contain``.
        """
        for observer in observers:
            try:
                what(observer)
            except Exception as error:
                self.end(observer.work, None, error)

    def attempt(
        self, work: str, refuse: Refuse | None, do: Callable[..., object], *arguments: Any
    ) -> None:
        """Do a piece of work as in ``contain``; to be called inside of it."""
        try:
            do(*arguments)
        except Exception as error:
            self.end(work, refuse, error)

    def end(self, work: str, refuse: Refuse | None, error: Exception) -> None:
        """An exception has ended a piece of work."""
        is_freed = has_freed(error)
        if not (is_freed or isinstance(error, UnavailableError)):
            self.report(work, error, refuse)
        elif refuse is not None:
            refuse(FREED if is_freed else str(error))

    def value(self, work: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns, or a NaN with the reason; to be called inside of ``contain``."""
        reasons: list[str] = []
        try:
            return compute(*arguments)
        except Exception as error:
            self.end(work, reasons.append, error)
        return Undefined(reasons[0])

    def report(self, work: str, error: Exception, refuse: Refuse | None = None) -> None:
        """Note an exception that ``work`` has raised, or raise it."""
        if self.strict or isinstance(error, Warning):
            raise error
        reason = f"{first_line(error)} ({_place(error)})"
        if refuse is not None:
            refuse(reason)
        self._note(FAILED.format(work=work, reason=reason))


@dataclass
class _Contained(AbstractContextManager[None]):
    """A context whose exceptions end in a boundary.

    By hand, since ``contextlib.contextmanager`` takes three times as many calls, and a step enters
    dozens of these.
    """

    boundary: Boundary
    work: str
    refuse: Refuse | None
    unseen: AbstractContextManager[Any] = field(default_factory=unseen)

    def __enter__(self) -> None:
        self.unseen.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.unseen.__exit__(kind, error, traceback)
        if isinstance(error, Exception):
            self.boundary.end(self.work, self.refuse, error)
            return True
        return False


def _place(error: Exception) -> str:
    """The innermost line of gradlens's or the user's code that an exception was raised from."""
    installed = {"site-packages", "dist-packages"}
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(PACKAGE) or installed.isdisjoint(Path(frame.filename).parts)
    ]
    filename, line = frames[-1] if frames else ("an unknown file", 0)
    return f"{Path(filename).name}, line {line}"


FAILED = (
    "{work} failed: {reason}. Training isn't affected; Cockpit(..., strict=True) raises the "
    "exception with its traceback"
)
