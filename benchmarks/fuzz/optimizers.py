"""Optimizers of random training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class SignDescent(Optimizer):
    """An optimizer of the user's own, which replaces parameters' data."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    step = parameter.grad.to_dense().sgn()
                    parameter.data = parameter.data - group["lr"] * step
                    self.state[parameter]["last"] = step


Optimizers = list[Optimizer]


def halves(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    middle = max(len(parameters) // 2, 1)
    return parameters[:middle], parameters[middle:]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups, of which one has a learning rate of zero."""
    first, second = halves(parameters)
    return [{"params": first, "lr": 0.0}, *([{"params": second}] if second else [])]


def two(parameters: list[nn.Parameter]) -> Optimizers:
    first, second = halves(parameters)
    both: Optimizers = [torch.optim.SGD(first, lr=0.05)]
    return both + ([torch.optim.Adam(second, lr=0.01)] if second else [])


def sparse(parameters: list[nn.Parameter]) -> Optimizers:
    """The first parameter is a table with sparse gradients."""
    both: Optimizers = [torch.optim.SparseAdam(parameters[:1], lr=0.01)]
    return [*both, torch.optim.SGD(parameters[1:], lr=0.05)]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizers]] = {
    "sgd": lambda ps: [torch.optim.SGD(ps, lr=0.05)],
    "momentum": lambda ps: [torch.optim.SGD(ps, lr=0.05, momentum=0.9)],
    "nesterov": lambda ps: [torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True)],
    "weight decay": lambda ps: [torch.optim.SGD(ps, lr=0.05, weight_decay=0.1, foreach=True)],
    "maximised": lambda ps: [torch.optim.SGD(ps, lr=0.01, maximize=True)],
    "fused sgd": lambda ps: [torch.optim.SGD(ps, lr=0.05, momentum=0.5, fused=True)],
    "rate of zero": lambda ps: [torch.optim.SGD(ps, lr=0.0)],
    "large rate": lambda ps: [torch.optim.SGD(ps, lr=1e6)],
    "tensor rate": lambda ps: [torch.optim.Adam(ps, lr=torch.tensor(0.01))],
    "adam": lambda ps: [torch.optim.Adam(ps, lr=0.01)],
    "adam, foreach": lambda ps: [torch.optim.Adam(ps, lr=0.01, foreach=True)],
    "adam, fused": lambda ps: [torch.optim.Adam(ps, lr=0.01, fused=True)],
    "adam, amsgrad": lambda ps: [torch.optim.Adam(ps, lr=0.01, amsgrad=True)],
    "adamw": lambda ps: [torch.optim.AdamW(ps, lr=0.01)],
    "rmsprop": lambda ps: [torch.optim.RMSprop(ps, lr=0.01, momentum=0.5)],
    "adagrad": lambda ps: [torch.optim.Adagrad(ps, lr=0.05)],
    "adadelta": lambda ps: [torch.optim.Adadelta(ps)],
    "sparse adam": sparse,
    "lbfgs": lambda ps: [torch.optim.LBFGS(ps, lr=0.1, max_iter=3)],
    "own": lambda ps: [SignDescent(ps, lr=0.01)],
    "groups": lambda ps: [torch.optim.SGD(groups(ps), lr=0.05)],
    "two": two,
    "none": lambda ps: [],
}
"""Optimizers by name; parameters descend by hand without any."""
