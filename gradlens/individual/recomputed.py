"""Parameters of modules without a rule: each sample's backward pass through that module alone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradlens.individual.operator import GradientOperator, accumulable
from gradlens.individual.tap import LayerCall


class CannotRecomputeError(Exception):
    """Why a module's individual gradients can't be found by recomputing it."""


class Recomputed(GradientOperator):
    """gₙ by a vector-Jacobian product through one module, for a few samples at a time.

    Every tensor argument whose batch axis has length N is split into samples; all others are
    shared by them. ``torch.func.vmap`` runs samples together where the module allows it,
    otherwise they run one after another. Nothing of the module or of the random number
    generators changes; a module that draws random numbers raises ``CannotRecomputeError``.
    """

    def __init__(self, call: LayerCall, name: str, scale: float = 1.0) -> None:
        self._module = _without_hooks(call.module)
        self._name = name
        self._parameter = call.module._parameters[name].detach()  # type: ignore[union-attr]
        self._leaves, self._structure = tree_flatten((call.args, dict(call.kwargs)))
        self._grad_outputs = call.grad_outputs
        self._output_axes = [
            batch_axis(call.module, index)
            for index, gradient in enumerate(call.grad_outputs)
            if gradient is not None
        ]
        batch_size = _batch_size(call)
        dtype = accumulable(self._parameter.new_empty(0)).dtype
        super().__init__(batch_size, self._parameter.shape, scale, dtype, self._parameter.device)
        self._input_axes = [
            axis if _has_length(leaf, axis, batch_size) else None
            for leaf, axis in (
                (leaf, batch_axis(call.module, index)) for index, leaf in enumerate(self._leaves)
            )
        ]
        self._together = True

    def _workspace(self) -> int:
        inputs = sum(leaf.numel() for leaf, _ in self._batched_inputs())
        return self._rows * self._columns + inputs // max(self.batch_size, 1)

    def _batched_inputs(self) -> list[tuple[Tensor, int]]:
        pairs = zip(self._leaves, self._input_axes, strict=True)
        return [(leaf, axis) for leaf, axis in pairs if axis is not None]

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._gradients(samples)[:, rows]

    def _gradients(self, samples: slice) -> Tensor:
        """``[n, R, K]``."""
        n = samples.stop - samples.start
        inputs = [leaf.narrow(axis, samples.start, n) for leaf, axis in self._batched_inputs()]
        known = [gradient for gradient in self._grad_outputs if gradient is not None]
        gradients = [
            gradient.narrow(axis, samples.start, n)
            for gradient, axis in zip(known, self._output_axes, strict=True)
        ]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            before = _random_state(self.device)
            result = self._run(inputs, gradients)
            if not torch.equal(before, _random_state(self.device)):
                raise CannotRecomputeError("its forward draws random numbers (dropout, say)")
        return result.to(self.dtype).reshape(n, self._rows, self._columns)

    def _run(self, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
        input_axes = [axis for _, axis in self._batched_inputs()]
        if self._together:
            try:
                in_dims = (input_axes, self._output_axes)
                return vmap(self._one_sample, in_dims=in_dims)(inputs, gradients)
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                # The module does something that vmap can't follow.
                self._together = False
        return torch.stack(
            [
                self._one_sample(
                    _select(inputs, input_axes, n), _select(gradients, self._output_axes, n)
                )
                for n in range(gradients[0].shape[self._output_axes[0]])
            ]
        )

    def _one_sample(self, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
        own = iter(inputs)
        leaves = [
            leaf if axis is None else next(own).unsqueeze(axis)
            for leaf, axis in zip(self._leaves, self._input_axes, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}

        def outputs(parameter: Tensor) -> list[Tensor]:
            state = {**buffers, self._name: parameter}
            output = functional_call(self._module, state, args, kwargs)
            return _selected(output, self._grad_outputs)

        pull_back = vjp(outputs, self._parameter)[1]
        pairs = zip(gradients, self._output_axes, strict=True)
        (gradient,) = pull_back([gradient.unsqueeze(axis) for gradient, axis in pairs])
        return gradient


def batch_axis(module: nn.Module, index: int = 0) -> int:
    """Which axis of the module's input or output tensor number ``index`` counts the samples."""
    if not isinstance(module, nn.RNNBase):
        return 0
    is_state = index > 0
    return 1 if is_state or not module.batch_first else 0


def _selected(output: Any, grad_outputs: tuple[Tensor | None, ...]) -> list[Tensor]:
    """The output tensors that the loss depends on."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if len(floating) != len(grad_outputs):
        raise CannotRecomputeError("some of its outputs don't depend on its parameters or inputs")
    return [t for t, g in zip(floating, grad_outputs, strict=True) if g is not None]


def _batch_size(call: LayerCall) -> int:
    index, known = next((i, g) for i, g in enumerate(call.grad_outputs) if g is not None)
    return known.shape[batch_axis(call.module, index)]


def _has_length(leaf: Any, axis: int, length: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == length


def _select(tensors: list[Tensor], axes: list[int], sample: int) -> list[Tensor]:
    return [tensor.select(axis, sample) for tensor, axis in zip(tensors, axes, strict=True)]


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
    return torch.get_rng_state()


def _without_hooks(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, calls no hook and keeps its state to itself."""
    clone = copy.copy(module)
    state = vars(clone)
    for name in list(state):
        if name.endswith("_hooks") or "_hooks_" in name:
            state[name] = OrderedDict()
    for name in ("_parameters", "_buffers", "_modules"):
        state[name] = dict(state[name])
    if isinstance(clone, nn.RNNBase):
        state["_flat_weights"] = list(clone._flat_weights)
    return clone
