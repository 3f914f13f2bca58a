"""Networks of the zoo, which tests have in common with ``python -m benchmarks.zoo``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from benchmarks.zoo import by_hand, generated
from benchmarks.zoo.network import Network
from benchmarks.zoo.transformers_families import Family

BY_HAND: dict[str, Network] = {network.name: network for network in by_hand.networks()}
GENERATED: dict[str, Network] = {network.name: network for network in generated.networks()}

IN_PARTS = "sampled softmax", "codebook", "mixed agents", "inner steps", "episodes", "trees"
IN_PARTS += "slope penalty", "continuous flow", "cached prompt of all", "attention over edges"
IN_PARTS += "3 crops, distilled", "4 crops, distilled", "gradient penalty", "forces of an energy"
IN_PARTS += "rollouts in one call", "rollouts step by step"
"""Networks that are refused where their parts are called one by one without a batch size."""

REFUSED = (
    *(f"{name}, called in parts" for name in IN_PARTS),
    *("list of sets", "list of sets, called in parts"),
    *("one large graph", "mixed graph", "labelled vertices*", "variable lengths*"),
    *("two towers*", "sampled softmax", "sampled softmax, called in parts, told N", "adjoint*"),
    *("attention over edges", "rollouts in one call", "rollouts step by step", "nested tensor*"),
    *("equilibrium with a hook*", "packed documents*", "fused head and loss*"),
    *("4 crops, distilled, called in parts, told N", "episodes, called in parts, told N"),
    *("transcription, T = N", "inner steps, called in parts, told N"),
)
"""Networks in which samples meet or can't be told apart, for some parameters at least."""


def is_refused(name: str) -> bool:
    """Whether some parameters of a network by hand have a reason instead of gradients."""
    return any(fnmatchcase(name, pattern) for pattern in REFUSED)


NAMES = {
    "CAUSAL_LM": ("GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM"),
    "MASKED_LM": ("BertForMaskedLM", "DebertaV2ForMaskedLM"),
    "SEQ_TO_SEQ_CAUSAL_LM": ("T5ForConditionalGeneration", "BartForConditionalGeneration"),
    "SEQUENCE_CLASSIFICATION": ("BertForSequenceClassification", "GPT2ForSequenceClassification"),
    "TOKEN_CLASSIFICATION": ("DistilBertForTokenClassification",),
    "MULTIPLE_CHOICE": ("RobertaForMultipleChoice",),
    "IMAGE_CLASSIFICATION": ("ViTForImageClassification", "ConvNextForImageClassification"),
    "AUDIO_CLASSIFICATION": ("Wav2Vec2ForSequenceClassification",),
}
FAMILIES = {
    f"{name}, T = {length}": Family(name, task, 4, length)
    for task, names in NAMES.items()
    for name in names
    for length in ((4, 6) if task == "CAUSAL_LM" else (6,))
}
"""Models of transformers with four samples, also with as many positions."""


def gpt2(**options: Any) -> nn.Module:
    """A language model of two layers and 11 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **without_dropout, bos_token_id=0, eos_token_id=0, **options)
    return GPT2LMHeadModel(config)
