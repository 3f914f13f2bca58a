"""The label of each element of a tensor: the sample that it belongs to.

Labels are an array of integers with as many axes as the tensor that they are of. Most
differ along one axis alone: along the others, they have the length 1 and hold for all entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_SAMPLE = -1
"""Label of a row without gradient, which belongs to no sample."""

MIXED = -2
"""Label of a row in which several samples meet, or that is no sample's though it has a gradient."""

UNREADABLE = -3
"""Label of a row whose numbers aren't finite, or too small for their precision."""

_UNSET = -(2**62)
"""Smaller than all labels."""

MOST_LABELS = 2**24
"""Labels of a tensor that are written out: 128 MiB. Most axes have one label for all entries."""

Shape: TypeAlias = tuple[int, ...]
Labels: TypeAlias = NDArray[np.int64]


def as_tensor(labels: Labels) -> Tensor:
    """Labels as a tensor of their own on the host, whatever the default device is."""
    return torch.tensor(np.ascontiguousarray(labels), device="cpu")


def only(label: int, dims: int) -> Labels:
    """One label for all elements of a tensor."""
    return np.full([1] * dims, label)


def counted(samples: range, axis: int, dims: int) -> Labels:
    """Labels of samples that come one after the other along an axis."""
    shape = [len(samples) if each == axis else 1 for each in range(dims)]
    return np.arange(samples.start, samples.stop).reshape(shape)


def labels_of(written: Labels) -> Labels:
    """Labels from those of all entries: one along each axis along which they are the same.

    An empty tensor has ``NO_SAMPLE``.
    """
    if not written.size:
        return only(NO_SAMPLE, written.ndim)
    for axis in axes_of(written):
        first = written.take([0], axis)
        written = first if (written == first).all() else written
    return written


def axes_of(labels: Labels) -> tuple[int, ...]:
    """The axes along which labels differ."""
    return tuple([axis for axis, length in enumerate(labels.shape) if length > 1])


def are_known(labels: Labels) -> bool:
    """Whether all elements have a sample."""
    return bool(labels.min() >= 0)


def are_none(labels: Labels) -> bool:
    """Whether no element has a sample, or an unknown one."""
    # Most are one label for all elements, which is compared in a third of the time.
    return labels.item() == NO_SAMPLE if labels.size == 1 else bool((labels == NO_SAMPLE).all())


def has_unnamed(labels: Labels) -> bool:
    """Whether some elements have a sample, or samples, and others none."""
    return labels.size > 1 and bool((labels == NO_SAMPLE).any())


def are_all(labels: Labels, samples: int) -> bool:
    """Whether these name all samples, and maybe something else."""
    return labels.size >= samples and distinct(labels).issuperset(range(samples))


def distinct(labels: Labels) -> set[int]:
    """All labels, each once."""
    return set(labels.flatten().tolist())


def moved(labels: Labels, places: Mapping[int, int], dims: int) -> Labels:
    """The same labels with their axes at other places, among ``dims``."""
    axes = axes_of(labels)
    lengths = {places[axis]: labels.shape[axis] for axis in axes}
    order = sorted(axes, key=places.__getitem__)
    rest = [axis for axis in range(labels.ndim) if axis not in axes]
    return labels.transpose([*order, *rest]).reshape([lengths.get(n, 1) for n in range(dims)])


def reshaped(labels: Labels, given: Shape, shape: Shape) -> Labels:
    """Labels of the same elements in the same order, in another shape."""
    if labels.size == 1:
        return labels.reshape([1] * len(shape))
    behind = 0
    while (
        behind < min(len(given), len(shape)) - 1
        and given[-1 - behind] == shape[-1 - behind]
        and labels.shape[-1 - behind] == 1
    ):
        behind += 1
    ends = len(given) - behind, len(shape) - behind
    kept = np.broadcast_to(labels.reshape(labels.shape[: ends[0]]), given[: ends[0]])
    return labels_of(kept.reshape(*shape[: ends[1]], *[1] * behind))


def replaced(labels: Labels, label: int, other: int) -> Labels:
    """Labels with another one in place of one."""
    return labels_of(np.where(labels == label, other, labels))


def joined(
    labels: Labels, axis: int, differing: int | None = None, length: int = 1
) -> Labels | None:
    """The one label along an axis, of the entries that have one.

    Or of those that each of ``length`` entries was repeated for. Where there are several, it is
    ``differing``; without that, there are no labels.
    """
    if labels.shape[axis] == 1:
        return labels
    each = labels.reshape(*labels.shape[:axis], -1, length, *labels.shape[axis + 1 :])
    most = np.where(each == NO_SAMPLE, _UNSET, each).max(axis)
    several = ((each != NO_SAMPLE) & (each != np.expand_dims(most, axis))).any(axis)
    most = np.where(most == _UNSET, NO_SAMPLE, most)
    if differing is None and several.any():
        return None
    if differing is not None:
        most = np.where(several, differing, most)
        most = np.where((each == UNREADABLE).any(axis), UNREADABLE, most)
    return labels_of(most)


def combined(one: Labels, other: Labels) -> Labels:
    """Labels by both of two, entry by entry; ``UNREADABLE`` if they are too many."""
    if one is other or are_none(other) or np.array_equal(one, other):
        return one
    if are_none(one):
        return other
    if prod(map(max, one.shape, other.shape)) > MOST_LABELS:
        return only(UNREADABLE, one.ndim)
    several = (one != NO_SAMPLE) & (other != NO_SAMPLE) & (one != other)
    found = np.where(several, MIXED, np.where(one == NO_SAMPLE, other, one))
    return labels_of(np.where((one == UNREADABLE) | (other == UNREADABLE), UNREADABLE, found))


def without_gaps(labels: Labels, samples: int) -> Labels:
    """Entries that no source depends on get the labels of those beside them.

    They do if there is just one axis along which these are all samples.
    """
    if not (labels == NO_SAMPLE).any():
        return labels
    whole: list[Labels] = []
    for axis in axes_of(labels):
        alone: Labels | None = labels
        for each in axes_of(labels):
            alone = alone if alone is None or each == axis else joined(alone, each)
        if alone is not None and are_all(alone, samples):
            whole.append(alone)
    return whole[0] if len(whole) == 1 else labels


def differ(one: Labels, others: Labels) -> bool:
    """Whether some element has one sample by these labels and another one by others."""
    return bool(((one >= 0) & (others >= 0) & (one != others)).any())
