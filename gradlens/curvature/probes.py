"""Random vectors from a private generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.products import Products

Seed: TypeAlias = int | np.random.Generator
"""A number, or a generator, which continues from its state. Draws are the same on every device."""


def rademacher(products: Products, generator: np.random.Generator) -> Tensor:
    """Independent signs ±1, ``[D]``."""
    return products.place(2 * generator.integers(0, 2, products.size, dtype=np.int8) - 1)


def gaussian(products: Products, generator: np.random.Generator) -> Tensor:
    """Independent standard normal numbers, ``[D]``: any direction is as likely as any other."""
    return products.place(generator.standard_normal(products.size))


@contextmanager
def private_random_numbers(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the context, and restore their states on leaving."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        torch.get_device_module(device).manual_seed(seed)
        yield
