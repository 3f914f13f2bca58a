"""Every private name of torch that gradlens uses, and what it is used for.

Torch promises nothing about these names: ``tests/test_torch_private.py`` checks what each of
them means, so that a new version of torch which changes one fails there first.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._library import autograd as _library_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import OptState
from torch.autograd.function import Function
from torch.jit._script import RecursiveScriptModule
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss
from torch.nn.modules.pooling import (
    _AdaptiveAvgPoolNd,
    _AdaptiveMaxPoolNd,
    _AvgPoolNd,
    _MaxPoolNd,
)
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch, checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

__all__ = ["tree_leaves", "tree_map_only"]
"""The leaves of nested containers, and containers of other leaves.

Containers that other libraries have registered with torch are included, such as the outputs of
transformers; torch has no public function for them.
"""

_autograd: Any = torch._C._autograd

# Base classes of modules: their public subclasses have no other class in common, and users derive
# layers and losses of their own from them.

LossModule: TypeAlias = _Loss
"""Base class of loss modules."""

BatchNorm: TypeAlias = _BatchNorm
"""Base class of normalisation over the batch."""

ChannelNorm: TypeAlias = _NormBase
"""Base class of normalisation by channel: over the batch, or over each instance."""

Convolution: TypeAlias = _ConvNd
"""Base class of convolutions, transposed or not."""

Dropout: TypeAlias = _DropoutNd
"""Base class of dropout, of elements or of channels."""

ScriptedModule: TypeAlias = RecursiveScriptModule
"""What ``torch.jit.script`` makes of a module."""

POOLING: tuple[type[nn.Module], ...] = (
    _MaxPoolNd,
    _AvgPoolNd,
    _AdaptiveMaxPoolNd,
    _AdaptiveAvgPoolNd,
)
"""Base classes of pooling layers."""


# Nodes of an autograd graph ---------------------------------------------------------------------


def saved(node: Any, name: str, *default: Any) -> Any:
    """What a node has saved for its backward pass, under the name that torch's derivatives give it.

    ``AttributeError`` if it has saved nothing under this name and there is no ``default``.
    ``torch.autograd.graph.saved_tensors_hooks`` is public, but must surround the forward pass.
    """
    return getattr(node, f"_saved_{name}", *default)


def signed(number: int) -> int:
    """A number that a node has saved, where torch shows it as an unsigned one of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def saved_integers(node: Any) -> tuple[Any, ...]:
    """The axes, offsets and sizes that a node has saved; nothing public lists them."""
    node_type: Any = type(node)
    values = [getattr(node, name) for name in _value_slots(node_type)]
    return tuple([value for value in values if isinstance(value, (int, tuple, bool))])


@cache
def _value_slots(node_type: Hashable) -> tuple[str, ...]:
    names = [name for name in dir(node_type) if name.startswith("_saved_")]
    return tuple(name for name in names if not hasattr(node_type, f"_raw{name}"))


def saved_where_they_are(node: Any) -> list[Tensor]:
    """The tensors that a node has saved, without those that hooks store elsewhere or recompute.

    Reading the latter by ``saved`` would run these hooks, such as those of a checkpoint.
    """
    return saved_tensors(node)[0]


def saved_tensors(node: Any) -> tuple[list[Tensor], bool]:
    """``saved_where_they_are``, and whether there are others."""
    slots = _saved_tensors(node)
    here = [one for one in slots if one.unpack_hook is None]
    return [one.data for one in here if one.data is not None], len(here) < len(slots)


def is_saved_elsewhere(node: Any) -> bool:
    """Whether hooks store tensors that a node has saved elsewhere, or recompute them."""
    return any(map(attrgetter("unpack_hook"), _saved_tensors(node)))


@dataclass(frozen=True)
class StoredTensor:
    """A saved tensor that hooks store: what they have ``stored`` in its place, and their hook.

    ``frame`` is that of the checkpoint whose hooks they are, if there is one.
    """

    stored: Any
    unpack: Callable[[Any], Tensor]
    frame: Any

    @property
    def is_recomputed_once(self) -> bool:
        """Whether the region has a context of its own, as one for selective checkpointing has.

        That one gives what it has stored to the first recomputation alone.
        """
        code, cells = self.frame.recompute_fn.__code__, self.frame.recompute_fn.__closure__
        contexts = dict(zip(code.co_freevars, cells, strict=True))
        context = contexts.get("recompute_context")
        return context is None or not isinstance(context.cell_contents, nullcontext)

    def hand_back(self, key: Any, tensor: Tensor) -> None:
        """Let the checkpoint return a tensor once more under a key, after it has handed it out."""
        handle = checkpoint._Handle()
        self.frame.recomputed[key][handle] = tensor
        self.stored.handles[key] = handle


def stored_tensors(node: Any, *names: str) -> list[StoredTensor]:
    """The tensors of a node that hooks store, under some names or all, without reading them.

    A checkpoint hands out each tensor once in a backward pass, and computes its region again where
    the first is read. There is no public way to read one and leave it there.
    """
    held = _saved_tensors(node, *names)
    return [_stored(one) for one in held if one.unpack_hook is not None]


def _stored(one: Any) -> StoredTensor:
    frame = None
    if isinstance(one.data, checkpoint._Holder):
        # Its hook, and one around it that reports errors, have the frame as a free variable.
        hook = one.unpack_hook
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        frame = cells["frame"].cell_contents
    return StoredTensor(one.data, one.unpack_hook, frame)


def recomputation_key() -> Any:
    """What checkpoints tell apart the passes by that recompute them; ``None`` outside of any."""
    group: Any = checkpoint.GraphExecGroup._get_current_group()
    if group is not None:
        return group
    return backward_pass_id() if in_backward_pass() else None


def _saved_tensors(node: Any, *names: str) -> list[Any]:
    """torch's objects that hold the tensors, each with the hook that gives it back."""
    node_type: Any = type(node)
    slots = [f"_raw_saved_{name}" for name in names] or _slots(node_type)
    found: list[Any] = []
    for name in slots:
        slot = getattr(node, name, ())
        found += slot if isinstance(slot, tuple) else (slot,)
    return found


def saved_by_name(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The single tensors of ``saved_where_they_are``, with the names that ``saved`` takes."""
    node_type: Any = type(node)
    for name in _slots(node_type):
        slot = getattr(node, name)
        if not isinstance(slot, tuple) and slot.unpack_hook is None and slot.data is not None:
            yield name.removeprefix("_raw_saved_"), slot.data


@cache
def _slots(node_type: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def function_name(type_: Any) -> str:
    """The name of a ``torch.autograd.Function`` and of its module, from the type of its nodes.

    Empty for torch's own nodes.
    """
    function = getattr(type_, "_forward_cls", None)
    return "" if function is None else f"{function.__module__}.{function.__name__}"


def backward_function(node: Any) -> Callable[..., Any] | None:
    """The backward function of a ``torch.autograd.Function``, from its node.

    ``None`` if it isn't written in Python. There is no public way from the node to the class. Of an
    operator of ``torch.library``, it is the function that ``register_autograd`` got: what torch
    runs around that sets ``ctx.needs_input_grad`` for the time of the call, and changes nothing
    else.
    """
    function = type(node)._forward_cls
    for name in ("backward", "vjp"):
        found = getattr(function, name)
        if found is not getattr(Function, name):
            while _is_of_library(found):
                names, cells = found.__code__.co_freevars, found.__closure__
                variables = dict(zip(names, (each.cell_contents for each in cells), strict=True))
                inner = variables.get("orig_backward")
                found = variables["info"]._backward_fn if inner is None else inner
            return found if isinstance(found, FunctionType) else None
    return None


def _is_of_library(function: Any) -> bool:
    """Whether a function is one that torch makes for operators of ``torch.library``."""
    is_python = isinstance(function, FunctionType)
    return is_python and function.__code__.co_filename == _library_autograd.__file__


def context_attributes(node: Any) -> dict[str, Any]:
    """What a ``torch.autograd.Function`` has set on ``ctx``, from its node.

    Without the structure of lists that torch keeps there for operators of ``torch.library``.
    """
    is_own = _is_of_library(type(node)._forward_cls.backward)
    return {n: each for n, each in vars(node).items() if not (is_own and n == "_pt_metadata")}


_HANDING_ON = frozenset(
    {
        "torch.nn.modules._functions.BackwardHookFunction",
        "torch.nn.parallel.distributed._DDPSink",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction",
    }
)


def hands_gradients_on(node: Any) -> bool:
    """Whether a node is that of a function of torch's own whose outputs are its inputs.

    Modules with backward hooks, ``DistributedDataParallel`` and ``fully_shard`` put them into the
    graph, for what they do when backward comes there.
    """
    return function_name(type(node)) in _HANDING_ON


def hooks_beside(handle: RemovableHandle) -> dict[int, Any]:
    """A node's hooks of this one's kind, as they are called; nothing public lists them."""
    reference: Any = handle.hooks_dict_ref
    found: dict[int, Any] = reference()
    return found


def call_first(handle: RemovableHandle) -> None:
    """Let a node call a hook before the others, which stay in their order."""
    hooks = hooks_beside(handle)
    for other in [each for each in hooks if each != handle.id]:
        hooks[other] = hooks.pop(other)


DispatchMode: TypeAlias = TorchDispatchMode
"""Base class of contexts that see each operation; its module is private, but in torch's notes."""


def set_part(module: nn.Module, name: str, part: nn.Module) -> None:
    """Set a part of a module; ``setattr`` also calls the hooks that others have for all modules."""
    module._modules[name] = part


def foreach(operation: str, *arguments: Any, **options: Any) -> list[Tensor]:
    """An operation for each of a list of tensors at once, such as ``"norm"``.

    The functions of torch for lists of tensors, which its optimizers use, are private.
    """
    return list(getattr(torch, f"_foreach_{operation}")(*arguments, **options) or ())


DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices whose autocast gradlens switches off."""


def unseen() -> AbstractContextManager[Any]:
    """A context for gradlens's own work, as if it were done outside of all contexts of the user's.

    No ``__torch_function__`` of modes or of tensors is called, but for the mode by which
    ``torch.set_default_device`` works, if there is no other. Dispatch modes see nothing, such as
    that of a selective checkpoint, which counts the operations of its region.
    ``saved_tensors_hooks`` store nothing, for which torch's compiler does the same. And nothing is
    computed under autocast or in anomaly mode. There is no public way to leave these contexts.
    """
    # Entered dozens of times a step, almost always where nothing is to be switched off.
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    has_others = any(not isinstance(mode, DeviceContext) for mode in modes)
    functions = (
        torch._C.DisableTorchFunction if has_others else torch._C.DisableTorchFunctionSubclass
    )
    is_seen = (
        torch._C._len_torch_dispatch_stack()
        or _autograd._top_saved_tensors_default_hooks(False) is not None
        or torch._C._is_any_autocast_enabled()
        or torch.is_anomaly_enabled()
    )
    return _all_off(functions()) if is_seen else functions()


@contextmanager
def _all_off(functions: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(functions)
        stack.enter_context(_python_dispatch._disable_current_modes())
        tracing = _autograd._saved_tensors_hooks_set_tracing(True)
        stack.callback(_autograd._saved_tensors_hooks_set_tracing, tracing)
        for device in filter(torch.is_autocast_enabled, DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def torch_functions_on() -> AbstractContextManager[None]:
    """A context in which each ``__torch_function__`` is called that ``unseen`` hides.

    For models and functions of the user's own.
    """
    return torch._C._EnableTorchFunction()


ALIKE = frozenset((
    torch.ops.aten.detach, torch.ops.aten.lift_fresh, torch.ops.aten._to_copy,
    torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.full_like,
    torch.ops.aten.empty_like,
))  # fmt: skip
"""Operations that make a tensor of the same elements, or of constants for each of them."""


@cache
def written_arguments(operation: Hashable) -> list[tuple[int, str]]:
    """The places and names of the arguments that an operation of torch changes.

    Nothing public says so.
    """
    schema: Any = operation._schema  # type: ignore[attr-defined]
    arguments = enumerate(schema.arguments)
    infos = ((place, argument.name, argument.alias_info) for place, argument in arguments)
    return [(place, name) for place, name, info in infos if info is not None and info.is_write]


def output_metadata(node: Any) -> Sequence[Any]:
    """``shape``, ``dtype`` and ``device`` of each output that a node had in the forward pass.

    Nothing public says what a node's gradients must look like. Torch calls them the node's inputs,
    since the backward pass enters it there.
    """
    metadata: Sequence[Any] = node._input_metadata
    return metadata


def sequence_numbers(nodes: Iterable[Any]) -> list[int]:
    """The ``sequence_number`` of each node."""
    return [node._sequence_nr() for node in nodes]


def sequence_number(node: Any) -> int:
    """A number that grows with the order in which a thread's forward pass has made its nodes.

    Nothing public says which of two nodes came first.
    """
    return int(node._sequence_nr())


def next_sequence_number() -> int:
    """The ``sequence_number`` of the node that this thread makes next; nothing public says it."""
    return int(torch._C._autograd._get_sequence_nr())


# Backward passes --------------------------------------------------------------------------------

NO_BACKWARD_PASS = -1
"""The ``backward_pass_id`` where none is running."""


def backward_pass_id() -> int:
    """A number of the backward pass that runs in this thread, different for each of them.

    Nothing public identifies a backward pass.
    """
    return torch._C._current_graph_task_id()


def in_backward_pass() -> bool:
    """Whether a backward pass is running in this thread, as when a checkpoint is recomputed."""
    return backward_pass_id() != NO_BACKWARD_PASS


def keeps_graph() -> bool:
    """Whether the backward pass that is running was called with ``retain_graph=True``.

    Nothing public says so. It may be called inside a backward pass alone.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_joined(model: nn.parallel.DistributedDataParallel) -> bool:
    """Whether the model's ``join`` was entered last with ``enable=True``.

    Inside, processes may have different numbers of steps. Nothing public says so, and torch forgets
    nothing where ``join`` is left: later forward passes exchange as those inside.
    """
    return bool(model._join_config.enable)


def recomputing() -> AbstractContextManager[Any]:
    """A context in which own passes may compute checkpointed regions again, each of them once.

    It can be entered several times. The class is public, but not whether one is active, inside of
    which there can't be another one.
    """
    group: Any = checkpoint.GraphExecGroup
    return group() if group._get_current_group() is None else nullcontext()


# Gradient scalers -------------------------------------------------------------------------------


def scaler_stages(scaler: torch.amp.GradScaler) -> Mapping[int, Mapping[str, Any]]:
    """What a scaler knows of each optimizer, by its ``id``.

    ``update`` starts a new mapping, and leaves this one as it is. Nothing public tells that an
    optimizer's gradients were unscaled, before ``unscale_`` raises the second time.
    """
    return scaler._per_optimizer_states


def unscaled_optimizers(stages: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """The ``id``s of the optimizers whose gradients ``unscale_`` or ``step`` has unscaled."""
    return {number for number, known in stages.items() if known["stage"] is not OptState.READY}


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run at its steps: not at those of wrappers that don't initialise ``Optimizer``.

    The mark of a class whose ``step`` runs hooks is private.
    """
    return getattr(type(optimizer).step, "hooked", False)


def fused_scale(optimizer: Optimizer | None) -> tuple[Tensor | None, Tensor | None]:
    """The scale that a fused optimizer divides gradients by in its step, and if one is infinite.

    A scaler sets both as attributes for the time of the step, which nothing public tells.
    """
    known = {} if optimizer is None else vars(optimizer)
    return known.get("grad_scale"), known.get("found_inf")


# Tensors ----------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place.

    Autograd compares these numbers itself, but has no public function for it. Inference tensors
    have none, and get 0.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """``version`` of each tensor."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def storage_number(tensor: Tensor) -> int:
    """The address of a tensor's storage object, which stays when its memory is freed for a while.

    ``tensor.untyped_storage().data_ptr()`` is public, but 0 for all that has no memory.
    """
    return int(tensor.untyped_storage()._cdata)


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers: meta tensors and fake ones have a shape alone.

    There is no public way to recognise fake ones.
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is running in this thread; nothing public says so."""
    return torch._C._functorch.maybe_current_level() is not None


# Modules ----------------------------------------------------------------------------------------


class UnscriptedHook:
    """Base class of hooks on modules that ``torch.jit.script`` leaves out of what it makes.

    It compiles each hook that ``values()`` of a module's tables returns, and fails at those that it
    can't compile; nothing public excludes a hook. A call of the module runs those in ``items()``.
    """


class _ScriptedHooks:
    """What ``values()`` of a table of hooks returns while it has one that is left out."""

    def __init__(self, table: OrderedDict[int, Any]) -> None:
        self._table = weakref.ref(table)
        # A pickle brings the numbers of its hooks along, with the options that they are called by:
        # a hook that is registered in the new process must not get one of them.
        # Without a generator: a collection of garbage inside it may remove hooks from the table.
        RemovableHandle.next_id = max(RemovableHandle.next_id, max(table, default=-1) + 1)

    def __call__(self) -> list[Any]:
        hooks = _listed(self._table() or {})
        return [hook for hook in hooks if not isinstance(hook, UnscriptedHook)]

    def __reduce__(self) -> tuple[type[_ScriptedHooks], tuple[OrderedDict[int, Any] | None]]:
        # A copy of a table has one of its own.
        return _ScriptedHooks, (self._table(),)


def _listed(table: Mapping[int, Any]) -> list[Any]:
    return [hook for _, hook in table.items()]


def _leave_in(table: Any) -> None:
    """Let a table without hooks that are left out be as torch has made it."""
    if not any(isinstance(hook, UnscriptedHook) for hook in _listed(table)):
        # Some tools replace tables by plain dicts, which have no attributes.
        getattr(table, "__dict__", {}).pop("values", None)


def add_hook(
    register: Callable[..., RemovableHandle], hook: UnscriptedHook, **options: bool
) -> RemovableHandle:
    """Register a hook by a method of a module, such as ``module.register_forward_hook``."""
    handle = register(hook, **options)
    table: Any = handle.hooks_dict_ref()
    table.values = _ScriptedHooks(table)
    return handle


def remove_hook(handle: RemovableHandle) -> None:
    """``handle.remove()``, also of an ``UnscriptedHook``."""
    handle.remove()
    table = handle.hooks_dict_ref()
    if table is not None:
        _leave_in(table)


def forward_hooks(module: nn.Module) -> list[Any]:
    """A module's forward hooks; the public interface can set them, but not list them."""
    return _listed(module._forward_hooks)


def remove_forward_hook(module: nn.Module, hook: object) -> None:
    """Remove a forward hook, which its public handle can't in copies of the module."""
    for key in [key for key, other in module._forward_hooks.items() if other is hook]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)
    _leave_in(module._forward_hooks)


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """A module's forward pre-hooks; there is no public list of them."""
    return _listed(module._forward_pre_hooks)


def backward_hooks(module: nn.Module) -> Mapping[int, Any]:
    """A module's backward hooks, full or not, by number; there is no public list of them."""
    return module._backward_hooks


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The parts whose calls run what ``torch.compile`` or ``module.compile()`` has made.

    There is no public way to recognise either.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")  # imported by both
    if dynamo is None:
        return []
    return [
        module
        for module in model.modules()
        if isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None
    ]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that was passed to ``torch.compile``, if this is what was returned."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    is_optimized = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    original: nn.Module = module._orig_mod if is_optimized else module  # type: ignore[assignment]
    return original


def compiled_call(module: nn.Module) -> Any:
    """The function that a call of the module runs, as ``module.compile()`` has set it, or ``None``.

    Hooks run inside it, so that there is no public way to run anything in front of it.
    """
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace the function that a call of the module runs; copies and pickles don't have it."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call


def hooked_forward(module: nn.Module) -> Callable[..., Any]:
    """What a call of a module runs by itself: its forward function and its hooks."""
    call: Callable[..., Any] = module._call_impl
    return call


def uncompiled_backward() -> AbstractContextManager[None]:
    """A context in which backward passes aren't compiled, in which hooks see no gradients.

    Compiled autograd as a whole is private. Where its public option compiles a backward pass, a
    compiled function surrounds that.
    """
    autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if autograd is None or not autograd.compiled_autograd_enabled:
        return nullcontext()
    disabled: AbstractContextManager[None] = autograd._disable()
    return disabled


def compiler_is_imported() -> bool:
    """Whether anything can have been compiled: torch imports its compiler when it is first used.

    That takes seconds, also for the public ``torch.compiler.set_stance``.
    """
    return "torch._dynamo" in sys.modules
