"""The forward hooks on layers that let BackPACK's extensions run on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from gradlens.backpack_adapter.layer_calls import keep_call
from gradlens.graph.hooks import NO_MODULE, HookOwner, OwnedHook, is_traced, removal, takes_hooks
from gradlens.graph.model_calls import keep_calls
from gradlens.stateful import State
from gradlens.torch_private import (
    LossModule,
    UnscriptedHook,
    add_forward_hook,
    forward_hooks,
    unseen,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def extend(model: AnyModule) -> AnyModule:
    """Install gradlens's hooks on the model's layers, and return the model.

    The hooks don't change what the model computes. Call it once, before the forward pass. You can
    also extend a loss module, for quantities of its curvature. First-order BackPACK extensions then
    work on the model. Second-order ones need BackPACK's own ``extend`` on the model and the loss.
    ``TypeError`` if it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(NO_MODULE.format(kind=type(model).__name__))
    for module in hookable_modules(model):
        if _permanent not in forward_hooks(module):
            add_forward_hook(module, _permanent, with_kwargs=True, prepend=True)
    keep_calls(model, user=model)
    return model


class _PermanentHook(UnscriptedHook):
    """A forward hook without state, of which there is one, also in copies and pickles."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not is_traced() and torch.is_grad_enabled():
            with unseen():
                keep_call(module, args, kwargs, output, partial(_report, module))

    def __reduce__(self) -> str:
        return "_permanent"


_permanent = _PermanentHook()


def _report(module: nn.Module, error: Exception) -> None:
    """Leave an exception to the installers; without any, raise it in the user's pass."""
    owners = [each.owner for each in forward_hooks(module) if isinstance(each, OwnedHook)]
    installers = [owner for owner in owners if isinstance(owner, HookInstaller)]
    if not installers:
        raise error
    for installer in installers:
        installer.failed(error)


class HookInstaller(HookOwner):
    """Installs hooks on the layers of some models, and removes them while they aren't needed.

    A hook costs 1 to 4 microseconds a call even if it returns at once: a step at which nothing is
    computed should cost what it costs without gradlens.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules = [module for model in models for module in hookable_modules(model)]
        self._losses = [module for module in self._modules if isinstance(module, LossModule)]
        self._installed: Sequence[nn.Module] = ()
        self._remove: Callable[[], object] = lambda: None
        self._always = False
        self._error: Exception | None = None
        self.install_if(True)

    def install_if(self, needed: bool, of_losses: bool = False) -> None:
        """Install the hooks for later forward passes if these may need them, or remove them.

        Those of loss modules alone if they are needed ``of_losses``.
        """
        wanted = self._modules if needed or self._always else self._losses if of_losses else ()
        if wanted is self._installed:
            return
        self._remove()
        hook = OwnedHook(self, HookInstaller._keep)
        # Before all other hooks, since those may replace the output.
        options = {"with_kwargs": True, "prepend": True}
        handles = [add_forward_hook(module, hook, **options) for module in wanted]
        self._installed, self._remove = wanted, removal(self, handles)

    def _keep(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.is_grad_enabled():
            keep_call(module, args, kwargs, output, partial(_report, module))

    def install_always(self) -> None:
        """Install the hooks for all later forward passes; ``install_if`` removes none."""
        self._always = True
        self.install_if(True)

    @property
    def missed_call(self) -> bool:
        """Whether layers have no hooks, so that there were none in the latest forward pass."""
        return self._installed is not self._modules

    def state_dict(self) -> State:
        """Whether the hooks are installed for all forward passes."""
        return {"always": self._always}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._always = state["always"]
        self.install_if(True)

    def failed(self, error: Exception) -> None:
        """Keep the first exception that a hook has raised, which the user's pass must not see."""
        self._error = self._error or error

    def take_error(self) -> Exception | None:
        """The first exception that hooks have raised since the last call of this function."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Remove the hooks for good."""
        self._always = False
        self.install_if(False)
        self._modules, self._losses = [], []


def hookable_modules(model: nn.Module) -> list[nn.Module]:
    """Leaf modules with parameters of their own, and losses, but no parametrizations."""
    parametrizations = {
        id(inner)
        for module in model.modules()
        if isinstance(module, ParametrizationList)
        for inner in module.modules()
    }
    return [m for m in model.modules() if _is_hookable(m) and id(m) not in parametrizations]


def _is_hookable(module: nn.Module) -> bool:
    has_parameters = any(True for _ in module.parameters(recurse=False))
    kept = has_parameters or isinstance(module, LossModule)
    return kept and takes_hooks(module) and not any(True for _ in module.children())
