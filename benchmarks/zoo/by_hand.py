"""Networks written by hand, of kinds that neither libraries nor ``generated`` show."""

from __future__ import annotations

from benchmarks.zoo import by_hand_images, by_hand_objectives, by_hand_rows
from benchmarks.zoo.network import Network, first_come


def networks() -> list[Network]:
    """All of them; ``ValueError`` if two have the same name."""
    modules = by_hand_rows, by_hand_objectives, by_hand_images
    return first_come([network for module in modules for network in module.networks()])
