"""Norms that don't lose digits."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of a dense or sparse tensor; half precisions accumulate in float32."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(tensor, dtype=torch.float32 if half else None)
