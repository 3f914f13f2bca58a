"""From tensors to what a history holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradlens.records import Value


def to_plain(value: Any) -> Value:
    """Numbers, arrays, lists and dicts instead of tensors and dataclasses; nothing shared.

    ``TypeError`` for anything else.
    """
    if isinstance(value, Tensor):
        return _tensor_to_plain(value.detach())
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        return value
    raise TypeError(
        f"a {type(value).__name__} can't be recorded: return a number, a string, an array or "
        "tensor, or lists and dicts of these"
    )


def _tensor_to_plain(tensor: Tensor) -> Value:
    if tensor.dim() == 0:
        return tensor.item()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.to_dense().cpu().numpy().copy()
