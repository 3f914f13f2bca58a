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


IMAGE = (4, 8, 8)
TEXT = (WORDS, 16)
UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
CROSS = {
    **UNET,
    "block_out_channels": (8, 16),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
PATCHED = {
    "sample_size": 8,
    "in_channels": 4,
    "patch_size": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
}
CODED = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
}

RECIPES: dict[str, Recipe] = {
    "UNet1DModel": Recipe(
        {
            "sample_size": 64,
            "block_out_channels": (32, 32, 64),
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 64,
        },
        {"sample": (2, 64), "timestep": ()},
    ),
    "UNet2DModel": Recipe(
        {
            **UNET,
            "block_out_channels": (8, 16),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        {"sample": IMAGE, "timestep": ()},
    ),
    "UNet2DConditionModel": Recipe(
        {
            **CROSS,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": IMAGE, "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "UNet3DConditionModel": Recipe(
        {
            **CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {"sample": (4, 3, 8, 8), "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "UVit2DModel": Recipe(
        {
            "hidden_size": 16,
            "cond_embed_dim": 16,
            "encoder_hidden_size": 16,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "vocab_size": 16,
            "codebook_size": 12,
            "block_out_channels": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "block_num_heads": 2,
            "intermediate_size": 32,
            "in_channels": 16,
        },
        {
            "input_ids": (4, 4),
            "encoder_hidden_states": TEXT,
            "pooled_text_emb": (16,),
            "micro_conds": (5,),
        },
    ),
    "AutoencoderKL": Recipe(CODED, {"sample": (3, 16, 16)}),
    "AutoencoderTiny": Recipe(
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderOobleck": Recipe(
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 2],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "audio_channels": 2,
        },
        {"sample": (2, 32)},
    ),
    "AutoencoderKLTemporalDecoder": Recipe(
        {
            key: value
            for key, value in CODED.items()
            if key not in ("up_block_types", "norm_num_groups")
        }
        | {"block_out_channels": (32, 32)},
        {"sample": (3, 16, 16)},
        {"num_frames": lambda: torch.tensor(1)},
    ),
    "VQModel": Recipe(
        {**CODED, "num_vq_embeddings": 12, "vq_embed_dim": 4, "norm_type": "group"},
        {"sample": (3, 16, 16)},
    ),
    "Transformer2DModel": Recipe(
        {**PATCHED, "num_embeds_ada_norm": 10, "norm_type": "ada_norm_zero"},
        {"hidden_states": IMAGE, "timestep": (), "class_labels": ()},
    ),
    "DiTTransformer2DModel": Recipe(
        {**PATCHED, "out_channels": 4, "num_embeds_ada_norm": 10},
        {"hidden_states": IMAGE, "timestep": (), "class_labels": ()},
    ),
    "PixArtTransformer2DModel": Recipe(
        {
            **PATCHED,
            "out_channels": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        {"hidden_states": IMAGE, "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "SD3Transformer2DModel": Recipe(
        {
            **PATCHED,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 12,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        },
        {
            "hidden_states": IMAGE,
            "timestep": (),
            "encoder_hidden_states": TEXT,
            "pooled_projections": (12,),
        },
    ),
    "AuraFlowTransformer2DModel": Recipe(
        {
            **{key: value for key, value in PATCHED.items() if key != "num_layers"},
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        {"hidden_states": IMAGE, "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "FluxTransformer2DModel": Recipe(
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 12,
            "axes_dims_rope": (2, 2, 4),
        },
        {
            "hidden_states": (6, 4),
            "timestep": (),
            "encoder_hidden_states": TEXT,
            "pooled_projections": (12,),
        },
        {
            "img_ids": lambda: torch.arange(18).view(6, 3).double(),
            "txt_ids": lambda: torch.zeros(WORDS, 3, dtype=torch.float64),
        },
    ),
    "SanaTransformer2DModel": Recipe(
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 1,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
        },
        {"hidden_states": IMAGE, "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "LatteTransformer3DModel": Recipe(
        {
            **PATCHED,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "num_embeds_ada_norm": 10,
            "video_length": 2,
            "norm_type": "ada_norm_single",
        },
        {"hidden_states": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "LTXVideoTransformer3DModel": Recipe(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
        },
        {
            "hidden_states": (8, 4),
            "timestep": (),
            "encoder_hidden_states": TEXT,
            "encoder_attention_mask": (WORDS,),
        },
        {
            "num_frames": lambda: torch.tensor(2),
            "height": lambda: torch.tensor(2),
            "width": lambda: torch.tensor(2),
        },
    ),
    "WanTransformer3DModel": Recipe(
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 8,
            "ffn_dim": 16,
            "num_layers": 2,
            "rope_max_seq_len": 16,
        },
        {"hidden_states": (4, 2, 4, 4), "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "CogVideoXTransformer3DModel": Recipe(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 16,
            "num_layers": 1,
            "sample_width": 4,
            "sample_height": 4,
            "sample_frames": 5,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": WORDS,
        },
        {"hidden_states": (2, 4, 4, 4), "timestep": (), "encoder_hidden_states": TEXT},
    ),
    "StableAudioDiTModel": Recipe(
        {
            "sample_size": 4,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 4,
            "num_key_value_attention_heads": 2,
            "num_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 4,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 16,
        },
        {
            "hidden_states": (4, 8),
            "timestep": (),
            "encoder_hidden_states": TEXT,
            "global_hidden_states": (1, 8),
        },
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
