"""Backward passes of gradlens's own through a user's graph, after which the model is as before."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.graph.hooks import hook_owners


@contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[None]:
    """Pause gradlens's hooks on the model, and restore its buffers and attributes afterwards.

    The user's own hooks on activations and modules can't be switched off: they do run.
    """
    modules = [] if model is None else [*model.modules()]
    with ExitStack() as stack:
        for owner in hook_owners(modules):
            stack.enter_context(owner.paused())
        stack.enter_context(buffers_kept(modules))
        stack.enter_context(attributes_kept(modules))
        yield


@contextmanager
def training_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gradients of the parameters, and random numbers, are the same after the context as before.

    The latter are those of torch, numpy and Python. Inside, ``p.grad`` is ``None``, so that it
    shows what a backward function of the user's own has accumulated itself.
    """
    leaves = [each for each in parameters if each.is_leaf]
    gradients = [each.grad for each in leaves]
    devices = sorted({each.device.index for each in leaves if each.is_cuda})
    try:
        for each in leaves:
            each.grad = None
        with torch.random.fork_rng(devices), random_states_kept():
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
def without_fused_recurrence(model: nn.Module) -> Iterator[None]:
    """cuDNN is off in the context, if the model has recurrent layers.

    Its recurrent layers can't be differentiated twice, and in eval mode not even once.
    """
    before = torch.backends.cudnn.enabled
    try:
        if any(isinstance(each, nn.RNNBase) for each in model.modules()):
            torch.backends.cudnn.enabled = False
        yield
    finally:
        torch.backends.cudnn.enabled = before


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


_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of all modules, which hold parameters, buffers, hooks and other modules."""


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modes of modules, and their plain attributes.

    Such are the weight that ``torch.nn.utils.weight_norm`` computes in the forward pass, a number
    of calls, or a list of activations. Of other objects, what they hold isn't restored.
    """
    kept = [
        (vars(module), {n: v for n, v in vars(module).items() if n not in _OF_MODULES})
        for module in modules
    ]
    found: dict[int, Any] = {}
    for _, own in kept:
        _add_containers(own.values(), found)
    contents = [(each, copy(each)) for each in found.values()]
    try:
        yield
    finally:
        for attributes, own in kept:
            for name in [*attributes]:
                if name not in own and name not in _OF_MODULES:
                    del attributes[name]
            attributes.update(own)
        for container, values in contents:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(values)


def _add_containers(values: Iterable[Any], found: dict[int, Any]) -> None:
    """Add the containers among values, and those inside of them, by their ``id``."""
    for each in values:
        if type(each) in _CONTAINERS and id(each) not in found:
            found[id(each)] = each
            _add_containers(each.values() if isinstance(each, dict) else each, found)


_CONTAINERS = (list, deque, dict, set, defaultdict, Counter, OrderedDict)


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' own buffers: the same tensors, with the values from before the context.

    Activation checkpointing runs layers again in each backward pass, and each run of a
    normalisation would change its running statistics.
    """
    kept = [
        (module, name, buffer, buffer.clone())
        for module in modules
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
