"""The forward hooks on layers that let BackPACK's extensions run on a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.parametrize import ParametrizationList

from gradlens.backpack_adapter.layer_calls import PendingCall, keep_with_graph
from gradlens.graph.hooks import NO_MODULE, is_traced, on_gradient, takes_hooks
from gradlens.graph.model_calls import keep_calls
from gradlens.stateful import State
from gradlens.torch_private import (
    LossModule,
    UnscriptedHook,
    add_forward_hook,
    forward_hooks,
    remove_forward_hook,
    tree_leaves,
    unseen,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)


_ATTRIBUTE = "_gradlens_layer_hook"
"""Where a module's hook is found, also while it isn't installed."""


def extend(model: AnyModule) -> AnyModule:
    """Install gradlens's hooks on the model's layers, and return the model.

    The hooks don't change what the model computes. Call it once, before the forward pass. You can
    also extend a loss module, for quantities of its curvature. First-order BackPACK
    extensions then work on the model. Second-order ones also need BackPACK's own ``extend`` on the
    model and the loss. ``TypeError`` if it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(NO_MODULE.format(kind=type(model).__name__))
    for module in hookable_modules(model):
        _hook_for(module).install_permanently(module)
    keep_calls(model, user=model)
    return model


class LayerHook(UnscriptedHook):
    """A forward hook on a layer, which runs BackPACK's extensions when backward reaches the layer.

    A layer has one, which is installed permanently (``permanent``), or while a ``HookInstaller``
    needs it. Once it was removed, ``missed_call`` says that the layer's latest call may have
    been without it. It is forgotten once no installer may install it again.

    The gradient at the output comes from a hook on the output tensor. A full backward hook would
    wrap inputs and outputs, and so forbid in-place operations; and each call has its own inputs
    here, also when a layer is called twice.
    """

    def __init__(self, permanent: bool = False) -> None:
        self.permanent = permanent
        self.missed_call = False
        self._users: weakref.WeakSet[HookInstaller] = weakref.WeakSet()
        self._installers: weakref.WeakSet[HookInstaller] = weakref.WeakSet()

    def keep_for(self, installer: HookInstaller) -> None:
        """Keep it, installed or not, until ``forget_for`` is called."""
        self._users.add(installer)

    def forget_for(self, installer: HookInstaller, module: nn.Module) -> None:
        """Let its module forget it, unless it is permanent or another installer may need it."""
        self._users.discard(installer)
        if not (self.permanent or self._users):
            delattr(module, _ATTRIBUTE)

    def install_permanently(self, module: nn.Module) -> None:
        """Install it on its module for good."""
        self.permanent = True
        self._install(module)

    def install_for(self, installer: HookInstaller, module: nn.Module) -> None:
        """Install it on its module until ``remove_for`` is called."""
        self._installers.add(installer)
        self._install(module)

    def remove_for(self, installer: HookInstaller, module: nn.Module) -> None:
        """Remove it from its module, unless it is permanent or another installer needs it."""
        self._installers.discard(installer)
        if not (self.permanent or self._installers):
            remove_forward_hook(module, self)
            self.missed_call = True

    def _install(self, module: nn.Module) -> None:
        if all(hook is not self for hook in forward_hooks(module)):
            # Before all other hooks, since those may replace the output.
            add_forward_hook(module, self, with_kwargs=True, prepend=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_traced() or not torch.is_grad_enabled():
            return
        self.missed_call = False
        try:
            with unseen():
                self._await_gradient(module, args, kwargs, output)
        except Exception as error:
            self._failed(error)

    def _await_gradient(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        outputs = _differentiable(output) if _has_calls_of_interest(module) else []
        if not outputs:
            return
        call = PendingCall(module, args, kwargs)
        if isinstance(module, LossModule):
            keep_with_graph(call, outputs[0])
        if len(outputs) == 1:
            on_gradient(outputs[0], lambda gradient: self._run_extensions(call, [gradient]))
        else:
            register_multi_grad_hook(outputs, partial(self._run_extensions, call))

    def _run_extensions(self, call: PendingCall, gradients: Sequence[Tensor | None]) -> None:
        try:
            call.run_extensions(gradients)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Leave an exception to the installers; without any, raise it in the user's pass."""
        if not self._installers:
            raise error
        for installer in self._installers:
            installer.keep_error(error)

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
        self._installed: Sequence[nn.Module] = ()
        self._losses = [module for module in self._modules if isinstance(module, LossModule)]
        self._always = False
        self._error: Exception | None = None
        for module in self._modules:
            _hook_for(module).keep_for(self)
        self.install_if(True)

    def install_if(self, needed: bool, of_losses: bool = False) -> None:
        """Install the hooks for later forward passes if these may need them, or remove them.

        Those of loss modules alone if they are needed ``of_losses``.
        """
        wanted = self._modules if needed or self._always else self._losses if of_losses else ()
        if wanted is self._installed:
            return
        before, after = ({id(each) for each in some} for some in (self._installed, wanted))
        for module in (each for each in self._installed if id(each) not in after):
            _hook_for(module).remove_for(self, module)
        for module in (each for each in wanted if id(each) not in before):
            _hook_for(module).install_for(self, module)
        self._installed = wanted

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hooks for a forward pass of gradlens's own, of which layers keep no trace."""
        hooks = [_hook_for(module) for module in self._modules]
        missed = [hook.missed_call for hook in hooks]
        self.install_if(True)
        try:
            yield
        finally:
            self.install_if(False)
            for hook, before in zip(hooks, missed, strict=True):
                hook.missed_call = before

    def install_always(self) -> None:
        """Install the hooks for all later forward passes; ``install_if`` removes none."""
        self._always = True
        self.install_if(True)

    def state_dict(self) -> State:
        """Whether the hooks are installed for all forward passes."""
        return {"always": self._always}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._always = state["always"]
        self.install_if(True)

    def keep_error(self, error: Exception) -> None:
        """Keep the first exception that a hook has raised, which the user's pass must not see."""
        self._error = self._error or error

    def take_error(self) -> Exception | None:
        """The first exception that hooks have raised since the last call of this function."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Remove the hooks for good, and what modules keep of them."""
        self._always = False
        self.install_if(False)
        for module in self._modules:
            _hook_for(module).forget_for(self, module)
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


def _has_calls_of_interest(module: nn.Module) -> bool:
    is_trained = any(p.requires_grad for p in module.parameters(recurse=False))
    return is_trained or isinstance(module, LossModule)


def _differentiable(output: Any) -> list[Tensor]:
    """Output tensors of a graph; a module may also return a parameter as it is."""
    if isinstance(output, Tensor):
        return [] if output.is_leaf else [output]
    return [o for o in tree_leaves(output) if isinstance(o, Tensor) and not o.is_leaf]
