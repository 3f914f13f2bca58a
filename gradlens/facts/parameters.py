"""Numbers of parameters, their gradients and updates, and of the optimizer and its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from gradlens.graph.hooks import HookOwner, OwnedHook, removal
from gradlens.graph.scaler import GradientScale
from gradlens.history.setup import ParameterGroup
from gradlens.numerics.shards import is_distributed
from gradlens.torch_private import version, versions

SAMPLED = 2**16
"""Of larger parameters, updates and second moments are those of so many elements."""

FEW = 64
"""So many elements of a weight show whether it is trained."""

SPREAD_ROWS = 32
"""Rows that are equal because of their initial values are equal among the first ones, too."""


def dense(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that this process has as a whole."""
    return {
        name: p
        for name, p in parameters.items()
        if not is_distributed(p) and p.layout == torch.strided and p.numel()
    }


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients of parameters that this process has as a whole, if they aren't sparse."""
    return {
        name: p.grad
        for name, p in parameters.items()
        if p.grad is not None and p.grad.layout == torch.strided
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
) -> dict[str, Tensor]:
    """Columns of the layers' table; gradients are those of the loss times their scales."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        weights = parameter.detach()
        if not weights.is_complex() and weights.is_floating_point():
            found[f"weight_rms/{name}"] = rms(weights)
            rows = rows_of_a_gate(name, parameters)
            if weights.dim() > 1 and min(rows, len(weights)) > 1:
                found[f"row_spread/{name}"] = row_spread(weights[:rows])
    for name, gradient in gradients.items():
        if not gradient.is_complex():
            found[f"gradient_rms/{name}"] = rms(gradient) / scales[name]
            nonzero = torch.count_nonzero(gradient) / gradient.numel()
            found[f"zero_gradients/{name}"] = 1 - nonzero
    return found


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
def update_numbers(
    before: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Columns of the layers' table, from some elements of the parameters before an update."""
    return {
        f"update_rms/{name}": rms(some_elements(parameters[name]) - elements)
        for name, elements in before.items()
        if name in parameters and elements.is_floating_point()
    }


class Strangers:
    """Weights in the graph of the loss that aren't the model's, from one record to the next."""

    def __init__(self) -> None:
        self._seen = WeakTensorKeyDictionary()

    @torch.no_grad()
    def numbers(self, weights: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        """Columns of the layers' table: how many there are, are new, and haven't changed."""
        before = self._seen
        self._seen = WeakTensorKeyDictionary({p: some_elements(p, FEW) for p in weights})
        if not weights:
            return {}
        known = [p for p in weights if p in before]
        same = [(before[p] == self._seen[p]).all().float() for p in known]
        return {
            "strangers/all": torch.tensor(float(len(weights))),
            "strangers/new": torch.tensor(float(len(weights) - len(known))),
            "strangers/same": torch.stack(same).sum() if same else torch.tensor(0.0),
        }


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
def second_moments(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Columns of the layers' table: the median of √v, by which Adam and its like divide."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
        if isinstance(moment, Tensor) and moment.shape == parameter.shape:
            found[f"root_second_moment/{name}"] = some_elements(moment).float().sqrt().median()
    return found


@dataclass(frozen=True)
class _Left:
    """A parameter and its gradient when a context was left, or when the optimizer used it."""

    parameter: nn.Parameter
    updates: int
    gradient: weakref.ref[Tensor]
    changes: int
    is_used: bool = False

    def now(self) -> Tensor | None:
        """The gradient, if it is the parameter's still."""
        gradient = self.gradient()
        return gradient if self.parameter.grad is gradient else None

    def is_stale(self) -> bool:
        """Whether the optimizer has used the gradient, and it is still what it was then."""
        gradient = self.now()
        return (
            gradient is not None
            and version(gradient) == self.changes
            and (self.is_used or version(self.parameter) > self.updates)
            # Zeros that were written by gradient.data.zero_() don't count as a change.
            and bool(gradient.any())
        )


class OptimizerSteps(HookOwner):
    """Counts an optimizer's steps after a backward pass, and finds what they begin with.

    The ``norm`` of the gradients is computed only if they have changed since the backward pass, as
    by clipping. ``is_stale`` says that the latest backward pass has added to the gradients of a
    past step, judged by one parameter: to one that the optimizer has used, and that was changed
    nowhere since. What isn't certain doesn't count: where the optimizer isn't known, a loop that
    clips gradients in place isn't found, nor is one with a fused optimizer, whose updates autograd
    doesn't count.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []
        self._scale: GradientScale | None = None
        self._left: _Left | None = None
        self._was_stale = self._goes_on = False
        self._optimizer: Optimizer | None = None
        self._remove_hook: Callable[[], object] = lambda: None
        self.count = 0
        self.norm: Tensor | None = None
        self.is_stale = False

    def enter(self, optimizer: Optimizer | None) -> None:
        """The next backward pass comes: see whether the gradient of the last one is still there."""
        self._was_stale = self._left is not None and self._left.is_stale()
        if optimizer is not None and optimizer is not self._optimizer:
            self.close()
            self._optimizer = optimizer
            hook = OwnedHook(self, OptimizerSteps._before_step)
            self._remove_hook = removal(self, [optimizer.register_step_pre_hook(hook)])

    def leave(self, goes_on: bool) -> None:
        """The backward pass is over; the step may go on with another one, before an update."""
        self._goes_on = goes_on
        left, self._left = self._left, self._now()
        self.is_stale = False
        if self._was_stale and left is not None and self._left is not None:
            added = self._left.changes == left.changes + 1
            self.is_stale = added and self._left.gradient() is left.gradient()

    def begin(self, scale: GradientScale | None) -> None:
        """The optimizer's steps come next; with the gradients' ``scale``, their norm is found."""
        self.count, self.norm, self._scale = 0, None, scale
        self._versions = [] if scale is None else self._present_versions()

    def _before_step(self, *_: object) -> None:
        """Count it; whatever has changed the gradient until now hasn't set it to zero."""
        self.count += 1
        scale = self._scale if self.count == 1 else None
        if scale is not None and self._versions != self._present_versions():
            gradients = gradients_of(self._parameters)
            self.norm = unscaled_norm(gradients, scale.of(self._parameters))
        left = None if self._left is None else self._left.now()
        if left is None or self._left is None or self._goes_on:
            return  # one that goes on runs in a closure, within the optimizer's step
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        if any(each is self._left.parameter for group in groups for each in group["params"]):
            self._left = replace(self._left, changes=version(left), is_used=True)

    @property
    def is_following(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def failed(self, error: Exception) -> None:
        """The user's step goes on."""

    def close(self) -> None:
        """Remove the hook."""
        self._remove_hook()
        self._optimizer = None

    def _present_versions(self) -> list[int]:
        return versions(gradients_of(self._parameters).values())

    def _now(self) -> _Left | None:
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if type(gradient) is Tensor and gradient.layout is torch.strided:
                changes = version(gradient)
                return _Left(parameter, version(parameter), weakref.ref(gradient), changes)
        return None


NOT_ZEROED = (
    "the backward pass has added to gradients that the optimizer had used already, so that p.grad "
    "is a sum over steps: call optimizer.zero_grad() before it"
)
