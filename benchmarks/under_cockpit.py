"""Training under cockpit-for-pytorch 1.0.2, in an environment of its own.

``python under_cockpit.py steps PROBLEM PRESET BATCH DEVICE`` takes a step for each line of the
standard input, without cockpit if it is "plain", and answers with its seconds. ``python
under_cockpit.py values OUT QUANTITY ...`` writes what it tracks in the run that both libraries are
compared on, which imports neither of them.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, BATCH_SIZE, LEARNING_RATE = 12, 16, 0.1
BINS_1D, RANGE_1D = 50, (-0.5, 0.5)
BINS_2D, RANGE_2D = (20, 25), ((-0.3, 0.3), (-0.5, 0.5))

ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradHist1d": {"bins": BINS_1D, "range": RANGE_1D},
    "GradHist2d": {"bins": BINS_2D, "range": RANGE_2D},
    "HessMaxEV": {"use_power": False},
    "TICDiag": {"curvature": "diag_ggn_exact"},
    "TICTrace": {"curvature": "diag_h"},
}
"""Of cockpit's quantities, besides the schedule."""


def network() -> nn.Sequential:
    """Small, seeded, and within what BackPACK's second-order rules support."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """Images ``[N, 1, 8, 8]`` that tell something about their labels ``[N]``."""
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(5, 1, 8, 8, generator=generator)
    found = []
    for _ in range(STEPS):
        labels = torch.randint(5, (BATCH_SIZE,), generator=generator)
        noise = torch.randn(BATCH_SIZE, 1, 8, 8, generator=generator)
        found.append((prototypes[labels] + noise, labels))
    return found


class Training:
    """A network in training under a cockpit with some quantities."""

    def __init__(self, model: nn.Module, quantities: list[Any], rate: float) -> None:
        from backpack import extend
        from cockpit import Cockpit

        self.model, self.loss_function = extend(model), extend(nn.CrossEntropyLoss())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        self.cockpit = Cockpit(model.parameters(), quantities=quantities)
        self._steps = 0

    def __call__(self, inputs: Tensor, labels: Tensor) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.loss_function(outputs, labels)
        info = {
            "batch_size": len(inputs),
            "individual_losses": nn.functional.cross_entropy(outputs, labels, reduction="none"),
            "loss": loss,
            "optimizer": self.optimizer,
        }
        with self.cockpit(self._steps, info=info):
            loss.backward(create_graph=self.cockpit.create_graph(self._steps))
        self.optimizer.step()
        self._steps += 1


def tracked(name: str) -> dict[int, Any]:
    """One quantity alone, so that a crash of one leaves the others."""
    from cockpit import quantities
    from cockpit.utils.schedules import linear

    quantity = getattr(quantities, name)(linear(1), **ARGUMENTS.get(name, {}))
    training = Training(network(), [quantity], LEARNING_RATE)
    for batch in batches():
        training(*batch)
    found = training.cockpit.get_output()
    return {step: simple(values[name]) for step, values in found.items() if name in values}


def simple(value: Any) -> Any:
    """Numbers, arrays, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: simple(entry) for key, entry in value.items()}
    return [simple(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def write_values(out: str, names: Sequence[str]) -> None:
    """Write ``{quantity: {step: value}}``, or the exception that ended it."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = tracked(name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    Path(out).write_bytes(pickle.dumps(found))


def answer(name: str, preset: str, batch_size: int, device: str) -> None:
    """Answer each line with the seconds of a step."""
    from cockpit.utils.configuration import configuration
    from problems import PROBLEMS

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    tracked = Training(PROBLEMS[name].build().to(device), configuration(preset), 0.01)
    batch = [each.to(device) for each in PROBLEMS[name].batch(batch_size)]
    untracked = PROBLEMS[name].build().to(device)
    optimizer = torch.optim.SGD(untracked.parameters(), lr=0.01)

    def plain(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(untracked(inputs), labels).backward()
        optimizer.step()

    for line in sys.stdin:
        step: Callable[..., None] = plain if line.strip() == "plain" else tracked
        start = now(device)
        step(*batch)
        print(now(device) - start, flush=True)


def now(device: str) -> float:
    """The time when all that was given to the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["values", out, *names]:
            write_values(out, names)
        case ["steps", name, preset, batch_size, device]:
            answer(name, preset, int(batch_size), device)
