"""Each method of the peft library on a small Llama and on a small BERT.

Needs peft beside transformers; ``networks`` raises ``ImportError`` without it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.network import Batch, Network, NotBuiltError
from benchmarks.zoo.transformers_families import Family, library

BASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "CAUSAL_LM": (
        Family("LlamaForCausalLM", "CAUSAL_LM", 4, 6),
        {"target_modules": ["q_proj", "v_proj"], "feedforward_modules": []},
    ),
    "SEQ_CLS": (
        Family("BertForSequenceClassification", "SEQUENCE_CLASSIFICATION", 4, 6),
        {"target_modules": ["query", "value"], "feedforward_modules": []},
    ),
}
"""Networks to adapt, and which of their layers, by peft's name of the task."""

OPTIONS: dict[str, Any] = {
    "r": 2,
    "num_virtual_tokens": 3,
    "encoder_hidden_size": 8,
    "adapter_len": 3,
    "adapter_layers": 2,
    "total_step": 10,
    "tinit": 1,
    "tfinal": 2,
    "boft_block_size": 4,
    "oft_block_size": 0,
    "oft_r": 4,
    "n_frequency": 10,
    "num_vectors": 8,
    "vector_length": 4,
    "block_size": 4,
    "token_indices": [4, 5, 6, 7],
    "n_tasks": 2,
    "num_tasks": 2,
    "group_size": 8,
    "projection_prng_key": 0,
}
"""Small numbers for what a method can be told, by name."""

SPECIAL: dict[str, dict[str, Any]] = {
    "ADALORA": {"orth_reg_weight": 0.0},  # the weight of a penalty, which is no sample's
    "BOFT": {"boft_block_num": 0},
    "CPT": {"cpt_token_ids": [4, 5, 6], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "ADAPTION_PROMPT": {"target_modules": "self_attn"},
    "LN_TUNING": {"target_modules": ["LayerNorm", "input_layernorm"]},
    "TRAINABLE_TOKENS": {"target_modules": None},
    "LOKR": {"r": 4},
}
"""What else a method needs, by its name."""

OF_TASKS = ("MULTITASK_PROMPT_TUNING", "POLY")
"""Methods for which each sample has the number of a task."""


def networks() -> list[Network]:
    """Each method with each base."""
    library()
    from peft import PeftType

    return [adapted(kind.value, task) for task in BASES for kind in PeftType]


def adapted(method: str, task: str) -> Network:
    """One base with one method."""
    family, _ = BASES[task]
    network = family.network()
    return Network(
        f"{method} on {family.name}",
        "peft",
        partial(build, method, task),
        partial(batch_of, network, method in OF_TASKS),
        network.loss,
        network.samples,
        units=network.units,
    )


def batch_of(base: Network, tasks: bool) -> Batch:
    """The base's, with the number of a task for each sample if ``tasks``."""
    batch = base.batch()
    if tasks:
        batch["task_ids"] = torch.randint(2, (base.samples,))
    return batch


def build(method: str, task: str) -> nn.Module:
    """The base with its method's parameters; ``NotBuiltError`` if it isn't one that can be had."""
    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    family, own = BASES[task]
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(PeftType(method))
    if config_class is None:
        raise NotBuiltError("peft has no configuration of this method")
    fields = config_class.__dataclass_fields__
    options = {**OPTIONS, **own, **SPECIAL.get(method, {})}
    known = {name: value for name, value in options.items() if name in fields}
    return get_peft_model(family.build(), config_class(task_type=task, **known))
