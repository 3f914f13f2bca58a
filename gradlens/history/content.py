"""The numbers and arrays of a history's values, in little memory."""

from __future__ import annotations

from array import array
from typing import TypeVar, final

from gradlens.history.json_lines import inflated
from gradlens.history.run_file import RunFile

RECENT = 64
"""So many arrays are kept for a comparison, since the edges of histograms recur."""


@final
class Content:
    """The numbers of values, in the order of the values, and their arrays as a file has them.

    Arrays are the deflated texts of ``gradlens.history.json_lines``. Those that are in a run's file
    can be left to it, and are read from there when they are asked for.
    """

    def __init__(self) -> None:
        self.numbers = array("d")
        self._texts: list[str] = []
        """Empty for those that were left to the file."""
        self._starts = array("q")
        """Where each is in the file; -1 for one that isn't there as it is."""
        self._lengths = array("q")
        self._recent: dict[str, int] = {}
        self._left = 0
        self._file: RunFile | None = None

    def add(self, text: str, size: int) -> None:
        """Add an array of ``size`` bytes to the numbers; ``ValueError`` if its text is damaged."""
        key = f"{size} {text}"
        if key not in self._recent:
            inflated(text, size)  # which fails now rather than when it is asked for
            if len(self._recent) == RECENT:
                self._recent.clear()
            self._recent[key] = len(self._texts)
            self._texts.append(text)
        self.append(self._recent[key])

    def bytes_of(self, place: float, size: int) -> bytes:
        """The array with this number; ``OSError`` if it was left to a file and can't be read."""
        at = int(place)
        if self._texts[at] or self._file is None:
            return inflated(self._texts[at], size)
        try:
            return inflated(self._file.read(self._starts[at], self._lengths[at]), size)
        except ValueError as error:
            text = f"{self._file.path} has been changed, and an array that it had can't be read"
            raise OSError(text) from error

    def append(self, number: float) -> None:
        """Add a number."""
        self.numbers = grown(self.numbers, number)

    def extend(self, numbers: list[float]) -> None:
        """Add several numbers."""
        packed = array("d", numbers)
        try:
            self.numbers.extend(packed)
        except BufferError:  # see ``grown``
            self.numbers = self.numbers + packed

    def locate(self, line: bytes, start: int) -> None:
        """Take note that the arrays added last are in this line of a file, which begins there."""
        at = 0
        for text in self._texts[len(self._starts) :]:
            found = line.find(text.encode(), at)
            self._starts.append(start + found if found >= 0 else -1)
            self._lengths.append(len(text))
            at = max(at, found)

    def leave(self, file: RunFile) -> None:
        """Leave the arrays to the file in which they were located."""
        self._file = file
        for at in range(self._left, len(self._starts)):
            if self._starts[at] >= 0:
                self._texts[at] = ""
        self._left = len(self._starts)


Number = TypeVar("Number", int, float)


def grown(column: array[Number], number: Number) -> array[Number]:
    """A column with one more number; it is a copy if another thread reads it, else the same one.

    While numpy reads an array, that can't grow, and an exception would reach the training loop.
    """
    try:
        column.append(number)
    except BufferError:
        return column + array(column.typecode, [number])
    return column
