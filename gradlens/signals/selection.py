"""Which layers of a model are meant."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

Selector: TypeAlias = str | int | type[nn.Module] | Callable[[nn.Module], bool]
"""A dotted name, a glob (whose ``*`` matches dots too), the name of a class, a class, an index,
or a predicate such as ``gradlens.signals.is_activation``."""

Selectors: TypeAlias = Selector | Iterable[Selector]

_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Selection:
    """The layers that one of ``include`` means, and none of ``exclude``; all without ``include``.

    Names and classes are looked for in all modules, everything else in the leaves: modules
    without children, and multi-head attention. ``leaf`` restricts all selectors to leaves
    (``True``), or lets all of them see every module (``False``). Modules ``depth`` levels below
    the model count as leaves, and nothing below them is selected; its children are at depth 1.
    An index counts what it can see, in the order of ``model.named_modules()``.
    """

    include: tuple[Selector, ...] = ()
    exclude: tuple[Selector, ...] = ()
    depth: int | None = None
    leaf: bool | None = None

    def __post_init__(self) -> None:
        for selector in (*self.include, *self.exclude):
            if not isinstance(selector, (str, int)) and not callable(selector):
                raise TypeError(
                    f"{selector!r} selects no layers: use a name, a glob, a class or its name, an "
                    "index, or a predicate"
                )
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth={self.depth} selects nothing: use 1 or more")


def selection(
    include: Selectors | Selection | None = None,
    exclude: Selectors = (),
    depth: int | None = None,
    leaf: bool | None = None,
) -> Selection:
    """A selection from one selector or several; a string is one of them."""
    if isinstance(include, Selection):
        return include
    return Selection(_several(() if include is None else include), _several(exclude), depth, leaf)


def _several(selectors: Selectors) -> tuple[Selector, ...]:
    if isinstance(selectors, (str, int)) or callable(selectors):
        return (selectors,)
    return tuple(selectors)


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
    """What selectors can see of a model."""

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
            if id(module) not in hidden and not name.endswith("parametrizations")
        }
        deepest = len(named) if depth is None else depth
        within = {n: m for n, m in named.items() if _depth(n) <= deepest and not _in_leaf(n, named)}
        leaves = {n for n, m in within.items() if is_leaf(m) or _depth(n) == deepest}
        self._root = root = type(model).__name__
        self.leaves = [n or root for n in within if n in leaves]
        found = self.leaves if leaf else [n or root for n in within]
        self.all = {n or root: m for n, m in within.items() if (n or root) in {*found}}
        self._by_value = self.leaves if leaf is None else found

    def matching(self, selectors: Sequence[Selector]) -> set[str]:
        return {name for selector in selectors for name in self._matching(selector)}

    def _matching(self, selector: Selector) -> set[str]:
        if isinstance(selector, int):
            return {self._at(selector)}
        found = self._named(selector) if isinstance(selector, str) else self._of_kind(selector)
        if not found:
            raise ValueError(self._nothing(selector))
        return found

    def _named(self, text: str) -> set[str]:
        if text in self.all and text != self._root:
            return {text}
        if _GLOB & {*text}:
            return {name for name in self._by_value if fnmatch.fnmatchcase(name, text)}
        return {name for name, module in self.all.items() if text in _class_names(module)}

    def _of_kind(self, selector: type[nn.Module] | Callable[[nn.Module], bool]) -> set[str]:
        if isinstance(selector, type):
            return {name for name, module in self.all.items() if isinstance(module, selector)}
        return {name for name in self._by_value if selector(self.all[name])}

    def _at(self, index: int) -> str:
        count = len(self._by_value)
        if not -count <= index < count:
            raise ValueError(f"there is no layer {index}: the model has {count} of them")
        return self._by_value[index]

    def _nothing(self, selector: Selector) -> str:
        names = [*self.all, *sorted({type(module).__name__ for module in self.all.values()})]
        if not isinstance(selector, str):
            kinds = ", ".join(sorted({type(self.all[name]).__name__ for name in self._by_value}))
            what = getattr(selector, "__name__", repr(selector))
            return f"no layer matches {what}: the model has {kinds}"
        return f"no layer matches {selector!r}{near(selector, names)}"


def near(word: str, words: Iterable[str]) -> str:
    """The end of an error message: what is spelled like a word that isn't known."""
    known = list(dict.fromkeys(words))
    by_lower_case = {other.lower(): other for other in reversed(known)}
    found = difflib.get_close_matches(word.lower(), by_lower_case, n=3, cutoff=0.5)
    if found:
        return f": did you mean {' or '.join(by_lower_case[other] for other in found)}?"
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" (there is {shown})"


def is_leaf(module: nn.Module) -> bool:
    """Whether it has no children; attention, which uses its children's parameters, is one."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    return all(name == "parametrizations" for name, _ in module.named_children())


def _class_names(module: nn.Module) -> list[str]:
    # Like isinstance, so that subclasses and parametrised layers are found.
    return [kind.__name__ for kind in type(module).__mro__]


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _in_leaf(name: str, named: dict[str, nn.Module]) -> bool:
    """Whether it is part of what counts as one layer."""
    words = name.split(".")
    outer = (".".join(words[:length]) for length in range(1, len(words)))
    return any(isinstance(named.get(other), nn.MultiheadAttention) for other in outer)
