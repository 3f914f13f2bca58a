"""A device that is simulated on the CPU, to find what waits for it or mixes it with the host."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

import gradlens
from gradlens import torch_private

PACKAGE = Path(gradlens.__file__).parent

HOST, DEVICE = torch.device("cpu"), torch.device("cuda")

WAITING = {
    "__bool__", "__float__", "__index__", "__int__", "allclose", "argwhere", "bincount", "equal",
    "is_nonzero", "item", "masked_select", "nonzero", "tolist", "unique",
}  # fmt: skip
"""Functions whose results depend on the elements, so that the program waits for the device."""

IMPOSSIBLE = {"__array__", "numpy"}
"""Functions that tensors on another device than the CPU don't have."""

OF_ONE_DEVICE = {"cat", "concatenate", "stack"}
"""Functions whose scalar tensors must be on the device of the others, too."""

BACKWARD = ("gradient", "retain_graph", "create_graph", "inputs")
"""The arguments of ``Tensor.backward``."""

ANY_DEVICE = {"__getitem__", "__setitem__", "copy_"}
"""Functions of tensors on several devices."""


class SimulatedDevice(TorchFunctionMode):
    """A context in which tensors count as being on a CUDA device.

    Those of the host are what was moved there, what was made without ``device=``, and what was
    computed from these alone. ``waits`` counts where gradlens waits for the device, and ``errors``
    where tensors of both are mixed, as a real device wouldn't permit.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()  # what other trainings have kept would count as being on the device
        self.waits: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._host: dict[int, weakref.ref[Tensor]] = {}
        self._entered: list[ExitStack] = []

    def __enter__(self) -> SimulatedDevice:
        # gradlens's own work is seen by a device, though not by tools of the user's.
        devices = (DeviceContext, SimulatedDevice)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch_private, "DeviceContext", devices))
            for module in (torch.cpu, torch.cuda):  # the device has the random numbers of the CPU
                state = partial(mock.patch.object, module, create=True)
                stack.enter_context(state("get_rng_state", lambda _: torch.get_rng_state()))
                stack.enter_context(state("set_rng_state", lambda x, _: torch.set_rng_state(x)))
            super().__enter__()
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.grad):
            return self._backward(func, args, kwargs)
        if func == Tensor.device.__get__:
            return HOST if self._is_on_host(args[0]) else DEVICE
        if func == Tensor.is_cuda.__get__:
            return not self._is_on_host(args[0])
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = [torch.device(leaf) for leaf in leaves if _is_device(leaf)]
        self._count(func.__name__, tensors)
        if places and places[-1] == DEVICE and not kwargs.get("non_blocking"):
            self._count_copies(func.__name__, tensors)
        if places:
            args, kwargs = tree_map(lambda leaf: HOST if _is_device(leaf) else leaf, (args, kwargs))
        result = func(*args, **kwargs)
        if func.__name__ == "cpu" or places:
            to_host = func.__name__ == "cpu" or places[-1] == HOST
            return self._moved(result, tensors, to_host)
        if all(map(self._is_on_host, tensors)):
            self._put(result)
        return result

    def _backward(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A backward pass whose hooks are in this context, too, which a call of ``func`` leaves."""
        with self, mock.patch("torch.autograd.has_torch_function", return_value=False):
            if func is torch.autograd.grad:
                return func(*args, **kwargs)
            given = {"gradient": None, **dict(zip(BACKWARD, args[1:], strict=False)), **kwargs}
            return torch.autograd.backward(args[0], given.pop("gradient"), **given)

    def _moved(self, result: Any, tensors: Sequence[Tensor], to_host: bool) -> Any:
        if any(result is tensor and self._is_on_host(tensor) != to_host for tensor in tensors):
            result = result.detach()  # another tensor, which is elsewhere
        if to_host:
            self._put(result)
        return result

    def _count(self, name: str, tensors: Sequence[Tensor]) -> None:
        on_host = [self._is_on_host(tensor) for tensor in tensors]
        if all(on_host):
            return
        masks = any(tensor.dtype == torch.bool and tensor.dim() for tensor in tensors[1:])
        if name in WAITING or name == "cpu" or (name == "__getitem__" and masks):
            self.waits[_caller(name)] += 1
        mixed = any(
            here and (tensor.dim() or name in OF_ONE_DEVICE)
            for here, tensor in zip(on_host, tensors, strict=True)
        )
        if name in IMPOSSIBLE or (mixed and name not in ANY_DEVICE | {"to"}):
            self.errors[_caller(name)] += 1

    def _count_copies(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Copies to the device of what isn't in pinned memory."""
        if name == "tensor" or (name == "to" and self._is_on_host(tensors[0])):
            self.waits[_caller(name)] += 1

    def _is_on_host(self, tensor: Tensor) -> bool:
        found = self._host.get(id(tensor))
        return found is not None and found() is tensor

    def _put(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._host[id(leaf)] = weakref.ref(leaf)


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf in ("cpu", "cuda"))


def _caller(name: str) -> str:
    """The line of gradlens that has called a function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {name}"
