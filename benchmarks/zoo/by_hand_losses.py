"""Networks of several inputs or losses, called whole or in parts by the training loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from benchmarks.zoo.by_hand_rows import (
    SETS,
    TRUNK,
    TWO,
    D,
    H,
    equal_halves,
    half_batch,
    linear,
    mask_count,
    mlp,
    parted,
    tokens_batch,
)
from benchmarks.zoo.losses import CLASSES, WORDS, numbers
from benchmarks.zoo.network import Batch, Network, also_told
from tests.cases.row_cases import Net

KIND = "by hand: losses"


def two_tasks(model: nn.Module, batch: Batch) -> Tensor:
    """Two heads on half of the batch each, whose losses are summed and divided by N."""
    hidden, left = model.trunk(batch["x"]).tanh(), batch["left"]
    first = cross_entropy(model.a(hidden[left]), batch["y"][left], reduction="sum")
    second = cross_entropy(model.b(hidden[~left]), batch["y"][~left], reduction="sum")
    return (first + second) / len(batch["x"])


def masked_head(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the tokens of a mask."""
    hidden = model.first(batch["x"]).tanh()
    return cross_entropy(model.second(hidden[batch["mask"]]), batch["y"][batch["mask"]])


def pairs_in_one(model: Net, a: Tensor, b: Tensor) -> Tensor:
    """Both sides of the pairs in one call, one behind the other."""
    left, right = model.net(torch.cat([a, b])).chunk(2)
    return model.head((left - right).abs())


def pairs_interleaved(model: Net, a: Tensor, b: Tensor) -> Tensor:
    """Both sides of the pairs in one call, in turns."""
    left, right = model.net(torch.stack([a, b], 1).flatten(0, 1)).view(len(a), 2, -1).unbind(1)
    return model.head((left - right).abs())


def pairs_in_two(model: Net, a: Tensor, b: Tensor) -> Tensor:
    """One call for each side of the pairs."""
    return model.head((model.net(a) - model.net(b)).abs())


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of ``model(a, b)``."""
    return cross_entropy(model(batch["a"], batch["b"]), batch["y"])


def triplets(model: nn.Module, batch: Batch) -> Tensor:
    """Anchors, positives and negatives in one call."""
    a, b, c = model.net(torch.cat([batch["a"], batch["b"], batch["c"]])).chunk(3)
    return relu((a - b).square().sum(1) - (a - c).square().sum(1) + 1).mean()


def simclr(model: nn.Module, batch: Batch) -> Tensor:
    """Each of 2N views has to find its partner among all others."""
    z = model.net(torch.cat([batch["a"], batch["b"]]))
    return _find_partner(z)


def _find_partner(z: Tensor) -> Tensor:
    z = nn.functional.normalize(z, dim=1)
    similarities = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    partners = torch.arange(len(z)).roll(len(z) // 2)
    return cross_entropy(similarities, partners)


def simclr_part(model: nn.Module, batch: Batch, n: int) -> Tensor:
    """The same loss as a function of what sample n contributes to the embeddings alone."""
    z = model.net(torch.cat([batch["a"], batch["b"]]))
    own = (torch.arange(len(z)) % (len(z) // 2) == n)[:, None]
    return _find_partner(torch.where(own, z, z.detach()))


def two_towers(model: nn.Module, batch: Batch) -> Tensor:
    """Queries and documents, where the documents of others are the negatives."""
    scores = model.query(batch["a"]) @ model.document(batch["b"]).T
    return cross_entropy(scores, torch.arange(len(scores)))


def two_towers_part(model: nn.Module, batch: Batch, n: int) -> Tensor:
    """The same loss as a function of sample n's query and document alone."""
    queries, documents = model.query(batch["a"]), model.document(batch["b"])
    own = (torch.arange(len(queries)) == n)[:, None]
    queries = torch.where(own, queries, queries.detach())
    documents = torch.where(own, documents, documents.detach())
    return cross_entropy(queries @ documents.T, torch.arange(len(queries)))


def cropped(model: Net, x: Tensor) -> Tensor:
    """A student sees all crops ``[N, C, D]`` in one call and a teacher the first; ``[C, N]``."""
    of_crops = x.transpose(0, 1)
    student = model.student(of_crops.flatten(0, 1)).log_softmax(-1)
    with torch.no_grad():
        teacher = model.teacher(of_crops[0]).softmax(-1)
    return -(teacher * student.view(*of_crops.shape[:2], -1)).sum(-1)


def distilled(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of what the student misses."""
    return cropped(model, batch["x"]).mean()


def list_of_sets(model: nn.Module, batch: Batch) -> Tensor:
    """A loop over sets of different sizes."""
    pooled = [model.inner(x).tanh().sum(0) for x in batch["x"]]
    return cross_entropy(model.outer(torch.stack(pooled)), batch["y"])


def list_batch(samples: int) -> Batch:
    """Sets of one to four elements."""
    sizes = torch.randint(1, 5, (samples,)).tolist()
    x = [torch.randn(size, D, dtype=torch.float64) for size in sizes]
    return {"x": x, "y": torch.randint(CLASSES, (samples,))}


def shared_negatives(model: nn.Module, batch: Batch) -> Tensor:
    """A sampled softmax: all samples are told from the same few random words."""
    hidden = model.net(batch["x"])
    own = (hidden * model.table(batch["word"])).sum(1, keepdim=True)
    others = hidden @ model.table(batch["negatives"]).T
    logits = torch.cat([own, others], 1)
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def negatives_batch(samples: int) -> Batch:
    """Words to find, and five that are wrong."""
    word, negatives = torch.randint(WORDS, (samples,)), torch.randint(WORDS, (5,))
    return {"x": numbers(samples, D)()["x"], "word": word, "negatives": negatives}


def recommender(model: nn.Module, batch: Batch) -> Tensor:
    """Users times items, with a bias of each."""
    scores = (model.users(batch["a"]) * model.items(batch["b"])).sum(1)
    scores = scores + model.bias(batch["b"])[:, 0]
    return nn.functional.binary_cross_entropy_with_logits(scores, batch["y"].double() / 2)


def quantised(model: nn.Module, batch: Batch) -> Tensor:
    """The nearest entries of a codebook, with gradients straight through."""
    hidden = model.encoder(batch["x"])
    nearest = torch.cdist(hidden.detach(), model.codes.weight).argmin(1)
    code = model.codes(nearest)
    output = model.decoder(hidden + (code - hidden).detach())
    commitment = (hidden - code.detach()).square().mean() + (hidden.detach() - code).square().mean()
    return nn.functional.mse_loss(output, batch["x"]) + commitment


def adaptive_softmax(model: nn.Module, batch: Batch) -> Tensor:
    """Rare words have a head of their own, on the rows that need it."""
    return model.softmax(model.net(batch["x"]), batch["word"]).loss


def words_of_rows(samples: int) -> Batch:
    """Rows with a word each, of which many are rare."""
    return {"x": numbers(samples, D)()["x"], "word": torch.randint(WORDS, (samples,))}


def segments(model: nn.Module, batch: Batch) -> Tensor:
    """Each token's own loss, averaged over tokens in each sample, and then over samples."""
    logits = model.net(batch["x"])
    each = cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none")
    return each.view(batch["tokens"].shape).mean(1).mean()


def pair_batch(samples: int, count: int = 2) -> Batch:
    """Two or three sides of each sample."""
    sides = {key: numbers(samples, D)()["x"] for key in "abc"[:count]}
    return {**sides, "y": torch.randint(CLASSES, (samples,))}


def item_batch(samples: int) -> Batch:
    """A user and an item of each sample; item 0 stands for none."""
    a, b = torch.randint(7, (samples,)), torch.randint(WORDS, (samples,))
    return {"a": a, "b": b, "y": torch.randint(3, (samples,))}


class Whole(nn.Module):
    """A network whose forward pass gives the loss."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.inner = network.build()
        self.loss = network.loss

    def forward(self, **batch: Tensor) -> Tensor:
        """All of the batch's inputs and labels by name."""
        return self.loss(self.inner, batch)


def whole_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What the model itself gives."""
    return model(**batch)


def ways(network: Network) -> list[Network]:
    """Called whole, and in parts by the training loop, and the latter told how many samples."""
    inner = network.contribution
    whole = replace(
        network,
        build=partial(Whole, network),
        loss=whole_loss,
        contribution=None if inner is None else lambda m, b, n: inner(m.inner, b, n),
    )
    return [whole, *also_told(replace(network, name=f"{network.name}, called in parts"))]


def networks() -> list[Network]:
    """Each in all ways in which it can be called."""
    found = [*_of_pairs(), *_of_rows(), *_of_meeting_samples()]
    return [way for network in found for way in ways(network)]


def _of_pairs() -> list[Network]:
    """Of two or three inputs for each sample."""
    parts = {"net": partial(mlp, D, H), "head": linear(H, CLASSES)}
    pairs, triples = partial(pair_batch, 4), partial(pair_batch, 4, 3)
    items = {
        "users": partial(nn.Embedding, 7, H),
        "items": partial(nn.Embedding, WORDS, H, padding_idx=0),
        "bias": partial(nn.Embedding, WORDS, 1, padding_idx=0),
    }
    return [
        Network("pairs in one cat", KIND, parted(pairs_in_one, **parts), pairs, pair_loss),
        Network("pairs interleaved", KIND, parted(pairs_interleaved, **parts), pairs, pair_loss),
        Network("pairs in two calls", KIND, parted(pairs_in_two, **parts), pairs, pair_loss),
        Network("triplets in one cat", KIND, parted(uncalled, **parts), triples, triplets),
        Network(
            "recommender", KIND, parted(uncalled, **items), partial(item_batch, 4), recommender
        ),
    ]


def _of_rows() -> list[Network]:
    """Of losses of parts of the batch, or of several."""
    trunk, head, sets = parted(uncalled, **TRUNK), parted(uncalled, **TWO), parted(uncalled, **SETS)
    student = parted(cropped, student=mlp, teacher=mlp)
    net = partial(mlp, D, H)
    rare = partial(nn.AdaptiveLogSoftmaxWithLoss, H, WORDS, [3, 7], div_value=2.0)
    coded = {"codes": partial(nn.Embedding, 5, H), "decoder": partial(mlp, H, D)}
    codes = parted(uncalled, encoder=net, **coded)
    sampled = parted(uncalled, net=net, table=partial(nn.Embedding, WORDS, H))
    adaptive, tokens = parted(uncalled, net=net, softmax=rare), parted(uncalled, net=mlp)
    given, shared = partial(negatives_batch, 4), {"axes": {"negatives": None}}
    found = [
        Network("losses on halves", KIND, trunk, partial(half_batch, 4), two_tasks),
        Network("losses on equal halves", KIND, trunk, partial(equal_halves, 4), two_tasks),
        Network("list of sets", KIND, sets, partial(list_batch, 4), list_of_sets),
        Network("sampled softmax", KIND, sampled, given, shared_negatives, **shared),
        Network("codebook", KIND, codes, numbers(4, D), quantised),
        Network("adaptive softmax", KIND, adaptive, partial(words_of_rows, 5), adaptive_softmax, 5),
    ]
    for length in (6, 4):
        of, suffix = partial(tokens_batch, 4, length), ", T = N" if length == 4 else ""
        counted = {"units": mask_count}
        found += [
            Network(f"loss of a mask{suffix}", KIND, head, of, masked_head, **counted),
            Network(f"loss of each token{suffix}", KIND, tokens, of, segments),
        ]
    for count in (3, 4):
        crops = numbers(4, count, D)
        found.append(Network(f"{count} crops, distilled", KIND, student, crops, distilled))
    return found


def _of_meeting_samples() -> list[Network]:
    """Of losses that compare samples with each other."""
    net = partial(mlp, D, H)
    views, towers = parted(uncalled, net=net), parted(uncalled, query=net, document=net)
    pairs, meet = partial(pair_batch, 4), {"meet": True}
    return [
        Network("SimCLR", KIND, views, pairs, simclr, contribution=simclr_part, **meet),
        Network(
            "two towers", KIND, towers, pairs, two_towers, contribution=two_towers_part, **meet
        ),
    ]


def uncalled(model: Net, *inputs: Tensor) -> Tensor:
    """For networks whose parts are called alone."""
    raise NotImplementedError
