"""Numbers of a batch's rows: of the model's inputs, and of the loss's labels and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.graph.kinds import LEAF, Node, kind, kind_of, plain_name
from gradlens.graph.loss import Loss
from gradlens.graph.model_calls import ModelCall
from gradlens.numerics.tensors import accumulable, on_device
from gradlens.torch_private import saved, saved_where_they_are, signed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The numbers of a batch's rows, of so many ``elements`` each.

    They are the norm of each row ``[N]``, half its mean and a hash ``[N, 2]``, and the ``centre``'s
    norm, which is that of the mean row. Rows with the same elements have the same hash, up to
    rounding. Half the mean of finite elements is finite, however large they are.
    """

    norms: Tensor
    products: Tensor
    centre: Tensor
    elements: int
    is_real: bool

    def __len__(self) -> int:
        return len(self.norms)


@torch.no_grad()
def rows_of(call: ModelCall) -> Rows | None:
    """The numbers of the first input with rows, real numbers before others; ``None`` without one.

    Data that is too large to be kept until the backward pass may be gone.
    """
    present = [each.reference() for each in call.inputs]
    tensors = [t for t in present if t is not None and t.numel() and not t.is_complex()]
    # A real vector may be a single sample.
    matrices = [t for t in tensors if t.dim() > 1 or not t.is_floating_point()]
    # What has another number of rows than the first one is a state, a mask or a graph.
    alike = [t for t in matrices if len(t) == len(matrices[0])]
    rows = next((t for t in alike if t.is_floating_point()), next(iter(alike), None))
    return None if rows is None else row_numbers(rows)


def row_numbers(rows: Tensor) -> Rows:
    """The numbers of the rows of a tensor."""
    flat = rows.detach().reshape(len(rows), -1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    # Squares of numbers such as 1e20, which data sets are filled with, overflow in float32.
    dtype = None if flat.device.type == "mps" else torch.float64
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=dtype)
    weights = _weights(flat.shape[1], flat.device).to(flat.dtype)
    if rows.is_floating_point() and flat.numel():
        weights = _fitting(weights, flat, norms)
    return Rows(
        norms,
        flat @ weights.T,
        torch.linalg.vector_norm(flat.mean(0), dtype=dtype),
        flat.shape[1],
        rows.is_floating_point(),
    )


@torch.no_grad()
def sizes(rows: Rows) -> Tensor:
    """The rms, mean and standard deviation of all elements, and the rows' spread, over the rms."""
    square, mean = rows.norms.square().mean() / rows.elements, 2 * rows.products[:, 0].mean()
    variance = (square - mean.square()).clamp(min=0)
    spread = (1 - rows.centre.square() / rows.elements / square).clamp(min=0)
    return torch.stack([square.sqrt(), mean.to(square), variance.sqrt(), spread.sqrt()])


USUAL = 256
"""A size of numbers, such as pixels, beside which others of about one have some digits left."""


def _fitting(weights: Tensor, rows: Tensor, norms: Tensor) -> Tensor:
    """The weights, the second ones smaller by a power of two for columns of large numbers.

    Beside a time in seconds, single precision has no digits for the others.
    """
    if rows.device.type == "cpu" and float(norms.amax()) <= USUAL:  # cheap to read there
        return weights
    largest = torch.maximum(rows.amax(0), -rows.amin(0)).nan_to_num_(1.0, 1.0)
    powers = (largest.clamp_min_(USUAL) / USUAL).log2_().floor_()
    return torch.stack([weights[0], weights[1] * torch.exp2(-powers)])


@cache
def _weights(elements: int, device: torch.device) -> Tensor:
    """``[2, F]``: those of half the mean, and numbers without a pattern.

    Products with their transpose take a fifth of the time of those with a matrix ``[F, 2]``.
    """
    with torch.inference_mode(False):
        places = torch.arange(elements, dtype=torch.float64, device="cpu")
        # The fractions of a fast sine, as in hash functions of shaders.
        mixed = torch.frac(torch.sin(12.9898 * (places + 1)) * 43758.5453)
        mean = torch.full((elements,), 0.5 / elements, dtype=torch.float64, device="cpu")
        return on_device(torch.stack([mean, mixed / math.sqrt(elements)]).float(), device)


def joined(parts: Sequence[Rows]) -> Floats:
    """The numbers ``[4, N]`` of all rows of some micro-batches, which are on the host."""
    columns = [
        np.stack([p.norms.numpy(), *p.products.numpy().T, np.full(len(p), float(p.centre))])
        for p in parts
    ]
    return np.concatenate(columns, axis=1).astype(np.float64)


def batch_columns(numbers: Floats, elements: int) -> dict[str, Floats]:
    """Facts of steps, from the numbers ``[K, 4, N]`` of rows of so many elements.

    A batch with rows that aren't finite has NaN in the other columns.
    """
    norms, halves, hashes, centres = np.moveaxis(numbers, 1, 0)
    steps, rows = norms.shape
    finite, means = np.isfinite(halves), 2 * halves
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


MOST_LABELS = 4096
"""Labels of a step are kept if there are no more."""


@dataclass(frozen=True)
class LossRows:
    """What a loss function was called with, and its values, for each row of the targets ``[M]``.

    Weights of classes and samples don't count. ``labels`` and ``classes`` are those of a
    classification, in which rows whose label is ``ignored`` have no loss; ``of_targets`` are the
    facts of the targets of a regression.
    """

    losses: Tensor | None = None
    labels: Tensor | None = None
    ignored: int | None = None
    classes: int = 0
    count: int = 0
    of_targets: Mapping[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def loss_rows(loss: Loss) -> LossRows:
    """The rows of a loss; none where it isn't known which function has computed it."""
    if loss.squared is not None:
        squares = saved(loss.squared, "self").square()
        count = len(squares) if squares.numel() else 0
        losses = squares.reshape(count, -1).mean(1) if 0 < count <= MOST_LABELS else None
        return LossRows(losses, count=count)
    if loss.targets is None or not loss.targets.numel():
        return LossRows()
    targets = torch.atleast_1d(loss.targets)  # a number alone is one row
    of = kind_of(kind(loss.function)).targets
    is_single = targets.numel() == len(targets)  # several labels of a row are none
    count = len(targets) if of == "numbers" else targets.numel()
    is_known = count <= MOST_LABELS and (of != "classes" or targets.dim() == 1)
    # With weights of their own, they may be actions, whose losses are multiplied by rewards.
    are_labels = of != "numbers" and loss.weighing is None
    classes = 2 if of == "probabilities" else 0
    if of == "classes":
        outputs = saved(loss.function, "self")
        classes = outputs.shape[1 if outputs.dim() > 1 else 0]
    return LossRows(
        loss.values(weighted=False) if is_known else None,
        targets.reshape(-1).clone() if is_known and is_single and are_labels else None,
        signed(saved(loss.function, "ignore_index")) if of == "classes" else None,
        classes,
        count,
        target_columns(targets) if of == "numbers" else {},
    )


@torch.no_grad()
def dense_labels(loss: Loss) -> dict[str, dict[str, Tensor]]:
    """Facts of the network, of a loss with several class labels for each sample.

    They are the share of the most frequent label, and that of padding, both of the labels that the
    loss counts. Probabilities are labels if they are 0 and 1, else the share is NaN. Padding is a
    label with which rows end, over two lengths or more, and which is nowhere else.
    """
    targets, samples = loss.targets, loss.samples
    of = "" if targets is None else kind_of(kind(loss.function)).targets
    if targets is None or of not in ("classes", "probabilities") or loss.is_weighted:
        return {}
    if not loss.is_multiple or not samples or targets.numel() % samples:
        return {}
    rows = targets.reshape(samples, -1)
    if rows.shape[1] < FEWEST_OF_ROW or (of == "classes" and targets.dim() > 3):
        return {}
    if of == "probabilities":
        most = (rows.float().mean() - 0.5).abs() + 0.5
        is_label = ((rows == 0) | (rows == 1)).all()
        return {"dense_labels": {"most": torch.where(is_label, most, math.nan)}}
    ignored = signed(saved(loss.function, "ignore_index"))
    is_counted = rows != ignored
    usual = rows.flatten().mode().values
    shares = [((rows == usual) & is_counted).sum() / is_counted.sum()]
    is_image = targets.dim() == 3 and targets.shape[1] > 1
    if not is_image:  # these end in background, which is no padding
        is_last = rows == rows[:, -1].mode().values
        at_end = is_last.flip(1).cumprod(1)
        lengths = at_end.sum(1)
        longest = lengths.max()
        shortest = torch.where(lengths > 0, lengths, longest).min()
        # Rows of it alone are of one class, as where each sample is a group of such.
        is_whole = longest == rows.shape[1]
        is_padding = (is_last.sum() == lengths.sum()) & (shortest < longest) & ~is_whole
        shares.append((at_end.flip(1) * is_counted).sum() / is_counted.sum() * is_padding)
    return {"dense_labels": dict(zip(("most", "padding"), shares, strict=False))}


FEWEST_OF_ROW = 4
"""Labels of a sample of which some may be padding."""


@torch.no_grad()
def token_columns(call: ModelCall | None, loss: Loss) -> dict[str, Tensor]:
    """Facts of steps, of a loss with a label for each token ``[N, T]`` that a model was given.

    ``labels_here`` is the share of the labels that are the token in their place, ``labels_next`` of
    those that are the one after it. A label for the last token, or the first one, may be missing.
    """
    given = [] if call is None else [each.reference() for each in call.inputs]
    tokens = next((t for t in given if t is not None and t.dim() == 2), None)
    of = "" if loss.targets is None else kind_of(kind(loss.function)).targets
    if loss.targets is None or of != "classes" or tokens is None or tokens.is_floating_point():
        return {}
    width = loss.targets.numel() // max(len(tokens), 1)
    if width < FEWEST_OF_ROW or width not in (tokens.shape[1], tokens.shape[1] - 1):
        return {}
    if width * len(tokens) != loss.targets.numel():
        return {}
    labels = loss.targets.reshape(len(tokens), width)
    is_counted = labels != signed(saved(loss.function, "ignore_index"))
    later = tokens[:, 1 : width + 1]
    found = {"labels_here": tokens[:, :width], "labels_next": later}
    return {
        name: ((labels[:, : each.shape[1]] == each) & is_counted[:, : each.shape[1]]).sum()
        / is_counted[:, : each.shape[1]].sum()
        for name, each in found.items()
    }


@torch.no_grad()
def output_columns(loss: Loss) -> dict[str, Tensor]:
    """Facts of steps, of what a loss function has compared with its targets.

    ``output_std`` is the standard deviation of the outputs over the rows. Of errors that are
    squared by hand, the facts of the targets are among them, too.
    """
    outputs = loss.outputs if loss.squared is None else predictions(loss.squared)
    if outputs is None or not outputs.dim() or len(outputs) < 2 or outputs.is_complex():
        return {}
    found = {"output_std": accumulable(outputs).var(0, correction=0).mean().sqrt()}
    if loss.squared is not None:
        is_first = loss.squared.next_functions[0][0].next_functions[0][0] is not None
        errors = saved(loss.squared, "self").detach()
        targets = outputs - errors if is_first else outputs + errors
        found |= target_columns(targets)
    return found


def target_columns(targets: Tensor) -> dict[str, Tensor]:
    """Facts of steps, of the targets of a regression."""
    numbers = accumulable(targets)
    return {"target_variance": numbers.var(correction=0), "target_mean": numbers.mean()}


def predictions(squared: Node) -> Tensor | None:
    """What constants are subtracted from, or from constants, where its node has kept it."""
    nodes = (node for node, _ in squared.next_functions[0][0].next_functions)
    node = next(each for each in nodes if each is not None)
    kept, name = saved_where_they_are(node), plain_name(kind(node))
    if name in ("Sigmoid", "Tanh") and len(kept) == 1:
        return kept[0].detach()
    if name != "Addmm" or len(kept) != 2 or not saved(node, "alpha") == saved(node, "beta") == 1:
        return None
    bias = node.next_functions[0][0]
    if bias is None or kind(bias) != LEAF:
        return None
    parts = [each.detach() for each in (saved(node, "mat1"), saved(node, "mat2"), bias.variable)]
    if any(part.numel() and not part.untyped_storage().size() for part in parts):
        return None  # parameters that fully_shard has freed after their layer
    return parts[2] + parts[0] @ parts[1]


def known_rows(losses: Floats, labels: Floats, ignored: int | None) -> tuple[Floats, Floats]:
    """The same with NaN as the loss of ignored rows, and −1 as their label."""
    if ignored is None or len(losses) != len(labels):
        return losses, labels
    is_ignored = labels == ignored
    return np.where(is_ignored, np.nan, losses), np.where(is_ignored, -1, labels)


def loss_columns(losses: Floats, classes: int) -> dict[str, Floats]:
    """Facts of steps, from losses of single samples ``[K, N]``; NaN is none."""
    counts = (~np.isnan(losses)).sum(axis=1)
    known = np.where(np.isnan(losses), -np.inf, losses)
    ordered = np.sort(losses, axis=1)  # NaN come last
    places = np.stack([np.maximum(counts - 1, 0), np.minimum(counts // 2, losses.shape[1] - 1)], 1)
    largest, middle = np.take_along_axis(ordered, places, axis=1).T
    found = {
        "loss_max": largest,
        "loss_largest": np.where(counts > 0, known.argmax(axis=1), np.nan),
        "loss_median": middle,
    }
    if classes > 1:
        over = (known > 2 * math.log(classes)).sum(axis=1)
        found["loss_over"] = np.where(counts > 0, over / np.maximum(counts, 1), np.nan)
    return found


def label_columns(counts: NDArray[np.int64]) -> dict[str, Floats]:
    """Facts of steps, from how often each class is a label ``[K, C]``."""
    sums = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(sums, 1)
    means = shares @ np.arange(counts.shape[1])
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    found = {"label_entropy": entropies, "label_mean": means}
    return {name: np.where(sums[:, 0] > 0, each, np.nan) for name, each in found.items()}


def counts_of(labels: Floats) -> NDArray[np.int64]:
    """How often each class is a label ``[K, C]``, of labels ``[K, N]`` of which −1 is none.

    Rows with labels that are no classes have no counts.
    """
    are_classes = (labels < MOST_CLASSES) & (labels == np.floor(labels)) | (labels < 0)
    known = (labels >= 0) & are_classes.all(axis=1, keepdims=True)
    classes = np.where(known, labels, 0).astype(np.int64)
    most = int(classes.max(initial=0)) + 1
    places = classes + most * np.arange(len(labels))[:, None]
    counts = np.bincount(places[known], minlength=most * len(labels))
    return counts.reshape(len(labels), most)


MOST_CLASSES = 1000
"""Labels are counted by class if their numbers are below this."""
