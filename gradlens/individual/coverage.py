"""What to tell the user about individual gradients that don't exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn


def remark_on_coupling(layers: Iterable[str]) -> str:
    """What layers that normalise over the batch do to individual gradients."""
    return (
        f"normalisation over the batch couples the samples in {', '.join(sorted(layers))}: "
        "individual gradients are not defined. What is tracked are each sample's contributions to "
        "the batch gradient; put these layers into eval mode for values of samples on their own"
    )


def remark_on_missing(parameters: Mapping[str, nn.Parameter], reasons: Mapping[str, str]) -> str:
    """Which share of the trainable parameters is covered, and why the rest is not."""
    total = sum(parameter.numel() for parameter in parameters.values())
    absent = sum(parameters[name].numel() for name in reasons)
    share = 100 * (total - absent) / total
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    details = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return (
        f"individual gradients cover {share:.4g} % of the trainable parameters, and quantities "
        f"that use them describe these alone. Missing are {details}"
    )
