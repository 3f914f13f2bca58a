"""Selection of layers and parameters for quantities of a part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from gradlens.signals.selection import Selection, select
from gradlens.spelling import near


def choose_parameters(
    quantity: str,
    model: nn.Module | None,
    parameters: Mapping[str, nn.Parameter],
    layers: Selection | None,
    own_names: str | Iterable[str] | None,
) -> tuple[str, ...]:
    """Names of the parameters of the selected layers, or of all layers without a selection.

    With ``own_names``, only those that have one of these names in their layers, such as
    ``"weight"``. ``ValueError`` names the quantity if nothing is selected.
    """
    names = tuple(parameters)
    if layers is not None:
        modules = select_for(quantity, model, layers)
        inside = {f"{layer}." for layer, module in modules.items() if module is not model}
        whole = len(inside) < len(modules)
        names = tuple(n for n in names if whole or any(n.startswith(start) for start in inside))
    if own_names is not None:
        chosen = (own_names,) if isinstance(own_names, str) else tuple(own_names)
        existing = sorted({_own_name(name) for name in names})
        for own_name in chosen:
            if own_name not in existing:
                hint = near(own_name, existing)
                raise ValueError(
                    f"{quantity}: no layer has a trainable parameter {own_name!r}{hint}"
                )
        names = tuple(name for name in names if _own_name(name) in chosen)
    if not names:
        raise ValueError(f"{quantity}: the selected layers have no trainable parameters")
    return names


def select_for(quantity: str, model: nn.Module | None, layers: Selection) -> dict[str, nn.Module]:
    """As ``select``; ``ValueError`` names the quantity, also if there is no model."""
    if model is None:
        raise ValueError(
            f"{quantity} selects layers: pass the model, as in Cockpit(model, ...), instead of "
            "its parameters"
        )
    try:
        return select(model, layers)
    except ValueError as error:
        raise ValueError(f"{quantity}: {error}") from None


def _own_name(parameter: str) -> str:
    return parameter.removesuffix(".original").rpartition(".")[2]
