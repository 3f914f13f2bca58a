"""Recorders of raw tensors that flow through modules, as in torchfunc."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.signals.selection import Selection, Selectors, select, selection
from gradlens.signals.signal import first_tensor

Self = TypeVar("Self", bound="Recorder")


class _Slot:
    """What is recorded of one module, and how many samples it was."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.ref(recorder)
        self.data: Any = None if recorder.reduction is not None else []
        self.samples = 0

    @torch.no_grad()
    def take_in(self, tensor: Tensor | None) -> None:
        recorder = self._recorder()
        if recorder is None or tensor is None:
            return
        if recorder.condition is not None and not recorder.condition():
            return
        # Whatever works in place later must not change it.
        value = tensor.detach().clone()
        self.samples += len(value) if value.dim() else 1
        if recorder.reduction is None:
            self.data.append(value)
        else:
            self.data = value if self.data is None else recorder.reduction(self.data, value)


class _Hook:
    """Tells a slot of what flows by; copies and pickles of it tell nobody."""

    def __init__(
        self,
        slot: _Slot | None = None,
        record: Callable[[_Slot, Any, Any], None] | None = None,
    ) -> None:
        self._slot = None if slot is None else weakref.ref(slot)
        self._record = record

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        slot = None if self._slot is None else self._slot()
        if slot is not None and self._record is not None:
            self._record(slot, (args, kwargs), output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class Recorder(ABC):
    """Records the first tensor of each call of some modules, detached and copied.

    There is a slot for each module, in the order in which they were registered; ``recorder[0]`` is
    what it holds: a list of tensors, or what ``reduction(so_far, tensor)`` has made of them,
    ``None`` before the first one. Nothing is recorded while ``condition()`` is false. As a context
    manager, it records until the context is left; the data stays.
    """

    def __init__(
        self,
        condition: Callable[[], bool] | None = None,
        reduction: Callable[[Any, Tensor], Any] | None = None,
    ) -> None:
        self.condition = condition
        self.reduction = reduction
        self._slots: list[_Slot] = []
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _register(self, module: nn.Module, slot: _Slot) -> RemovableHandle: ...

    @final
    def modules(
        self: Self,
        module: nn.Module,
        types: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        indices: int | Iterable[int] | None = None,
    ) -> Self:
        """Record all of ``module.modules()`` that are of these ``types`` and at these ``indices``.

        Indices count all modules, whatever their types. ``ValueError`` if nothing fits.
        """
        return self._add(list(module.modules()), types, indices)

    @final
    def children(
        self: Self,
        module: nn.Module,
        types: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        indices: int | Iterable[int] | None = None,
    ) -> Self:
        """As ``modules``, of ``module.children()``."""
        return self._add(list(module.children()), types, indices)

    @final
    def layers(self: Self, module: nn.Module, chosen: Selectors | Selection | None = None) -> Self:
        """Record the selected layers: see ``gradlens.signals.Selection``."""
        for layer in select(module, selection(chosen)).values():
            self._watch(layer)
        return self

    def _add(
        self: Self,
        found: list[nn.Module],
        types: type[nn.Module] | Iterable[type[nn.Module]] | None,
        indices: int | Iterable[int] | None,
    ) -> Self:
        kinds = (types,) if isinstance(types, type) else None if types is None else tuple(types)
        places = {indices} if isinstance(indices, int) else None if indices is None else {*indices}
        outside = sorted(place for place in places or () if not 0 <= place < len(found))
        if outside:
            raise ValueError(f"there is no module {outside[0]}: there are {len(found)} of them")
        chosen = [
            module
            for place, module in enumerate(found)
            if (kinds is None or isinstance(module, kinds)) and (places is None or place in places)
        ]
        if not chosen:
            there = ", ".join(sorted({type(module).__name__ for module in found})) or "nothing"
            raise ValueError(
                f"no module is of types={types} and at indices={indices}: there is {there}"
            )
        for module in chosen:
            self._watch(module)
        return self

    def _watch(self, module: nn.Module) -> None:
        slot = _Slot(self)
        self._handles.append(self._register(module, slot))
        self._slots.append(slot)

    # What was recorded.

    @property
    def data(self) -> list[Any]:
        """What the slots hold."""
        return [slot.data for slot in self._slots]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Any:
        return self._slots[index].data

    def __setitem__(self, index: int, value: Any) -> None:
        self._slots[index].data = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def samples(self, index: int) -> int:
        """How many samples were recorded in a slot: the lengths of its tensors."""
        return self._slots[index].samples

    def iter_samples(self) -> Iterator[int]:
        """How many samples were recorded in each slot."""
        return iter([slot.samples for slot in self._slots])

    def apply(self: Self, function: Callable[[Any], Any]) -> Self:
        """Replace what each slot holds by ``function(data)``."""
        for slot in self._slots:
            slot.data = function(slot.data)
        return self

    def apply_sample(self: Self, function: Callable[[Any, int], Any]) -> Self:
        """Replace what each slot holds by ``function(data, samples)``."""
        for slot in self._slots:
            slot.data = function(slot.data, slot.samples)
        return self

    def save(self, path: str | Path, mkdir: bool = False) -> None:
        """Write what the slots hold to ``0.pt``, ``1.pt`` and so on in ``path``, by ``torch.save``.

        With ``mkdir`` the folder may be missing.
        """
        folder = Path(path)
        if mkdir:
            folder.mkdir(parents=True, exist_ok=True)
        for index, data in enumerate(self):
            torch.save(data, folder / f"{index}.pt")

    # The end.

    def remove(self, index: int) -> Any:
        """Stop recording a module; returns what its slot held. Later slots move up."""
        slot = self._slots.pop(index)
        self._handles.pop(index).remove()
        return slot.data

    def close(self) -> None:
        """Stop recording; the data stays."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Whoever keeps no recorder has nothing to close it with.
        self.close()


@final
class ForwardPre(Recorder):
    """Records what goes into modules, as it is before they are called."""

    def _register(self, module: nn.Module, slot: _Slot) -> RemovableHandle:
        hook = _Hook(slot, _record_input)
        return module.register_forward_pre_hook(hook, with_kwargs=True)


@final
class ForwardInput(Recorder):
    """Records what goes into modules, as it is after their call, which may work in place."""

    def _register(self, module: nn.Module, slot: _Slot) -> RemovableHandle:
        hook = _Hook(slot, _record_input)
        return module.register_forward_hook(hook, with_kwargs=True)


@final
class ForwardOutput(Recorder):
    """Records what comes out of modules."""

    def _register(self, module: nn.Module, slot: _Slot) -> RemovableHandle:
        hook = _Hook(slot, _record_output)
        return module.register_forward_hook(hook, with_kwargs=True)


@final
class BackwardInput(Recorder):
    """Records gradients at the tensors that go into modules.

    It is the whole gradient at the tensor, whatever else uses it. A tensor that needs no gradient,
    such as the input of most first layers, has none to record.
    """

    def _register(self, module: nn.Module, slot: _Slot) -> RemovableHandle:
        hook = _Hook(slot, _await_input_gradient)
        return module.register_forward_pre_hook(hook, with_kwargs=True)


@final
class BackwardOutput(Recorder):
    """Records gradients at the tensors that come out of modules."""

    def _register(self, module: nn.Module, slot: _Slot) -> RemovableHandle:
        hook = _Hook(slot, _await_output_gradient)
        return module.register_forward_hook(hook, with_kwargs=True)


def _record_input(slot: _Slot, inputs: Any, output: Any) -> None:
    slot.take_in(first_tensor(inputs))


def _record_output(slot: _Slot, inputs: Any, output: Any) -> None:
    slot.take_in(first_tensor(output))


def _await_input_gradient(slot: _Slot, inputs: Any, output: Any) -> None:
    _await_gradient(slot, first_tensor(inputs))


def _await_output_gradient(slot: _Slot, inputs: Any, output: Any) -> None:
    _await_gradient(slot, first_tensor(output))


def _await_gradient(slot: _Slot, tensor: Tensor | None) -> None:
    if tensor is None or not tensor.requires_grad:
        return
    reference = weakref.ref(slot)

    def take_in(gradient: Tensor) -> None:
        found = reference()
        if found is not None:
            found.take_in(gradient)

    tensor.register_hook(take_in)
