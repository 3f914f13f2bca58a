"""What is watched in the training of large models, beside plain formulas in float64.

``python -m benchmarks.watching [WORD ...] [--way WAY] [--write]`` trains twelve small networks for
two steps: with the whole batch at once, in micro-batches, under autocast, and on two processes. A
second training without gradlens, in one process, has the gradients, updates, outputs and scores of
attention that the formulas are of. A line has a quantity's values that are right, those that are
NaN, and those that are wrong. ``--write`` writes docs/watching.csv, with a row for each quantity.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from scipy.special import stdtrit
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import gradlens
from benchmarks.diagnosis.networks import Memory, SelfAttention, conv, groups, stack
from benchmarks.diagnosis.networks import Residual as Added
from benchmarks.problems import Residual
from benchmarks.zoo.network import Batch, Network, classify, drawn, integers, normal, numbers
from benchmarks.zoo.transformers_families import Family
from gradlens import quantities as q
from gradlens.history.history import History
from gradlens.history.undefined import Undefined
from gradlens.signals import is_normalization
from gradlens.signals.predicates import computes_attention
from gradlens.torch_private import LossModule
from tests.cases.processes import free_port, join_group, run_processes
from tests.cases.references import flat, gradients_of, stacked
from tests.quantities.test_along_update import slow_ledger
from tests.quantities.test_layer_quantities import predictions
from tests.quantities.test_noise_scales import between_parts as of_parts
from tests.quantities.test_noise_scales import bounds
from tests.quantities.test_optimizer_state import adam, expected
from tests.quantities.test_outliers import rows as by_feature

OUT = Path(__file__).parents[1] / "docs" / "watching.csv"

Values: TypeAlias = dict[str, Tensor]

SAMPLES, LENGTH, WORDS, WIDTH, STEPS = 8, 6, 11, 8, 2

# Networks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A network of the zoo, the layer whose outputs are logits, and its normalisations."""

    network: Network
    head: str
    norms: Any = is_normalization


class Translation(nn.Module):
    """torch's encoder and decoder, with causal masks and cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        sizes = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, **sizes)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``[N, T]`` each."""
        source, target = self.embedding(x), self.embedding(y)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=source.dtype)
        found: Tensor = self.head(self.transformer(source, target, tgt_mask=mask))
        return found


class Pixels(SelfAttention):
    """Each pixel ``[N, D, H, W]`` and what it attends to."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.flatten(2).mT).mT.reshape(x.shape)


def next_words(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the words that follow in the last text."""
    texts = [*batch.values()]
    return cross_entropy(model(*texts)[:, :-1].mT, texts[-1][:, 1:])


def clean(model: nn.Module, batch: Batch) -> Tensor:
    """How far the noise is that a network sees in images."""
    return mse_loss(model(batch["x"] + batch["noise"]), batch["noise"])


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Residual(4, 6)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )


def unet() -> nn.Module:
    """With attention of pixels to each other at the coarser view."""
    layers = partial(conv, norm=groups, activation=nn.SiLU)
    coarse = *layers(4, WIDTH), Pixels(WIDTH, 2), nn.ConvTranspose2d(WIDTH, 4, 2, 2)
    return stack(layers(2, 4), Added(nn.MaxPool2d(2), *coarse), nn.Conv2d(4, 2, 3, padding=1))


def lstm() -> nn.Module:
    memory = Memory(nn.LSTM, WIDTH, WIDTH, num_layers=2)
    return stack(nn.Embedding(WORDS, WIDTH), memory, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def of_transformers(
    name: str, task: str, head: str, norms: Any = ("*norm",), **options: Any
) -> Watched:
    family = Family(name, task, SAMPLES, LENGTH, **{"padded": False, **options})
    return Watched(family.network(), head, norms)


def of_own(build: Callable[[], nn.Module], batch: Any, loss: Any, head: str) -> Watched:
    return Watched(Network("", "", build, batch, loss, SAMPLES), head)


TEXT, IMAGE = integers(WORDS, SAMPLES, LENGTH), normal(SAMPLES, 2, 4, 4)
NETWORKS: Mapping[str, Watched] = {
    "GPT-2": of_transformers("GPT2LMHeadModel", "CAUSAL_LM", "lm_head", ("*ln_*",)),
    "Llama": of_transformers("LlamaForCausalLM", "CAUSAL_LM", "lm_head"),
    "Mixtral, grouped queries": of_transformers("MixtralForCausalLM", "CAUSAL_LM", "lm_head"),
    "Mistral, sliding window": of_transformers("MistralForCausalLM", "CAUSAL_LM", "lm_head"),
    "ViT": of_transformers(
        "ViTForImageClassification", "IMAGE_CLASSIFICATION", "classifier", is_normalization
    ),
    "BERT, padded": of_transformers(
        *("BertForMaskedLM", "MASKED_LM", "cls.predictions.decoder", is_normalization),
        attention="eager",
        padded=True,
    ),
    "T5": of_transformers(
        "T5ForConditionalGeneration", "SEQ_TO_SEQ_CAUSAL_LM", "lm_head", ("*layer_norm",)
    ),
    "ResNet": of_own(resnet, numbers(SAMPLES, 2, 4, 4), classify, "6"),
    "LSTM": of_own(lstm, drawn(x=TEXT), next_words, "3"),
    "UNet": of_own(unet, drawn(x=IMAGE, noise=IMAGE), clean, "4"),
    "torch's Transformer": of_own(Translation, drawn(x=TEXT, y=TEXT), next_words, "head"),
    "MLP": of_own(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
        *(numbers(SAMPLES, 5), classify, "3"),
    ),
}

# Ways of training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """In how many parts a batch comes to each of some processes."""

    parts: int = 1
    processes: int = 1
    bfloat16: bool = False
    share: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.bfloat16 else torch.float64

    @property
    def tolerance(self) -> float:
        """Of what is computed in another order than the reference."""
        return 0.03 if self.bfloat16 else 1e-6

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16)


WAYS = {
    "1 × 8": Way(),
    "4 × 2": Way(4),
    "DDP": Way(2, 2),
    "FSDP2": Way(2, 2, share=True),
    "bfloat16": Way(4, bfloat16=True),
}


def tracked(watched: Watched, model: nn.Module) -> list[q.Quantity]:
    attends = any(map(computes_attention, model.modules()))
    attention = (q.AttentionLogits, q.AttentionEntropy) if attends else ()
    noise = partial(q.GradNoiseScale, between="samples")
    return [
        *(q.OptimizerState(), q.RelativeUpdate(), q.GradNorm(), q.ClippedGradNorm()),
        *(q.ActivationOutliers(), q.OutputEntropy(layers=watched.head)),
        *(q.WeightSpectrum(), q.UpdateSpectrum(), q.Stability()),
        *(q.CriticalSharpness(), q.StepLedger()),
        *(kind(by_head=True) for kind in attention),
        q.GradNoiseScale(between="parts", name="GradNoiseScale between parts"),
        noise(name="GradNoiseScale"),
        noise(layers=watched.norms, name="GradNoiseScale of norms"),
        noise(norm="l1", name="GradNoiseScale in l1"),
        noise(norm="nuclear", name="GradNoiseScale in the nuclear norm"),
    ]


def build(network: Network, way: Way) -> nn.Module:
    torch.manual_seed(0)
    return network.build().to(way.dtype).train()


def data(network: Network, way: Way, step: int) -> list[Batch]:
    """The parts of all processes, in their order."""
    torch.manual_seed(step + 1)
    whole = {
        name: each.to(way.dtype) if each.is_floating_point() else each
        for name, each in network.batch().items()
    }
    count = way.parts * way.processes
    pieces = {name: each.chunk(count) for name, each in whole.items()}
    return [{name: each[n] for name, each in pieces.items()} for n in range(count)]


EPSILON, BETAS, DECAY, RATE, CLIP = 1e-6, (0.9, 0.95), 0.1, 0.01, 0.3


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with decay of matrices alone, as for large models."""
    groups: tuple[list[nn.Parameter], ...] = ([], [])
    for parameter in model.parameters():
        groups[parameter.dim() > 1].append(parameter)
    options = {"lr": RATE, "betas": BETAS, "eps": EPSILON}
    with_decay = {"params": groups[1], "weight_decay": DECAY}
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.0}, with_decay], **options)


def whole_loss(model: nn.Module, network: Network, way: Way, parts: Sequence[Batch]) -> Tensor:
    """That of all parts, which can be differentiated twice, as fused attention can't."""
    with way.autocast(), sdpa_kernel(SDPBackend.MATH):
        return torch.stack([network.loss(model, part) for part in parts]).mean()


def train(watched: Watched, way: Way, rank: int = 0) -> History:
    """The training that gradlens watches."""
    network = watched.network
    model: Any = build(network, way)
    if way.share:
        for each in reversed([*model.modules()]):
            for layer in each if isinstance(each, nn.ModuleList) else ():
                fully_shard(layer)
        fully_shard(model)
    elif way.processes > 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_of(model)
    cockpit = gradlens.Cockpit(model, tracked(watched, model))
    for step in range(STEPS):
        parts = data(network, way, step)[rank * way.parts : (rank + 1) * way.parts]
        closure = partial(whole_loss, model, network, way, parts)
        optimizer.zero_grad()
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            if way.share:
                model.set_requires_gradient_sync(last)
            wait = way.processes > 1 and not way.share and not last
            with model.no_sync() if wait else nullcontext():
                with way.autocast():
                    loss = network.loss(model, part)
                given = {"optimizer": optimizer, "accumulating": not last, "closure": closure}
                with cockpit(step, loss=loss, **given):
                    (loss / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    cockpit.close()
    return cockpit.history


def worker(rank: int, port: int, folder: Path, names: Sequence[str], ways: Sequence[str]) -> None:
    """Train all networks in one of the processes."""
    warnings.simplefilter("ignore")
    join_group(rank, 2, port)
    try:
        for way in ways:
            for name in names:
                history = train(NETWORKS[name], WAYS[way], rank)
                if rank == 0:
                    history.write(file_of(folder, name, way))
    finally:
        distributed.destroy_process_group()


# The training without gradlens -------------------------------------------------------------------

Scores: TypeAlias = tuple[Tensor, Tensor]
"""Scores and weights ``[N, H, T, S]``."""
Loss: TypeAlias = Callable[[Values], Tensor]
"""As a function of the parameters in float64."""


class OfModel(nn.Module):
    """A function of a model as a module, so that it can be called with other parameters."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self.function = copy.deepcopy(model), function

    def forward(self) -> Tensor:
        return self.function(self.model)

    def at(self, dtype: torch.dtype, values: Values) -> Tensor:
        """The function's value at these parameters."""
        cast = {f"model.{name}": value.to(dtype) for name, value in values.items()}
        found: Tensor = functional_call(self, cast, ())
        return found


@dataclass
class Facts:
    """What is true of a step, in float64; ``parts`` and ``rows`` are gradients of mean losses.

    ``loss`` is that of the whole batch, and ``of_part`` that of the last part of the first process,
    of which curvature is.
    """

    start: Values
    loss: Loss
    of_part: Loss
    parts: list[Values] = field(default_factory=list)
    rows: list[Values] = field(default_factory=list)
    gradients: Values = field(default_factory=dict)
    clipped: Values = field(default_factory=dict)
    end: Values = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    attention: dict[str, list[Scores]] = field(default_factory=dict)


def exact(tensors: Mapping[str, Tensor | None]) -> Values:
    return {n: t.detach().double().clone() for n, t in tensors.items() if t is not None}


def reference(network: Network, way: Way) -> list[Facts]:
    """Each step of the same training, without processes."""
    model = build(network, way)
    named = dict(model.named_parameters())
    optimizer, found = optimizer_of(model), list[Facts]()
    coupled = any(isinstance(each, nn.BatchNorm2d) for each in model.modules())
    for step in range(STEPS):
        parts = data(network, way, step)
        of_all, of_last = (
            OfModel(model, partial(whole_loss, network=network, way=way, parts=some))
            for some in (parts, [parts[way.parts - 1]])
        )
        losses = partial(of_all.at, way.dtype), partial(of_last.at, way.dtype)
        facts = Facts(exact(named), *losses)
        optimizer.zero_grad()
        for part in parts:
            with seen(model, facts), way.autocast():
                loss = network.loss(model, part)
            facts.parts.append(exact(gradients_of(loss, named)))
            with way.autocast():
                facts.rows += (by_row if coupled else one_by_one)(network, model, part)
            (loss / len(parts)).backward()
        facts.gradients = exact({n: p.grad for n, p in named.items()})
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        facts.clipped = exact({n: p.grad for n, p in named.items()})
        optimizer.step()
        facts.end = exact(named)
        found.append(facts)
    return found


def one_by_one(network: Network, model: nn.Module, part: Batch) -> list[Values]:
    """gₙ of each sample of a part, from a forward and a backward pass of its own."""
    named, samples = dict(model.named_parameters()), len(next(iter(part.values())))
    alone = replace(network, samples=samples)
    shares = (alone.part(model, part, n) for n in range(samples))
    found = [exact(gradients_of(share, named)) for share in shares]
    return [{name: samples * each for name, each in row.items()} for row in found]


def by_row(network: Network, model: nn.Module, part: Batch) -> list[Values]:
    """What passes through each sample's row of layers, where a normalisation couples samples."""
    model, calls = copy.deepcopy(model), dict[str, Any]()
    for name, module in model.named_modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_hook(
                lambda module, x, out, name=name: calls.update({name: (module, x[0], out)})
            )
    loss, samples = network.loss(model, part), len(part["x"])
    given = torch.autograd.grad(loss, [out for *_, out in calls.values()])
    found: list[Values] = [{} for _ in range(samples)]
    for (name, (module, x, _)), gradient in zip(calls.items(), given, strict=True):
        own = dict(module.named_parameters(recurse=False))
        for n, row in enumerate(found):
            kept = torch.zeros_like(gradient)
            kept[n] = samples * gradient[n]
            each = torch.autograd.grad(type(module).forward(module, x), [*own.values()], kept)
            row |= exact({f"{name}.{key}": g for key, g in zip(own, each, strict=True)})
    return found


@contextmanager
def seen(model: nn.Module, facts: Facts) -> Iterator[None]:
    """Outputs of leaves, and scores of attention by the innermost layer that is called so."""
    inside, fused = list[str](), nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Tensor:
        order = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        options = dict(zip(order, given, strict=False)) | named
        scale = options.get("scale") or query.shape[-1] ** -0.5
        q, k = query.detach().double(), key.detach().double()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores, bias = q @ k.mT * scale, torch.zeros(())
        if options.get("is_causal"):
            bias = torch.full(scores.shape[-2:], -torch.inf).triu(1)
        if (mask := options.get("attn_mask")) is not None:
            bias = mask.detach().double() if mask.is_floating_point() else (~mask).double()
            bias = bias if mask.is_floating_point() else bias.masked_fill(~mask, -torch.inf)
        if inside:
            pair = scores, torch.softmax(scores + bias, -1)
            facts.attention.setdefault(inside[-1], []).append(pair)
        return fused(query, key, value, *given, **named)

    def attend_eagerly(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any
    ) -> Any:
        attend(query, key, value, mask, scale=named.get("scaling"))
        return written_out(module, query, key, value, mask, **named)

    def keep(name: str, module: nn.Module, _: object, output: Any) -> None:
        facts.outputs.setdefault(name, []).append(torch.from_numpy(by_feature(output)))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if "attention" in type(module).__name__.lower():
                enter = module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
                leave = module.register_forward_hook(lambda *_: inside.pop() and None)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            is_leaf = not [*module.children()] or isinstance(module, nn.MultiheadAttention)
            if is_leaf and not isinstance(module, LossModule):
                stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        patched = "torch.nn.functional.scaled_dot_product_attention"
        stack.enter_context(mock.patch(patched, attend))
        if getattr(getattr(model, "config", None), "_attn_implementation", "") == "eager":
            library = sys.modules[type(model).__module__]
            written_out = library.eager_attention_forward
            eager = mock.patch.object(library, "eager_attention_forward", attend_eagerly)
            stack.enter_context(eager)
        yield


# Formulas ----------------------------------------------------------------------------------------

Pairs: TypeAlias = Iterator[tuple[Any, Any, float]]
"""Numbers that were found, those that are right, and a size of which rounding errors are."""
Formula: TypeAlias = Callable[[Any, Watched, Sequence[Facts]], Pairs]
"""Of a record, and of the steps up to its own."""


def entries(found: Any, truth: Mapping[str, Any], size: float = 0.0) -> Pairs:
    """Of a dict; if it is a NaN, each of its entries is."""
    for name, value in truth.items():
        yield found if isinstance(found, Undefined) else found[name], value, size


def optimizer_state(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    largest = max(float(g.abs().max()) for g in steps[-1].clipped.values())
    for name, record in found["parameters"].items():
        gradients = [each.clipped[name] for each in steps if name in each.clipped]
        if name in steps[-1].clipped:
            averages = replace(adam(gradients, BETAS[1]), floor=EPSILON)
            truth = expected(averages, gradients[-1])
            yield from entries(record, {n: truth[n] for n in ("m", "root_v")}, 1e-12 * largest)
            if gradients[-1].norm() > 1e-9 * largest:  # else it is rounding noise
                yield from entries(record, {n: truth[n] for n in ("rms", "cosine")})


def relative_update(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    for name, record in found["parameters"].items():
        start, end = steps[-1].start[name], steps[-1].end[name]
        length = (end - start).norm()
        yield from entries(record, {"rms": length / start.numel() ** 0.5}, 1e-9)
        if not 0 < start.norm() < 1e-9:  # else it is rounding noise
            yield from entries(record, {"value": length / start.norm() if start.any() else None})


def of_norms(found: Any, of: Values) -> Pairs:
    size = 1e-12 * max(float(each.norm()) for each in of.values())
    yield sorted(found) == sorted(of), True, 0.0
    for name, value in found.items():
        yield value, of[name].norm(), size


def outliers(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    yield {*found["layers"]} <= {*steps[-1].outputs}, True, 0.0
    for name, record in found["layers"].items():
        calls = steps[-1].outputs[name]
        x = torch.cat([each.flatten() for each in calls])
        sizes = [float(each.abs().max()) for each in calls]
        call = calls[sizes.index(max(sizes))]
        apart = x - x.mean()
        spread = apart.pow(2).mean()
        is_spread = spread.sqrt() > 1e-13 * max(sizes)
        kurtosis = apart.pow(4).mean() / spread**2 - 3 if is_spread else None
        yield from entries(record, {"largest": max(sizes), "kurtosis": kurtosis}, 1e-6)
        if len({len(each) for each in calls}) == 1:
            missing = isinstance(record, Undefined)
            place = [record] if missing else [record[name] for name in ("position", "channel")]
            unknown = [each for each in place if isinstance(each, Undefined)]
            at = unknown[0] if unknown else call[(slice(None), *map(int, place))].abs().max()
            yield at, max(sizes), 0.0


def output_entropy(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    z = torch.cat([x.flatten(0, 1) for x in steps[-1].outputs[watched.head]])
    yield from entries(found["layers"][watched.head], predictions(z.numpy()))


def of_attention(
    value: Callable[[Sequence[Scores]], Tensor], found: Any, _: Watched, steps: Sequence[Facts]
) -> Pairs:
    yield sorted(found["layers"]) == sorted(steps[-1].attention), True, 0.0
    for name, record in found["layers"].items():
        if name in steps[-1].attention:
            truth = value(steps[-1].attention[name])
            if isinstance(record, Undefined):
                yield record, None, 0.0
            else:
                yield len(record), len(truth), 0.0
                yield from ((x, y, 1e-9) for x, y in zip(record, truth, strict=False))


def largest_scores(calls: Sequence[Scores]) -> Tensor:
    """Of each head, where weights aren't zero."""
    seen = [scores.masked_fill(weights == 0, -math.inf) for scores, weights in calls]
    return torch.stack([each.amax((0, 2, 3)) for each in seen]).amax(0)


def entropies(calls: Sequence[Scores]) -> Tensor:
    """Of the weights of each head."""
    each = [-(torch.xlogy(w, w)).sum(-1).transpose(0, 1).flatten(1) for _, w in calls]
    return torch.cat(each, 1).mean(1)


def spectrum(found: Any, matrices: Values) -> Pairs:
    for name, record in found["parameters"].items():
        values = torch.linalg.svdvals(matrices[name].flatten(1))
        if not values[0]:
            yield record, None, 0.0
        elif isinstance(record, Undefined):
            yield record, values[0], 0.0
        else:
            norm = record["norm"]
            rounding, missing = 1e-6 * values[0], values[0] - norm
            yield bool(-rounding <= missing <= record["residual"] + rounding), True, 0.0
            yield record["stable_rank"], (matrices[name].norm() / norm) ** 2, 0.0


def stability(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    """Of the step that comes, with the averages of the steps before."""
    facts, past, scales = steps[-1], [each.clipped for each in steps[:-1]], []
    value = found if isinstance(found, Undefined) else found["ratio"]
    if not past or any(facts.start.keys() - each.keys() for each in past):
        yield value, None, 0.0
        return
    for name, start in facts.start.items():
        root = adam([each[name] for each in past], BETAS[1]).root
        assert root is not None
        decay = DECAY if start.dim() > 1 else 0.0
        limit = (2 - RATE * decay) * (1 + BETAS[0]) / (RATE * (1 - BETAS[0]))
        factor = limit * (root + EPSILON) * (1 - BETAS[0] ** len(past))
        scales.append(torch.where(root > 0, 1 / factor, 0.0).sqrt().flatten())
    yield value, largest_eigenvalue(facts, torch.cat(scales)), 0.0


def largest_eigenvalue(facts: Facts, scales: Tensor) -> float:
    """Of SHS; S has the roots of the inverse limits."""
    flat = torch.cat([p.flatten() for p in facts.start.values()]).requires_grad_()
    parts = zip(
        facts.start.items(), flat.split([p.numel() for p in facts.start.values()]), strict=True
    )
    loss = facts.of_part({name: part.view_as(p) for (name, p), part in parts})
    (gradient,) = torch.autograd.grad(loss, flat, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        along = scales * torch.from_numpy(vector.ravel())
        (found,) = torch.autograd.grad(gradient, flat, along, retain_graph=True)
        return (scales * found).numpy()

    operator = LinearOperator((len(flat), len(flat)), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(len(flat))
    return float(eigsh(operator, 1, which="LA", v0=start, tol=1e-8)[0][0])


@torch.no_grad()
def critical_sharpness(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    """The loss is higher than at the start at 1/low, and not at 1/high or before it."""
    facts = steps[-1]
    if isinstance(found, Undefined) or isinstance(found["ratio"], Undefined):
        yield found if isinstance(found, Undefined) else found["ratio"], None, 0.0
        return

    def rise(multiple: float) -> float:
        at = {n: p + multiple * (facts.end[n] - p) for n, p in facts.start.items()}
        return float(facts.loss(at) - facts.loss(facts.start))

    high, low = 1 / found["low"], 1 / found["high"]
    yield rise(high) > 0, True, 0.0
    yield all(rise(share * low) <= 0 for share in (1.0, 0.75, 0.5, 0.25, 0.1)), True, 0.0
    yield found["low"] <= found["ratio"] <= found["high"], True, 0.0
    yield found["threshold"], 2 / RATE, 0.0
    yield found["sharpness"], found["ratio"] * 2 / RATE, 0.0


def step_ledger(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    truth = slow_ledger(steps[-1].loss, steps[-1].start, steps[-1].end)
    layers, size = truth.pop("layers"), abs(truth["change"])
    yield from entries(found, truth, size)
    if not isinstance(found, Undefined):
        for layer, record in found["layers"].items():
            yield from entries(record, layers[layer], size)


def between_parts(found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    parts, number = steps[-1].parts, SAMPLES // len(steps[-1].parts)
    if len(parts) == 1:
        yield found, None, 0.0
        return
    count = len(parts)
    trace, squared = of_parts(parts, [number] * count, [1 / count] * count)
    size = sum(float(g.square().sum()) for each in parts for g in each.values()) / count
    yield from ratio(found, trace, squared, size)


def between_samples(found: Any, steps: Sequence[Facts], names: Sequence[str]) -> Pairs:
    own = {name: each for name, each in stacked(steps[-1].rows).items() if name in names}
    rows = flat(own).numpy()
    mean = rows.mean(0)
    trace = ((rows - mean) ** 2).sum() / (len(rows) - 1)
    squared = (mean**2).sum() - trace / len(rows)
    yield from ratio(found, trace, squared, (rows**2).sum(1).mean())


def ratio(found: Any, trace: float, squared: float, size: float) -> Pairs:
    """Of a noise scale, whose error is that of the squared norm over what is left of it."""
    yield from entries(found, {"trace": trace, "squared_norm": squared}, size)
    value = trace / squared if squared > 0 else None
    yield from entries(found, {"value": value}, size / abs(squared) * (value or 0.0))


def in_other_norms(norm: Any, found: Any, watched: Watched, steps: Sequence[Facts]) -> Pairs:
    """The bounds of both, the value between them, and the lower end of the interval."""
    sums = np.zeros((4, SAMPLES))
    for name, each in stacked(steps[-1].rows).items():
        if norm == "l1" or steps[-1].start[name].dim() > 1:
            rows = each.numpy()
            sums += bounds(rows if norm == "l1" else rows.reshape(SAMPLES, len(rows[0]), -1), norm)
    least, most, less, more = sums.mean(1)
    errors = sums.std(1, ddof=1) / math.sqrt(SAMPLES)
    t = float(stdtrit(SAMPLES - 1, 0.975))  # half of the error for each of the two bounds
    truth = {"low": (max(less - t * errors[2], 0) / (most + t * errors[1])) ** 2}
    apart = least <= 0 or (more / least * most / less) ** 2 > 4
    truth["value"] = None if apart else less * more / (least * most)
    yield from entries(found, truth)


def normalising(watched: Watched) -> list[str]:
    """Parameters of normalisations."""
    return [
        f"{name}.{own}"
        for name, module in watched.network.build().named_modules()
        if re.search("norm|ln_", name) or is_normalization(module)
        for own, _ in module.named_parameters(recurse=False)
    ]


FORMULAS: Mapping[str, Formula] = {
    "OptimizerState": optimizer_state,
    "RelativeUpdate": relative_update,
    "GradNorm": lambda found, _, steps: of_norms(found, steps[-1].gradients),
    "ClippedGradNorm": lambda found, _, steps: of_norms(found, steps[-1].clipped),
    "ActivationOutliers": outliers,
    "OutputEntropy": output_entropy,
    "AttentionLogits": partial(of_attention, largest_scores),
    "AttentionEntropy": partial(of_attention, entropies),
    "WeightSpectrum": lambda found, _, steps: spectrum(found, steps[-1].start),
    "UpdateSpectrum": lambda found, _, steps: spectrum(
        found, {n: steps[-1].end[n] - p for n, p in steps[-1].start.items()}
    ),
    "Stability": stability,
    "CriticalSharpness": critical_sharpness,
    "StepLedger": step_ledger,
    "GradNoiseScale between parts": between_parts,
    "GradNoiseScale": lambda found, _, steps: between_samples(found, steps, [*steps[-1].start]),
    "GradNoiseScale of norms": lambda found, watched, steps: between_samples(
        found, steps, normalising(watched)
    ),
    "GradNoiseScale in l1": partial(in_other_norms, "l1"),
    "GradNoiseScale in the nuclear norm": partial(in_other_norms, "nuclear"),
}


# The table ---------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """How many numbers of a quantity are right, which are wrong, and why others are NaN."""

    right: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.right} right", *(f"{n} × NaN, {why}" for why, n in self.reasons.items())]
        return "\n      ".join([*lines, *(f"WRONG {text}" for text in self.wrong[:3])])

    def add(self, found: Any, expected: Any, size: float, tolerance: float) -> None:
        if isinstance(found, Undefined) or (isinstance(found, float) and math.isnan(found)):
            self.reasons[getattr(found, "reason", "") or "NO REASON"] += 1
        elif expected is None:
            self.wrong.append(f"{found} instead of a NaN")
        elif abs(float(found) - float(expected)) <= tolerance * (abs(float(expected)) + size):
            self.right += 1
        else:
            self.wrong.append(f"{float(found)} instead of {float(expected)}")


OWN = {"Stability": 1e-3}
"""The relative tolerance that a quantity has by itself."""


def covered(steps: Sequence[Facts], history: History) -> list[Facts]:
    """The steps, of the last of which samples have the gradients that gradlens covers alone."""
    at = max(each for each in history.coverages if each < len(steps))
    missing = history.coverages[at].missing
    rows = [{n: g for n, g in row.items() if n not in missing} for row in steps[-1].rows]
    return [*steps[:-1], replace(steps[-1], rows=rows)]


def judged(
    watched: Watched, way: Way, history: History, facts: Sequence[Facts]
) -> dict[str, Verdict]:
    verdicts = dict[str, Verdict]()
    for name, formula in FORMULAS.items():
        if name in history.names:
            verdict = verdicts[name] = Verdict()
            for step in range(STEPS):
                found = history[name].get(step, Undefined("not recorded"))
                if isinstance(found, Undefined):
                    verdict.reasons[found.reason] += 1
                else:
                    known = covered(facts[: step + 1], history)
                    for each in formula(found, watched, known):
                        verdict.add(*each, max(way.tolerance, OWN.get(name, 0.0)))
    return verdicts


def trained(names: Sequence[str], ways: Sequence[str]) -> Iterator[tuple[str, str, History]]:
    """Histories by network and way; those on two processes come last, all together."""
    together = [way for way in ways if WAYS[way].processes > 1]
    for name in names:
        for way in ways:
            if way not in together:
                yield name, way, train(NETWORKS[name], WAYS[way])
    with TemporaryDirectory() as folder:
        if together:
            run_processes(worker, 2, free_port(), Path(folder), names, together)
        for name in names:
            for way in together:
                yield name, way, History.load(file_of(Path(folder), name, way))


def file_of(folder: Path, name: str, way: str) -> Path:
    return folder / f"{[*NETWORKS].index(name)} {way}.jsonl"


def cell(verdicts: Sequence[Verdict]) -> str:
    """In how many networks a quantity is right; in how many it has no value, or a wrong one."""
    wrong, right = sum(bool(v.wrong) for v in verdicts), sum(bool(v.right) for v in verdicts)
    nothing = sum(not v.right and not v.wrong for v in verdicts)
    parts = {"": right - sum(bool(v.right and v.wrong) for v in verdicts), " NaN": nothing}
    parts[" wrong"] = wrong
    return ", ".join(f"{count}{word}" for word, count in parts.items() if count)


def main() -> None:
    """Print a line for each quantity of each network, and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--write", action="store_true", help=f"write {OUT.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [n for n in NETWORKS if not options.words or any(w in n for w in options.words)]
    ways = options.way or [*WAYS]
    found = {name: {way: list[Verdict]() for way in ways} for name in FORMULAS}
    for name, way, history in trained(names, ways):
        facts = reference(NETWORKS[name].network, WAYS[way])
        for quantity, verdict in judged(NETWORKS[name], WAYS[way], history, facts).items():
            found[quantity][way].append(verdict)
            print(name, way, quantity, verdict, sep=": ", flush=True)
    rows = [["quantity", *ways]]
    rows += [[name, *(cell(each[way]) for way in ways)] for name, each in found.items()]
    for row in rows:
        print(*(f"{entry:36}" for entry in row))
    if options.write:
        with OUT.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
