"""Numbers of a batch, from the rows of the model's first input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.graph.hooks import HookOwner, OwnedHook, removal
from gradlens.graph.unseen import unseen
from gradlens.torch_private import add_forward_hook, tree_leaves

Floats = NDArray[np.float64]


class RowNumbers(NamedTuple):
    """The norm of each row ``[N]``, its mean and a hash ``[N, 2]``, and the norm of the mean row.

    Rows with the same elements have the same hash, up to rounding.
    """

    norms: Tensor
    products: Tensor
    centre: Tensor


@dataclass(frozen=True)
class Rows:
    """The numbers of a batch's rows, and how many elements a row has."""

    numbers: RowNumbers
    elements: int
    is_real: bool

    def __len__(self) -> int:
        return len(self.numbers.norms)


class BatchRows(HookOwner):
    """Reduces each row of a model's input to three numbers, by a hook after its forward pass.

    A hook before it would be in the way of other tools. It does nothing unless the rows are wanted.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._latest: Rows | None = None
        self.is_wanted = True
        handles: list[RemovableHandle] = []
        if model is not None:
            hook = OwnedHook(self, BatchRows._read)
            handles.append(add_forward_hook(model, hook, with_kwargs=True))
        self._remove_hook = removal(self, handles)

    def _read(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not (self.is_wanted and torch.is_grad_enabled()):
            return
        rows = _rows(args, kwargs)
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
def row_numbers(rows: Tensor) -> RowNumbers:
    with unseen():
        flat = rows.detach().reshape(len(rows), -1).float()
        return RowNumbers(
            torch.linalg.vector_norm(flat, dim=1),
            flat @ _weights(flat.shape[1], flat.device),
            torch.linalg.vector_norm(flat.mean(0)),
        )


@cache
def _weights(elements: int, device: torch.device) -> Tensor:
    """``[F, 2]``: those of the mean, and numbers without a pattern."""
    with torch.inference_mode(False):
        places = torch.arange(elements, dtype=torch.float64)
        # The fractions of a fast sine, as in hash functions of shaders.
        mixed = torch.frac(torch.sin(12.9898 * (places + 1)) * 43758.5453)
        mean = torch.full((elements,), 1 / elements, dtype=torch.float64)
        return torch.stack([mean, mixed / math.sqrt(elements)], 1).float().to(device)


def joined(parts: Sequence[Sequence[Floats]]) -> Floats:
    """The numbers ``[4, N]`` of all rows of some micro-batches, from their ``RowNumbers``."""
    return np.concatenate(
        [
            np.stack([norms, *products.T, np.full(len(norms), centre)])
            for norms, products, centre in parts
        ],
        axis=1,
    )


def batch_columns(numbers: Floats, elements: int) -> dict[str, Floats]:
    """Columns of the steps' table, from the numbers ``[K, 4, N]`` of rows of so many elements.

    A batch with rows that aren't finite has NaN in the other columns.
    """
    norms, means, hashes, centres = np.moveaxis(numbers, 1, 0)
    steps, rows = norms.shape
    finite = np.isfinite(norms)
    whole = finite.all(axis=1)
    bad_row = np.where(whole, np.nan, finite.argmin(axis=1))
    counts = {
        "samples": np.full(steps, float(rows)),
        "bad_rows": rows - finite.sum(axis=1, dtype=np.float64),
        "bad_row": bad_row,
    }
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = _sizes(norms / math.sqrt(elements), means, centres, elements)
        hashed = {"distinct_rows": distinct(norms, hashes), "checksum": hashes.sum(axis=1)}
    return counts | {n: np.where(whole, c, np.nan) for n, c in (sizes | hashed).items()}


def _sizes(rms: Floats, means: Floats, centres: Floats, elements: int) -> dict[str, Floats]:
    square = np.square(rms).mean(axis=1)
    mean = means.mean(axis=1)
    spread = np.maximum(square - np.square(centres).mean(axis=1) / elements, 0.0)
    return {
        "input_rms": np.sqrt(square),
        "input_mean": mean,
        "input_std": np.sqrt(np.maximum(square - mean**2, 0.0)),
        "input_spread": np.sqrt(spread / np.where(square > 0, square, 1.0)),
        "row_rms_max": rms.max(axis=1),
        "row_rms_median": np.sort(rms, axis=1)[:, rms.shape[1] // 2],
        "row_largest": rms.argmax(axis=1).astype(np.float64),
    }


SAME = 1e-5
"""Hashes whose difference is smaller, relative to the largest, are those of the same elements: in
single precision, sums of the same numbers in another order differ by less."""


def distinct(norms: Floats, hashes: Floats) -> Floats:
    """The number of rows that differ from all others ``[K]``, from ``[K, N]``."""
    scaled = [
        np.round(each / (SAME * np.maximum(np.abs(each).max(axis=1, keepdims=True), 1e-30)))
        for each in (norms, hashes)
    ]
    keys = np.sort(scaled[0] + scaled[1] / SAME * 10, axis=1)
    return 1.0 + np.count_nonzero(np.diff(keys, axis=1), axis=1)
