"""Keeps what a model's latest call has returned, at which the loss's curvature is computed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.hooks.model_calls import tensors_of
from gradlens.hooks.module_hooks import HookOwner
from gradlens.hooks.torch_private import remove_forward_hook


class ModelOutputs(HookOwner):
    """A forward hook that keeps the tensors that its model's latest call has returned.

    It is registered while later calls may be those of a step that needs them, and the tensors are
    released when they are taken. Copies and pickles of the model get an empty hook.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._registered = False
        self._latest: tuple[Tensor, ...] = ()

    def keep_if(self, needed: bool) -> None:
        """Keep what later calls return if that is needed, and release what is kept otherwise."""
        if self._model is None or needed == self._registered:
            return
        self._registered = needed
        if needed:
            self._model.register_forward_hook(self)
        else:
            remove_forward_hook(self._model, self)
            self._latest = ()

    def take(self) -> tuple[Tensor, ...]:
        """The tensors with a graph that the latest call has returned; they are kept no longer."""
        found, self._latest = self._latest, ()
        return found

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # The compiler first: what else is read in compiled code, it compiles anew for.
        if torch.compiler.is_compiling() or self._paused or not torch.is_grad_enabled():
            return
        with suppress(Exception):  # of objects that the model returns; the forward pass goes on
            self._latest = tuple(t for t in tensors_of(output) if t.grad_fn is not None)

    def __reduce__(self) -> tuple[type[ModelOutputs], tuple[()]]:
        return ModelOutputs, ()
