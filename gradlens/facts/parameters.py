"""Numbers of parameters, their gradients and updates, and of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from gradlens.history.setup import ParameterGroup
from gradlens.numerics.shards import is_distributed

SAMPLED = 2**16
"""Of larger parameters, updates and second moments are those of so many elements."""

FEW = 64
"""So many elements of a weight show whether it is trained."""

SPREAD_ROWS = 32
"""Rows that are equal because of their initial values are equal among the first ones, too."""


ByKind: TypeAlias = dict[str, dict[str, Tensor]]
"""Numbers of layers or parameters, by their kind and then by name."""


def dense(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that this process has as a whole."""
    return {
        name: p
        for name, p in parameters.items()
        if not is_distributed(p) and p.layout == torch.strided and p.numel()
    }


def norm(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The norm of all elements of some tensors; ``None`` without any."""
    return nn.utils.get_total_norm([*tensors.values()]) if tensors else None


def unscaled_norm(tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> Tensor | None:
    """As ``norm``, of gradients that are each divided by its scale."""
    totals: dict[str, Tensor] = {}
    for scale in {*scales.values()}:
        total = norm({name: each for name, each in tensors.items() if scales[name] == scale})
        if total is not None:
            totals[f"{scale}"] = total / scale
    return norm(totals) if len(totals) > 1 else next(iter(totals.values()), None)


def some_elements(tensor: Tensor, most: int = SAMPLED) -> Tensor:
    """A copy of at most so many elements, from all parts of a tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(-(-flat.numel() // most), 1)].clone()


def rms(tensor: Tensor) -> Tensor:
    """The root mean square of a tensor's elements."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return found / tensor.numel() ** 0.5


@torch.no_grad()
def parameter_numbers(
    parameters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor],
    scales: Mapping[str, float],
) -> ByKind:
    """Facts of parameters; gradients are those of the loss times their scales."""
    weights = {name: p.detach() for name, p in parameters.items() if p.is_floating_point()}
    rows = {n: w[: rows_of_a_gate(n, parameters)] for n, w in weights.items() if w.dim() > 1}
    real = {name: gradient for name, gradient in gradients.items() if not gradient.is_complex()}
    return {
        "weight_rms": {name: rms(each) for name, each in weights.items()},
        "row_spread": {name: row_spread(each) for name, each in rows.items() if len(each) > 1},
        "gradient_rms": {name: rms(each) / scales[name] for name, each in real.items()},
        "zero_gradients": {n: 1 - torch.count_nonzero(g) / g.numel() for n, g in real.items()},
    }


def rows_of_a_gate(name: str, parameters: Mapping[str, nn.Parameter]) -> int:
    """How many rows of a weight are those of units of the same kind, at most.

    The weights of recurrent layers have rows for several gates, which differ even where units of
    one gate have the same weights.
    """
    hidden = parameters.get(name.replace("weight_ih_l", "weight_hh_l"))
    is_recurrent = "weight_hh_l" in name or "weight_ih_l" in name
    return hidden.shape[1] if is_recurrent and hidden is not None else SPREAD_ROWS


def row_spread(weights: Tensor) -> Tensor:
    """The rms of the first rows' differences from their mean, over that of these rows."""
    rows = weights[:SPREAD_ROWS].flatten(1).float()
    return torch.linalg.vector_norm(rows - rows.mean(0)) / torch.linalg.vector_norm(rows)


@torch.no_grad()
def update_numbers(before: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> ByKind:
    """Facts of parameters, from some elements of the parameters before an update."""
    found = {
        name: rms(some_elements(parameters[name]) - elements)
        for name, elements in before.items()
        if name in parameters and elements.is_floating_point()
    }
    return {"update_rms": found}


@torch.no_grad()
def is_same(elements: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Whether some elements of parameters are what they were."""
    pairs = [(each, some_elements(parameters[n], FEW)) for n, each in elements.items()]
    same = [(one == other).all() for one, other in pairs]
    return torch.stack([each.to(same[0].device) for each in same]).all().float()


class Strangers:
    """Weights in the graph of the loss that aren't the model's, from one record to the next."""

    def __init__(self) -> None:
        self._seen = WeakTensorKeyDictionary()

    @torch.no_grad()
    def numbers(self, weights: Sequence[nn.Parameter]) -> ByKind:
        """Facts of the network: how many there are, are new, and haven't changed."""
        before = self._seen
        self._seen = WeakTensorKeyDictionary({p: some_elements(p, FEW) for p in weights})
        if not weights:
            return {}
        known = [p for p in weights if p in before]
        same = [(before[p] == self._seen[p]).all().float() for p in known]
        found = {
            "all": torch.tensor(float(len(weights)), device="cpu"),
            "new": torch.tensor(float(len(weights) - len(known)), device="cpu"),
            "same": torch.stack(same).sum() if same else torch.zeros((), device="cpu"),
        }
        return {"strangers": found}


def groups(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[ParameterGroup, ...]:
    """The parameter groups; ``names`` are those of parameters by ``id``."""
    return tuple(
        ParameterGroup(_options(group), tuple(names.get(id(p), "") for p in group["params"]))
        for group in optimizer.param_groups
    )


def _options(group: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in group.items():
        if name in OF_SCHEDULES or value is None:
            continue
        if name == "betas":
            found |= {"beta1": float(value[0]), "beta2": float(value[1])}
        elif isinstance(value, (bool, int, float)):
            found[name] = float(value)
    return found


OF_SCHEDULES = frozenset({"lr", "initial_lr", "params", "max_lr", "min_lr", "max_momentum"})
"""Entries of a group that change from step to step, or are no options."""


@torch.no_grad()
def second_moments(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> ByKind:
    """Facts of parameters: the median of √v, by which Adam and its like divide."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
        if isinstance(moment, Tensor) and moment.shape == parameter.shape:
            # A complex moment has those of the real and the imaginary part, each for itself.
            moment = torch.view_as_real(moment) if moment.is_complex() else moment
            found[name] = some_elements(moment).float().sqrt().median()
    return {"root_second_moment": found}
