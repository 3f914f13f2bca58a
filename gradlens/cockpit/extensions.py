"""The BackPACK extensions and extension hooks of one tracked step, by where they run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.backpack_adapter.context import extended_by_backpack
from gradlens.backpack_adapter.per_sample_gradients import PerSampleGradients
from gradlens.quantities.quantity import Quantity


@dataclass(frozen=True)
class StepExtensions:
    """Extensions of a step, one of each class, the user's own first.

    ``within`` run in the user's backward pass, with the ``hooks`` of quantities after them on each
    module. ``apart`` are of second order and need passes of their own. ``per_sample`` says that
    per-sample gradients are needed. ``saved`` are the names under which results are on the
    parameters only as long as the context lasts.
    """

    within: Sequence[BackpropExtension]
    apart: Sequence[BackpropExtension]
    hooks: Sequence[tuple[Quantity, Callable[[nn.Module], None]]]
    per_sample: bool
    saved: frozenset[str]


def step_extensions(
    active: Iterable[Quantity],
    by_user: Sequence[BackpropExtension],
    model: nn.Module | None,
    global_step: int,
) -> StepExtensions:
    """What the active quantities and the user need at a step."""
    given, hooks = list(by_user), []
    for quantity in active:
        given += quantity.extensions(global_step)
        hooks += [(quantity, hook) for hook in quantity.extension_hooks(global_step)]
    by_class: dict[type[BackpropExtension], BackpropExtension] = {}
    for extension in given:
        by_class.setdefault(type(extension), extension)
    per_sample = by_class.pop(PerSampleGradients, None) is not None
    found = list(by_class.values())
    second_order = [e for e in found if e.expects_backpropagation_quantities()]
    apart = second_order if _runs_by_layer_hooks(model) else []
    return StepExtensions(
        [extension for extension in found if extension not in apart],
        apart,
        hooks,
        per_sample,
        frozenset(e.savefield for e in found) - {e.savefield for e in by_user},
    )


def needs_layer_hooks(extensions: Iterable[BackpropExtension], model: nn.Module | None) -> bool:
    """Whether one of the extensions runs by gradlens's hooks on layers."""
    found = (e for e in extensions if not isinstance(e, PerSampleGradients))
    first_order = any(not e.expects_backpropagation_quantities() for e in found)
    return first_order and _runs_by_layer_hooks(model)


class SavedResults:
    """What the user's extensions have saved on the parameters when a step begins."""

    def __init__(
        self, extensions: Sequence[BackpropExtension], parameters: Iterable[nn.Parameter]
    ) -> None:
        self._parameters = tuple(parameters)
        self._before = [(extension, self._saved_by(extension)) for extension in extensions]

    def lacking(self) -> list[str]:
        """Class names of the extensions that have saved nothing since."""
        return [
            type(extension).__name__
            for extension, before in self._before
            if all(map(operator.is_, before, self._saved_by(extension)))
        ]

    def _saved_by(self, extension: BackpropExtension) -> list[Any]:
        return [vars(parameter).get(extension.savefield) for parameter in self._parameters]


def _runs_by_layer_hooks(model: nn.Module | None) -> bool:
    """Whether BackPACK has no hooks of its own on the model."""
    return model is not None and not extended_by_backpack(model)
