"""The run under cockpit-for-pytorch, in its own environment: ``python parity_cockpit.py OUT``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from backpack import extend
from cockpit import Cockpit, quantities
from cockpit.utils.schedules import linear
from parity_problem import (
    BATCH_SIZE,
    BINS_1D,
    BINS_2D,
    LEARNING_RATE,
    RANGE_1D,
    RANGE_2D,
    batches,
    network,
)

TRACKED = (
    "Loss",
    "Parameters",
    "GradNorm",
    "Distance",
    "UpdateSize",
    "NormTest",
    "InnerTest",
    "OrthoTest",
    "MeanGSNR",
    "EarlyStopping",
    "CABS",
    "Alpha",
    "HessTrace",
    "HessMaxEV",
    "TICDiag",
    "TICTrace",
    "GradHist1d",
    "GradHist2d",
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradHist1d": {"bins": BINS_1D, "range": RANGE_1D},
    "GradHist2d": {"bins": BINS_2D, "range": RANGE_2D},
    "HessMaxEV": {"use_power": False},
    "TICDiag": {"curvature": "diag_ggn_exact"},
    "TICTrace": {"curvature": "diag_h"},
}


def track(name: str) -> dict[int, Any]:
    """One quantity alone, so that a crash of one leaves the others."""
    model = extend(network())
    loss_function = extend(torch.nn.CrossEntropyLoss())
    individual_losses = torch.nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    quantity = getattr(quantities, name)(linear(1), **ARGUMENTS.get(name, {}))
    cockpit = Cockpit(model.parameters(), quantities=[quantity])
    for step, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        output = model(inputs)
        loss = loss_function(output, labels)
        info = {
            "batch_size": BATCH_SIZE,
            "individual_losses": individual_losses(output, labels),
            "loss": loss,
            "optimizer": optimizer,
        }
        with cockpit(step, info=info):
            loss.backward(create_graph=cockpit.create_graph(step))
        optimizer.step()
    return {s: plain(v[name]) for s, v in cockpit.get_output().items() if name in v}


def plain(value: Any) -> Any:
    """Numbers, arrays, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def main() -> None:
    """Write ``{quantity: {step: value}}``, or the exception that ended it."""
    found: dict[str, Any] = {}
    for name in TRACKED:
        try:
            found[name] = track(name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
