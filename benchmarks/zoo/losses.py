"""Losses and data that many networks of the zoo share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.zoo.network import Batch, some_of

CLASSES = 3
WORDS = 13


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of ``model(x)`` ``[N, K]`` and labels ``y`` ``[N]``."""
    return cross_entropy(model(batch["x"]), batch["y"])


def regress(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of ``model(x)`` and ``y`` of the same shape."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def label_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of ``model(x)`` ``[N, T, K]``, over all tokens whose label isn't -100."""
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def label_tokens_first(model: nn.Module, batch: Batch) -> Tensor:
    """The same for outputs ``[T, N, K]`` and labels ``[T, N]``."""
    return label_tokens(model, batch)


def images(samples: int = 4, channels: int = 2, size: int = 8) -> Callable[[], Batch]:
    """Random images ``[N, C, H, W]`` with a label each."""
    return numbers(samples, channels, size, size)


def numbers(samples: int, *shape: int) -> Callable[[], Batch]:
    """Random numbers ``[N, *shape]`` with a label for each sample."""

    def batch() -> Batch:
        x = torch.randn(samples, *shape, dtype=torch.float64)
        return {"x": x, "y": torch.randint(CLASSES, (samples,))}

    return batch


def words(samples: int, length: int) -> Callable[[], Batch]:
    """Random words ``[N, T]`` with a label for each text."""

    def batch() -> Batch:
        x = torch.randint(WORDS, (samples, length))
        return {"x": x, "y": torch.randint(CLASSES, (samples,))}

    return batch


def labelled_words(samples: int, length: int) -> Callable[[], Batch]:
    """Random words ``[N, T]`` with labels for some of them, for each text another number."""

    def batch() -> Batch:
        x = torch.randint(WORDS, (samples, length))
        return {"x": x, "y": some_of(torch.randint(WORDS, (samples, length)))}

    return batch


def targets(samples: int, inside: tuple[int, ...], outside: tuple[int, ...]) -> Callable[[], Batch]:
    """Random numbers ``[N, *inside]`` with targets ``[N, *outside]``."""

    def batch() -> Batch:
        x = torch.randn(samples, *inside, dtype=torch.float64)
        return {"x": x, "y": torch.randn(samples, *outside, dtype=torch.float64)}

    return batch
