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
from dataclasses import dataclass, field
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradlens
from benchmarks.problems import Residual, transformers_library
from gradlens import quantities as q
from gradlens.history.history import History
from gradlens.history.undefined import Undefined
from gradlens.signals import is_normalization
from gradlens.signals.predicates import computes_attention
from gradlens.torch_private import LossModule
from tests.cases.processes import free_port, join_group, run_processes

OUT = Path(__file__).parents[1] / "docs" / "watching.csv"

Batch: TypeAlias = dict[str, Tensor]
Values: TypeAlias = dict[str, Tensor]

SAMPLES, LENGTH, WORDS, WIDTH, STEPS = 8, 6, 11, 8, 2

# Networks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """How to build a network, its data, and its losses ``[N]``; ``norms`` are its normalisations.

    ``head`` is the layer whose outputs are logits.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]
    norms: Any = is_normalization
    head: str = ""


def words(*names: str, **more: int) -> Batch:
    found = {name: torch.randint(3, WORDS, (SAMPLES, LENGTH)) for name in names}
    return found | {name: torch.randint(classes, (SAMPLES,)) for name, classes in more.items()}


def of_transformers(name: str, attention: str = "sdpa", **options: Any) -> nn.Module:
    library = transformers_library()
    model_class = getattr(library, name)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = model_class.config_class(**ends, **options)
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    model: nn.Module = model_class(config)
    return model


def of_words(model: nn.Module, batch: Batch) -> Tensor:
    """Of the next word, for each text."""
    logits = _logits(model(input_ids=batch["x"]))
    return cross_entropy(logits[:, :-1].mT, batch["x"][:, 1:], reduction="none").mean(1)


def of_labels(model: nn.Module, batch: Batch) -> Tensor:
    logits = _logits(model(batch["x"]))
    return cross_entropy(logits, batch["y"], reduction="none")


def of_masked(model: nn.Module, batch: Batch) -> Tensor:
    """Of texts that are padded to different lengths."""
    mask = torch.arange(LENGTH) < batch["lengths"][:, None] + 3
    logits = model(input_ids=batch["x"], attention_mask=mask.long()).logits
    return cross_entropy(logits.mT, batch["y"], reduction="none").mean(1)


def of_pairs(model: nn.Module, batch: Batch) -> Tensor:
    """Of the words of another text."""
    logits = _logits(model(batch["x"], decoder_input_ids=batch["y"]))
    return cross_entropy(logits[:, :-1].mT, batch["y"][:, 1:], reduction="none").mean(1)


def of_noise(model: nn.Module, batch: Batch) -> Tensor:
    """Of the noise that images are mixed with."""
    share = (batch["t"] + 1)[:, None, None, None] / 10
    mixed = (1 - share).sqrt() * batch["x"] + share.sqrt() * batch["noise"]
    found: Tensor = model(mixed, batch["t"], batch["text"]) - batch["noise"]
    return found.square().mean((1, 2, 3))


def _logits(output: Any) -> Tensor:
    found: Tensor = getattr(output, "logits", output)
    return found


class Recurrent(nn.Module):
    """A language model of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.lstm, self.head = (
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[N, T]``."""
        found: Tensor = self.head(self.norm(self.lstm(self.embedding(input_ids))[0]))
        return found


class Translation(nn.Module):
    """torch's encoder and decoder, with causal masks and cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        sizes = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, **sizes)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """``[N, T]`` each."""
        source, target = self.embedding(x), self.embedding(decoder_input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=source.dtype)
        found: Tensor = self.head(self.transformer(source, target, tgt_mask=mask))
        return found


class Attention(nn.Module):
    """Of pixels to each other, or to a text."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(context, 2 * width)

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        """``[N, C, H, W]``, and ``[N, T, D]``."""
        pixels = self.norm(x).flatten(2).mT
        keys, values = self.key_value(pixels if text is None else text).chunk(2, -1)
        heads = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in
                 (self.query(pixels), keys, values))  # fmt: skip
        found = nn.functional.scaled_dot_product_attention(*heads)
        return x + self.out(found.transpose(1, 2).flatten(2)).mT.reshape(x.shape)


class Block(nn.Module):
    """A residual block that gets a time."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time, self.second = nn.Linear(4, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``[N, C, H, W]``, and ``[N, D]``."""
        inner = self.first(nn.functional.silu(self.norm(x))) + self.time(time)[..., None, None]
        found: Tensor = self.second(nn.functional.silu(inner)) + self.shortcut(x)
        return found


class UNet(nn.Module):
    """Of diffusion: down, attention in the middle, and up with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.texts = nn.Embedding(9, 4), nn.Embedding(WORDS, 4)
        self.inside, self.down = nn.Conv2d(2, 4, 3, padding=1), Block(4, 4)
        self.halve, self.middle = nn.Conv2d(4, 4, 3, 2, 1), Block(4, 4)
        self.own, self.cross = Attention(4, 4), Attention(4, 4)
        self.enlarge, self.up = nn.ConvTranspose2d(4, 4, 2, 2), Block(8, 4)
        self.outside = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """``[N, 2, H, W]``, ``[N]``, and ``[N, T]``."""
        time = self.times(t)
        first = self.down(self.inside(x), time)
        small = self.own(self.middle(self.halve(first), time))
        large = self.enlarge(self.cross(small, self.texts(text)))
        found: Tensor = self.outside(self.up(torch.cat([large, first], 1), time))
        return found


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Residual(4, 6)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def images() -> Batch:
    return {"x": torch.randn(SAMPLES, 2, 4, 4), "y": torch.randint(3, (SAMPLES,))}


def noisy() -> Batch:
    return images() | words("text", t=9) | {"noise": torch.randn(SAMPLES, 2, 4, 4)}


LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": WORDS, "n_positions": 8, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
BERT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {**BERT, "image_size": 4, "patch_size": 2, "num_channels": 2, "num_labels": 3}
T5 = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
of, texts = partial, partial(words, "x")
NETWORKS: Mapping[str, Network] = {
    "GPT-2": Network(
        of(of_transformers, "GPT2LMHeadModel", **GPT2, **NO_DROPOUT),
        *(texts, of_words, ("*ln_*",), "lm_head"),
    ),
    "Llama, grouped queries": Network(
        of(of_transformers, "LlamaForCausalLM", **LLAMA), texts, of_words, ("*norm",), "lm_head"
    ),
    "Mixtral": Network(
        of(of_transformers, "MixtralForCausalLM", **LLAMA, **MIXTRAL),
        *(texts, of_words, ("*norm",), "lm_head"),
    ),
    "Mistral, sliding window": Network(
        of(of_transformers, "MistralForCausalLM", **LLAMA, sliding_window=3),
        *(texts, of_words, ("*norm",), "lm_head"),
    ),
    "ViT": Network(
        of(of_transformers, "ViTForImageClassification", **VIT),
        *(images, of_labels, is_normalization, "classifier"),
    ),
    "BERT, padded": Network(
        of(of_transformers, "BertForMaskedLM", "eager", **BERT),
        *(of(words, "x", "y", lengths=4), of_masked, is_normalization, "cls.predictions.decoder"),
    ),
    "T5": Network(
        of(of_transformers, "T5ForConditionalGeneration", **T5),
        *(of(words, "x", "y"), of_pairs, ("*layer_norm",), "lm_head"),
    ),
    "ResNet": Network(resnet, images, of_labels, is_normalization, "6"),
    "LSTM": Network(Recurrent, texts, of_words, is_normalization, "head"),
    "diffusion UNet": Network(UNet, noisy, of_noise, is_normalization, "outside"),
    "torch's Transformer": Network(
        Translation, of(words, "x", "y"), of_pairs, is_normalization, "head"
    ),
    "MLP": Network(
        mlp,
        lambda: {"x": torch.randn(SAMPLES, 5), "y": torch.randint(3, (SAMPLES,))},
        *(of_labels, is_normalization, "3"),
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


def tracked(network: Network, model: nn.Module) -> list[q.Quantity]:
    attends = any(map(computes_attention, model.modules()))
    attention = (q.AttentionLogits, q.AttentionEntropy) if attends else ()
    noise = partial(q.GradNoiseScale, between="samples")
    return [
        *(q.OptimizerState(), q.RelativeUpdate(), q.GradNorm(), q.ClippedGradNorm()),
        *(q.ActivationOutliers(), q.OutputEntropy(layers=network.head)),
        *(q.WeightSpectrum(), q.UpdateSpectrum(), q.Stability()),
        *(q.CriticalSharpness(), q.StepLedger()),
        *(kind(by_head=True) for kind in attention),
        q.GradNoiseScale(between="parts", name="GradNoiseScale between parts"),
        *(
            noise(name="GradNoiseScale"),
            noise(layers=network.norms, name="GradNoiseScale of norms"),
        ),
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
        return torch.stack([network.losses(model, part).mean() for part in parts]).mean()


def train(network: Network, way: Way, rank: int = 0) -> History:
    """The training that gradlens watches."""
    model: Any = build(network, way)
    if way.share:
        for each in reversed([*model.modules()]):
            for layer in each if isinstance(each, nn.ModuleList) else ():
                fully_shard(layer)
        fully_shard(model)
    elif way.processes > 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_of(model)
    cockpit = gradlens.Cockpit(model, tracked(network, model))
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
                    loss = network.losses(model, part).mean()
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


@dataclass
class Facts:
    """What is true of a step, in float64; ``parts`` and ``rows`` are gradients of mean losses."""

    start: Values
    parts: list[Values]
    rows: list[Values]
    gradients: Values = field(default_factory=dict)
    clipped: Values = field(default_factory=dict)
    end: Values = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    attention: dict[str, list[Scores]] = field(default_factory=dict)
    loss: Callable[[Values], Tensor] = field(default=lambda values: torch.zeros(()))
    """That of the whole batch, with other parameters."""
    of_part: Callable[[Values], Tensor] = field(default=lambda values: torch.zeros(()))
    """That of the last part of the first process, of which curvature is."""


def exact(tensors: Mapping[str, Tensor | None]) -> Values:
    return {n: t.detach().double().clone() for n, t in tensors.items() if t is not None}


def gradients_of(loss: Tensor, model: nn.Module) -> Values:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [*named.values()], allow_unused=True, retain_graph=True)
    return exact(dict(zip(named, found, strict=True)))


def reference(network: Network, way: Way) -> list[Facts]:
    """Each step of the same training, without processes."""
    model = build(network, way)
    optimizer, found = optimizer_of(model), list[Facts]()
    for step in range(STEPS):
        parts = data(network, way, step)
        facts = Facts(exact(dict(model.named_parameters())), [], [])
        optimizer.zero_grad()
        for part in parts:
            with seen(model, facts), way.autocast():
                losses = network.losses(model, part)
                loss = losses.mean()
            facts.parts.append(gradients_of(loss, model))
            coupled = any(isinstance(each, nn.BatchNorm2d) for each in model.modules())
            facts.rows += (
                by_row(network, model, part)
                if coupled
                else [gradients_of(each, model) for each in losses]
            )
            (loss / len(parts)).backward()
        named = dict(model.named_parameters())
        facts.gradients = exact({n: p.grad for n, p in named.items()})
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        facts.clipped = exact({n: p.grad for n, p in named.items()})
        facts.loss = partial(moved, copy.deepcopy(model), network, way, parts)
        facts.of_part = partial(facts.loss.func, *facts.loss.args[:3], [parts[way.parts - 1]])
        optimizer.step()
        facts.end = exact(named)
        found.append(facts)
    return found


def by_row(network: Network, model: nn.Module, part: Batch) -> list[Values]:
    """What passes through each sample's row of layers, where a normalisation couples samples."""
    model, calls = copy.deepcopy(model), dict[str, Any]()
    for name, module in model.named_modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_hook(
                lambda module, x, out, name=name: calls.update({name: (module, x[0], out)})
            )
    losses = network.losses(model, part)
    given = torch.autograd.grad(losses.mean(), [out for *_, out in calls.values()])
    found: list[Values] = [{} for _ in losses]
    for (name, (module, x, _)), gradient in zip(calls.items(), given, strict=True):
        own = dict(module.named_parameters(recurse=False))
        for n, row in enumerate(found):
            kept = torch.zeros_like(gradient)
            kept[n] = len(losses) * gradient[n]
            each = torch.autograd.grad(type(module).forward(module, x), [*own.values()], kept)
            row |= exact({f"{name}.{key}": g for key, g in zip(own, each, strict=True)})
    return found


def moved(model: nn.Module, network: Network, way: Way, parts: Any, values: Values) -> Tensor:
    """The loss with other parameters, which it is differentiable in."""
    model = copy.deepcopy(model)
    owners = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            owners[name].copy_(value)
    loss = whole_loss(model, network, way, parts)
    loss.of = owners  # type: ignore[attr-defined]
    return loss


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

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if "attention" in type(module).__name__.lower():
                enter = module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
                leave = module.register_forward_hook(lambda *_: inside.pop() and None)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            is_leaf = not [*module.children()] or isinstance(module, nn.MultiheadAttention)
            if is_leaf and not isinstance(module, LossModule):
                keep = partial(_keep, facts.outputs, name)
                stack.callback(module.register_forward_hook(keep).remove)
        patched = "torch.nn.functional.scaled_dot_product_attention"
        stack.enter_context(mock.patch(patched, attend))
        if getattr(getattr(model, "config", None), "_attn_implementation", "") == "eager":
            library = sys.modules[type(model).__module__]
            written_out = library.eager_attention_forward
            stack.enter_context(
                mock.patch.object(library, "eager_attention_forward", attend_eagerly)
            )
        yield


def _keep(found: dict[str, list[Tensor]], name: str, module: nn.Module, _: Any, out: Any) -> None:
    tensor = (out[0] if isinstance(out, tuple) else out).detach().double()
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.ConvTranspose2d, nn.GroupNorm)) or (
        tensor.dim() == 4
    ):
        tensor = tensor.movedim(1, -1)
    found.setdefault(name, []).append(tensor)


# Formulas ----------------------------------------------------------------------------------------

Pairs: TypeAlias = Iterator[tuple[Any, Any, float]]
"""Numbers that were found, those that are right, and a size of which rounding errors are."""
Formula: TypeAlias = Callable[[Any, Network, Sequence[Facts]], Pairs]
"""Of a record, and of the steps up to its own."""


def _entries(found: Any, expected: Mapping[str, Any], size: float = 0.0) -> Pairs:
    """Of a dict; if it is a NaN, each of its entries is."""
    for name, value in expected.items():
        yield found if isinstance(found, Undefined) else found[name], value, size


def optimizer_state(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    largest = max(float(g.abs().max()) for g in steps[-1].clipped.values())
    for name, record in found["parameters"].items():
        past = [each.clipped.get(name) for each in steps]
        gradients = [each for each in past if each is not None]
        if past[-1] is None:
            continue
        first, second = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
        for g in gradients:
            first = BETAS[0] * first + (1 - BETAS[0]) * g
            second = BETAS[1] * second + (1 - BETAS[1]) * g**2
        m = first / (1 - BETAS[0] ** len(gradients))
        v, g = second / (1 - BETAS[1] ** len(gradients)), gradients[-1]
        quotient = g / v.clamp(min=EPSILON**2).sqrt()
        yield from _entries(record, {"m": m.norm(), "root_v": v.sum().sqrt()}, 1e-12 * largest)
        if g.norm() > 1e-9 * largest:  # else it is rounding noise
            cosine = (m * g).sum() / m.norm() / g.norm()
            yield from _entries(record, {"rms": quotient.square().mean().sqrt(), "cosine": cosine})


def relative_update(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    for name, record in found["parameters"].items():
        start, end = steps[-1].start[name], steps[-1].end[name]
        length = (end - start).norm()
        yield from _entries(record, {"rms": length / start.numel() ** 0.5}, 1e-9)
        if not 0 < start.norm() < 1e-9:  # else it is rounding noise
            yield from _entries(record, {"value": length / start.norm() if start.any() else None})


def of_norms(found: Any, of: Values) -> Pairs:
    size = 1e-12 * max(float(each.norm()) for each in of.values())
    yield sorted(found) == sorted(of), True, 0.0
    for name, value in found.items():
        yield value, of[name].norm(), size


def outliers(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    yield {*found["layers"]} <= {*steps[-1].outputs}, True, 0.0
    for name, record in found["layers"].items():
        calls = [x.reshape(len(x), -1, x.shape[-1]) for x in steps[-1].outputs[name]]
        x = torch.cat([each.flatten() for each in calls])
        sizes = [float(each.abs().max()) for each in calls]
        call = calls[sizes.index(max(sizes))]
        place = int(call.abs().argmax())
        apart = x - x.mean()
        spread = apart.pow(2).mean()
        is_spread = spread.sqrt() > 1e-13 * max(sizes)
        kurtosis = apart.pow(4).mean() / spread**2 - 3 if is_spread else None
        yield from _entries(record, {"largest": max(sizes), "kurtosis": kurtosis}, 1e-6)
        if len({len(each) for each in calls}) == 1:
            places = {"channel": place % call.shape[2], "position": place // call.shape[2]}
            places["position"] %= call.shape[1]
            yield from _entries(record, places)


def output_entropy(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    z = torch.cat([x.reshape(-1, x.shape[-1]) for x in steps[-1].outputs[network.head]])
    p = torch.softmax(z, 1)
    counts = torch.bincount(z.argmax(1), minlength=z.shape[1])
    expected = {
        "entropy": -(p * p.log()).sum(1).mean(),
        "rms": z.square().mean().sqrt(),
        "largest": z.abs().max(),
        "top_share": counts.max() / len(z),
        "classes": z.shape[1],
    }
    yield from _entries(found["layers"][network.head], expected)


def _of_attention(
    found: Any, steps: Sequence[Facts], value: Callable[[Sequence[Scores]], Tensor]
) -> Pairs:
    yield sorted(found["layers"]) == sorted(steps[-1].attention), True, 0.0
    for name, record in found["layers"].items():
        if name in steps[-1].attention:
            expected = value(steps[-1].attention[name])
            if isinstance(record, Undefined):
                yield record, None, 0.0
            else:
                yield len(record), len(expected), 0.0
                yield from ((x, y, 1e-9) for x, y in zip(record, expected, strict=False))


def attention_logits(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    def largest(calls: Sequence[Scores]) -> Tensor:
        seen = [scores.masked_fill(weights == 0, -math.inf) for scores, weights in calls]
        return torch.stack([each.amax((0, 2, 3)) for each in seen]).amax(0)

    return _of_attention(found, steps, largest)


def attention_entropy(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    def entropy(calls: Sequence[Scores]) -> Tensor:
        each = [-(torch.xlogy(w, w)).sum(-1).transpose(0, 1).flatten(1) for _, w in calls]
        return torch.cat(each, 1).mean(1)

    return _of_attention(found, steps, entropy)


def spectrum(found: Any, matrices: Values) -> Pairs:
    for name, record in found["parameters"].items():
        values = torch.linalg.svdvals(matrices[name].flatten(1))
        if not values[0]:
            yield record, None, 0.0
        elif isinstance(record, Undefined):
            yield record, values[0], 0.0
        else:
            norm, residual = record["norm"], record["residual"]
            error = residual + 1e-7 * values[0]
            yield norm, values[(values - norm).abs().argmin()], float(error)
            yield norm, values[0], 0.01 * float(values[0])
            yield record["stable_rank"], (matrices[name].norm() / norm) ** 2, 0.0


def stability(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    """Of the step that comes, with the averages of the steps before."""
    facts, count = steps[-1], len(steps) - 1
    if not count:
        yield found if isinstance(found, Undefined) else found["ratio"], None, 0.0
        return
    second, sums = {n: torch.zeros_like(p) for n, p in facts.start.items()}, Counter[str]()
    for step in steps[:-1]:
        for name, g in step.clipped.items():
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g**2
            sums[name] += 1
    if min(sums[name] for name in second) < count:
        yield found if isinstance(found, Undefined) else found["ratio"], None, 0.0
        return
    scales = []
    for name, v in second.items():
        decay = DECAY if facts.start[name].dim() > 1 else 0.0
        root = (v / (1 - BETAS[1] ** count)).sqrt() + EPSILON
        limit = (2 - RATE * decay) * (1 + BETAS[0]) / (RATE * (1 - BETAS[0]))
        scales.append(torch.where(v > 0, 1 / (limit * root * (1 - BETAS[0] ** count)), 0.0).sqrt())
    ratio = largest_eigenvalue(facts, [*second], scales)
    yield found if isinstance(found, Undefined) else found["ratio"], ratio, 0.0


def largest_eigenvalue(facts: Facts, names: Sequence[str], scales: Sequence[Tensor]) -> float:
    """Of SHS; S has the roots of the inverse limits."""
    loss = facts.of_part(facts.start)
    leaves = [loss.of[name] for name in names]  # type: ignore[attr-defined]
    gradient = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    sizes = [each.numel() for each in leaves]

    def product(vector: np.ndarray) -> np.ndarray:
        parts = torch.from_numpy(vector.ravel()).split(sizes)
        scaled = [part.reshape(s.shape) * s for part, s in zip(parts, scales, strict=True)]
        pairs = [(g, d) for g, d in zip(gradient, scaled, strict=True) if g is not None]
        slope = torch.stack([(g * d).sum() for g, d in pairs]).sum()
        found = torch.autograd.grad(slope, leaves, retain_graph=True, allow_unused=True)
        rows = [
            torch.zeros_like(s) if h is None else h.double() * s
            for h, s in zip(found, scales, strict=True)
        ]
        return torch.cat([row.flatten() for row in rows]).numpy()

    size = sum(sizes)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    return float(eigsh(operator, 1, which="LA", v0=start, tol=1e-8)[0][0])


def critical_sharpness(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    """The loss is higher than at the start at 1/low, and not at 1/high or before it."""
    facts = steps[-1]
    if isinstance(found, Undefined) or isinstance(found["ratio"], Undefined):
        yield found if isinstance(found, Undefined) else found["ratio"], None, 0.0
        return
    step = {n: facts.end[n] - p for n, p in facts.start.items()}

    def rise(multiple: float) -> float:
        at = {n: p + multiple * step[n] for n, p in facts.start.items()}
        with torch.no_grad():
            return float(facts.loss(at)) - before

    with torch.no_grad():
        before = float(facts.loss(facts.start))
    high, low = 1 / found["low"], 1 / found["high"]
    yield rise(high) > 0, True, 0.0
    yield all(rise(share * low) <= 0 for share in (1.0, 0.75, 0.5, 0.25, 0.1)), True, 0.0
    yield found["low"] <= found["ratio"] <= found["high"], True, 0.0
    yield found["threshold"], 2 / RATE, 0.0
    yield found["sharpness"], found["ratio"] * 2 / RATE, 0.0


def step_ledger(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    facts = steps[-1]
    names = [*facts.start]
    loss = facts.loss(facts.start)
    step = [facts.end[n] - facts.start[n] for n in names]
    leaves = [loss.of[n] for n in names]  # type: ignore[attr-defined]
    gradient = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    pairs = [(g, d) for g, d in zip(gradient, step, strict=True) if g is not None]
    slope = torch.stack([(g * d).sum() for g, d in pairs]).sum()
    curved = torch.autograd.grad(slope, leaves, allow_unused=True)
    seconds = [
        0.0 if h is None else float((h * d).sum()) for h, d in zip(curved, step, strict=True)
    ]
    with torch.no_grad():
        change = float(facts.loss(facts.end)) - float(loss)
    terms = {"change": change, "first": float(slope), "second": sum(seconds) / 2}
    terms["rest"] = change - terms["first"] - terms["second"]
    yield from _entries(found, terms, abs(change))
    if isinstance(found, Undefined):
        return
    layers = {n: n.rpartition(".")[0] for n in names}
    for layer, record in found["layers"].items():
        own = [n for n, of in enumerate(layers.values()) if of == layer]
        first = sum(
            0.0 if gradient[n] is None else float((gradient[n] * step[n]).sum()) for n in own
        )
        second = sum(seconds[n] for n in own) / 2
        yield from _entries(record, {"first": first, "second": second}, abs(change))


def between_parts(found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    parts, number = steps[-1].parts, SAMPLES // len(steps[-1].parts)
    if len(parts) == 1:
        yield found, None, 0.0
        return
    flat = _rows(parts, [*steps[-1].start])
    small, big = (flat**2).sum(1).mean(), (flat.mean(0) ** 2).sum()
    trace = (small - big) / (1 / number - 1 / SAMPLES)
    squared = big - trace / SAMPLES
    yield from _ratio(found, trace, squared, small)


def _rows(gradients: Sequence[Values], names: Sequence[str]) -> np.ndarray:
    """``[N, D]``; parameters without a gradient have zeros."""
    shapes = {n: g.shape for each in gradients for n, g in each.items()}
    rows = [
        np.concatenate(
            [each.get(n, torch.zeros(shapes[n])).numpy().ravel() for n in names if n in shapes]
        )
        for each in gradients
    ]
    return np.stack(rows)


def between_samples(found: Any, steps: Sequence[Facts], names: Sequence[str]) -> Pairs:
    flat = _rows(steps[-1].rows, names)
    mean = flat.mean(0)
    trace = ((flat - mean) ** 2).sum() / (len(flat) - 1)
    squared = (mean**2).sum() - trace / len(flat)
    yield from _ratio(found, trace, squared, (flat**2).sum(1).mean())


def _ratio(found: Any, trace: float, squared: float, size: float) -> Pairs:
    """Of a noise scale, whose error is that of the squared norm over what is left of it."""
    yield from _entries(found, {"trace": trace, "squared_norm": squared}, size)
    value = trace / squared if squared > 0 else None
    yield from _entries(found, {"value": value}, size / abs(squared) * (value or 0.0))


def in_other_norms(norm: str, found: Any, network: Network, steps: Sequence[Facts]) -> Pairs:
    """The bounds of both, the value between them, and the lower end of the interval."""
    sums = np.zeros((4, SAMPLES))
    for name, start in steps[-1].start.items():
        if any(name in each for each in steps[-1].rows) and (norm == "l1" or start.dim() > 1):
            zero = torch.zeros_like(start)
            rows = np.stack([each.get(name, zero).numpy() for each in steps[-1].rows])
            sums += bounds(rows if norm == "l1" else rows.reshape(SAMPLES, len(rows[0]), -1), norm)
    least, most, less, more = sums.mean(1)
    errors = sums.std(1, ddof=1) / math.sqrt(SAMPLES)
    t = float(stdtrit(SAMPLES - 1, 0.975))  # half of the error for each of the two bounds
    expected = {"low": (max(less - t * errors[2], 0) / (most + t * errors[1])) ** 2}
    apart = least <= 0 or (more / least * most / less) ** 2 > 4
    expected["value"] = None if apart else less * more / (least * most)
    yield from _entries(found, expected)


def bounds(g: np.ndarray, norm: str) -> np.ndarray:
    """Of ‖G‖ and of the noise, from below and from above, for each sample ``[4, N]``."""

    def direction(matrix: np.ndarray) -> np.ndarray:
        if norm == "l1":
            return np.sign(matrix)
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return np.asarray((left * (values > 1e-12 * values[0])) @ right)

    n, mean = len(g), g.mean(0)
    axes = tuple(range(1, g.ndim))
    halves = g[: n // 2], g[n // 2 :]
    ways = [direction(half.mean(0)) for half in halves]
    least = np.concatenate([(halves[0] * ways[1]).sum(axes), (halves[1] * ways[0]).sum(axes)])
    most = (g * direction(mean)).sum(axes)
    if norm == "l1":
        without = [np.delete(g, i, 0).std(0, ddof=1).sum() for i in range(n)]
        noise = n * g.std(0, ddof=1).sum() - (n - 1) * np.array(without)
        return np.stack([least, most, noise, noise])
    apart = g - mean
    if apart.shape[1] > apart.shape[2]:
        apart = apart.swapaxes(1, 2)
    own = apart @ apart.swapaxes(1, 2) * n / (n - 1)  # the covariance is their mean
    values, vectors = np.linalg.eigh(own.mean(0))
    roots = np.sqrt(values.clip(0))
    inverse = np.where(values > 1e-13 * values[-1], 1 / np.where(roots > 0, roots, 1), 0)
    turned = np.einsum("ik,nij,jk->nk", vectors, own, vectors)
    less = roots.sum() / 2 + turned @ inverse / 2
    more = np.sqrt(len(values) * values.sum()) / 2 * (1 + turned.sum(1) / (values.sum() or 1))
    return np.stack([least, most, less, more])


FORMULAS: Mapping[str, Formula] = {
    "OptimizerState": optimizer_state,
    "RelativeUpdate": relative_update,
    "GradNorm": lambda found, _, steps: of_norms(found, steps[-1].gradients),
    "ClippedGradNorm": lambda found, _, steps: of_norms(found, steps[-1].clipped),
    "ActivationOutliers": outliers,
    "OutputEntropy": output_entropy,
    "AttentionLogits": attention_logits,
    "AttentionEntropy": attention_entropy,
    "WeightSpectrum": lambda found, _, steps: spectrum(found, steps[-1].start),
    "UpdateSpectrum": lambda found, _, steps: spectrum(
        found, {n: steps[-1].end[n] - p for n, p in steps[-1].start.items()}
    ),
    "Stability": stability,
    "CriticalSharpness": critical_sharpness,
    "StepLedger": step_ledger,
    "GradNoiseScale between parts": between_parts,
    "GradNoiseScale": lambda found, _, steps: between_samples(found, steps, [*steps[-1].start]),
    "GradNoiseScale of norms": lambda found, network, steps: between_samples(
        found, steps, normalising(network)
    ),
    "GradNoiseScale in l1": partial(in_other_norms, "l1"),
    "GradNoiseScale in the nuclear norm": partial(in_other_norms, "nuclear"),
}


def normalising(network: Network) -> list[str]:
    model = network.build()
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if re.search("norm|ln_", name) or is_normalization(module)
        for own, _ in module.named_parameters(recurse=False)
    ]


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


def judged(
    network: Network, way: Way, history: History, facts: Sequence[Facts]
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
                    for each in formula(found, network, facts[: step + 1]):
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
        facts = reference(NETWORKS[name], WAYS[way])
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
