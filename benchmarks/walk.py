"""The walk of one number: which functions of gradlens run in one tracked step of ``NormTest``.

``python -m benchmarks.walk`` counts calls, functions, files and changes of file, for a step with a
new graph and for a known one; ``--list`` names the functions in their order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gradlens

PACKAGE = str(Path(gradlens.__file__).parent)
STEPS = {1: "new graph", 15: "known graph"}
"""The samples of a graph are found at its first step, which has some facts of its own, too."""


class Walk:
    """Functions of the package in the order of their calls, while it is the profile function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not _is_part(code.co_name):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            self.calls.append((file, f"{code.co_name}:{code.co_firstlineno}"))

    @property
    def changes(self) -> int:
        """How often the file changes from one call to the next."""
        files = [file for file, _ in self.calls]
        return sum(a != b for a, b in itertools.pairwise(files))


def _is_part(name: str) -> bool:
    """Comprehensions and lambdas belong to the function that they stand in."""
    return name.startswith("<")


def walks() -> dict[str, Walk]:
    """One walk for each kind of step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Walk] = {}
    with tempfile.TemporaryDirectory() as folder:
        quantities = [gradlens.quantities.NormTest()]
        cockpit = gradlens.Cockpit(model, quantities, run=Path(folder) / "run.jsonl")
        for step in range(1, max(STEPS) + 1):
            optimizer.zero_grad()
            loss = loss_function(model(torch.randn(16, 10)), torch.randint(3, (16,)))
            walk = Walk()
            sys.setprofile(walk)
            with cockpit(step, loss=loss):
                loss.backward()
            sys.setprofile(None)
            optimizer.step()
            if step in STEPS:
                found[STEPS[step]] = walk
        cockpit.close()
    return found


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the functions")
    options = parser.parse_args()
    for name, walk in walks().items():
        functions, files = set(walk.calls), {file for file, _ in walk.calls}
        print(
            f"{name}: {len(walk.calls)} calls, {len(functions)} functions, {len(files)} files, "
            f"{walk.changes} changes of file"
        )
        for file, function in dict.fromkeys(walk.calls) if options.list else ():
            print(f"  {file} {function}")


if __name__ == "__main__":
    main()
