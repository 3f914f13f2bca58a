"""Losses for random networks, and the heads in front of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.cases.random_layers import VOCABULARY

Batch = dict[str, Tensor]
"""The tensors of a batch by name; samples are along the first axis of all of them."""

Divisors = tuple[float, ...] | None
"""What the sums of a loss are divided by; ``None`` if it takes its own means."""

CLASSES = 3


class Head(nn.Module):
    """A layer on the state; where one passes, it is tied to a table of words."""

    def __init__(self, width: int, outputs: int, table: nn.Parameter | None) -> None:
        super().__init__()
        self.out = nn.Linear(width, outputs)
        if table is not None and table.shape == self.out.weight.shape:
            self.out.weight = table

    def forward(self, x: Tensor, batch: Batch) -> Any:
        return self.out(x)


class MaskedHead(Head):
    """A head on the chosen tokens alone."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(x[batch["chosen"]])


class TwoHeads(Head):
    """Two heads, each on its part of the batch."""

    def __init__(self, width: int, outputs: int, table: nn.Parameter | None) -> None:
        super().__init__(width, outputs, table)
        self.other = nn.Linear(width, outputs)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        flags = batch["flags"]
        return self.out(x[flags]), self.other(x[~flags])


class StateAndHead(Head):
    """A head, and the state itself."""

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.out(x), x


class Views(Head):
    """The outputs of the views of which the batch was made."""

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        return self.out(x).chunk(len(x) // len(batch["features"]))


class Heads(Head):
    """Heads whose outputs are stacked in front of the samples."""

    def __init__(self, width: int, outputs: int, table: nn.Parameter | None) -> None:
        super().__init__(width, outputs, table)
        self.others = nn.ModuleList(nn.Linear(width, outputs) for _ in range(2))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return torch.stack([head(x) for head in (self.out, *self.others)])


class PositionsFirstHead(Head):
    """Outputs with positions first."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(x.transpose(0, 1))


LossFunction = Callable[[Any, Batch, Divisors], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss of a head's outputs.

    Divided by nothing of its own, it is the sum over samples of their losses, which a mean loss
    divides by ``divisors(batch)``. It is for ``tokens``, or for one vector a sample. The head
    ``reads`` some of the batch, and ``targets`` are what the loss reads.
    """

    function: LossFunction
    divisors: Callable[[Batch], tuple[float, ...]]
    targets: tuple[str, ...]
    outputs: int = CLASSES
    tokens: bool = False
    views: int = 1
    coupled: bool = False
    head: type[Head] = Head
    reads: tuple[str, ...] = ()


def reduced(
    function: Callable[..., Tensor],
    *arguments: Tensor,
    divisors: Divisors,
    place: int = 0,
    **options: Any,
) -> Tensor:
    """The function's own mean, or its sum divided by what is given."""
    if divisors is None:
        return function(*arguments, reduction="mean", **options)
    return function(*arguments, reduction="sum", **options) / divisors[place]


def averaged(losses: Tensor, divisors: Divisors, place: int = 0) -> Tensor:
    """The mean of per-sample losses, or their sum divided by what is given."""
    return losses.mean() if divisors is None else losses.sum() / divisors[place]


def count(batch: Batch) -> tuple[float, ...]:
    return (len(batch["labels"]),)


def scored(batch: Batch) -> tuple[float, ...]:
    return (int((batch["words"] >= 0).sum()),)


def chosen(batch: Batch) -> tuple[float, ...]:
    return (int(batch["chosen"].sum()),)


def cross_entropy(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return reduced(F.cross_entropy, logits, batch["labels"], divisors=divisors)


def smoothed(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    labels = batch["labels"]
    return reduced(F.cross_entropy, logits, labels, divisors=divisors, label_smoothing=0.1)


def unreduced(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def sorted_losses(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return averaged(unreduced(logits, batch).sort().values, divisors)


def ranked_losses(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    """In another order, which has weights."""
    order = batch["weights"].argsort()
    return averaged(unreduced(logits, batch)[order] * batch["weights"][order], divisors)


def heavy(batch: Batch) -> Tensor:
    """Samples of a large weight."""
    return batch["weights"] > 0.7


def count_heavy(batch: Batch) -> tuple[float, ...]:
    return (max(float(heavy(batch).sum()), 1.0),)


def trimmed_losses(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    """Of some samples alone, in reverse."""
    losses = unreduced(logits, batch)[heavy(batch)].flip(0)
    return losses.sum() / (divisors or count_heavy(batch))[0]


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def class_weighted(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    labels = batch["labels"]
    return reduced(F.cross_entropy, logits, labels, divisors=divisors, weight=CLASS_WEIGHTS)


def sample_weighted(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    return averaged(batch["weights"] * losses, divisors)


def soft_labels(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    target = batch["vectors"].softmax(-1)
    if divisors is None:
        return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
    return F.kl_div(logits.log_softmax(-1), target, reduction="sum") / divisors[0]


def squared_error(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return reduced(F.mse_loss, outputs, batch["vectors"], divisors=divisors)


def huber(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return 0.7 * reduced(F.smooth_l1_loss, outputs, batch["vectors"], divisors=divisors)


def binary(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    target = (batch["vectors"] > 0).to(logits.dtype)
    return reduced(F.binary_cross_entropy_with_logits, logits, target, divisors=divisors)


def margin(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return reduced(F.multi_margin_loss, logits, batch["labels"], divisors=divisors)


def by_hand(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return averaged((outputs * 0.7).sin().square().sum(1), divisors)


def two_parts(outputs: tuple[Tensor, Tensor], batch: Batch, divisors: Divisors) -> Tensor:
    """A loss for each head; a head without a sample has none."""
    flags = batch["flags"]
    total = outputs[0].sum() * 0 + outputs[1].sum() * 0
    if flags.any():
        labels = batch["labels"][flags]
        total = total + reduced(F.cross_entropy, outputs[0], labels, divisors=divisors)
    if not flags.all():
        vectors = batch["vectors"][~flags]
        total = total + reduced(F.mse_loss, outputs[1], vectors, divisors=divisors, place=1)
    return total


def divisors_of_parts(batch: Batch) -> tuple[float, ...]:
    first = int(batch["flags"].sum())
    return max(first, 1), max(CLASSES * (len(batch["flags"]) - first), 1)


def auxiliary(outputs: tuple[Tensor, Tensor], batch: Batch, divisors: Divisors) -> Tensor:
    """A loss at the head, and another one on the state in front of it."""
    first = cross_entropy(outputs[0], batch, divisors)
    return first + 0.1 * averaged(outputs[1].square().sum(1), divisors)


def triplet(outputs: tuple[Tensor, ...], batch: Batch, divisors: Divisors) -> Tensor:
    """Besides the distances there is a penalty, since all views may be the same."""
    distances = reduced(F.triplet_margin_loss, *outputs, divisors=divisors, eps=1e-2)
    return distances + 0.1 * averaged(outputs[0].square().sum(1), divisors)


def siamese(outputs: tuple[Tensor, ...], batch: Batch, divisors: Divisors) -> Tensor:
    """As ``triplet``, with two views, one of them detached."""
    first, second = outputs
    similarity = F.cosine_similarity(first, second.detach(), dim=-1, eps=1e-3)
    return averaged(1 - similarity + 0.1 * first.square().sum(1), divisors)


def one_number(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    """A loss of shape [1]."""
    losses = outputs[:, :1].square()
    return losses.mean(0) if divisors is None else losses.sum(0) / divisors[0]


def stacked_heads(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    """Losses ``[K, N]``."""
    labels = batch["labels"].expand(outputs.shape[:2])
    losses = F.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none")
    return averaged(losses, divisors)


def added_heads(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return torch.stack([cross_entropy(each, batch, divisors) for each in outputs]).sum()


def token_matrix(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    """Losses ``[N, T]``."""
    return reduced(F.mse_loss, outputs[..., 0], batch["words"].sign().double(), divisors=divisors)


def all_tokens(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    rows, words = logits.flatten(0, 1), batch["words"].flatten()
    return reduced(F.cross_entropy, rows, words, divisors=divisors, ignore_index=-100)


def all_tokens_in_places(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return reduced(F.cross_entropy, logits.mT, batch["words"], divisors=divisors)


def all_tokens_positions_first(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    rows, words = logits.flatten(0, 1), batch["words"].T.flatten()
    return reduced(F.cross_entropy, rows, words, divisors=divisors)


def next_token(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    rows, words = logits[:, :-1].flatten(0, 1), batch["words"][:, 1:].flatten()
    return reduced(F.cross_entropy, rows, words, divisors=divisors)


def scored_next(batch: Batch) -> tuple[float, ...]:
    return (int((batch["words"][:, 1:] >= 0).sum()),)


def chosen_tokens(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    words = batch["classes"][batch["chosen"]]
    return reduced(F.cross_entropy, logits[batch["chosen"]], words, divisors=divisors)


def tokens_of_masked_head(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    words = batch["classes"][batch["chosen"]]
    return reduced(F.cross_entropy, logits, words, divisors=divisors)


def token_means(logits: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    """The mean over samples of the mean over their tokens."""
    losses = F.cross_entropy(logits.mT, batch["classes"], reduction="none")
    return averaged(losses.mean(1), divisors)


def token_errors(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    target = F.one_hot(batch["classes"], VOCABULARY).to(outputs.dtype)
    return reduced(F.mse_loss, outputs, target, divisors=divisors)


def contrastive(outputs: tuple[Tensor, ...], batch: Batch, divisors: Divisors) -> Tensor:
    """Each sample's two views against the views of all others."""
    first, second = (F.normalize(view, dim=-1, eps=1e-2) for view in outputs)
    logits = first @ second.T / 0.5
    return reduced(F.cross_entropy, logits, torch.arange(len(first)), divisors=divisors)


def spread_of_batch(outputs: Tensor, batch: Batch, divisors: Divisors) -> Tensor:
    return averaged((outputs - outputs.mean(0)).square().sum(1), divisors)


def elements(name: str, width: int) -> Callable[[Batch], tuple[float, ...]]:
    """The number of numbers that a mean of errors is over."""
    return lambda batch: (batch[name].shape[:2].numel() * width,)


LABELS, VECTORS, WORDS = ("labels",), ("vectors",), ("words",)
OF_VECTORS = elements("labels", CLASSES)

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, count, LABELS),
    "smoothed": Loss(smoothed, count, LABELS),
    "class weights": Loss(
        class_weighted, lambda batch: (float(CLASS_WEIGHTS[batch["labels"]].sum()),), LABELS
    ),
    "sample weights": Loss(sample_weighted, count, ("labels", "weights")),
    "sorted losses": Loss(sorted_losses, count, LABELS),
    "ranked losses": Loss(ranked_losses, count, ("labels", "weights")),
    "trimmed losses": Loss(trimmed_losses, count_heavy, ("labels", "weights")),
    "soft labels": Loss(soft_labels, count, VECTORS),
    "squared error": Loss(squared_error, OF_VECTORS, VECTORS),
    "huber": Loss(huber, OF_VECTORS, VECTORS),
    "binary": Loss(binary, OF_VECTORS, VECTORS),
    "margin": Loss(margin, count, LABELS),
    "by hand": Loss(by_hand, count, ()),
    "two heads": Loss(
        two_parts,
        divisors_of_parts,
        ("labels", "vectors", "flags"),
        head=TwoHeads,
        reads=("flags",),
    ),
    "auxiliary": Loss(auxiliary, count, LABELS, head=StateAndHead),
    "triplet": Loss(triplet, count, (), views=3, head=Views),
    "siamese": Loss(siamese, count, (), views=2, head=Views),
    "one number": Loss(one_number, count, ()),
    "stacked heads": Loss(
        stacked_heads, lambda batch: (3 * len(batch["labels"]),), LABELS, head=Heads
    ),
    "added heads": Loss(added_heads, count, LABELS, head=Heads),
    "matrix of tokens": Loss(token_matrix, elements("words", 1), WORDS, VOCABULARY, True),
    "tokens": Loss(all_tokens, scored, WORDS, VOCABULARY, True),
    "tokens [N, C, T]": Loss(all_tokens_in_places, scored, WORDS, VOCABULARY, True),
    "tokens, positions first": Loss(
        all_tokens_positions_first, scored, WORDS, VOCABULARY, True, head=PositionsFirstHead
    ),
    "next token": Loss(next_token, scored_next, WORDS, VOCABULARY, True),
    "chosen tokens": Loss(chosen_tokens, chosen, ("classes", "chosen"), VOCABULARY, True),
    "head on chosen tokens": Loss(
        tokens_of_masked_head,
        chosen,
        ("classes", "chosen"),
        VOCABULARY,
        True,
        head=MaskedHead,
        reads=("chosen",),
    ),
    "token means": Loss(token_means, count, ("classes",), VOCABULARY, True),
    "token errors": Loss(
        token_errors, elements("classes", VOCABULARY), ("classes",), VOCABULARY, True
    ),
    "contrastive": Loss(contrastive, count, (), views=2, coupled=True, head=Views),
    "spread of the batch": Loss(spread_of_batch, count, (), coupled=True),
}
