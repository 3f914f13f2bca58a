"""The parameters of a model that a matrix is taken over, by their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gradlens.spelling import near


def selected_parameters(
    model: nn.Module, names: Sequence[str] | None = None
) -> dict[str, nn.Parameter]:
    """Parameters by name, in the model's order; by default all that require a gradient.

    A name is that of a parameter, or of a module, for all of its parameters that require a
    gradient. Raises ``ValueError`` for a name that the model doesn't have, a module without such
    parameters, and a single string.
    """
    named = dict(model.named_parameters())
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if names is None:
        return trainable
    if isinstance(names, str):
        raise ValueError(f"parameters={names!r} is one string: pass a list, [{names!r}]")
    chosen: set[str] = set()
    for name in names:
        found = {one for one in trainable if one.startswith(f"{name}.")}
        found |= {name} & named.keys()
        if not found:
            modules = [module for module, _ in model.named_modules() if module]
            if name in modules:
                raise ValueError(f"the module {name!r} has no parameters that require a gradient")
            raise ValueError(
                f"the model has no parameter or module {name!r}{near(name, [*named, *modules])}"
            )
        chosen |= found
    return {name: p for name, p in named.items() if name in chosen}
