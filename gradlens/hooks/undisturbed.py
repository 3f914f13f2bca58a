"""Passes through a user's graph of which the model keeps no trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.hooks.layer_calls import taps_of
from gradlens.hooks.pausable import ListeningHook, Pausable
from gradlens.per_sample.labelling.graph import Graph, is_python_function


@contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[None]:
    """Who listens to the model's layers hears nothing of passes inside the context.

    And buffers are as before it afterwards. Hooks of the user's own on activations and modules
    can't be switched off, and do run.
    """
    listeners = [] if model is None else [each for each in _listeners(model) if not each.paused]
    for listener in listeners:
        listener.paused = True
    try:
        with buffers_kept(model):
            yield
    finally:
        for listener in listeners:
            listener.paused = False


@contextmanager
def training_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gradients of the parameters, and random numbers, are the same after the context as before.

    Inside, ``p.grad`` is ``None``, so that it shows what a backward function of the user's own has
    accumulated itself.
    """
    leaves = [each for each in parameters if each.is_leaf]
    gradients = [each.grad for each in leaves]
    devices = sorted({each.device.index for each in leaves if each.is_cuda})
    for each in leaves:
        each.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for each, gradient in zip(leaves, gradients, strict=True):
            each.grad = gradient


@contextmanager
def attributes_kept(graph: Graph) -> Iterator[None]:
    """What functions in Python keep for their backward pass is the same after the context.

    Some let go of it in that pass.
    """
    held: list[Any] = [vars(node) for node in graph.nodes if is_python_function(node)]
    kept = [dict(attributes) for attributes in held]
    try:
        yield
    finally:
        for attributes, before in zip(held, kept, strict=True):
            attributes.clear()
            attributes.update(before)


def _listeners(model: nn.Module) -> Iterator[Pausable]:
    for tap in taps_of(model):
        yield from tap.listeners
    for module in model.modules():
        hooks: list[Any] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for hook in hooks:
            if isinstance(hook, ListeningHook) and hook.listener is not None:
                yield hook.listener


@contextmanager
def hooks_muted(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Without the tensors' own hooks: a user's may count calls, or clip what passes."""
    hooks = [t._backward_hooks for t in tensors if t._backward_hooks]
    kept = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, entries in zip(hooks, kept, strict=True):
            registered.update(entries)


@contextmanager
def buffers_kept(model: nn.Module | None) -> Iterator[None]:
    """Buffers are the same objects, and hold the same, after the context as before.

    Activation checkpointing runs layers again in each backward pass, and normalisation would
    count every run.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in ([] if model is None else model.modules())
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer
            # The graph may have saved it, and would miss the version.
            buffer.data.copy_(values)
