"""Backward passes of gradlens's own through a user's graph, after which the model is as before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.graph.hooks import hook_owners


@contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[None]:
    """Pause gradlens's hooks on the model, and restore its buffers afterwards.

    The user's own hooks on activations and modules can't be switched off: they do run.
    """
    with ExitStack() as stack:
        for owner in set() if model is None else hook_owners(model):
            stack.enter_context(owner.paused())
        stack.enter_context(buffers_kept(model))
        yield


@contextmanager
def training_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gradients of the parameters, and random numbers, are the same after the context as before.

    Inside, ``p.grad`` is ``None``, so that it shows what a backward function of the user's own has
    accumulated itself.
    """
    leaves = [each for each in parameters if each.is_leaf]
    gradients = [each.grad for each in leaves]
    devices = sorted({each.device.index for each in leaves if each.is_cuda})
    try:
        for each in leaves:
            each.grad = None
        with torch.random.fork_rng(devices):
            yield
    finally:
        for each, gradient in zip(leaves, gradients, strict=True):
            each.grad = gradient


def random_states(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """The states of Python's, numpy's and torch's generators, of the CPU and of tensors' devices.

    They are equal if no random number was drawn in between.
    """
    of_numpy: Any = np.random.get_state(legacy=False)
    devices = {each.device for each in tensors if each.is_cuda}
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
    drawn = tuple(bytes(state.cpu().numpy()) for state in of_torch)
    numbers = tuple(np.asarray(each).tobytes() for each in of_numpy["state"].values())
    return random.getstate(), numbers, drawn


@contextmanager
def random_states_kept() -> Iterator[None]:
    """The states of Python's and numpy's global generators are the same after the context."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules are in eval mode inside the context, and in their own modes afterwards.

    Without a call of ``model.eval()``, which a class may have defined to do more, such as to merge
    weights.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the modes of a model's modules, and tensors that they have as plain attributes.

    Such is the weight that ``torch.nn.utils.weight_norm`` computes in the forward pass.
    """
    kept = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name == "training" or isinstance(value, Tensor)
    ]
    try:
        yield
    finally:
        for attributes, name, value in kept:
            attributes[name] = value


@contextmanager
def buffers_kept(model: nn.Module | None) -> Iterator[None]:
    """Restore a model's buffers: the same tensors, with the same values as before the context.

    Activation checkpointing runs layers again in each backward pass, and each run of a
    normalisation would change its running statistics.
    """
    kept = [
        (module, name, buffer, buffer.clone())
        for module in ([] if model is None else model.modules())
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in kept:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            # Through .data, since the graph may have saved the buffer and checks its version.
            buffer.data.copy_(values)
