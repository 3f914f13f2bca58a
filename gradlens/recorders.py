"""Recorders of the tensors that go into and come out of modules, as in torchfunc."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from gradlens.graph.hooks import HookOwner, OwnedHook, on_gradient, removal
from gradlens.signals.selection import Selection, Selectors, select, selection
from gradlens.signals.signal import tensors_in
from gradlens.torch_private import add_hook, remove_hook, version

Self = TypeVar("Self", bound="Recorder")
Types: TypeAlias = type[nn.Module] | Iterable[type[nn.Module]] | None
Indices: TypeAlias = int | Iterable[int] | None


class _Slot(HookOwner):
    """What was recorded of one module, and how many samples it was.

    ``awaited`` are the hooks on tensors whose gradients are still to come, by tensor and version.
    """

    def __init__(self, recorder: Recorder, name: str, module: nn.Module) -> None:
        self._recorder = weakref.ref(recorder)
        self.name = f"{name or 'the model'} ({type(module).__name__})"
        self.module = module
        self.removal: Callable[[], object] | None = None
        self.awaited: MutableMapping[Tensor, dict[int, RemovableHandle]] = WeakTensorKeyDictionary()
        self.data: Any = None if recorder.reduction is not None else []
        self.samples = 0

    @torch.inference_mode(False)  # what is recorded may be used outside of it
    @torch.no_grad()
    def record(self, tensor: Tensor | None) -> None:
        recorder = self._recorder()
        if recorder is None or self.removal is None or tensor is None:
            return
        try:
            if recorder.condition is not None and not recorder.condition():
                return
            # Later in-place operations must not change it.
            value = tensor.detach().clone()
            self.data = self._with(value, recorder.reduction)
        except Exception as error:
            raise RuntimeError(
                f"{type(recorder).__name__} failed at {self.name}: {type(error).__name__}: {error}"
            ) from error
        self.samples += len(value) if value.dim() else 1

    def _with(self, value: Tensor, reduction: Callable[[Any, Tensor], Any] | None) -> Any:
        if reduction is not None:
            return value if self.data is None else reduction(self.data, value)
        if isinstance(self.data, list):
            self.data.append(value)
            return self.data
        return [value] if self.data is None else [self.data, value]

    def record_gradient(self, tensor: Tensor | None) -> None:
        """Record the gradient at a tensor in the backward passes to come, while still open."""
        if tensor is None or not tensor.requires_grad or not torch.is_grad_enabled():
            return
        # A leaf may go in at every step; another tensor may be changed in place, and go in again.
        hooks = self.awaited.setdefault(tensor, {})
        number, opened = 0 if tensor.is_leaf else version(tensor), self.removal

        def receive(slot: _Slot, gradient: Tensor) -> None:
            if slot.removal is opened:
                slot.record(gradient)

        if number not in hooks:
            hooks[number] = on_gradient(tensor, OwnedHook(self, receive))

    def open(self, handle: RemovableHandle) -> None:
        """Own the hook on the module, which is removed with the slot at the latest."""
        self.removal = removal(self, [handle])

    def close(self) -> None:
        """Remove the slot's hooks; the data stays."""
        for handle in [handle for hooks in self.awaited.values() for handle in hooks.values()]:
            remove_hook(handle)
        if self.removal is not None:
            self.removal()
        self.removal = None
        self.awaited.clear()


class Recorder:
    """Records the first tensor of each call of some modules, detached and copied.

    That is the first floating-point tensor in nested tuples, lists and dicts, and without one the
    first tensor. There is a slot for each module, in the order in which they were registered;
    ``recorder[0]`` is the content of the first slot: a list of tensors, or the result of
    ``reduction(so_far, tensor)``, which is ``None`` before the first tensor. Nothing is recorded
    while ``condition()`` is false. If one of these two raises, a ``RuntimeError`` names the module.
    Calls inside transforms of ``torch.func``, and backward passes of a cockpit's own, such as those
    of curvature quantities, are not recorded.

    As a context manager, it records until the context is left, also by an exception. Later tensors,
    such as gradients of an earlier forward pass, are not recorded. The data stays, and entering the
    context again adds to it.
    """

    before_call: ClassVar[bool] = False
    """Whether inputs are recorded as they are before the call."""
    of_input: ClassVar[bool] = False
    """Whether inputs are recorded as they are after the call; otherwise, outputs are."""
    of_gradient: ClassVar[bool] = False
    """Whether the gradients at them are recorded instead."""

    def __init__(
        self,
        condition: Callable[[], bool] | None = None,
        reduction: Callable[[Any, Tensor], Any] | None = None,
    ) -> None:
        self.condition = condition
        self.reduction = reduction
        self._slots: list[_Slot] = []
        self._closed = False

    def _register(self, slot: _Slot) -> RemovableHandle:
        """Set the hook of a slot on its module."""
        receive = _Slot.record_gradient if self.of_gradient else _Slot.record
        of_input = self.of_input

        def before(slot: _Slot, module: nn.Module, args: Any, kwargs: Any) -> None:
            receive(slot, _first((args, kwargs)))

        def after(slot: _Slot, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            receive(slot, _first((args, kwargs) if of_input else output))

        if self.before_call:
            return add_hook(
                slot.module.register_forward_pre_hook, OwnedHook(slot, before), with_kwargs=True
            )
        return add_hook(slot.module.register_forward_hook, OwnedHook(slot, after), with_kwargs=True)

    @final
    def modules(
        self: Self, module: nn.Module, types: Types = None, indices: Indices = None
    ) -> Self:
        """Record all of ``module.modules()`` that are of these ``types`` and at these ``indices``.

        Indices count all modules, whatever their types. ``ValueError`` if nothing fits.
        """
        return self._add(list(module.named_modules()), types, indices)

    @final
    def children(
        self: Self, module: nn.Module, types: Types = None, indices: Indices = None
    ) -> Self:
        """As ``modules``, of ``module.children()``."""
        return self._add(list(module.named_children()), types, indices)

    @final
    def layers(self: Self, module: nn.Module, chosen: Selectors | Selection | None = None) -> Self:
        """Record the selected layers: see ``gradlens.signals.Selection``."""
        self._record(select(module, selection(chosen)).items())
        return self

    def _add(
        self: Self, found: list[tuple[str, nn.Module]], types: Types, indices: Indices
    ) -> Self:
        kinds = None if types is None else _several(types)
        places = None if indices is None else {*_several(indices)}
        outside = sorted(place for place in places or () if not 0 <= place < len(found))
        if outside:
            raise ValueError(f"there is no module {outside[0]}: there are {len(found)} of them")
        chosen = [
            (name, module)
            for place, (name, module) in enumerate(found)
            if (kinds is None or isinstance(module, kinds)) and (places is None or place in places)
        ]
        if not chosen:
            there = ", ".join(sorted({type(module).__name__ for _, module in found})) or "nothing"
            raise ValueError(
                f"no module is of types={types} and at indices={indices}: there is {there}"
            )
        self._record(chosen)
        return self

    def _record(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        if self._closed:
            raise RuntimeError(
                "the recorder is closed: add modules before, or in another `with recorder:`"
            )
        for name, module in modules:
            slot = _Slot(self, name, module)
            slot.open(self._register(slot))
            self._slots.append(slot)

    # The recorded data.

    @property
    def data(self) -> list[Any]:
        """The contents of the slots."""
        return [slot.data for slot in self._slots]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Any:
        return self._slot(index).data

    def __setitem__(self, index: int, value: Any) -> None:
        self._slot(index).data = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def samples(self, index: int) -> int:
        """How many samples were recorded in a slot: the lengths of its tensors."""
        return self._slot(index).samples

    def iter_samples(self) -> Iterator[int]:
        """How many samples were recorded in each slot."""
        return iter([slot.samples for slot in self._slots])

    def apply(self: Self, function: Callable[[Any], Any]) -> Self:
        """Replace the content of each slot by ``function(data)``, unless it is ``None``.

        Later tensors are reduced with the new content; without a reduction they are appended to it,
        and it becomes the first element of a list if it isn't one. If ``function`` raises, a
        ``RuntimeError`` names the module and all slots stay as they are.
        """
        return self.apply_sample(lambda data, samples: function(data))

    def apply_sample(self: Self, function: Callable[[Any, int], Any]) -> Self:
        """As ``apply``, with ``function(data, samples)``."""
        found = [slot for slot in self._slots if slot.data is not None]
        for slot, data in zip(found, [_applied(function, slot) for slot in found], strict=True):
            slot.data = data
        return self

    def save(self, path: str | Path, mkdir: bool = False) -> None:
        """Write the slots' contents to ``0.pt``, ``1.pt`` and so on in ``path``, by ``torch.save``.

        With ``mkdir`` the folder is created if it doesn't exist.
        """
        folder = Path(path)
        if mkdir:
            folder.mkdir(parents=True, exist_ok=True)
        for index, data in enumerate(self):
            torch.save(data, folder / f"{index}.pt")

    def _slot(self, index: int) -> _Slot:
        if not -len(self._slots) <= index < len(self._slots):
            raise IndexError(f"there is no slot {index}: the recorder has {len(self._slots)}")
        return self._slots[index]

    # Closing.

    def remove(self, index: int) -> Any:
        """Stop recording a module, and return the content of its slot. Later slots move up."""
        slot = self._slot(index)
        self._slots.remove(slot)
        slot.close()
        return slot.data

    def close(self) -> None:
        """Stop recording; the data stays."""
        self._closed = True
        for slot in self._slots:
            slot.close()

    def __enter__(self: Self) -> Self:
        self._closed = False
        for slot in self._slots:
            if slot.removal is None:
                slot.open(self._register(slot))
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is tied to its modules and can't be copied or pickled: use "
            "save(), or its data"
        )


def _applied(function: Callable[[Any, int], Any], slot: _Slot) -> Any:
    try:
        return function(slot.data, slot.samples)
    except Exception as error:
        raise RuntimeError(
            f"apply failed at {slot.name}: {type(error).__name__}: {error}"
        ) from error


def _several(values: Any) -> tuple[Any, ...]:
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return tuple(values) if several else (values,)


@final
class ForwardPre(Recorder):
    """Records what goes into modules, as it is before they are called."""

    before_call = True


@final
class ForwardInput(Recorder):
    """Records what goes into modules, as it is after their call, which may work in place."""

    of_input = True


@final
class ForwardOutput(Recorder):
    """Records what comes out of modules."""


@final
class BackwardInput(Recorder):
    """Records gradients at the tensors that go into modules.

    This is the whole gradient at the tensor, including that of its other uses. A tensor that goes
    in several times is therefore recorded once for each backward pass. A tensor that needs no
    gradient, such as the input of most first layers, has none.
    """

    before_call = of_gradient = True


@final
class BackwardOutput(Recorder):
    """Records gradients at the tensors that come out of modules."""

    of_gradient = True


def _first(value: Any) -> Tensor | None:
    """The first floating-point tensor, and without one the first tensor."""
    found = [*tensors_in(value)]
    return next((t for t in found if t.is_floating_point()), found[0] if found else None)
