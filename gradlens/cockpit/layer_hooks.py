"""Hooks on layers for BackPACK's extensions, curvature and per-sample losses."""

from __future__ import annotations

from torch import nn

from gradlens.hooks.layer_calls import Watch, taps_of


class LayerHooks:
    """Installs the hooks on the layers of a model and of a loss module, and removes them.

    They are installed for forward passes that may need them, as far as can be forecast.
    """

    def __init__(self, model: nn.Module | None, loss_function: nn.Module | None) -> None:
        self._model = model
        self._watch = Watch()
        self._always = False
        for watched in (model, loss_function):
            if watched is not None:
                self._watch.over(watched)

    def install(self, needed: bool) -> None:
        """Install the hooks for the forward passes to come if they may be ``needed``."""
        self._watch.awake = needed or self._always

    def install_always(self) -> None:
        """Install the hooks for all forward passes to come, since needs can't be forecast."""
        self._always = self._watch.awake = True

    @property
    def were_missing(self) -> bool:
        """Whether the latest forward pass ran without hooks."""
        return self._model is not None and any(tap.slept for tap in taps_of(self._model))

    def remove(self) -> None:
        """Remove all hooks."""
        self._watch.awake = False
