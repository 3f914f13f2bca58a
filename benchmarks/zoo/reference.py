"""Per-sample gradients of a network by one backward pass for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.zoo.network import Batch, Network
from tests.cases.references import gradients_of, stacked

LOW_PRECISION = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


@contextmanager
def hooks_muted(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Without the tensors' own hooks, which may count calls or clip gradients."""
    hooks = [each._backward_hooks for each in tensors if each._backward_hooks]
    kept = [dict(registered) for registered in hooks]
    try:
        for registered in hooks:
            registered.clear()
        yield
    finally:
        for registered, entries in zip(hooks, kept, strict=True):
            registered.update(entries)


@dataclass(frozen=True)
class Reference:
    """Per-sample gradients ``[N, *P]`` and the batch's gradient, by parameter name.

    ``inconsistency`` is how far those of samples are from adding up to the batch's, relative to
    its largest number, and ``low_precision`` says that parts of the network compute in float32 or
    less.
    """

    rows: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    inconsistency: float
    low_precision: bool

    @property
    def largest(self) -> float:
        """The largest number of the batch's gradient."""
        return _largest(self.gradients)


def reference(network: Network, model: nn.Module, batch: Batch, copies: int = 1) -> Reference:
    """By as many forward and backward passes as there are samples, and one of the batch.

    Statistics of batch normalisation in train mode are held fixed at those of the batch. With
    several ``copies`` a sample stands as often in its batch of one, which has the same mean loss.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Hooks on parameters, such as those that project p.grad, are no part of the loss's gradient.
    with hooks_muted(parameters.values()), _statistics_of_the_batch(network, model, batch):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss = network.loss(model, batch)
        gradients = gradients_of(loss, parameters)
        found = []
        for n in range(network.samples):
            _restore(model, buffers)
            found.append(gradients_of(network.part(model, batch, n, copies), parameters))
        _restore(model, buffers)
    rows = {name: each * network.samples for name, each in stacked(found).items()}
    return Reference(rows, gradients, _inconsistency(rows, gradients), _is_low(loss))


def batch_gradients(network: Network, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The gradients of the batch's loss, after which buffers are as they were."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = gradients_of(network.loss(model, batch), parameters)
    _restore(model, buffers)
    return gradients


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Whatever a forward pass has changed, as a power iteration does."""
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.data.copy_(buffers[name])


def _inconsistency(rows: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
    distances = {name: rows[name].mean(0) - g for name, g in gradients.items()}
    distance = _largest(distances) / (_largest(gradients) or 1.0)
    return distance if distance == distance else float("inf")


def _largest(gradients: Mapping[str, Tensor]) -> float:
    """Not a number if one of them isn't."""
    if not gradients:
        return 0.0
    return float(torch.stack([gradient.abs().max() for gradient in gradients.values()]).max())


def _is_low(loss: Tensor) -> bool:
    """Whether a node of the loss's graph has an output in less than float64."""
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(m is not None and m.dtype in LOW_PRECISION for m in node._input_metadata):
            return True
        stack += [child for child, _ in node.next_functions]
    return False


def normalisations(model: nn.Module) -> list[_BatchNorm]:
    """Batch normalisations that would compute statistics of the batch now."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and not isinstance(module, nn.modules.instancenorm._InstanceNorm)
        and (module.training or module.running_mean is None)
    ]


@contextmanager
def _statistics_of_the_batch(network: Network, model: nn.Module, batch: Batch) -> Iterator[None]:
    """Batch normalisations use the batch's statistics as running ones; as they were, after it."""
    live = normalisations(model)
    before = [dict(module.__dict__, **module._buffers) for module in live]
    hooks = [module.register_forward_pre_hook(_remember) for module in live]
    try:
        if live:
            with torch.no_grad():
                network.loss(model, batch)
        for hook in hooks:
            hook.remove()
        for module in live:
            if hasattr(module, "batch_mean"):
                module.running_mean, module.running_var = module.batch_mean, module.batch_var
                module.training, module.track_running_stats = False, True
        yield
    finally:
        for module, old in zip(live, before, strict=True):
            module.running_mean, module.running_var = old["running_mean"], old["running_var"]
            module.training = old["training"]
            module.track_running_stats = old["track_running_stats"]


def _remember(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    axes = [axis for axis in range(inputs[0].ndim) if axis != 1]
    module.batch_mean = inputs[0].detach().mean(axes)
    module.batch_var = inputs[0].detach().var(axes, unbiased=False)
