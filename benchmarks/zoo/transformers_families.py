"""Every class of the transformers library's lists for classification and language, made small.

Losses are those that the models compute from labels. Texts are padded to different lengths, and
labels are given to some of the tokens, so that a sample's share of the loss changes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.zoo.network import Batch, Network, NotBuiltError, labelled, some_of
from benchmarks.zoo.tiny_configs import WORDS, tiny

CLASSES = 3
LARGEST = 3_000_000

UNPADDED = "Longformer|LED|Canine"
"""Models whose gradients aren't finite where short texts are padded, by themselves."""

ROUTED = (
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
    *("DeepseekV3ForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM"),
)
"""Mixtures of experts that are also run with their experts in one product, and grouped."""

TEXTS: dict[str, str] = {
    "CAUSAL_LM": "causal language",
    "MASKED_LM": "masked language",
    "SEQ_TO_SEQ_CAUSAL_LM": "translation",
    "SEQUENCE_CLASSIFICATION": "sequence classification",
    "TOKEN_CLASSIFICATION": "token classification",
    "QUESTION_ANSWERING": "question answering",
    "MULTIPLE_CHOICE": "multiple choice",
}
SIGNALS: dict[str, str] = {
    "IMAGE_CLASSIFICATION": "image classification",
    "AUDIO_CLASSIFICATION": "audio classification",
}
BY_TOKEN = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION")


@dataclass(frozen=True)
class Family:
    """One class of models for a task of ``TEXTS`` or ``SIGNALS``."""

    name: str
    task: str
    samples: int
    length: int
    experts: str = "eager"
    dtype: torch.dtype = torch.float64
    padded: bool = True
    attention: str | None = None
    """How transformers computes attention, where not as usual."""

    @cached_property
    def model_class(self) -> Any:
        """The class itself."""
        return getattr(library(), self.name)

    @cached_property
    def config(self) -> Any:
        """Its configuration, made small."""
        classes = 2 if self.task == "QUESTION_ANSWERING" else CLASSES
        more = {"is_decoder": True} if self.task == "CAUSAL_LM" else {}
        config = tiny(self.model_class.config_class, num_labels=classes, **more)
        config._experts_implementation = self.experts
        if self.attention is not None:
            config._attn_implementation = self.attention
        return config

    @cached_property
    def accepted(self) -> set[str]:
        """What its forward pass can be given."""
        return set(inspect.signature(self.model_class.forward).parameters)

    def build(self) -> nn.Module:
        """The model; ``NotBuiltError`` if it is large all the same."""
        with torch.device("meta"):
            size = sum(p.numel() for p in self.model_class(self.config).parameters())
        if size > LARGEST:
            raise NotBuiltError(f"too large: {size} parameters")
        return self.model_class(self.config)

    def batch(self) -> Batch:
        """New texts, images or sounds with labels."""
        batch = self._signals() if self.task in SIGNALS else self._texts()
        return {key: value for key, value in batch.items() if key in {*self.accepted, "labels"}}

    def _signals(self) -> Batch:
        labels = torch.randint(CLASSES, (self.samples,))
        name = self.model_class.main_input_name
        shape = _signal_shape(name, self.config)
        return {name: torch.randn(self.samples, *shape, dtype=torch.float64), "labels": labels}

    def _texts(self) -> Batch:
        n, t = self.samples, self.length
        lengths = torch.randint(3, t + 1, (n,))
        lengths[0] = t
        if not self.padded or re.match(UNPADDED, self.name):
            lengths[:] = t
        ids = torch.randint(4, WORDS - 1, (n, t))
        ids[torch.arange(n), lengths - 1] = 2
        mask = (torch.arange(t) < lengths[:, None]).long()
        ids = ids * mask
        labels = torch.randint(CLASSES, (n,))
        if self.task == "MULTIPLE_CHOICE":
            ids = torch.stack([ids, ids.roll(1, 0), ids.flip(0)], 1)
            mask = torch.stack([mask, mask.roll(1, 0), mask.flip(0)], 1)
        elif self.task in BY_TOKEN:
            words = CLASSES if self.task == "TOKEN_CLASSIFICATION" else WORDS
            labels = torch.randint(words, (n, t)) if self.task != "CAUSAL_LM" else ids
            labels = _first_ignored(some_of(labels.masked_fill(mask == 0, -100), 0.7))
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if "global_attention_mask" in self.accepted:
            batch["global_attention_mask"] = (torch.arange(t) == 0).long().expand(ids.shape)
        if self.name.startswith("Bros"):
            batch["bbox"] = torch.rand(n, t, 8, dtype=torch.float64)
        if self.task == "QUESTION_ANSWERING":
            ends = (torch.rand(2, n) * lengths).long()
            batch = {**batch, "start_positions": ends[0], "end_positions": ends[1]}
            del batch["labels"]
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's own, or the mean over tokens or samples of what it gives."""
        if "labels" in self.accepted or "start_positions" in self.accepted:
            return model(**batch).loss
        labels = batch["labels"]
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        if self.task == "CAUSAL_LM":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten())

    def units(self, batch: Batch) -> float:
        """How many labels the loss averages over."""
        return labelled(batch["labels"])

    def network(self) -> Network:
        """As the zoo wants it."""
        kind = f"transformers: {({**TEXTS, **SIGNALS})[self.task]}"
        name = f"{self.name}, T = N" if self.samples == self.length else self.name
        if self.experts != "eager":
            name = f"{name}, {self.experts}"
        units = self.units if self.task in BY_TOKEN else None
        return Network(
            name,
            kind,
            self.build,
            self.batch,
            self.loss,
            self.samples,
            units=units,
            dtype=self.dtype,
        )


def _first_ignored(labels: Tensor) -> Tensor:
    """No label for the first token, which language models that predict the next can't use."""
    labels[:, 0] = -100
    labels[0, 1] = labels[0, 1].clamp(min=1)
    return labels


def _signal_shape(name: str, config: Any) -> tuple[int, ...]:
    """The shape of one image or sound."""
    if name == "pixel_values" or (name == "inputs" and hasattr(config, "image_size")):
        size = getattr(getattr(config, "vision_config", config), "image_size", 64)
        size = size if isinstance(size, int) else size[0]
        return (getattr(config, "num_channels", 3), size, size)
    if name == "input_features":
        features = getattr(config, "feature_projection_input_dim", None)
        return (10, features) if features else (config.num_mel_bins, 128)
    if hasattr(config, "num_mel_bins"):
        return (config.max_length, config.num_mel_bins)
    return (1600,)


@cache
def library() -> Any:
    """The library; without torchvision, some of whose builds don't match torch's."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def families() -> Iterator[Family]:
    """Each class once for the first task that lists it, and with T = N where tokens count."""
    library()
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for task in (*TEXTS, *SIGNALS):
        listed = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        names = [
            n for value in listed.values() for n in ([value] if isinstance(value, str) else value)
        ]
        for name in dict.fromkeys(names):
            if name in seen:
                continue
            seen.add(name)
            yield Family(name, task, 4, 6)
            if task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
                yield Family(name, task, 4, 4)
    for name in ROUTED:
        yield Family(name, "CAUSAL_LM", 4, 6, "batched_mm")
        yield Family(name, "CAUSAL_LM", 4, 6, "grouped_mm", torch.float32)


def networks() -> list[Network]:
    """All of them, built when they are needed."""
    return [family.network() for family in families()]
