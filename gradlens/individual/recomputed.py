"""Parameters of modules without a rule: each sample's backward pass through that module alone."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradlens.individual.operator import GradientOperator, accumulable
from gradlens.individual.tap import LayerCall, known_gradient


class CannotRecomputeError(Exception):
    """Why a module's individual gradients can't be found by recomputing it."""


class Recomputed(GradientOperator):
    """gₙ by a vector-Jacobian product through one module, for a few samples at a time.

    Every tensor argument whose batch axis has length N is split into samples; all others are
    shared by them. ``torch.func.vmap`` runs samples together where the module allows it,
    otherwise they run one after another. Nothing of the module or of the random number
    generators changes. ``CannotRecomputeError`` for modules that draw random numbers, and for
    whatever else the module does that a second run can't repeat.
    """

    def __init__(self, call: LayerCall, name: str, scale: float = 1.0) -> None:
        self._module = without_hooks(call.module)
        self._module.training = call.training
        self._name = name
        self._parameter = call.module._parameters[name].detach()  # type: ignore[union-attr]
        self._autocast = call.autocast
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
        axes = [batch_axis(call.module, index) for index in range(len(self._leaves))]
        self._input_axes = [
            axis if _has_length(leaf, axis, batch_size) else None
            for leaf, axis in zip(self._leaves, axes, strict=True)
        ]
        self._together = True

    def outlive_update(self) -> None:
        self._parameter = self._parameter.clone()
        for name, parameter in list(self._module._parameters.items()):
            if parameter is not None:
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(self._module, name, copied)
        for name, buffer in list(self._module._buffers.items()):
            if buffer is not None:
                self._module._buffers[name] = buffer.clone()

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
        device, dtype = self.device.type, self._autocast
        with _no_randomness(self.device), torch.autocast(device, dtype, enabled=dtype is not None):
            result = self._run(inputs, gradients)
        if result.is_sparse:
            raise CannotRecomputeError("its gradient is sparse")
        return result.to(self.dtype).reshape(n, self._rows, self._columns)

    def _run(self, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
        axes = [axis for _, axis in self._batched_inputs()]
        if self._together:
            try:
                in_dims = (axes, self._output_axes)
                return vmap(self._one_of_many, in_dims=in_dims)(inputs, gradients)
            except Exception:
                # Whatever torch.func can't follow, plain autograd may.
                self._together = False
        count = gradients[0].shape[self._output_axes[0]]
        samples = (
            (_select(inputs, axes, n), _select(gradients, self._output_axes, n))
            for n in range(count)
        )
        try:
            return torch.stack([self._one_alone(*sample) for sample in samples])
        except CannotRecomputeError:
            raise
        except Exception as error:
            raise CannotRecomputeError(f"recomputing its module failed ({error})") from error

    def _one_of_many(self, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
        def outputs(parameter: Tensor) -> list[Tensor]:
            return self._outputs(parameter, inputs)

        found, pull_back = vjp(outputs, self._parameter)[:2]
        (gradient,) = pull_back(self._batches_of_one(gradients, found))
        return gradient

    def _one_alone(self, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
        with torch.enable_grad():
            parameter = self._parameter.clone().requires_grad_()
            outputs = self._outputs(parameter, inputs)
        cotangents = self._batches_of_one(gradients, outputs)
        (gradient,) = torch.autograd.grad(outputs, parameter, cotangents)
        return gradient

    def _outputs(self, parameter: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs that the loss depends on, for a batch of one."""
        own = iter(inputs)
        leaves = [
            leaf if axis is None else next(own).unsqueeze(axis)
            for leaf, axis in zip(self._leaves, self._input_axes, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        state = {**buffers, self._name: parameter}
        output = functional_call(self._module, state, args, kwargs)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        if len(floating) != len(self._grad_outputs):
            raise CannotRecomputeError(
                "some of its outputs don't depend on its parameters or inputs"
            )
        return [t for t, g in zip(floating, self._grad_outputs, strict=True) if g is not None]

    def _batches_of_one(self, gradients: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        return [
            gradient.unsqueeze(axis).to(output.dtype)
            for gradient, axis, output in zip(gradients, self._output_axes, outputs, strict=True)
        ]


def batch_axis(module: nn.Module, index: int = 0) -> int:
    """Which axis of the module's input or output tensor number ``index`` counts the samples."""
    if not isinstance(module, nn.RNNBase):
        return 0
    is_state = index > 0
    return 1 if is_state or not module.batch_first else 0


def _batch_size(call: LayerCall) -> int:
    index, known = known_gradient(call)
    return known.shape[batch_axis(call.module, index)]


def _has_length(leaf: Any, axis: int, length: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == length


def _select(tensors: list[Tensor], axes: list[int], sample: int) -> list[Tensor]:
    return [tensor.select(axis, sample) for tensor, axis in zip(tensors, axes, strict=True)]


@contextmanager
def _no_randomness(device: torch.device) -> Iterator[None]:
    """Put all generators back, and raise if one was used: a second run would draw otherwise."""
    python, arrays = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = _torch_state(device)
        try:
            yield
        finally:
            drawn = not torch.equal(before, _torch_state(device))
            drawn |= python != random.getstate()
            drawn |= str(arrays) != str(np.random.get_state(legacy=False))
            random.setstate(python)
            np.random.set_state(arrays)
    if drawn:
        raise CannotRecomputeError("its forward draws random numbers (dropout, say)")


def _torch_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
    return torch.get_rng_state()


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, calls no hook and keeps its state to itself.

    ``CannotRecomputeError`` if the module doesn't compute by its class alone.
    """
    if "forward" in vars(module):
        raise CannotRecomputeError("its forward was replaced on the instance")
    if module._forward_pre_hooks:
        raise CannotRecomputeError("it has forward pre-hooks, which may set what it computes with")
    clone = copy.copy(module)
    state = vars(clone)
    for name, value in list(state.items()):
        if name.endswith("_hooks") or "_hooks_" in name:
            state[name] = OrderedDict()
        elif isinstance(value, (dict, list, set)):
            state[name] = copy.copy(value)
    return clone
