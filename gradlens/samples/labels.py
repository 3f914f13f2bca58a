"""The label of each element of a tensor: the sample that it belongs to.

Most labels differ along one axis alone, and are those of the batch's rows in their order. They are
written out for the axes along which they differ, and go from tensor to tensor without a copy:
what is known of their values is found once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from math import prod
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch
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

MOST_KEPT = 2**16
"""Labels of a result that is kept for the same arguments, half a megabyte of them."""

Shape: TypeAlias = tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R", "Labels", "Labels | None")


@dataclass(frozen=True, eq=False)
class Values:
    """Labels that are written out, what is known of them, and what was computed from them."""

    tensor: Tensor

    @cached_property
    def _ends(self) -> tuple[int, int]:
        if not self.tensor.numel():
            return NO_SAMPLE, NO_SAMPLE
        lowest, highest = self.tensor.aminmax()
        return int(lowest), int(highest)

    @property
    def lowest(self) -> int:
        """The smallest label."""
        return self._ends[0]

    @property
    def highest(self) -> int:
        """The largest label."""
        return self._ends[1]

    @cached_property
    def distinct(self) -> frozenset[int]:
        """All labels, each once."""
        return frozenset(self.tensor.unique().tolist())

    @cached_property
    def results(self) -> dict[Any, Any]:
        """What functions have computed from these labels, by their arguments."""
        return {}

    def has(self, label: int) -> bool:
        """Whether some element has a label."""
        return self.lowest <= label <= self.highest and label in self.distinct

    def are_all(self, samples: int) -> bool:
        """Whether these name all samples, and maybe something else."""
        return self.tensor.numel() >= samples and self.distinct.issuperset(range(samples))


class Labels(NamedTuple):
    """The label of each element of a tensor that has ``dims`` axes.

    ``values`` are those along the ``axes`` along which they differ, in the order of these.
    """

    values: Values
    axes: tuple[int, ...]
    dims: int

    @property
    def tensor(self) -> Tensor:
        """The labels with as many axes as the tensor, of length 1 where they don't differ."""
        shape = [1] * self.dims
        for axis, length in zip(self.axes, self.values.tensor.shape, strict=True):
            shape[axis] = length
        return self.values.tensor.reshape(shape)

    @property
    def are_known(self) -> bool:
        """Whether all elements have a sample."""
        return self.values.lowest >= 0

    @property
    def are_none(self) -> bool:
        """Whether no element has a sample, or an unknown one."""
        return self.values.lowest == self.values.highest == NO_SAMPLE

    def at(self, places: Mapping[int, int], dims: int) -> Labels:
        """The same labels with their axes at other places, among ``dims``."""
        axes = tuple([places[axis] for axis in self.axes])
        if len(axes) < 2 or list(axes) == sorted(axes):
            return Labels(self.values, axes, dims)
        return _permuted(self, axes, dims)


_COUNTED: WeakValueDictionary[range, Values] = WeakValueDictionary()


def _counted(samples: range) -> Values:
    """The samples one after the other, which are the same object as long as it is in use."""
    found = _COUNTED.get(samples)
    if found is None:
        found = _COUNTED[samples] = Values(torch.arange(samples.start, samples.stop, device="cpu"))
    return found


@cache
def _only(label: int) -> Values:
    return Values(torch.tensor(label, device="cpu"))


def only(label: int, dims: int) -> Labels:
    """One label for all elements of a tensor."""
    return Labels(_only(label), (), dims)


def counted(samples: range, axis: int, dims: int) -> Labels:
    """Labels of samples that come one after the other along an axis."""
    if len(samples) == 1:
        return only(samples.start, dims)
    return Labels(_counted(samples), (axis,), dims)


def labels_of(written: Tensor) -> Labels:
    """Labels from a tensor of them, some of whose axes may have length 1."""
    axes = [axis for axis, length in enumerate(written.shape) if length != 1]
    values = Values(written.reshape([written.shape[axis] for axis in axes]))
    if values.lowest == values.highest:
        return only(values.lowest, written.dim())
    for place in reversed(range(len(axes))) if len(axes) > 1 else ():
        first = values.tensor.select(place, 0)
        if bool((values.tensor == first.unsqueeze(place)).all()):
            del axes[place]
            values = Values(first)
    samples = range(values.lowest, values.highest + 1)
    if values.tensor.shape == (len(samples),):
        in_order = _counted(samples)
        values = in_order if torch.equal(values.tensor, in_order.tensor) else values
    return Labels(values, tuple(axes), written.dim())


def _once(
    function: Callable[Concatenate[Labels, P], R],
) -> Callable[Concatenate[Labels, P], R]:
    """A function of labels that gives the same object as before for the same arguments."""

    @wraps(function)
    def found(labels: Labels, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not labels.axes or labels.values.tensor.numel() > MOST_KEPT:
            return function(labels, *args, **kwargs)
        results = labels.values.results
        key = (function, labels.axes, labels.dims, args, *kwargs.items())
        if key in results:
            known: R = results[key]
            return known
        result = function(labels, *args, **kwargs)
        if result is None or result.values.tensor.numel() <= MOST_KEPT:
            results[key] = result
        return result

    return found


@_once
def _permuted(labels: Labels, axes: tuple[int, ...], dims: int) -> Labels:
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return Labels(Values(labels.values.tensor.permute(order)), tuple(sorted(axes)), dims)


@_once
def reshaped(labels: Labels, given: Shape, shape: Shape) -> Labels:
    """Labels of the same elements in the same order, in another shape."""
    if not labels.axes:
        return Labels(labels.values, (), len(shape))
    behind, tensor = 0, labels.tensor
    while (
        behind < min(len(given), len(shape)) - 1
        and given[-1 - behind] == shape[-1 - behind]
        and tensor.shape[-1 - behind] == 1
    ):
        behind += 1
    ends = len(given) - behind, len(shape) - behind
    kept = tensor.reshape(tensor.shape[: ends[0]]).expand(given[: ends[0]])
    return labels_of(kept.reshape(*shape[: ends[1]], *[1] * behind))


@_once
def replaced(labels: Labels, label: int, other: int) -> Labels:
    """Labels with another one in place of one."""
    if not labels.values.lowest <= label <= labels.values.highest:
        return labels
    return labels_of(labels.tensor.masked_fill(labels.tensor == label, other))


@_once
def joined(
    labels: Labels, axis: int, differing: int | None = None, length: int = 1
) -> Labels | None:
    """The one label along an axis, of the entries that have one.

    Or of those that each of ``length`` entries was repeated for. Where there are several, it is
    ``differing``; without that, there are no labels.
    """
    if axis not in labels.axes:
        return labels
    each = labels.tensor.unflatten(axis, (-1, length))
    are_none = each == NO_SAMPLE
    most = each.masked_fill(are_none, _UNSET).amax(axis, keepdim=True)
    several = (~are_none & (each != most)).any(axis, keepdim=True)
    most = most.masked_fill(most == _UNSET, NO_SAMPLE)
    if differing is None and bool(several.any()):
        return None
    if differing is not None:
        are_unknown = (each == UNREADABLE).any(axis, keepdim=True)
        most = most.masked_fill(several, differing).masked_fill(are_unknown, UNREADABLE)
    return labels_of(most.squeeze(axis))


@_once
def repeated(labels: Labels, axis: int, times: int) -> Labels:
    """Labels of a tensor that was repeated along an axis."""
    return labels_of(labels.tensor.repeat([times if n == axis else 1 for n in range(labels.dims)]))


def combined(one: Labels, other: Labels) -> Labels | None:
    """Labels by both of two, entry by entry; ``None`` if they are too many."""
    if one == other or other.are_none:
        return one
    return other if one.are_none else _combined(one, other)


@_once
def _combined(labels: Labels, others: Labels) -> Labels | None:
    one, other = labels.tensor, others.tensor
    if one.shape == other.shape and torch.equal(one, other):
        return labels
    if prod(map(max, one.shape, other.shape)) > MOST_LABELS:
        return None
    is_open = one == NO_SAMPLE
    several = ~is_open & (other != NO_SAMPLE) & (one != other)
    found = torch.where(is_open, other, one).masked_fill(several, MIXED)
    if UNREADABLE in (labels.values.lowest, others.values.lowest):
        found = found.masked_fill((one == UNREADABLE) | (other == UNREADABLE), UNREADABLE)
    return labels_of(found)


@_once
def without_gaps(labels: Labels, samples: int) -> Labels:
    """Entries that no source depends on get the labels of those beside them.

    They do if there is just one axis along which these are all samples.
    """
    if not labels.values.has(NO_SAMPLE):
        return labels
    whole: list[Labels] = []
    for axis in labels.axes:
        alone: Labels | None = labels
        for each in labels.axes:
            alone = alone if alone is None or each == axis else joined(alone, each)
        if alone is not None and alone.values.are_all(samples):
            whole.append(alone)
    return whole[0] if len(whole) == 1 else labels


def differ(one: Labels, others: Labels) -> bool:
    """Whether some element has one sample by these labels and another one by others."""
    if one == others:
        return False
    first, second = one.tensor, others.tensor
    return bool(((first >= 0) & (second >= 0) & (first != second)).any())


def same_labels(labels: Sequence[Labels]) -> bool:
    """Whether all of them say the same of each element."""
    first, *others = labels
    return all(
        each[1:] == first[1:] and torch.equal(each.values.tensor, first.values.tensor)
        for each in others
        if each != first
    )
