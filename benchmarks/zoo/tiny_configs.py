"""Configurations of the transformers library made small by the names of their entries."""

from __future__ import annotations

import re
from typing import Any

WORDS = 40

RULES: tuple[tuple[str, Any], ...] = (
    (r"type_vocab_size|.*vocab_sizes|vocab_offset|.*prompt.*|num_feat_extract_layers", None),
    (r".*vocab.*size.*|.*group_vocab", WORDS),
    (r"(.*_)?pad_(token_id|index|idx)", 0),
    (r"(.*_)?bos_(token_id|index)|.*decoder_start_token_id", 1),
    (r"(.*_)?eos_(token_id|index)", 2),
    (r"(cls|sep|mask|unk)_(token_id|index)", 3),
    (r".*_token_(id|index)", WORDS - 1),
    (r"n_mamba_heads|mamba_dt_rank", "mamba"),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups)", "kv"),
    (r"(.*_)?(n_heads?|num_heads|attention_heads|num_head|linear_num_value_heads)", 4),
    (r"linear_num_key_heads", 2),
    (r"num_.*attention_heads(_per_layer)?", 4),
    (r"qk_rope_head_dim", 4),
    (r"qk_head_dim", 12),
    (r"(.*_)?(head_dim|d_head|dim_head|d_kv|kv_channels|attention_head_size)|mamba_headdim", 8),
    (r"linear_(key|value)_head_dim|attention_head_dim|qk_nope_head_dim|v_head_dim", 8),
    (r"(kv|q|o)_lora_rank|.*_rank", 8),
    (r"(.*_)?conv_dim|tdnn_dim", 8),
    (r"(hidden|embed|embedding|stage_out|stage_in|stage_mid)_(sizes?|dims?|channels)", 32),
    (r"d_model|n_embd|dim|emb_dim|embed_dims?|hidden_dims?|.*hidden_sizes?|embedding_size", 32),
    (r".*_embed_dim|word_embed_proj_dim|.*embedding_size|lru_width|entity_emb_size", 32),
    (r"(pooler_output|projection|prediction_head|d_latents|output_hidden).*", 32),
    (r"(.*_)?projection_dim|(.*_)?proj_(size|dim)|feature_projection_input_dim", 32),
    (r".*intermediate_size.*|.*ffn_(hidden_size|dim)|d_ff|dff|dim_ff|d_inner|n_inner", 48),
    (r".*feed_forward_size|mlp_dim|dense_dim|decoder_hidden_size|.*ffn_dim", 48),
    (r"num_sparse_.*_layers|num_dense_layers|first_k_dense_replace", 1),
    (r"(decoder|encoder)_sparse_step|moe_layer_(interval|start_index)", 1),
    (r"moe_layer_end_index|moe_layer_freq", 1),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_adapter_layers", 0),
    (r"(.*_)?(num_hidden_layers|n_layers?|num_layers|layers)|num_blocks", 2),
    (r"num_.*_layers(_per_stack)?|num_self_attends_per_block", 2),
    (r".*(num_(local_|routed_)?experts|n_routed_experts|zero_expert_num)", 4),
    (r".*shared_experts", 1),
    (r".*num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group|num_limited_groups", 1),
    (r"(attn|expert)_layer_period", 2),
    (r"(attn|expert)_layer_offset", 1),
    (r"rotary_dim", 4),
    (r"(mamba_)?d_state|mamba_d_state|state_size|ssm_state_size", 4),
    (r"mamba_d_ssm", 64),
    (r"(mamba_)?dt_rank|time_step_rank|mamba_dt_rank", 4),
    (r"(mamba_)?n_groups|mamba_ngroups", 1),
    (r".*sliding_window(_size)?|local_attention|attention_window(_size)?", 4),
    (r"(decoder_|encoder_)?max_position_embeddings|n_positions|n_ctx|max_seq_len", 64),
    (r".*max_.*position_embeddings|max_(source|target)_positions|model_max_length", 64),
    (r"image_size", 16),
    (r"patch_size", 4),
    (r"num_mel_bins", 16),
    (r"max_length", 24),
    (r"(.*_)?depths?|num_block_repeats|stage_num_blocks|stage_numb_of_layers|layer_depths", 1),
    (r"num_(conv_pos_embedding|output|input)?_?groups|num_groups", 2),
    (r"num_conv_pos_embeddings", 4),
    (r"num_latents|num_query_tokens|num_landmarks|num_hash_buckets", 8),
    (r"(image|text)_.*hidden_size", 32),
    (r"mem_len", 0),
)
"""Regular expressions of names and what their integers become; the first that matches counts.

Where an entry is a list, each of its numbers does. ``None`` leaves it as it is, and ``"kv"`` gives
as many heads for keys as for queries, or half of them, by which the default does.
"""

STARTED = {"decoder_start_token_id": 0}
HYBRID = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
WINDOWS = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2}
AXIAL = {
    "axial_pos_embds_dim": [16, 16],
    "axial_pos_shape": [2, 3],
    "attn_layers": ["local", "lsh"],
}
CHUNKED = {"lsh_attn_chunk_length": 2, "local_attn_chunk_length": 2}
LAYOUT = {"coordinate_size": 5, "shape_size": 6, "max_2d_position_embeddings": 1024}
STAGED = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}

SPECIAL: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "BitConfig": {"layer_type": "preactivation", **STAGED, "num_groups": 2},
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "ConvNextConfig": {"image_size": 32},
    "ConvNextV2Config": {"image_size": 32},
    "CvtConfig": {"embed_dim": (8, 16, 32), "num_heads": (1, 2, 4), "depth": (3, 3, 3)},
    "DeepseekV2Config": EXPERTS,
    "DonutSwinConfig": WINDOWS,
    "Dots1Config": EXPERTS,
    "EfficientNetConfig": {
        "width_coefficient": 0.1,
        "depth_coefficient": 0.1,
        "image_size": 64,
        "hidden_dim": 128,
    },
    "DbrxConfig": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "EsmConfig": {"vocab_size": WORDS, "pad_token_id": 0, "mask_token_id": 3},
    "FocalNetConfig": {"embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1]},
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_kv_shared_layers": 0,
    },
    "HGNetV2Config": {
        "stem_channels": (3, 4, 8),
        "stage_in_channels": (8, 16, 16, 16),
        "stage_mid_channels": (4, 4, 4, 4),
        "stage_out_channels": (16, 16, 16, 16),
        "hidden_sizes": [16, 16, 16, 16],
    },
    "HieraConfig": {
        "embed_dim": 8,
        "image_size": (32, 32),
        "patch_size": (7, 7),
        "depths": (1, 1),
        "num_heads": (1, 2),
        "num_query_pool": 1,
        "masked_unit_size": (2, 2),
        "masked_unit_attention": (True, False),
    },
    "LagunaConfig": {"num_attention_heads_per_layer": [4, 4]},
    "LayoutLMv3Config": LAYOUT,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LevitConfig": {
        "image_size": 32,
        "patch_size": 16,
        "hidden_sizes": (16, 24, 32),
        "num_attention_heads": (2, 3, 4),
    },
    "LiltConfig": {"hidden_size": 48},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "LongT5Config": STARTED,
    "Mamba2Config": {"num_heads": 8},
    "Mistral4Config": {"head_dim": 8},
    "NeoMMEConfig": {"head_dim": 16},
    "MobileBertConfig": {"true_hidden_size": 16, "intra_bottleneck_size": 16, "embedding_size": 16},
    "MobileNetV1Config": {"depth_multiplier": 0.1},
    "MobileNetV2Config": {"depth_multiplier": 0.1, "finegrained_output": False},
    "MobileViTV2Config": {"width_multiplier": 0.1, "patch_size": 2, "image_size": 64},
    "NystromformerConfig": {
        "num_landmarks": 64,
        "segment_means_seq_len": 64,
        "conv_kernel_size": 3,
    },
    "PerceiverConfig": {"max_position_embeddings": 6, "qk_channels": 32, "v_channels": 32},
    "PvtConfig": {"image_size": 32, "hidden_sizes": (8, 16, 16, 32), "patch_sizes": (4, 2, 2, 2)},
    "PvtV2Config": {"image_size": 64, "hidden_sizes": (8, 16, 16, 32)},
    "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
    "ReformerConfig": {**AXIAL, **CHUNKED},
    "RegNetConfig": {**STAGED, "groups_width": 4, "layer_type": "y"},
    "SiglipVisionConfig": {"image_size": 16, "patch_size": 4},
    "Siglip2VisionConfig": {"num_patches": 16},
    "SwinConfig": WINDOWS,
    "SwitchTransformersConfig": STARTED,
    "Swinv2Config": {**WINDOWS, "pretrained_window_sizes": [0, 0]},
    "T5Config": STARTED,
    "TextNetConfig": {"hidden_sizes": [8, 8, 8, 8, 8], "stem_out_channels": 8},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {**HYBRID, "attention_hidden_size": 64, "attention_head_dim": 16},
    "Zamba2Config": {
        **HYBRID,
        "num_attention_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"mode": "train", "num_heads": 4, "chunk_size": 2},
}
"""What else a configuration class needs to be small, and to have parts that fit together."""


def tiny(config_class: type, **more: Any) -> Any:
    """An instance of the class, with small numbers, and kinds of layers each once."""
    default = config_class()
    options = {
        **_small(default),
        **_kinds(default),
        **SPECIAL.get(config_class.__name__, {}),
        **more,
    }
    return config_class(**options)


def _small(config: Any) -> dict[str, Any]:
    """Overrides by name; configurations inside of the configuration are made small, too."""
    from transformers import PretrainedConfig

    found: dict[str, Any] = {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            found[name] = tiny(type(value))
        elif isinstance(value, float) and re.search(r"drop|mask_(time|feature)_prob", name):
            found[name] = 0.0
        elif name in ("output_router_logits", "add_router_probs"):
            found[name] = False
        else:
            new = _number(name, value, values)
            if new is not None:
                found[name] = new
    return found


def _number(name: str, value: Any, values: dict[str, Any]) -> Any:
    """What an entry becomes; ``None`` if it stays."""
    rule = next((new for pattern, new in RULES if re.fullmatch(pattern, name)), None)
    if rule is None or isinstance(value, (bool, str, dict)):
        return None
    if rule == "kv":
        queries = [values.get(key) for key in ("num_attention_heads", "n_heads", "n_head")]
        return 4 if value in queries else 2
    if rule == "mamba":
        return None if name == "n_mamba_heads" else 4
    if name == "intermediate_size" and "expand" in values:
        return 64
    if name == "head_dim" and "qk_rope_head_dim" in values:
        return 4
    if isinstance(value, (list, tuple)):
        numbers = value and all(isinstance(entry, int) for entry in value)
        return type(value)(rule for _ in value) if numbers else None
    return rule if isinstance(value, int) or _is_size(name, value) else None


def _is_size(name: str, value: Any) -> bool:
    """Whether an entry without a number is one that would be derived from large ones."""
    return value is None and bool(re.fullmatch(r".*_token_id|.*intermediate_size|head_dim", name))


def _kinds(config: Any) -> dict[str, Any]:
    """As many layers as there are kinds of them, at least two."""
    name = type(config).attribute_map.get("layer_types", "layer_types")
    kinds = vars(config).get(name)
    if not isinstance(kinds, (list, tuple)) or not kinds:
        return {}
    different = list(dict.fromkeys(kinds))
    layers = different if len(different) > 1 else [different[0]] * 2
    return {name: layers, "num_hidden_layers": len(layers)}
