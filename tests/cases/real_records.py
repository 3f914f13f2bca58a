"""Records that quantities have made in a real training, for tests of what is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from gradlens import Aggregate, Cockpit, quantities
from gradlens.history.undefined import Undefined
from gradlens.messages import GradlensWarning

OPTIONS: dict[str, dict[str, Any]] = {
    "AttentionLogits": {"by_head": True},
    "DirectionalDerivatives": {"k": 8},
    "GradHist1d": {"bins": 60, "range": (-0.5, 0.5), "keep_individual": True},
    "GradHist2d": {"range": ((-0.5, 0.5), (-2, 2)), "keep_individual": True},
    "HessEigenvalues": {"k": 4, "which": "magnitude"},
    "HessTrace": {"samples": 3},
    "SpectralDensity": {"probes": 2, "steps": 8},
    "TICDiag": {"curvature": "diag_ggn_exact"},
    "TICTrace": {"curvature": "diag_ggn_exact"},
}
"""Options of quantities that differ from the usual ones."""


class Network(nn.Module):
    """Three layers of ten features behind attention, by their names in ``shapes``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.bends = nn.ModuleList(nn.Tanh() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.attention(x, x, x, need_weights=False)[0]).mean(1)
        for layer, bend in zip(self.layers, self.bends, strict=False):
            x = bend(layer(x))
        found: Tensor = self.layers[-1](x)
        return found


def trained(kinds: tuple[str, ...], make: Callable[..., Optimizer]) -> dict[str, Any]:
    """Records of the last step but one, at which all that waits for another one is known."""
    torch.manual_seed(0)
    model, loss_function = Network(), nn.CrossEntropyLoss()
    optimizer = make(model.parameters())
    tracked = [getattr(quantities, kind)(**OPTIONS.get(kind, {})) for kind in kinds]
    cockpit = Cockpit(
        model, [*tracked, Aggregate(quantities.OutputNorm(name="Aggregate"))], facts=False
    )
    for step in range(3):
        x, labels = torch.randn(24, 5, 10), torch.randint(10, (24,))
        optimizer.zero_grad()
        loss = loss_function(model(x), labels)
        with cockpit(
            step,
            loss=loss,
            optimizer=optimizer,
            closure=lambda x=x, labels=labels: loss_function(model(x), labels),
            info={"groups": [n % 3 for n in range(24)]},
        ):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    cockpit.tick_epoch()
    cockpit.close()
    history = cockpit.history
    found = {kind: history[kind][1] for kind in kinds}
    return found | {"Aggregate": history["Aggregate (epoch)"][2]}


@cache
def records(kinds: tuple[str, ...]) -> dict[str, Any]:
    """By kind."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GradlensWarning)  # that a diagonal is estimated
        others = tuple(kind for kind in kinds if kind != "OptimizerState")
        found = trained(others, partial(SGD, lr=0.1))
        return found | trained(("OptimizerState",), partial(Adam, lr=0.01))


PARTS = ("layers.", "attention", "bends.")
"""How names of layers and parameters begin."""
FIXED = ("edges", "grid")
"""What is in units of its own."""


def record(real: Any, factor: float, names: Mapping[str, Any]) -> Any:
    """The record of a network with these parameters, times a factor."""
    if isinstance(real, Mapping):
        if any(key.startswith(PARTS) for key in real):
            real = renamed(real, names)
        return {
            key: part if key in FIXED else record(part, factor, names) for key, part in real.items()
        }
    if isinstance(real, list):
        return [record(part, factor, names) for part in real]
    is_scaled = isinstance(real, float) or (isinstance(real, np.ndarray) and real.dtype.kind == "f")
    return real if isinstance(real, Undefined) or not is_scaled else real * factor


def renamed(real: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Parts by the names of another network's layers, or of its weights and biases, in turn."""
    own = {n: part for n, part in real.items() if n.startswith("layers.")} or dict(real)
    ends = {name.rpartition(".")[2] for name in own} & {"weight", "bias"}
    layers = [*dict.fromkeys(name.rpartition(".")[0] for name in names)]
    wanted = [name for name in names if name.rpartition(".")[2] in ends] if ends else layers
    parts = [*own.values()]
    return {name: parts[place % len(parts)] for place, name in enumerate(wanted)}
