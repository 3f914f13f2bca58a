"""Whether a backward function in Python leaves everything as it was, so that it may run once more.

The backward function of a ``torch.autograd.Function`` can do anything: overwrite what it has saved,
take something out of a list, count. It is run by gradlens only if its bytecode shows that it
computes with numbers, tensors and torch's functions alone, and calls no other function in Python.
While it runs, no tensor that was there before may be changed, and no random number drawn.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import getattr_static
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.graph.kinds import Node
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import (
    ALIKE,
    DispatchMode,
    backward_function,
    storage_number,
    tree_leaves,
    written_arguments,
)

_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(...), slice, torch.Size, torch.dtype,
    torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

_BUILTINS = frozenset((
    "abs", "all", "any", "bool", "complex", "divmod", "enumerate", "filter", "float", "int",
    "isinstance", "len", "list", "map", "max", "min", "pow", "range", "reversed", "round", "set",
    "slice", "sorted", "str", "sum", "tuple", "zip", "NotImplementedError", "RuntimeError",
    "TypeError", "ValueError", "AssertionError",
))  # fmt: skip
"""Built-in functions that change nothing but what is made inside the function."""

_REACHING_OUT = frozenset((
    "apply_", "autograd", "backward", "batch_norm", "compile", "cuda", "cudnn", "cudnn_batch_norm",
    "data_ptr", "distributed", "fork", "get_rng_state", "grad", "increment_version",
    "instance_norm", "jit", "library", "load", "manual_seed", "map_", "metadata",
    "miopen_batch_norm", "multiprocessing", "native_batch_norm", "next_functions", "numpy", "ops",
    "register_forward_hook", "register_hook", "register_prehook", "requires_grad_", "retain_grad",
    "save", "seed", "set_default_dtype", "set_rng_state", "share_memory_", "storage", "to_dlpack",
    "untyped_storage", "utils", "xpu",
))  # fmt: skip
"""Names of what changes more than tensors that torch's dispatcher sees."""

_CHANGING = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"})
"""Instructions that change what outlives the call, or may."""

_SETTING = frozenset({torch.ops.aten.index_put, torch.ops.aten.index_put_})
"""Operations that set elements where a mask says so."""

_MODULES = (torch, torch.nn, torch.nn.functional, math)
_PLACES = (
    Tensor, *_MODULES, torch.fft, torch.linalg, torch.special, tuple, list, dict, set, str, int,
    float, complex, bytes, slice, range, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.finfo, torch.iinfo,
    *(each for each in vars(torch.return_types).values() if isinstance(each, type)),
)  # fmt: skip
_NAMES = frozenset(name for place in _PLACES for name in dir(place))
"""Attributes that a harmless function may use: those of torch, of its results, and of Python."""


def why_not_to_run(node: Node) -> str:
    """What a Python function's backward may change, in words; empty if it changes nothing."""
    for name, value in vars(node).items():
        if not _is_constant(value):
            return f"it has {type(value).__name__} {name!r} on ctx"
    function = _backward(node)
    if function is None:
        return "it isn't written in Python, or wrapped by a function of somebody's own"
    reason = _why_not_code(function.__code__)
    if reason:
        return reason
    of_ctx = {*vars(node), *dir(node)}
    for name in _names(function.__code__, _ATTRIBUTES):
        if name not in of_ctx and not _is_attribute_of_torch(name):
            return f"it uses {name!r}"
    for name, value in _reached(function).items():
        if not _is_harmless(value):
            return f"it uses {name!r}"
    return ""


def constants_of(node: Node) -> str:
    """The numbers and texts that a harmless backward function depends on, wherever they are."""
    function = _backward(node)
    found = [*vars(node).items(), *(() if function is None else _reached(function).items())]
    return " ".join(f"{name}={value!r}" for name, value in found if _is_number(value))


def _backward(node: Node) -> FunctionType | None:
    """The backward function, without what torch has wrapped it in, as ``once_differentiable``."""
    function: Any = backward_function(node)
    while hasattr(function, "__wrapped__"):
        if _is_of_others(function):
            return None
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def _reached(function: FunctionType) -> dict[Any, Any]:
    """What a function uses from outside: variables, defaults and globals, by their names.

    Unknown names, and those of what isn't Python's any more, are ``_UNKNOWN``.
    """
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    known = vars(builtins) | function.__globals__
    names = _names(function.__code__, _GLOBALS)
    return closure | dict(enumerate(defaults)) | {n: known.get(n, _UNKNOWN) for n in names}


_UNKNOWN = object()


def _is_harmless(value: Any) -> bool:
    """Whether a backward function may use a value from outside."""
    if _is_constant(value) or any(value is each for each in (*_MODULES, Tensor, nn.Parameter)):
        return True
    name = getattr(value, "__name__", "")
    if name in _BUILTINS and value is getattr(builtins, name):
        return True
    of_torch = any(value is vars(module).get(name) for module in _MODULES)
    return of_torch and name not in _REACHING_OUT and not _is_of_others(value)


def _is_attribute_of_torch(name: str) -> bool:
    """Whether an attribute is one of torch or of Python, which nobody has put there."""
    if name not in _NAMES:
        return False
    of_modules = (vars(module).get(name) for module in _MODULES)
    return not any(map(_is_of_others, (getattr_static(Tensor, name, None), *of_modules)))


def _is_of_others(value: Any) -> bool:
    """Whether it is a function that torch hasn't defined, whatever it says of its module."""
    function = getattr(value, "__func__", value)
    if isinstance(function, FunctionType):
        return not function.__code__.co_filename.startswith(_TORCH)
    return isinstance(function, list | dict | set)


_TORCH = str(Path(torch.__file__).parent)


def _is_constant(value: Any) -> bool:
    """Whether nothing but torch's operations, which are watched, can change a value."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return type(value) in (Tensor, nn.Parameter) or isinstance(value, _CONSTANTS)


def _is_number(value: Any) -> bool:
    """Whether a value is a constant without tensors."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_number, value))
    return isinstance(value, _CONSTANTS)


@cache
def _why_not_code(code: CodeType) -> str:
    """What the instructions of a function may change, without what they call."""
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            name, argument = instruction.opname, str(instruction.argval)
            is_outside = name.endswith("_DEREF") and argument in each.co_freevars
            if name in _CHANGING or (is_outside and name.startswith(("STORE", "DELETE"))):
                return f"it sets or deletes {argument!r}"
            if name in _ATTRIBUTES and (argument in _REACHING_OUT or argument.startswith("_")):
                return f"it uses {argument!r}"
    return ""


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that read an attribute."""
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that read a name from outside."""


@cache
def _names(code: CodeType, instructions: tuple[str, ...]) -> tuple[str, ...]:
    """The names that some instructions of a function use."""
    found = (each for inner in _codes(code) for each in dis.get_instructions(inner))
    return tuple(dict.fromkeys(str(one.argval) for one in found if one.opname in instructions))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@contextmanager
def existing_tensors_kept(own: Iterable[Tensor]) -> Iterator[Watched]:
    """Refuse operations that change tensors from before the context, but for ``own`` ones.

    The same for operations that draw random numbers. ``UnavailableError`` comes in place of either,
    before anything is changed.
    """
    with Watched(map(storage_number, own)) as watched:
        yield watched


class Watched(DispatchMode):
    """Lets operations change only memory that was made in the context, and what it was given.

    ``is_elementwise`` says that all of them have computed elements from those at the same place.
    """

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()
        self._own = set(storages)
        self.is_elementwise = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnavailableError("it draws random numbers")
        given = [*_tensors((args, kwargs))]
        for place, name in written_arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            written = _tensors(value)
            if _has_others(value) or any(storage_number(t) not in self._own for t in written):
                raise UnavailableError("it overwrites a tensor")
        result = func(*args, **kwargs)
        found = [*_tensors(result)]
        if not _has_others((args, kwargs)):  # these may have views that were there before
            self._own |= {*map(storage_number, found)} - {*map(storage_number, given)}
        self.is_elementwise = self.is_elementwise and _is_elementwise(func, args)
        return result


def _is_elementwise(operation: Any, args: Any) -> bool:
    """Whether an operation computes each element from elements at the same place."""
    if operation.overloadpacket in _SETTING:  # as gradient[x < 0] = 0 does
        tensor, (mask, *others), value, *_ = args
        return not others and mask.dtype == torch.bool and mask.dim() == tensor.dim() > value.dim()
    return torch.Tag.pointwise in operation.tags or operation.overloadpacket in ALIKE


def _has_others(values: Any) -> bool:
    """Whether there are tensors that aren't strided, whose memory isn't known."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return any(leaf.layout != torch.strided for leaf in leaves)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    )
