"""Models of the diffusers library with small configurations.

Needs diffusers; ``networks`` raises ``ImportError`` without it. Its other models are named as not
built, since each needs a configuration and inputs of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.network import Batch, Network, NotBuiltError

SAMPLES = 4
WORDS = 5


@dataclass(frozen=True)
class Recipe:
    """How to build a model, and the shapes of its inputs for one sample.

    An input without a shape, ``()``, is a number for each sample, as the time is. ``shared`` inputs
    are the same for all samples.
    """

    options: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    shared: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


SIZES: dict[str, Any] = {
    **dict.fromkeys(("in_channels", "out_channels", "latent_channels", "norm_num_groups"), 4),
    **dict.fromkeys(("sample_size", "attention_head_dim", "time_proj_dim", "freq_dim"), 8),
    **dict.fromkeys(("vq_embed_dim", "cond_embed_dim", "hidden_size", "rope_max_seq_len"), 16),
    **dict.fromkeys(("cross_attention_dim", "caption_channels", "joint_attention_dim"), 16),
    **dict.fromkeys(("caption_projection_dim", "encoder_hidden_size", "text_dim", "ffn_dim"), 16),
    **dict.fromkeys(("text_embed_dim", "cross_attention_input_dim"), 16),
    **dict.fromkeys(("num_layers", "num_attention_heads", "patch_size", "video_length"), 2),
    **dict.fromkeys(("num_cross_attention_heads", "block_num_heads"), 2),
    **dict.fromkeys(("num_key_value_attention_heads",), 2),
    **dict.fromkeys(("layers_per_block", "num_single_layers", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_mmdit_layers", "num_single_dit_layers"), 1),
    **dict.fromkeys(("pooled_projection_dim", "num_vq_embeddings", "codebook_size"), 12),
    "block_out_channels": (8, 16),
    "num_embeds_ada_norm": 10,
    "pos_embed_max_size": 64,
    "cross_attention_head_dim": 8,
    "global_states_input_dim": 8,
    "vocab_size": 16,
}
"""What most models are told, by name."""


def sized(names: str, **others: Any) -> dict[str, Any]:
    """Small numbers for these names, and what else a model is told."""
    return {name: SIZES[name] for name in names.split()} | others


def blocks(*names: str) -> dict[str, tuple[str, ...]]:
    """Of a UNet, from the finest to the coarsest; those on the way up are in the other order."""
    turned = tuple(name.replace("Down", "Up") for name in reversed(names))
    return {"down_block_types": names, "up_block_types": turned}


IMAGE, TEXT = (4, 8, 8), (WORDS, 16)
OF_UNETS = "sample_size in_channels out_channels layers_per_block norm_num_groups"
OF_PATCHES = "sample_size in_channels patch_size num_attention_heads attention_head_dim"
OF_CODES = "block_out_channels latent_channels norm_num_groups"
CODED = {"in_channels": 3, "out_channels": 3, **blocks(*("DownEncoderBlock2D",) * 2)}
CODED["up_block_types"] = ("UpDecoderBlock2D",) * 2
TIMED = {"hidden_states": IMAGE, "timestep": ()}
LABELLED, READING = {**TIMED, "class_labels": ()}, {**TIMED, "encoder_hidden_states": TEXT}

RECIPES: dict[str, Recipe] = {
    "UNet1DModel": Recipe(
        sized("", sample_size=64, block_out_channels=(32, 32, 64), in_channels=2, out_channels=2)
        | {"extra_in_channels": 64},
        {"sample": (2, 64), "timestep": ()},
    ),
    "UNet2DModel": Recipe(
        sized(f"{OF_UNETS} block_out_channels", attention_head_dim=4)
        | blocks("DownBlock2D", "AttnDownBlock2D"),
        {"sample": IMAGE, "timestep": ()},
    ),
    "UNet2DConditionModel": Recipe(
        sized(f"{OF_UNETS} block_out_channels cross_attention_dim", attention_head_dim=4)
        | blocks("DownBlock2D", "CrossAttnDownBlock2D"),
        {"sample": IMAGE, "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "UNet3DConditionModel": Recipe(
        sized(f"{OF_UNETS} block_out_channels cross_attention_dim", attention_head_dim=4)
        | blocks("CrossAttnDownBlock3D", "DownBlock3D"),
        {"sample": (4, 3, 8, 8), "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "UVit2DModel": Recipe(
        sized("hidden_size cond_embed_dim encoder_hidden_size vocab_size codebook_size")
        | sized("num_hidden_layers num_attention_heads block_num_heads", block_out_channels=16)
        | {"micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20, "intermediate_size": 32}
        | {"in_channels": 16},
        {"input_ids": (4, 4), "encoder_hidden_states": TEXT}
        | {"pooled_text_emb": (16,), "micro_conds": (5,)},
    ),
    "AutoencoderKL": Recipe(sized(OF_CODES, **CODED), {"sample": (3, 16, 16)}),
    "AutoencoderTiny": Recipe(
        dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8))
        | dict.fromkeys(("num_encoder_blocks", "num_decoder_blocks"), (1, 1)),
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderOobleck": Recipe(
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "channel_multiples": [1, 2]}
        | {"decoder_channels": 8, "decoder_input_channels": 4, "audio_channels": 2},
        {"sample": (2, 32)},
    ),
    "AutoencoderKLTemporalDecoder": Recipe(
        sized("latent_channels", in_channels=3, out_channels=3, block_out_channels=(32, 32))
        | {"down_block_types": ("DownEncoderBlock2D",) * 2},
        {"sample": (3, 16, 16)},
        {"num_frames": lambda: torch.tensor(1)},
    ),
    "VQModel": Recipe(
        sized(f"{OF_CODES} num_vq_embeddings", vq_embed_dim=4, norm_type="group", **CODED),
        {"sample": (3, 16, 16)},
    ),
    "Transformer2DModel": Recipe(
        sized(f"{OF_PATCHES} num_layers num_embeds_ada_norm", norm_type="ada_norm_zero"), LABELLED
    ),
    "DiTTransformer2DModel": Recipe(
        sized(f"{OF_PATCHES} num_layers out_channels num_embeds_ada_norm"), LABELLED
    ),
    "PixArtTransformer2DModel": Recipe(
        sized(f"{OF_PATCHES} num_layers cross_attention_dim caption_channels", out_channels=8)
        | {"use_additional_conditions": False},
        READING,
    ),
    "SD3Transformer2DModel": Recipe(
        sized(f"{OF_PATCHES} num_layers out_channels joint_attention_dim caption_projection_dim")
        | sized("pooled_projection_dim", pos_embed_max_size=8),
        {**READING, "pooled_projections": (12,)},
    ),
    "AuraFlowTransformer2DModel": Recipe(
        sized(f"{OF_PATCHES} out_channels num_mmdit_layers num_single_dit_layers")
        | sized("joint_attention_dim caption_projection_dim pos_embed_max_size"),
        READING,
    ),
    "FluxTransformer2DModel": Recipe(
        sized("in_channels num_single_layers attention_head_dim num_attention_heads")
        | sized("joint_attention_dim pooled_projection_dim", patch_size=1, num_layers=1)
        | {"axes_dims_rope": (2, 2, 4)},
        {**READING, "hidden_states": (6, 4), "pooled_projections": (12,)},
        {
            "img_ids": lambda: torch.arange(18).view(6, 3).double(),
            "txt_ids": lambda: torch.zeros(WORDS, 3, dtype=torch.float64),
        },
    ),
    "SanaTransformer2DModel": Recipe(
        sized(f"{OF_PATCHES} num_layers out_channels num_cross_attention_heads")
        | sized("cross_attention_head_dim cross_attention_dim caption_channels", patch_size=1),
        READING,
    ),
    "LatteTransformer3DModel": Recipe(
        sized(f"{OF_PATCHES} num_layers out_channels cross_attention_dim caption_channels")
        | sized("num_embeds_ada_norm video_length", norm_type="ada_norm_single"),
        {**READING, "hidden_states": (4, 2, 8, 8)},
    ),
    "LTXVideoTransformer3DModel": Recipe(
        sized("in_channels out_channels num_attention_heads attention_head_dim", num_layers=1)
        | sized("cross_attention_dim caption_channels"),
        {**READING, "hidden_states": (8, 4), "encoder_attention_mask": (WORDS,)},
        dict.fromkeys(("num_frames", "height", "width"), lambda: torch.tensor(2)),
    ),
    "WanTransformer3DModel": Recipe(
        sized("num_attention_heads in_channels out_channels text_dim freq_dim ffn_dim num_layers")
        | sized("rope_max_seq_len", patch_size=(1, 2, 2), attention_head_dim=12),
        {**READING, "hidden_states": (4, 2, 4, 4)},
    ),
    "CogVideoXTransformer3DModel": Recipe(
        sized("num_attention_heads attention_head_dim in_channels out_channels text_embed_dim")
        | sized("patch_size", num_layers=1, time_embed_dim=4, temporal_compression_ratio=4)
        | {"sample_width": 4, "sample_height": 4, "sample_frames": 5}
        | {"max_text_seq_length": WORDS},
        {**READING, "hidden_states": (2, 4, 4, 4)},
    ),
    "StableAudioDiTModel": Recipe(
        sized("in_channels out_channels num_layers num_key_value_attention_heads", sample_size=4)
        | sized("num_attention_heads time_proj_dim global_states_input_dim", attention_head_dim=4)
        | sized("cross_attention_input_dim", cross_attention_dim=4),
        {**READING, "hidden_states": (4, 8), "global_hidden_states": (1, 8)},
    ),
}

INTEGERS = ("class_labels", "input_ids", "timestep")
MASKS = ("encoder_attention_mask",)


def build(name: str) -> nn.Module:
    """The model; ``NotBuiltError`` if there is no recipe."""
    import diffusers

    if name not in RECIPES:
        raise NotBuiltError("no small configuration is known here")
    return getattr(diffusers, name)(**RECIPES[name].options)


def batch_of(name: str) -> Batch:
    """Random inputs."""
    recipe = RECIPES[name]
    shared = {key: make() for key, make in recipe.shared.items()}
    own = {key: _random(key, (SAMPLES, *shape)) for key, shape in recipe.inputs.items()}
    return {**own, **shared}


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    if name in INTEGERS:
        return torch.randint(10, shape)
    if name in MASKS:
        return torch.ones(shape, dtype=torch.float64)
    return torch.randn(shape, dtype=torch.float64)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """How far the outputs are from ones, since some models' are zero at first."""
    plain = {k: int(v) if v.ndim == 0 else v for k, v in batch.items()}
    output = model(**plain)
    if not isinstance(output, Tensor):
        output = output[0]
    return (output - 1).square().mean()


def networks() -> list[Network]:
    """Those with a recipe, and all others by name."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    endings = ("2DModel", "3DModel", "1DModel", "DiTModel", "ConditionModel", "VQModel")
    names = [n for n in dir(diffusers) if n.endswith(endings) or n.startswith("Autoencoder")]
    names += [name for name in RECIPES if name not in names]
    return [_network(name) for name in sorted(names)]


def _network(name: str) -> Network:
    recipe = RECIPES.get(name, Recipe({}, {}))
    axes = dict.fromkeys(recipe.shared)
    return Network(
        name, "diffusers", partial(build, name), partial(batch_of, name), loss, SAMPLES, axes
    )
