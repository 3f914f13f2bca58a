"""What a tracked step takes: files, functions and calls of Python, and operations of torch.

``python -m benchmarks.walk`` counts them for an MLP of four linear layers with SGD, from
``zero_grad`` to the update, at steps whose graph is known. A usual step is the median of twenty;
the largest number of operations is that of the step that records facts of layers. Operations are
those that reach torch's dispatcher, gradlens's own ones, too, less those of a plain step; its calls
are those of functions of the package, all calls those of functions written in Python. ``--list``
names the functions of a usual step of ``NormTest``, and ``--sites`` counts operations by where
gradlens calls them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import gradlens
from gradlens.quantities import Alpha, GradHist1d, GradNoiseScale, GradNorm, NormTest

PACKAGE = str(Path(gradlens.__file__).parent)
STEPS = range(33, 53)
"""The samples of a graph are found anew at steps 1, 2, 4, 8, ..., and facts of layers are recorded
at one of twenty."""

TRACKED: dict[str, Callable[[], Any]] = {
    "nothing": list,
    "GradNorm": lambda: [GradNorm()],
    "NormTest": lambda: [NormTest()],
    "GradNoiseScale": lambda: [GradNoiseScale()],
    "GradHist1d": lambda: [GradHist1d()],
    "Alpha": lambda: [Alpha()],
    "economy": lambda: "economy",
    "business": lambda: "business",
}


class Walk:
    """Calls of functions in their order, as (file, function), while it is the profile function."""

    def __init__(self) -> None:
        self.calls = 0
        self.own: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        self.calls += 1
        code = frame.f_code
        # Comprehensions and lambdas belong to the function that they stand in.
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            self.own.append((file, f"{code.co_name}:{code.co_firstlineno}"))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which calls are counted."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


class Operations(TorchDispatchMode):
    """Operations that reach the dispatcher, by the line of gradlens that calls them."""

    def __init__(self, by_site: bool = False) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._by_site = by_site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[f"{_site()} {func}" if self._by_site else ""] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which gradlens's own operations are seen, which it hides from modes."""
        with patch.object(_python_dispatch, "_disable_current_modes", nullcontext), self:
            yield


def _site() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def steps(quantities: Any, counter: Callable[[], Any]) -> list[Any]:
    """The counters of some steps; plain ones without quantities."""
    torch.manual_seed(0)
    sizes = (20, 16, 16, 16, 4)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1]
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = quantities is None
    cockpit = None if plain else gradlens.Cockpit(model, quantities, loss_function=loss_function)
    found: list[Any] = []
    for step in range(STEPS.stop):
        inputs, labels = torch.randn(32, 20), torch.randint(4, (32,))
        counts = counter()
        with counts.counting() if step in STEPS else nullcontext():
            optimizer.zero_grad()
            loss = loss_function(model(inputs), labels)
            tracked = cockpit(step, loss=loss, optimizer=optimizer) if cockpit else nullcontext()
            with tracked:
                loss.backward()
            optimizer.step()
        found += [counts] if step in STEPS else []
    if cockpit is not None:
        cockpit.close()
    return found


def _usual(walks: Sequence[Walk]) -> Walk:
    calls = median_low(walk.calls for walk in walks)
    return next(walk for walk in walks if walk.calls == calls)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("only", nargs="*", help="names of quantities or presets")
    parser.add_argument("--list", action="store_true", help="name the functions")
    parser.add_argument("--sites", action="store_true", help="operations by line")
    options = parser.parse_args()
    plain = median_low(each.found.total() for each in steps(None, Operations))
    print(f"operations above a plain step's {plain}; most: at one step of twenty\n")
    names = "files", "functions", "own calls", "all calls", "operations", "most"
    print(f"{'':15}" + "".join(f"{name:>11}" for name in names))
    for name in options.only or TRACKED:
        walk = _usual(steps(TRACKED[name](), Walk))
        by_step = steps(TRACKED[name](), lambda: Operations(options.sites))
        operations = sorted(each.found.total() - plain for each in by_step)
        functions, files = set(walk.own), {file for file, _ in walk.own}
        numbers = len(files), len(functions), len(walk.own), walk.calls
        row = *numbers, operations[len(operations) // 2], operations[-1]
        print(f"{name:15}" + "".join(f"{number:11,}" for number in row), flush=True)
        for file, function in dict.fromkeys(walk.own) if options.list else ():
            print(f"  {file} {function}")
        usual = sorted(by_step, key=lambda each: each.found.total())[len(by_step) // 2]
        for site, number in usual.found.most_common() if options.sites else ():
            print(f"  {number:5} {site}")


if __name__ == "__main__":
    main()
