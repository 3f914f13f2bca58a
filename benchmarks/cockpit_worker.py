"""Training steps under cockpit-for-pytorch 1.0.2, one for each line of the standard input.

``python cockpit_worker.py PROBLEM PRESET BATCH DEVICE``, in an environment of its own. A line
"plain" asks for a step without it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import torch
from backpack import extend
from cockpit import Cockpit
from cockpit.utils.configuration import configuration
from problems import PROBLEMS


def main() -> None:
    """Answer each line with the seconds of a step."""
    warnings.simplefilter("ignore")
    name, preset, batch_size, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    model = extend(PROBLEMS[name].build().to(device))
    inputs, labels = (each.to(device) for each in PROBLEMS[name].batch(batch_size))
    loss_function = extend(torch.nn.CrossEntropyLoss())
    individual = torch.nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cockpit = Cockpit(model.parameters(), quantities=configuration(preset))
    untracked = PROBLEMS[name].build().to(device)
    plain = plain_step(untracked, inputs, labels)
    step = 0
    for line in sys.stdin:
        if line.strip() == "plain":
            print(plain(), flush=True)
            continue
        start = _now(inputs)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_function(outputs, labels)
        info = {
            "batch_size": batch_size,
            "individual_losses": individual(outputs, labels),
            "loss": loss,
            "optimizer": optimizer,
        }
        with cockpit(step, info=info):
            loss.backward(create_graph=cockpit.create_graph(step))
        optimizer.step()
        print(_now(inputs) - start, flush=True)
        step += 1


def plain_step(
    model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> Callable[[], float]:
    """Its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        start = _now(inputs)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        return _now(inputs) - start

    return step


def _now(inputs: torch.Tensor) -> float:
    """The time when all that was given to the inputs' device is done."""
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
