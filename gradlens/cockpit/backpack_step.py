"""BackPACK's extensions and extension hooks in one context, if there are any."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.backpack_adapter.context import contained, extended_by_backpack, with_extensions
from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.values import StepValues
from gradlens.gradients.gradients import Setting
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.quantity import Quantity

_Asked: TypeAlias = tuple[Sequence[BackpropExtension], Sequence[Callable[[nn.Module], None]]]
"""The extensions and the extension hooks of a quantity."""


class BackpackStep:
    """Runs the extensions of the active quantities and the user's own, one of each class.

    What BackPACK says of the user's own is raised, as without gradlens. All need BackPACK's hooks:
    without these, they are an ``UnavailableError``, or the NaN of quantities.
    """

    def __init__(
        self,
        global_step: int,
        by_user: Sequence[BackpropExtension],
        values: StepValues,
        setting: Setting,
        boundary: Boundary,
    ) -> None:
        self._by_user = by_user
        self._values = values
        self._boundary = boundary
        self._parameters = setting.parameters
        self._lacks_hooks = setting.model is not None and not extended_by_backpack(setting.model)
        self._check(by_user)
        self._asked: dict[Quantity, _Asked] = {}
        for quantity in values.active:
            with boundary.contain(quantity.name, values.refusing(quantity)):
                extensions = quantity.extensions(global_step)
                hooks = quantity.extension_hooks(global_step)
                self._check([*extensions, *hooks])
                self._asked[quantity] = extensions, hooks
        own = [each for extensions, _ in self._asked.values() for each in extensions]
        by_class: dict[type[BackpropExtension], BackpropExtension] = {}
        for extension in [*by_user, *own]:
            by_class.setdefault(type(extension), extension)
        self._found = list(by_class.values())
        saved = {each.savefield for each in self._found}
        self._saved = saved - {each.savefield for each in by_user}
        self._before = [(extension, self._saved_by(extension)) for extension in by_user]

    def _check(self, asked: Iterable[Any]) -> None:
        """``UnavailableError`` if something is asked for without BackPACK's hooks."""
        for each in asked if self._lacks_hooks else ():
            name = getattr(each, "__name__", type(each).__name__)
            raise UnavailableError(NOT_EXTENDED.format(name=name))

    @contextmanager
    def running(self, debug: bool) -> Iterator[None]:
        """A context in which the extensions are active."""
        hooks = [
            partial(self._run_hook, quantity, hook)
            for quantity, (_, own) in self._asked.items()
            for hook in own
        ]
        with with_extensions([*map(self._contained, self._found)], hooks, debug):
            yield

    def _contained(self, extension: BackpropExtension) -> BackpropExtension:
        """An extension that isn't the user's own, whose exceptions are the NaN of quantities."""
        if extension in self._by_user:
            return extension
        asking = [
            quantity
            for quantity, (extensions, _) in self._asked.items()
            if type(extension) in map(type, extensions)
        ]
        refuse = self._values.refusing(*asking)
        return contained(extension, partial(self._boundary.contain, asking[0].name, refuse))

    def _run_hook(
        self, quantity: Quantity, hook: Callable[[nn.Module], None], module: nn.Module
    ) -> None:
        with self._boundary.contain(quantity.name, self._values.refusing(quantity)):
            hook(module)

    @property
    def lacking(self) -> str:
        """What is wrong with the user's extensions that have saved nothing; empty if nothing is."""
        names = [
            type(extension).__name__
            for extension, before in self._before
            if all(map(operator.is_, before, self._saved_by(extension)))
        ]
        return NOTHING_SAVED.format(extensions=", ".join(names)) if names else ""

    def _saved_by(self, extension: BackpropExtension) -> list[Any]:
        return [vars(each).get(extension.savefield) for each in self._parameters.values()]

    def release(self) -> None:
        """Remove from the parameters what extensions have saved for quantities alone."""
        for parameter in self._parameters.values() if self._saved else ():
            for savefield in self._saved & vars(parameter).keys():
                delattr(parameter, savefield)


NOTHING_SAVED = (
    "{extensions} saved nothing on the parameters that are tracked. BackPACK's extensions need a "
    "backward pass inside the context, and hooks on model and loss module before the forward pass: "
    "extend both by backpack.extend"
)
NOT_EXTENDED = (
    "{name} needs BackPACK's hooks on the model: extend the model, and the loss module for what is "
    "of second order, by backpack.extend before the forward pass"
)
