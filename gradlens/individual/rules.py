"""From a module's call to one structured operator for each of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.rnn import PackedSequence

from gradlens.individual.convolution import Convolution, Geometry
from gradlens.individual.dense import Dense
from gradlens.individual.operator import GradientOperator, accumulable
from gradlens.individual.outer_product import OuterProduct, SumOfOuterProducts
from gradlens.individual.recomputed import CannotRecomputeError, Recomputed
from gradlens.individual.rows import IndexedRows
from gradlens.individual.tap import LayerCall

Operators: TypeAlias = dict[str, GradientOperator]
"""By the parameter's name in its module."""

Rule: TypeAlias = Callable[[LayerCall, Tensor, Tensor, float], Operators]
"""``(call, input, grad_output, scale)``, for modules with one input and one output."""


class BatchAxisError(ValueError):
    """A layer whose leading axis is not the batch."""


def operators_of(call: LayerCall, scale: float) -> Operators:
    """One operator for each trainable parameter of the called module.

    ``scale`` is N under a mean loss and 1 under a sum loss. Modules of a known class, or of a
    subclass that computes the same, get its rule; all others are recomputed sample by sample.
    """
    rule = _rule_for(call.module)
    parameters = call.module._parameters
    if any(parameters[name].is_complex() for name in call.trainable):  # type: ignore[union-attr]
        raise CannotRecomputeError("it is complex")
    _refuse(call)
    (grad_output, *_), arguments = call.grad_outputs, (*call.args, *call.kwargs.values())
    if rule is None or len(arguments) != 1 or grad_output is None:
        # A parameter that has two names is one.
        distinct = {id(parameters[name]): name for name in sorted(call.trainable)}
        return {name: Recomputed(call, name, scale) for name in distinct.values()}
    operators = rule(call, arguments[0].detach(), grad_output.detach(), scale)
    return {name: operators[name] for name in operators if name in call.trainable}


def _refuse(call: LayerCall) -> None:
    """``CannotRecomputeError`` for calls that keep no axis of samples."""
    if any(isinstance(argument, PackedSequence) for argument in call.args):
        raise CannotRecomputeError(
            "it got a packed sequence, which has no axis of samples: pass padded ones"
        )
    if isinstance(call.module, nn.EmbeddingBag) and len(call.args) + len(call.kwargs) > 1:
        raise CannotRecomputeError(
            "it got its bags by offsets or with weights: pass indices of shape [N, L] alone"
        )
    distributed = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if isinstance(call.module, nn.SyncBatchNorm) and call.training and distributed:
        raise CannotRecomputeError(
            "it normalises with the statistics of all processes: use BatchNorm, or eval mode"
        )


def couples_samples(call: LayerCall) -> bool:
    """Whether the module mixes samples, so that none has a gradient of its own."""
    return uses_batch_statistics(call.module, call.training)


def uses_batch_statistics(module: nn.Module, training: bool) -> bool:
    """Whether the module normalises over the batch, in train mode or not."""
    return isinstance(module, _BatchNorm) and (training or module.running_mean is None)


def _linear(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    _require_axes(call.module, inputs, at_least=2)
    if inputs.dim() == 2:
        weight: GradientOperator = OuterProduct(grad_output, inputs, scale)
    else:
        weight = SumOfOuterProducts(grad_output.flatten(1, -2), inputs.flatten(1, -2), scale)
    return {"weight": weight, "bias": _sum_over(grad_output, range(1, inputs.dim() - 1), scale)}


def _convolution(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    module = cast(_ConvNd, call.module)
    _require_axes(module, inputs, at_least=2 + len(module.kernel_size))
    weight = Convolution(grad_output, _padded(module, inputs), _geometry(module), scale)
    return {"weight": weight, "bias": _sum_over(grad_output, range(2, inputs.dim()), scale)}


def _transposed_convolution(
    call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float
) -> Operators:
    module = cast(_ConvTransposeNd, call.module)
    _require_axes(module, inputs, at_least=2 + len(module.kernel_size))
    padding = [side for p in reversed(_integers(module.padding)) for side in (p, p)]
    # Output padding adds positions at the far end which no input position may reach.
    weight = Convolution(inputs, F.pad(grad_output, padding), _geometry(module), scale)
    return {"weight": weight, "bias": _sum_over(grad_output, range(2, inputs.dim()), scale)}


def _embedding(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    module = cast(nn.Embedding, call.module)
    _require_axes(module, inputs, at_least=1)
    indices = inputs.reshape(len(inputs), -1)
    delta = accumulable(grad_output).reshape(*indices.shape, -1)
    if module.scale_grad_by_freq:
        _, inverse, counts = torch.unique(indices, return_inverse=True, return_counts=True)
        delta = delta / counts[inverse][..., None]
    if module.padding_idx is not None:
        delta = delta.masked_fill((indices == module.padding_idx)[..., None], 0)
    return {"weight": IndexedRows(indices, delta, module.num_embeddings, scale)}


def _layer_norm(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    module = cast(nn.LayerNorm, call.module)
    shape = list(module.normalized_shape)
    _require_axes(module, inputs, at_least=1 + len(shape))
    normalized = F.layer_norm(inputs, shape, None, None, module.eps)
    positions = range(1, inputs.dim() - len(shape))
    return _scale_and_shift(normalized, grad_output, positions, scale)


def _rms_norm(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    module = cast(nn.RMSNorm, call.module)
    shape = list(module.normalized_shape)
    _require_axes(module, inputs, at_least=1 + len(shape))
    normalized = F.rms_norm(inputs, shape, None, module.eps)
    positions = range(1, inputs.dim() - len(shape))
    return _scale_and_shift(normalized, grad_output, positions, scale)


def _group_norm(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    module = cast(nn.GroupNorm, call.module)
    _require_axes(module, inputs, at_least=2)
    normalized = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    return _scale_and_shift(normalized, grad_output, range(2, inputs.dim()), scale)


def _batch_norm(call: LayerCall, inputs: Tensor, grad_output: Tensor, scale: float) -> Operators:
    module = cast(_BatchNorm, call.module)
    _require_axes(module, inputs, at_least=2)
    with_batch_statistics = couples_samples(call)
    mean, variance = (
        (None, None) if with_batch_statistics else (module.running_mean, module.running_var)
    )
    normalized = F.batch_norm(
        inputs, mean, variance, None, None, with_batch_statistics, 0.0, module.eps
    )
    return _scale_and_shift(normalized, grad_output, range(2, inputs.dim()), scale)


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.ConvTranspose1d: _transposed_convolution,
    nn.ConvTranspose2d: _transposed_convolution,
    nn.ConvTranspose3d: _transposed_convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.SyncBatchNorm: _batch_norm,
}


def has_rule(module: nn.Module) -> bool:
    """Whether the individual gradients of the module's parameters follow from its class."""
    return _rule_for(module) is not None


def takes_positions(module: nn.Module) -> bool:
    """Whether the module computes on its last axes alone, whatever is in front of them."""
    return _rule_for(module) in (_linear, _embedding, _layer_norm, _rms_norm)


_METHODS_THAT_COMPUTE = ("forward", "_conv_forward", "__call__")


def _rule_for(module: nn.Module) -> Rule | None:
    """The rule of the nearest known base class whose computation the module's class inherits."""
    known = next((cls for cls in type(module).__mro__ if cls in _RULES), None)
    if known is None or set(_METHODS_THAT_COMPUTE) & vars(module).keys():
        return None
    for method in _METHODS_THAT_COMPUTE:
        if getattr(type(module), method, None) is not getattr(known, method, None):
            return None
    return _RULES[known]


def _scale_and_shift(
    normalized: Tensor, grad_output: Tensor, positions: range, scale: float
) -> Operators:
    weighted = accumulable(grad_output) * accumulable(normalized)
    return {
        "weight": _sum_over(weighted, positions, scale),
        "bias": _sum_over(grad_output, positions, scale),
    }


def _sum_over(gradients: Tensor, axes: range, scale: float) -> Dense:
    gradients = accumulable(gradients)
    return Dense(gradients.sum(tuple(axes)) if axes else gradients, scale)


def _geometry(module: _ConvNd) -> Geometry:
    return Geometry(module.kernel_size, module.stride, module.dilation, module.groups)


def _padded(module: _ConvNd, inputs: Tensor) -> Tensor:
    # Sides from the last spatial axis to the first, uneven where padding="same" needs it.
    sides = list(module._reversed_padding_repeated_twice)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(inputs, sides, mode=mode) if any(sides) else inputs


def _integers(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    assert not isinstance(padding, str)  # torch has no named padding for transposed convolutions
    return padding


def _require_axes(module: nn.Module, inputs: Tensor, at_least: int) -> None:
    if inputs.dim() < at_least:
        raise BatchAxisError(
            f"it got an input of shape {list(inputs.shape)}, which has no batch axis: "
            "add one in front (x.unsqueeze(0) for a single sample)"
        )
