"""Selects layers of a model."""

from __future__ import annotations

import fnmatch
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from gradlens.graph.hooks import takes_hooks
from gradlens.spelling import near

Selector: TypeAlias = str | int | nn.Module | type[nn.Module] | Callable[[nn.Module], bool]
"""A dotted name, a glob (whose ``*`` matches dots too), the name of a class, a class, a module of
the model, an index, or a predicate such as ``gradlens.signals.is_activation``."""

Selectors: TypeAlias = Selector | Iterable[Selector]

_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Selection:
    """Layers that match one of ``include`` (all without it), and none of ``exclude``.

    Names, classes and modules are matched with all modules, other selectors with the leaves alone:
    modules without children, and multi-head attention. With ``leaf=True`` all selectors are matched
    with leaves alone, with ``leaf=False`` with all modules. Modules ``depth`` levels below the
    model count as leaves, and nothing below them is selected; its children are at depth 1. An index
    counts the modules that it is matched with, in the order of ``model.named_modules()``, a
    negative one from the end.
    """

    include: tuple[Selector, ...] = ()
    exclude: tuple[Selector, ...] = ()
    depth: int | None = None
    leaf: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "include", _several(self.include))
        object.__setattr__(self, "exclude", _several(self.exclude))
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise ValueError(f"depth={self.depth!r} selects nothing: use a number from 1 on")


def selection(
    include: Selectors | Selection | None = None,
    exclude: Selectors = (),
    depth: int | None = None,
    leaf: bool | None = None,
) -> Selection:
    """A selection from one selector or several, or from another one.

    ``exclude`` adds to what that excludes; ``depth`` and ``leaf`` replace its own. Without
    ``include``, or with an empty tuple, all layers are selected; ``ValueError`` for anything else
    that is empty, which is more likely a mistake.
    """
    if isinstance(include, Selection):
        return replace(
            include,
            exclude=(*include.exclude, *_several(exclude)),
            depth=include.depth if depth is None else depth,
            leaf=include.leaf if leaf is None else leaf,
        )
    chosen = () if include is None else _several(include)
    if not chosen and include is not None and not isinstance(include, tuple):
        raise ValueError(f"{include!r} selects no layers: leave it out to select all of them")
    return Selection(chosen, _several(exclude), depth, leaf)


def _several(selectors: Selectors) -> tuple[Selector, ...]:
    """Selectors in a tuple; ``TypeError`` names what is none."""
    if _is_selector(selectors) or not isinstance(selectors, Iterable):
        chosen: tuple[Any, ...] = (selectors,)
    else:
        chosen = tuple(selectors)
    for selector in chosen:
        if not _is_selector(selector):
            raise TypeError(
                f"{' '.join(reprlib.repr(selector).split())} selects no layers: use a name, a "
                "glob, a class or its name, a module of the model, an index, or a predicate"
            )
    return chosen


def _is_selector(selector: object) -> bool:
    if isinstance(selector, bool):
        return False
    return isinstance(selector, (str, int)) or callable(selector)


def select(model: nn.Module, chosen: Selection) -> dict[str, nn.Module]:
    """The selected modules by dotted name, in the model's order.

    The model itself goes by the name of its class. ``ValueError`` names a selector that matches
    nothing, with what is near to it.
    """
    layers = _Layers(model, chosen.depth, chosen.leaf)
    wanted = layers.matching(chosen.include) if chosen.include else set(layers.leaves)
    wanted -= layers.matching(chosen.exclude)
    if not wanted:
        raise ValueError("the selection leaves no layer: exclude less")
    return {name: module for name, module in layers.all.items() if name in wanted}


class _Layers:
    """The modules of a model that selectors are matched with."""

    def __init__(self, model: nn.Module, depth: int | None, leaf: bool | None) -> None:
        hidden = {
            id(inner)
            for module in model.modules()
            if isinstance(module, ParametrizationList)
            for inner in module.modules()
        }
        named = {
            name: module
            for name, module in model.named_modules()
            if id(module) not in hidden
            and takes_hooks(module)
            and name.rpartition(".")[2] != "parametrizations"
        }
        deepest = len(named) if depth is None else depth
        within = {n: m for n, m in named.items() if _depth(n) <= deepest and not _in_leaf(n, named)}
        leaves = {n for n, m in within.items() if is_leaf(m) or _depth(n) == deepest}
        self._inside = {*model.modules()}
        kind = type(model).__name__
        self._root = root = f"{kind} (itself)" if kind in named else kind
        self.leaves = [n or root for n in within if n in leaves]
        found = self.leaves if leaf else [n or root for n in within]
        self.all = {n or root: m for n, m in within.items() if (n or root) in {*found}}
        self._by_value = self.leaves if leaf is None else found

    def matching(self, selectors: Sequence[Selector]) -> set[str]:
        return {name for selector in selectors for name in self._matching(selector)}

    def _matching(self, selector: Selector) -> set[str]:
        if isinstance(selector, int):
            return {self._at(selector)}
        if isinstance(selector, nn.Module):
            return {self._same(selector)}
        found = self._named(selector) if isinstance(selector, str) else self._of_kind(selector)
        if not found:
            raise ValueError(self._nothing(selector))
        return found

    def _same(self, module: nn.Module) -> str:
        """The name of a module itself."""
        name = next((name for name, other in self.all.items() if other is module), None)
        if name is None:
            known = module in self._inside
            what = (
                "inside a layer, or no leaf: choose another depth= or leaf="
                if known
                else "not in the model: pass a part of the model itself"
            )
            raise ValueError(f"the {type(module).__name__} that is to be selected is {what}")
        return name

    def _named(self, text: str) -> set[str]:
        if text in self.all and text != self._root:
            return {text}
        if _GLOB & {*text}:
            return {name for name in self._by_value if fnmatch.fnmatchcase(name, text)}
        # Like isinstance, so that subclasses and parametrised layers are found.
        kinds = {name: {kind.__name__ for kind in type(m).__mro__} for name, m in self.all.items()}
        return {name for name, own in kinds.items() if text in own}

    def _of_kind(self, selector: type[nn.Module] | Callable[[nn.Module], bool]) -> set[str]:
        if isinstance(selector, type):
            return {name for name, module in self.all.items() if isinstance(module, selector)}
        return {name for name in self._by_value if self._holds(selector, name)}

    def _holds(self, predicate: Callable[[nn.Module], bool], name: str) -> bool:
        module = self.all[name]
        try:
            return bool(predicate(module))
        except Exception as error:
            raise ValueError(
                f"the predicate {_name_of(predicate)} failed for layer {name} "
                f"({type(module).__name__}): {error}. Pass one that returns True or False for any "
                "layer"
            ) from error

    def _at(self, index: int) -> str:
        count = len(self._by_value)
        if not -count <= index < count:
            raise ValueError(
                f"there is no layer {index}: the model has {count} of them, 0 to {count - 1}"
            )
        return self._by_value[index]

    def _nothing(self, selector: Selector) -> str:
        names = [*self.all, *sorted({type(module).__name__ for module in self.all.values()})]
        if not isinstance(selector, str):
            kinds = ", ".join(sorted({type(self.all[name]).__name__ for name in self._by_value}))
            return f"no layer matches {_name_of(selector)}: the model has {kinds}"
        return f"no layer matches {selector!r}{near(selector, names)}"


def is_leaf(module: nn.Module) -> bool:
    """Whether it has no children, or is attention, which uses its children's parameters itself."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    return all(name == "parametrizations" for name, _ in module.named_children())


def _name_of(selector: object) -> str:
    return getattr(selector, "__name__", repr(selector))


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _in_leaf(name: str, named: dict[str, nn.Module]) -> bool:
    """Whether it is part of a module that counts as one layer."""
    words = name.split(".")
    outer = (".".join(words[:length]) for length in range(1, len(words)))
    return any(isinstance(named.get(other), nn.MultiheadAttention) for other in outer)
