"""The ledger of individual gradients: which parameters have them, and what they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

COUPLING = {
    "coupled": (
        "individual gradients are not defined. What is tracked are each sample's contributions to "
        'the batch gradient (batchnorm="coupled"); Cockpit(..., batchnorm="frozen") gives the '
        "gradients with the batch's statistics held fixed, and eval mode those of samples alone"
    ),
    "frozen": (
        "individual gradients are those with the batch's statistics held fixed "
        '(batchnorm="frozen"), and their mean is not the batch gradient'
    ),
    "skip": (
        'individual gradients are not defined in front of that, and left out (batchnorm="skip")'
    ),
}


@dataclass(frozen=True)
class Coverage:
    """What individual gradients a step had.

    ``missing`` says of parameters why they have none. ``coupled`` names the layers that normalise
    over the batch, and ``batchnorm`` the policy for these (``gradlens.individual.batchnorm``).
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    coupled: tuple[str, ...] = ()
    batchnorm: str = "coupled"

    def share(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Covered elements over all elements of the parameters with these shapes."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        absent = sum(size for name, size in sizes.items() if name in self.missing)
        total = sum(sizes.values())
        return 1 - absent / total if total else math.nan

    def remarks(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """What the user should know, in words."""
        if self.coupled:
            yield (
                f"normalisation over the batch couples the samples in {', '.join(self.coupled)}: "
                f"{COUPLING[self.batchnorm]}"
            )
        if self.missing:
            details = "; ".join(
                f"{', '.join(names)}: {reason}" for reason, names in self.by_reason().items()
            )
            yield (
                f"individual gradients cover {percent(self.share(shapes))} of the trainable "
                "parameters, and quantities that use them describe these alone. Missing are "
                f"{details}"
            )

    def by_reason(self) -> dict[str, list[str]]:
        """Missing parameters by the reason."""
        found: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            found.setdefault(reason, []).append(name)
        return found

    def plain(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self) | {"missing": dict(self.missing), "coupled": list(self.coupled)}

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Coverage:
        """The inverse of ``plain``."""
        return cls(dict(found["missing"]), tuple(found["coupled"]), found["batchnorm"])


@dataclass(frozen=True)
class CoverageTable:
    """A coverage in words and numbers; ``str`` of it is a table."""

    coverage: Coverage
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def share(self) -> float:
        """Covered elements over all elements of the trainable parameters."""
        return self.coverage.share(self.shapes)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """A line for each layer, those alike together, and a total."""
        width = max((len(name) for name in self.shapes), default=9)
        lines = [f"{'parameter':{width}}  {'elements':>10}  individual gradients"]
        for name, shape in self.shapes.items():
            why = self.coverage.missing.get(name)
            layer = name.rpartition(".")[0] or name
            what = f"none: {why}" if why else _kind(self.coverage, layer)
            lines.append(f"{name:{width}}  {math.prod(shape):>10,}  {what}")
        total = sum(math.prod(shape) for shape in self.shapes.values())
        lines.append(f"{'all':{width}}  {total:>10,}  {percent(self.share)} covered")
        if self.coverage.coupled:
            lines.append("")
            lines.append(next(self.coverage.remarks(self.shapes)))
        return lines


def percent(share: float) -> str:
    """Never rounded up to all, or down to nothing."""
    shown = f"{100 * share:.4g} %"
    if share < 1 and shown == "100 %":
        return "almost 100 %"
    return shown


def _kind(coverage: Coverage, layer: str) -> str:
    return "covered; couples the samples" if layer in coverage.coupled else "covered"
