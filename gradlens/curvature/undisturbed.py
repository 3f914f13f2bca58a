"""Passes through a user's graph of which the model keeps no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gradlens.individual.tap import taps_of


@contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[None]:
    """Who listens to the model's layers hears nothing of backward passes inside the context.

    And buffers are as before it afterwards: activation checkpointing runs layers again in each
    backward pass, and normalisation would count every run. Hooks of the user's own on activations
    and modules can't be switched off, and do run.
    """
    if model is None:
        yield
        return
    taps = taps_of(model)
    listeners = [each for tap in taps for each in tap.listeners if not each.paused]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for listener in listeners:
        listener.paused = True
    try:
        yield
    finally:
        for listener in listeners:
            listener.paused = False
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer
            # The graph may have saved it, and would miss the version.
            buffer.data.copy_(values)
