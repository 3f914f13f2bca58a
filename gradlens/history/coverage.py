"""The ledger of per-sample gradients: which parameters have them, and what they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gradlens.history.html import table

FEW = 6
"""No more names than this are listed in a remark."""

FROZEN = "it is frozen"

Policy: TypeAlias = Literal["coupled", "frozen", "skip"]
"""What is done where normalisation couples samples (``gradlens.samples.batchnorm``)."""

COUPLING: Mapping[Policy, str] = {
    "coupled": (
        "per-sample gradients are not defined. What is tracked are each sample's contributions to "
        'the batch gradient (batchnorm="coupled"); Cockpit(..., batchnorm="frozen") gives the '
        "gradients with the batch's statistics held fixed, and eval mode those of samples alone"
    ),
    "frozen": (
        "per-sample gradients are those with the batch's statistics held fixed "
        '(batchnorm="frozen"), and their mean is not the batch gradient'
    ),
    "skip": (
        'per-sample gradients are not defined in front of that, and left out (batchnorm="skip")'
    ),
}


@dataclass(frozen=True)
class Coverage:
    """What per-sample gradients a step had.

    ``missing`` says of parameters why they have none. ``frozen`` are those that need no gradient at
    the step, and aren't trained. ``coupled`` names the layers that normalise over the batch, and
    ``batchnorm`` the policy for these (``gradlens.samples.batchnorm``). ``samples`` is N and
    ``known_by`` how it is known.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    coupled: tuple[str, ...] = ()
    batchnorm: Policy = "coupled"
    samples: int | None = None
    known_by: str = ""
    frozen: tuple[str, ...] = ()

    def share(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Covered elements over all that aren't frozen, of the parameters with these shapes."""
        sizes = {n: math.prod(shape) for n, shape in shapes.items() if n not in self.frozen}
        absent = sum(size for name, size in sizes.items() if name in self.missing)
        total = sum(sizes.values())
        return 1 - absent / total if total else math.nan

    def notes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """What the user should know, in words."""
        if self.coupled:
            yield (
                f"normalisation over the batch couples the samples in {layers(self.coupled)}: "
                f"{COUPLING[self.batchnorm]}"
            )
        if self.missing:
            details = "; ".join(
                f"{few(names)}{', each for this reason' * (len(names) > 1)}: {reason}"
                for reason, names in self.by_reason().items()
            )
            yield (
                f"per-sample gradients cover {percent(self.share(shapes))} of the trainable "
                "parameters, and quantities that use them describe these alone. Missing are "
                f"{details}"
            )

    def by_reason(self) -> dict[str, list[str]]:
        """Missing parameters by the reason."""
        found: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            found.setdefault(reason, []).append(name)
        return found


COLUMNS = ("parameter", "elements", "per-sample gradients")


@dataclass(frozen=True)
class CoverageTable:
    """A coverage in words and numbers; ``str`` of it is a table."""

    coverage: Coverage
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def share(self) -> float:
        """Covered elements over all elements of the trainable parameters."""
        return self.coverage.share(self.shapes)

    def __repr__(self) -> str:
        return f"CoverageTable({', '.join([self._of_all(), *self._batch()])})"

    def _repr_html_(self) -> str:
        heading = f"Per-sample gradients of {'; '.join([self._of_all(), *self._batch()])}"
        return table(heading, COLUMNS, self._rows(), self._notes())

    def __str__(self) -> str:
        """A line for each parameter, and one for all."""
        total = "all", f"{self._elements(self.shapes):,}", self._of_all()
        rows = [COLUMNS, *self._rows(), total]
        width = max((len(name) for name in self.shapes), default=9)
        lines = [f"{name:{width}}  {elements:>12}  {what}" for name, elements, what in rows]
        return "\n".join([*lines, *self._batch(), *self._notes()])

    def _rows(self) -> list[tuple[str, str, str]]:
        """Of each parameter its name, elements, and what is known of its gradients, once."""
        first: dict[str, str] = {}
        rows = []
        for name, shape in self.shapes.items():
            what = self._what(name)
            before = first.setdefault(what, name)
            missing = self.coverage.missing.keys() - self.coverage.frozen
            again = before != name and name in missing
            rows.append((name, f"{math.prod(shape):,}", f"none, as {before}" if again else what))
        return rows

    def short(self) -> list[str]:
        """Lines, one for all parameters of which the same can be said."""
        groups: dict[str, list[str]] = {}
        for name in self.shapes:
            groups.setdefault(self._what(name), []).append(name)
        lines = [f"per-sample gradients of {self._of_all()}"]
        for what, names in groups.items():
            lines.append(f"{self._elements(names):>12,} elements ({few(names)}): {what}")
        return [*lines, *self._batch(), *self._notes()]

    def _what(self, name: str) -> str:
        why = FROZEN if name in self.coverage.frozen else self.coverage.missing.get(name)
        return f"none: {why}" if why else "covered"

    def _of_all(self) -> str:
        return f"{percent(self.share)} of the trainable parameters"

    def _elements(self, names: Iterable[str]) -> int:
        return sum(math.prod(self.shapes[name]) for name in names)

    def _batch(self) -> list[str]:
        found = self.coverage
        return [] if found.samples is None else [f"N = {found.samples}, by {found.known_by}"]

    def _notes(self) -> list[str]:
        if not self.coverage.coupled:
            return []
        return [next(self.coverage.notes(self.shapes))]


def layers(names: Sequence[str]) -> str:
    """Names of layers, which may be numbers, after the word."""
    return f"layer{'' if len(names) == 1 else 's'} {few(names)}"


def few(names: Sequence[str]) -> str:
    """Names, or the first and last of many with their number."""
    if len(names) <= FEW:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}, {len(names)} altogether"


def percent(share: float) -> str:
    """Never rounded up to all, or down to nothing."""
    shown = f"{100 * share:.4g} %"
    if share < 1 and shown == "100 %":
        return "almost 100 %"
    return shown
