"""The layers, ways to call them, entries and losses of random networks, each in one network."""

from __future__ import annotations

from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from benchmarks.zoo.network import Batch, Network
from tests.cases import networks as of_layers
from tests.cases import random_networks
from tests.cases.random_networks import Recipe

SAMPLES = 3
"""Of single layers, whose outputs have no other axis of that length."""


def networks() -> list[Network]:
    """Those of ``tests.cases`` in which no samples meet."""
    recipes = random_networks.each_once().items()
    found = [_of_recipe(name, recipe) for name, recipe in recipes if not recipe.coupled]
    layers = of_layers.NETWORKS.items()
    return found + [_of_layer(name, each) for name, each in layers]


def _of_recipe(name: str, recipe: Recipe) -> Network:
    sized = random_networks.build(recipe)
    build, batch = partial(random_networks.build, recipe), partial(_batch, sized)
    kind, loss = "generated: random networks", random_networks.Network.batch_loss
    options = {"contribution": _share, "told": recipe.told}
    return Network(name, kind, build, batch, loss, recipe.samples, **options)  # type: ignore[arg-type]


def _batch(sized: random_networks.Network) -> Batch:
    return {
        **random_networks.draw_batch(sized, int(torch.randint(random_networks.STEPS, 10**6, ())))
    }


def _share(model: nn.Module, batch: Batch, n: int) -> Tensor:
    assert isinstance(model, random_networks.Network)
    return next(islice(random_networks.shares(model, batch), n, None))


def _of_layer(name: str, layer: of_layers.Network) -> Network:
    def batch() -> Batch:
        return {"x": layer.inputs(SAMPLES)}

    return Network(f"layer: {name}", "generated: layers", layer.build, batch, _squares, SAMPLES)


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch["x"])
    return (output - 1).square().mean()
