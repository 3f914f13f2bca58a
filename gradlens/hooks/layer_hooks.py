"""The forward hooks on layers that let BackPACK's extensions run on a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.parametrize import ParametrizationList

from gradlens.hooks.layer_calls import PendingCall
from gradlens.hooks.model_calls import keep_calls
from gradlens.hooks.module_hooks import on_gradient
from gradlens.hooks.torch_private import (
    LossModule,
    forward_hooks,
    remove_forward_hook,
    tree_leaves,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_ATTRIBUTE = "_gradlens_layer_hook"
"""Where a module's hook is found, also while it isn't installed."""


def extend(model: AnyModule) -> AnyModule:
    """Install gradlens's hooks on the model's layers, and return the model.

    Nothing changes in what the model computes. Call it once, before the forward pass. A loss module
    can be extended too, for quantities that need per-sample losses. First-order BackPACK extensions
    then work on the model too. Second-order ones need BackPACK's own ``extend`` on model and loss
    besides.
    """
    for module in hookable_modules(model):
        _hook_for(module).install_permanently(module)
    keep_calls(model)
    return model


class LayerHook:
    """A forward hook on a layer, which runs BackPACK's extensions when backward reaches the layer.

    A layer has one, which is installed permanently (``permanent``), or while a ``HookInstaller``
    needs it. Once it was removed, ``missed_call`` says that the layer's latest call may have
    been without it. The layer loses it when the last installer is closed.

    The gradient at the output comes from a hook on the output tensor. A full backward hook would
    wrap inputs and outputs, and so forbid in-place operations; and each call has its own inputs
    here, also when a layer is called twice.
    """

    def __init__(self, permanent: bool = False) -> None:
        self.permanent = permanent
        self.missed_call = False
        self._installers: weakref.WeakSet[HookInstaller] = weakref.WeakSet()
        self._needed_by: weakref.WeakSet[HookInstaller] = weakref.WeakSet()

    def install_permanently(self, module: nn.Module) -> None:
        """Install it on its module for good."""
        self.permanent = True
        self._install(module)

    def install_for(self, installer: HookInstaller, module: nn.Module) -> None:
        """Install it on its module until ``remove_for`` is called."""
        self._installers.add(installer)
        self._needed_by.add(installer)
        self._install(module)

    def remove_for(self, installer: HookInstaller, module: nn.Module) -> None:
        """Remove it from its module, unless it is permanent or another installer needs it."""
        self._needed_by.discard(installer)
        if not (self.permanent or self._needed_by):
            remove_forward_hook(module, self)
            self.missed_call = True

    def close_for(self, installer: HookInstaller, module: nn.Module) -> None:
        """As ``remove_for``; its module forgets it unless another installer may need it."""
        self.remove_for(installer, module)
        self._installers.discard(installer)
        if not (self.permanent or self._installers):
            vars(module).pop(_ATTRIBUTE, None)

    def _install(self, module: nn.Module) -> None:
        if all(hook is not self for hook in forward_hooks(module).values()):
            # Before all other hooks, since those may replace the output.
            module.register_forward_hook(self, with_kwargs=True, prepend=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # There can be no hooks on the tensors of a compiled graph.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.missed_call = False
        outputs = _differentiable(output) if _has_calls_of_interest(module) else []
        if not outputs:
            return
        call = PendingCall(module, args, kwargs, outputs[0])
        if len(outputs) == 1:
            on_gradient(outputs[0], lambda gradient: call.run_extensions([gradient]))
        else:
            register_multi_grad_hook(outputs, call.run_extensions)

    def __reduce__(self) -> tuple[type[LayerHook], tuple[bool]]:
        # Copies and pickles of a module get a hook of their own, without installers.
        return LayerHook, (self.permanent,)


class HookInstaller:
    """Installs the layer hooks of some models, and removes them while they aren't needed.

    A hook costs 1 to 4 microseconds a call even if it returns at once: a step at which nothing is
    computed should cost what it costs without gradlens.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules = [module for model in models for module in hookable_modules(model)]
        self._installed = self._always = False
        self.install_if(True)

    def install_if(self, needed: bool) -> None:
        """Install the hooks for later forward passes if these may need them, or remove them."""
        needed = needed or self._always
        if needed == self._installed:
            return
        self._installed = needed
        for module in self._modules:
            hook = _hook_for(module)
            if needed:
                hook.install_for(self, module)
            else:
                hook.remove_for(self, module)

    def install_always(self) -> None:
        """Install the hooks for all later forward passes; ``install_if`` removes none."""
        self._always = True
        self.install_if(True)

    def close(self) -> None:
        """Remove the hooks for good."""
        for module in self._modules:
            hook = layer_hook(module)
            if hook is not None:
                hook.close_for(self, module)
        self._modules = []

    @property
    def missed_call(self) -> bool:
        """Whether layers had no hook in their latest calls, or may have had none."""
        return any(_hook_for(module).missed_call for module in self._modules)


def layer_hook(module: nn.Module) -> LayerHook | None:
    """The module's hook, installed or not; ``None`` if it never had one."""
    hook: LayerHook | None = vars(module).get(_ATTRIBUTE)
    return hook


def _hook_for(module: nn.Module) -> LayerHook:
    """The module's hook, made if there is none."""
    hook: LayerHook = vars(module).setdefault(_ATTRIBUTE, LayerHook())
    return hook


def hookable_modules(model: nn.Module) -> list[nn.Module]:
    """Leaf modules with parameters of their own, dropout and losses, but no parametrizations."""
    parametrizations = {
        id(inner)
        for module in model.modules()
        if isinstance(module, ParametrizationList)
        for inner in module.modules()
    }
    return [m for m in model.modules() if _is_hookable(m) and id(m) not in parametrizations]


def _is_hookable(module: nn.Module) -> bool:
    has_parameters = any(True for _ in module.parameters(recurse=False))
    kept = has_parameters or isinstance(module, (LossModule, nn.Dropout))
    return kept and not any(True for _ in module.children())


def _has_calls_of_interest(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.training
    is_trained = any(p.requires_grad for p in module.parameters(recurse=False))
    return is_trained or isinstance(module, LossModule)


def _differentiable(output: Any) -> list[Tensor]:
    """Output tensors of a graph; a module may also return a parameter as it is."""
    if isinstance(output, Tensor):
        return [] if output.is_leaf else [output]
    return [o for o in tree_leaves(output) if isinstance(o, Tensor) and not o.is_leaf]
