"""Weights of convolutions of any dimension, with groups, stride and dilation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from gradlens.numerics.norms import scale_of
from gradlens.numerics.tensors import double
from gradlens.operators.operator import slices
from gradlens.operators.outer_products import OfFactors, factors_of, squared_norms_by_positions

PATCHES_BYTES = 4 * 2**20
"""Memory of the patches that are cut out at once, where elements are stored.

Measured on two cores: with 1 and with 16 MiB, patches and products take a tenth longer at least,
and three times as long if the system has to allocate the memory page by page.
"""


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride and dilation along each spatial axis, and the number of groups."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Convolution(OfFactors):
    """gₙ = Σₛ δₙₛ xₙₛᵀ over output positions s, where xₙₛ is the patch that s is computed from.

    ``delta`` is ``[N, R, *S]``, ``inputs`` the padded input ``[N, C, *L]``; the weight has shape
    ``[R, C/groups, *kernel]``. For a transposed convolution the two swap roles. Patches are cut
    out (unfolded) for a few samples at a time. Norms go through pairs of positions where that is
    cheaper.
    """

    makes_blocks = True

    def __init__(
        self, delta: Tensor, inputs: Tensor, geometry: Geometry, scale: float = 1.0
    ) -> None:
        self._geometry = geometry
        self._positions = delta.shape[2:]
        inputs = _reached(inputs, geometry, delta.shape)
        self._delta, self._inputs, eps = factors_of(delta, inputs, scale)
        channels = inputs.shape[1] // geometry.groups
        shape = (delta.shape[1], channels, *geometry.kernel)
        super().__init__(len(delta), shape, self._delta.dtype, delta.device, eps)

    def _workspace(self) -> int:
        patches = self._geometry.groups * self._columns * math.prod(self._positions)
        whole_result = self._rows * self._columns if self._geometry.groups > 1 else 0
        return patches + whole_result

    def _block(self, samples: slice, rows: slice) -> Tensor:
        if self._geometry.groups == 1:
            return self._delta[samples].flatten(2)[:, rows] @ self._patches(samples)[:, 0].mT
        delta = self._delta[samples].flatten(2).unflatten(1, (self._geometry.groups, -1))
        return (delta @ self._patches(samples).mT).flatten(1, 2)[:, rows]

    def _write(self, to: Tensor) -> None:
        if self._geometry.groups > 1:
            super()._write(to)
            return
        shape = self._windows(slice(0, 1)).shape[1:]
        at_once = self._patches_bytes // max(shape.numel() * self.dtype.itemsize, 1)
        parts = slices(self.batch_size, at_once)
        memory = self._inputs.new_empty(min(max(at_once, 1), self.batch_size), *shape)
        for part in parts:
            windows = self._windows(part)
            patches = memory[: len(windows)].copy_(windows).view(len(windows), self._columns, -1)
            torch.bmm(self._delta[part].flatten(2), patches.mT, out=to[part])

    @property
    def _patches_bytes(self) -> int:
        return PATCHES_BYTES if self.device.type == "cpu" else self._piece_bytes

    def squared_norms(self) -> Tensor:
        positions = math.prod(self._positions)
        cheaper = positions * (self._rows + self._columns) < self._rows * self._columns
        if not cheaper or self._geometry.groups > 1 or not self.batch_size:
            return super().squared_norms()
        numbers_per_sample = positions * (2 * positions + self._columns)
        at_once = self._piece_bytes // max(numbers_per_sample * self.dtype.itemsize, 1)
        norms = [
            squared_norms_by_positions(
                self._delta[part].flatten(2).mT, self._patches(part)[:, 0].mT
            )
            for part in slices(self.batch_size, at_once)
        ]
        return torch.cat(norms)

    def _dot(self, direction: Tensor) -> Tensor:
        size = scale_of(direction)
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[len(self._geometry.kernel) - 1]
        weight = (direction / size).to(self.dtype)
        output = convolve(self._inputs, weight, **self._arguments())
        return double(torch.linalg.vecdot(output.flatten(1), self._delta.flatten(1))) * size

    def sum(self) -> Tensor:
        space = len(self._geometry.kernel)
        weight_gradient = (conv1d_weight, conv2d_weight, conv3d_weight)[space - 1]
        return weight_gradient(self._inputs, self.shape, self._delta, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        geometry = self._geometry
        return {
            "stride": geometry.stride,
            "dilation": geometry.dilation,
            "groups": geometry.groups,
        }

    def _patches(self, samples: slice) -> Tensor:
        """Patches ``[n, groups, K, S]``."""
        windows = self._windows(samples)
        return windows.reshape(
            len(windows), self._geometry.groups, self._columns, math.prod(self._positions)
        )

    def _windows(self, samples: slice) -> Tensor:
        """Patches ``[n, C, *kernel, *S]``, a view."""
        windows = self._inputs[samples]
        geometry = self._geometry
        for axis, (kernel, stride, dilation) in enumerate(
            zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=2
        ):
            windows = windows.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        space = len(geometry.kernel)
        kernel_axes = range(2 + space, 2 + 2 * space)
        position_axes = range(2, 2 + space)
        return windows.permute(0, 1, *kernel_axes, *position_axes)


def _reached(inputs: Tensor, geometry: Geometry, positions: tuple[int, ...]) -> Tensor:
    """The part of the padded input that the output positions are computed from."""
    for axis, (kernel, stride, dilation) in enumerate(
        zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=2
    ):
        inputs = inputs.narrow(
            axis, 0, (positions[axis] - 1) * stride + dilation * (kernel - 1) + 1
        )
    return inputs
