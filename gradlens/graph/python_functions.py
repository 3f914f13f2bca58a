"""Whether a backward function in Python leaves everything as it was, so that it may run once more.

The backward function of a ``torch.autograd.Function`` can do anything: overwrite what it has saved,
take something out of a list, count. It is run by gradlens only if its bytecode, and that of the
functions that it calls, shows that it computes with numbers, tensors and torch's functions alone.
While it runs, no tensor that was there before may be changed, and no random number drawn.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from inspect import getattr_static
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from gradlens.graph.kinds import Node
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import (
    ALIKE,
    DispatchMode,
    backward_function,
    context_attributes,
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

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
"""Instructions that read a global or built-in name."""


def why_not_to_run(node: Node) -> str:
    """What a Python function's backward may change, in words; empty if it changes nothing."""
    attributes = context_attributes(node)
    for name, value in attributes.items():
        if not _is_constant(value):
            return f"it has {type(value).__name__} {name!r} on ctx"
    backward = backward_function(node)
    if backward is None:
        return "it isn't written in Python"
    return _why_not(backward, ()) or _unknown_attribute(backward, {*attributes, *dir(node)})


def _unknown_attribute(function: Any, known: set[str]) -> str:
    """Which attribute a function uses that neither torch nor its ``known`` context has.

    One that others have put on tensors, or on torch, may hold anything.
    """
    for each in _with_callees(function):
        classes = [value for value in _reached(each).values() if isinstance(value, type)]
        own = known.union(*map(dir, classes))
        for name in _names(each.__code__, _ATTRIBUTES):
            if name not in own and not _is_own(name):
                return f"it uses {name!r}"
    return ""


_PLACES = (
    Tensor, torch, torch.nn, torch.nn.functional, torch.fft, torch.linalg, torch.special, math,
    tuple, list, dict, set, str, int, float, complex, bytes, slice, range, torch.Size, torch.dtype,
    torch.device, torch.layout, torch.finfo, torch.iinfo,
    *(each for each in vars(torch.return_types).values() if isinstance(each, type)),
)  # fmt: skip
_NAMES = frozenset(name for place in _PLACES for name in dir(place))
"""Attributes that a harmless function may use: those of torch, of its results, and of Python."""


def _is_own(name: str) -> bool:
    """Whether an attribute is one of torch or of Python, which nobody has put there."""
    if name not in _NAMES:
        return False
    of_modules = (vars(module).get(name) for module in (torch, torch.nn.functional))
    return not any(map(_is_of_others, (getattr_static(Tensor, name, None), *of_modules)))


def _is_of_others(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    if isinstance(function, FunctionType):
        return not _is_of_torch(function)
    return isinstance(function, list | dict | set)


def _with_callees(function: Any) -> Iterator[FunctionType]:
    """A function and those of others that it calls."""
    waiting, visited = [function], set[int]()
    while waiting:
        each = waiting.pop()
        while hasattr(each, "__wrapped__"):
            each = each.__wrapped__
        if isinstance(each, FunctionType) and not (id(each) in visited or _is_of_torch(each)):
            visited.add(id(each))
            yield each
            waiting += (getattr(value, "__func__", value) for value in _used(each).values())


def _why_not(function: Any, callers: tuple[Any, ...]) -> str:
    """What a function may change, or what of it can't be seen; empty if it changes nothing.

    ``callers`` are the functions and classes that are being looked at, and that it may call back.
    """
    original = function
    while hasattr(original, "__wrapped__"):  # as by once_differentiable
        if not _is_of_torch(original):
            code = getattr(original, "__code__", None)  # the name of a wrapper is another's, too
            return f"it is wrapped by {getattr(code, 'co_name', type(original).__name__)!r}"
        original = original.__wrapped__
    if not isinstance(original, FunctionType):
        return f"it calls {getattr(original, '__name__', type(original).__name__)!r}"
    reason = _why_not_code(original.__code__)
    if reason:
        return reason
    for name in _names(original.__code__, _GLOBALS):
        is_built_in = name in _BUILTINS and hasattr(builtins, name)
        if name not in original.__globals__ and not is_built_in:
            return f"it calls {name!r}"
    attributes = _names(original.__code__, _ATTRIBUTES)
    for name, value in _reached(original).items():
        if not _is_harmless(value, attributes, (*callers, original)):
            return f"it uses {name!r}"
    return ""


def _reached(function: FunctionType) -> dict[Any, Any]:
    """What a function uses from outside: variables, defaults and globals, by their names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    last = zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False)
    defaults = dict(last) | (function.__kwdefaults__ or {})
    given = {f"{name} (a default argument)": value for name, value in defaults.items()}
    names, known = _names(function.__code__, _GLOBALS), function.__globals__
    return closure | given | {n: known[n] for n in names if n in known}


def _used(function: FunctionType) -> dict[Any, Any]:
    """What a function reaches, and what it uses of the ``torch.autograd.Function`` among that."""
    found = _reached(function)
    classes = [each for each in found.values() if isinstance(each, type)]
    attributes = _names(function.__code__, _ATTRIBUTES)
    return found | {
        f"{each.__qualname__}.{name}": getattr_static(each, name, None)
        for each in classes
        if issubclass(each, Function)
        for name in attributes
    }


def constants_of(node: Node) -> str:
    """The numbers and texts that a harmless backward function depends on, wherever they are."""
    found = [*vars(node).items()]
    for function in _with_callees(backward_function(node)):
        found += _used(function).items()
    return " ".join(f"{name}={value!r}" for name, value in found if _is_number(value))


def _is_number(value: Any) -> bool:
    """Whether a value is a constant without tensors."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_number, value))
    return isinstance(value, _CONSTANTS)


def _is_harmless(value: Any, names: Iterable[str], callers: tuple[Any, ...]) -> bool:
    """Whether a backward function may use a value from outside, and its attributes ``names``."""
    if _is_constant(value) or value is math or _is_torch_module(value):
        return True
    if isinstance(value, type):
        built_in = value is getattr(builtins, value.__name__, None)
        if issubclass(value, Function):
            return value in callers or all(
                _is_harmless_attribute(value, name, names, callers) for name in names
            )
        return (built_in and value.__name__ in _BUILTINS) or value in (Tensor, nn.Parameter)
    if isinstance(value, BuiltinFunctionType | MethodType) or not isinstance(value, FunctionType):
        name = getattr(value, "__name__", "")
        return value is getattr(torch, name, None) or value is getattr(math, name, None)
    functional = value.__module__.startswith("torch.nn.functional") and _is_of_torch(value)
    if value in callers or functional:
        return True
    return not _why_not(value, callers)


def _is_harmless_attribute(
    function: type[Function], name: str, names: Iterable[str], callers: tuple[Any, ...]
) -> bool:
    """Whether what a ``torch.autograd.Function`` has under a name, if anything, may be used.

    The attributes ``names`` may be those of another function that it has.
    """
    if name == "apply" and function.setup_context is not Function.setup_context:
        return False
    found = getattr_static(function, "forward" if name == "apply" else name, None)
    if found is not None and found is getattr_static(Function, name, None):
        return True  # of torch
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    return _is_constant(found) or _is_harmless(found, names, (*callers, function))


def _is_of_torch(function: Any) -> bool:
    """Whether torch has defined a function; what a wrapper says of its module is another's."""
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and code.co_filename.startswith(_TORCH)


_TORCH = str(Path(torch.__file__).parent)


def _is_torch_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and value in (torch, torch.nn, torch.nn.functional)


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
def _names(code: CodeType, reading: frozenset[str]) -> tuple[str, ...]:
    """The names that some instructions read, in a function and those inside."""
    instructions = (each for inner in _codes(code) for each in dis.get_instructions(inner))
    names = (str(each.argval) for each in instructions if each.opname in reading)
    return tuple(dict.fromkeys(names))


class Watched(DispatchMode):
    """Lets operations change only memory that was made in the context, and ``own`` tensors.

    ``UnavailableError`` comes in place of other changes, and of random numbers, before anything is
    changed. ``is_elementwise`` says that all operations have computed elements from those at the
    same place.
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
        for place, name in written_arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            if not self._own.issuperset(_memory(value)):
                raise UnavailableError("it overwrites a tensor")
        result, given = func(*args, **kwargs), _memory((args, kwargs))
        if NOT_STRIDED not in given:  # such tensors may have views that were there before
            self._own |= _memory(result) - given - {NOT_STRIDED}
        self.is_elementwise = self.is_elementwise and _is_elementwise(func, args)
        return result


def _is_elementwise(operation: Any, args: Any) -> bool:
    """Whether an operation computes each element from elements at the same place."""
    if operation.overloadpacket in _SETTING:  # as gradient[x < 0] = 0 does
        tensor, (mask, *others), value, *_ = args
        return not others and mask.dtype == torch.bool and mask.dim() == tensor.dim() > value.dim()
    return torch.Tag.pointwise in operation.tags or operation.overloadpacket in ALIKE


NOT_STRIDED = -1
"""In place of the storages of a tensor that isn't strided, which may have several."""


def _memory(values: Any) -> set[int]:
    """The storages of all tensors."""
    leaves = [values] if isinstance(values, Tensor) else tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return {storage_number(t) if t.layout == torch.strided else NOT_STRIDED for t in tensors}
