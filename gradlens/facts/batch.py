"""Numbers of a batch, from the rows of the model's first input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.hooks.global_state import without_autocast
from gradlens.hooks.module_hooks import HookOwner, OwnedHook, removal
from gradlens.hooks.torch_private import tree_leaves

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The numbers of a batch's rows ``[4, N]``, and how many elements a row has."""

    numbers: Tensor
    elements: int
    is_real: bool


class BatchRows(HookOwner):
    """Reduces each row of a model's input to three numbers, by a hook after its forward pass.

    A hook before it would be in the way of other tools.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._latest: Rows | None = None
        handles: list[RemovableHandle] = []
        if model is not None:
            hook = OwnedHook(self, BatchRows._read)
            handles.append(model.register_forward_hook(hook, with_kwargs=True))
        self._remove_hook = removal(self, handles)

    def _read(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        rows = _rows(args, kwargs) if torch.is_grad_enabled() else None
        if rows is not None:
            elements = rows.numel() // len(rows)
            self._latest = Rows(row_numbers(rows), elements, rows.is_floating_point())

    def failed(self, error: Exception) -> None:
        """The user's forward pass goes on, as with classes of tensors that lack something."""

    def take(self) -> Rows | None:
        """Those of the latest call; ``None`` if there was none since."""
        found, self._latest = self._latest, None
        return found

    def close(self) -> None:
        """Remove the hook."""
        self._remove_hook()


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first input with rows, real numbers before others."""
    leaves = args if args and isinstance(args[0], Tensor) else tree_leaves((args, kwargs))
    tensors = [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel() and not leaf.is_nested
        if leaf.layout == torch.strided and not leaf.is_complex()
    ]
    # A real vector may be a single sample.
    real = [each for each in tensors if each.is_floating_point() and each.dim() > 1]
    whole = [each for each in tensors if not each.is_floating_point()]
    return next(iter(real or whole), None)


@torch.no_grad()
def row_numbers(rows: Tensor) -> Tensor:
    """The norm of each row, its mean and a hash, and the norm of the mean row ``[4, N]``.

    Rows with the same elements have the same hash, up to rounding.
    """
    with without_autocast():
        flat = rows.detach().reshape(len(rows), -1).float()
        norms = torch.linalg.vector_norm(flat, dim=1)
        products = flat @ _weights(flat.shape[1], flat.device)
        centre = torch.linalg.vector_norm(flat.mean(0))
        return torch.cat([norms[None], products.T, centre.expand(1, len(rows))])


@cache
def _weights(elements: int, device: torch.device) -> Tensor:
    """``[F, 2]``: those of the mean, and numbers without a pattern."""
    with torch.inference_mode(False):
        places = torch.arange(elements, dtype=torch.float64)
        # The fractions of a fast sine, as in hash functions of shaders.
        mixed = torch.frac(torch.sin(12.9898 * (places + 1)) * 43758.5453)
        mean = torch.full((elements,), 1 / elements, dtype=torch.float64)
        return torch.stack([mean, mixed / math.sqrt(elements)], 1).float().to(device)


def batch_columns(numbers: Floats, elements: int) -> dict[str, float]:
    """Columns of the steps' table, from the numbers ``[4, N]`` of rows of so many elements."""
    norms, means, hashes, centre = numbers
    rms = norms / math.sqrt(elements)
    whole = np.isfinite(norms)
    found: dict[str, float] = {"samples": len(norms), "bad_rows": float((~whole).sum())}
    if not whole.all():
        found["bad_row"] = float(np.flatnonzero(~whole)[0])
        return found
    largest = int(rms.argmax())
    square = float(np.square(rms).mean())
    mean = float(means.mean())
    spread = max(square - float(np.square(centre).mean()) / elements, 0.0)
    return found | {
        "input_rms": math.sqrt(square),
        "input_mean": mean,
        "input_std": math.sqrt(max(square - mean**2, 0.0)),
        "input_spread": math.sqrt(spread / square) if square else 0.0,
        "row_rms_max": float(rms[largest]),
        "row_rms_median": median(rms),
        "row_largest": largest,
        "distinct_rows": float(distinct(norms, hashes)),
        "checksum": float(hashes.sum()),
    }


SAME = 1e-5
"""Hashes whose difference is smaller, relative to the largest, are those of the same elements: in
single precision, sums of the same numbers in another order differ by less."""


def distinct(norms: Floats, hashes: Floats) -> int:
    """The number of rows that differ from all others."""
    scaled = [np.round(each / (SAME * max(np.abs(each).max(), 1e-30))) for each in (norms, hashes)]
    keys = np.sort(scaled[0] + scaled[1] / SAME * 10)
    return 1 + int(np.count_nonzero(np.diff(keys)))


def median(numbers: Floats) -> float:
    """The median, or the larger one of two; several times faster than ``numpy.median``."""
    middle = len(numbers) // 2
    return float(np.partition(numbers, middle)[middle])
