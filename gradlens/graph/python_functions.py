"""Whether a backward function in Python leaves everything as it was, so that it may run once more.

The backward function of a ``torch.autograd.Function`` can do anything: overwrite what it has saved,
take something out of a list, count. It is run by gradlens only if its bytecode shows that it
computes with numbers, tensors and torch's functions alone, and calls no function of others. While
it runs, no tensor that was there before may be changed, and no random number drawn.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from inspect import getattr_static, unwrap
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
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
    "slice", "sorted", "str", "sum", "super", "tuple", "zip", "NotImplementedError",
    "RuntimeError", "TypeError", "ValueError", "AssertionError",
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

_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
"""Instructions that read an attribute."""


def why_not_to_run(node: Node) -> str:
    """What a Python function's backward may change, in words; empty if it changes nothing."""
    for name, value in vars(node).items():
        if not _is_constant(value):
            return f"it has {type(value).__name__} {name!r} on ctx"
    backward: Any = backward_function(node)
    while hasattr(backward, "__wrapped__"):  # as by once_differentiable
        if not _is_of_torch(backward):
            code = getattr(backward, "__code__", None)  # the name of a wrapper is another's, too
            return f"it is wrapped by {getattr(code, 'co_name', type(backward).__name__)!r}"
        backward = backward.__wrapped__
    if not isinstance(backward, FunctionType):
        return "it isn't written in Python"
    unknown = [
        *(name for name in _attribute_names(backward.__code__) if not _is_known(name, node)),
        *(name for name, value in _reached(backward).items() if not _is_harmless(value)),
    ]
    return _why_not_code(backward.__code__) or (f"it uses {unknown[0]!r}" if unknown else "")


_PLACES = (
    Tensor, torch, torch.nn, torch.nn.functional, torch.fft, torch.linalg, torch.special, math,
    tuple, list, dict, set, str, int, float, complex, bytes, slice, range, torch.Size, torch.dtype,
    torch.device, torch.layout, torch.finfo, torch.iinfo,
    *(each for each in vars(torch.return_types).values() if isinstance(each, type)),
)  # fmt: skip
_NAMES = frozenset(name for place in _PLACES for name in dir(place))
"""Attributes that a harmless function may use: those of torch, of its results, and of Python."""


def _is_known(name: str, node: Node) -> bool:
    """Whether an attribute is one of the context, of torch or of Python.

    One that others have put on tensors, or on torch, may hold anything.
    """
    if name not in _NAMES:
        return name in dir(node)
    places = (Tensor, torch, torch.nn.functional)
    return not any(_is_of_others(getattr_static(place, name, None)) for place in places)


def _is_of_others(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    if isinstance(function, FunctionType):
        return not _is_of_torch(function)
    return isinstance(function, list | dict | set)


def _reached(function: FunctionType) -> dict[Any, Any]:
    """What a function uses from outside: variables, defaults and globals, by their names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    known = {name: getattr(builtins, name) for name in _BUILTINS} | function.__globals__
    used = {name: known.get(name, _MISSING) for name in _global_names(function.__code__)}
    return closure | dict(enumerate(defaults)) | used


_MISSING = object()


def constants_of(node: Node) -> str:
    """The numbers and texts that a harmless backward function depends on, wherever they are."""
    found = [*vars(node).items()]
    function: Any = backward_function(node)
    backward = unwrap(function)
    if isinstance(backward, FunctionType):
        found += _reached(backward).items()
    return " ".join(f"{name}={value!r}" for name, value in found if _is_number(value))


def _is_number(value: Any) -> bool:
    """Whether a value is a constant without tensors."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_number, value))
    return isinstance(value, _CONSTANTS)


def _is_harmless(value: Any) -> bool:
    """Whether a backward function may use a value from outside: no function of others is one."""
    if _is_constant(value) or value is Tensor:
        return True
    name = getattr(value, "__name__", "")
    if name in _BUILTINS and value is getattr(builtins, name):
        return True
    if isinstance(value, ModuleType):
        return value in (math, torch, torch.nn, torch.nn.functional)
    if isinstance(value, FunctionType):
        return value.__module__.startswith("torch.nn.functional") and _is_of_torch(value)
    of_torch = any(value is getattr(place, name, None) for place in (torch, math))
    return of_torch and not isinstance(value, type)


def _is_of_torch(function: Any) -> bool:
    """Whether torch has defined a function; what a wrapper says of its module is another's."""
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and code.co_filename.startswith(_TORCH)


_TORCH = str(Path(torch.__file__).parent)


def _is_constant(value: Any) -> bool:
    """Whether nothing but torch's operations, which are watched, can change a value."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return type(value) in (Tensor, nn.Parameter) or isinstance(value, _CONSTANTS)


@cache
def _why_not_code(code: CodeType) -> str:
    """What the instructions of a function may change, without what they call."""
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            name, argument = instruction.opname, str(instruction.argval)
            if name in _CHANGING or (name.endswith("_DEREF") and _is_written(name, argument, each)):
                return f"it sets or deletes {argument!r}"
            if name in _ATTRIBUTES and (argument in _REACHING_OUT or argument.startswith("_")):
                return f"it uses {argument!r}"
    return ""


def _is_written(name: str, variable: str, code: CodeType) -> bool:
    return name.startswith(("STORE", "DELETE")) and variable in code.co_freevars


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = (
        str(instruction.argval)
        for each in _codes(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return tuple(dict.fromkeys(names))


@cache
def _attribute_names(code: CodeType) -> tuple[str, ...]:
    instructions = (each for inner in _codes(code) for each in dis.get_instructions(inner))
    names = (str(each.argval) for each in instructions if each.opname in _ATTRIBUTES)
    return tuple(dict.fromkeys(names))


class Watched(DispatchMode):
    """Lets operations change only memory that was made in the context, and its ``own`` tensors.

    Nor may they draw random numbers: ``UnavailableError`` comes before anything is changed.
    ``is_elementwise`` says that all of them have computed elements from those at the same place.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._own = set(map(storage_number, own))
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
