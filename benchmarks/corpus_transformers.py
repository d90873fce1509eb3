# Builds tiny, randomly initialised transformers models and inputs that fit them.
#
# A configuration class is shrunk by field name (`hidden_size`, `num_hidden_layers`, ...), recursively through its
# sub-configurations; `OVERRIDES` holds what a name cannot tell. Inputs are made from the signature of `forward`.
"""Tiny transformers models from shrunk configurations."""

from __future__ import annotations

import inspect
from typing import Any

import torch

VOCAB = 128

# fmt: off
# Field name -> small value. Only fields that a configuration really has are passed on.
SMALL: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32, "embedding_size": 32,
    "encoder_hidden_size": 32, "decoder_hidden_size": 32, "projection_dim": 32, "hidden_dim": 32, "width": 32,
    "model_dim": 32, "word_embed_proj_dim": 32, "text_embed_dim": 32, "output_dim": 32, "proj_dim": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "depth": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "decoder_num_hidden_layers": 2,
    "encoder_num_hidden_layers": 2, "num_blocks": 2, "decoder_num_layers": 2, "num_temporal_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_head_dim": 8,
    "num_kv_heads": 2, "kv_channels": 8, "decoder_num_attention_heads": 4, "encoder_num_attention_heads": 4,
    "intermediate_size": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_ff": 64, "d_kv": 8,
    "ffn_hidden_size": 64, "n_inner": 64, "mlp_dim": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "feed_forward_size": 64,
    "vocab_size": VOCAB, "type_vocab_size": 2, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128,
    "max_source_positions": 128, "max_target_positions": 128, "max_seq_len": 128, "vocab_size_per_layer_input": VOCAB,
    "image_size": 32, "patch_size": 8, "num_channels": 3, "num_frames": 4, "tubelet_size": [2, 8, 8],
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_k": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_topk": 2, "num_expert": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "sliding_window": 16, "attention_window": 8, "num_labels": 5,
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "time_step_rank": 4, "chunk_size": 8, "conv_kernel": 4, "n_mamba_heads": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_mel_bins": 16, "num_queries": 6, "num_query_tokens": 4, "hidden_size_per_layer_input": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2,
    "cls_token_id": 1, "mask_token_id": 3, "unk_token_id": 3, "forced_eos_token_id": None,
    "image_token_id": VOCAB - 2, "image_token_index": VOCAB - 2, "video_token_id": VOCAB - 3,
    "audio_token_id": VOCAB - 4,
    "vision_start_token_id": VOCAB - 5, "vision_end_token_id": VOCAB - 6, "vision_token_id": VOCAB - 7,
    "rope_scaling": None, "use_timm_backbone": False, "use_pretrained_backbone": False,
}

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_SWIN = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "image_size": 64, "patch_size": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "deepseek_v2": {"num_key_value_heads": 4}, "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4}, "convnext": {"image_size": 64}, "convnextv2": {"image_size": 64},
    "efficientnet": {"image_size": 64, "hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0},
    "mobilevitv2": {"image_size": 64, "patch_size": 2}, "levit": {"image_size": 224, "patch_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 8}, "qwen3_5_text": {"full_attention_interval": 2},
    "qwen2_vl_text": {"rope_parameters": _MROPE}, "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "swinv2": _SWIN, "swin": _SWIN, "donut-swin": _SWIN, "maskformer-swin": _SWIN,
}
# fmt: on


def shrink(config_class: type, overrides: dict[str, Any] | None = None) -> Any:
    """Return an instance of `config_class` with small numbers in every field that `SMALL` knows."""
    return config_class(**_shrunk_fields(config_class, overrides or {}))


def _shrunk_fields(config_class: type, overrides: dict[str, Any]) -> dict[str, Any]:
    default = config_class()
    fields = default.to_dict()
    known = {name for name, value in fields.items() if not isinstance(value, (list, dict))}
    out = {name: value for name, value in SMALL.items() if name in known}
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        current = getattr(default, name, None)
        if current is None:
            continue
        sub = type(current) if sub_class.__name__ == "AutoConfig" else sub_class
        child = {k[len(name) + 2 :]: v for k, v in overrides.items() if k.startswith(name + "__")}
        out[name] = _shrunk_fields(sub, child)
        out[name].setdefault("model_type", sub.model_type)
    out.update({k: v for k, v in overrides.items() if "__" not in k})
    return out


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    for holder in (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return default


def _ids(batch: int, length: int) -> Any:
    return torch.randint(4, VOCAB - 8, (batch, length))


def _image_size(config: Any) -> tuple[int, int]:
    size = _first(config, ("image_size", "input_size", "img_size"), 64)
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def make_inputs(kind: str, model: Any, batch: int, length: int) -> dict[str, Any]:
    """Keyword arguments for one call; `kind` joins the words below by `+`."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    out: dict[str, Any] = {}
    for part in kind.split("+"):
        if part == "text":
            out["input_ids"] = _ids(batch, length)
        elif part == "mask":  # what a tokenizer makes: the second shape pads its last row
            out["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
            if batch > 1:
                out["attention_mask"][-1, length - 3 :] = 0
        elif part == "decoder":
            out["decoder_input_ids"] = _ids(batch, length - 3)
        elif part == "image":
            height, width = _image_size(config)
            channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
            out["pixel_values"] = torch.randn(batch, channels, height, width)
        elif part == "video":
            height, width = _image_size(config)
            frames = _first(config, ("num_frames", "frames_per_clip"), 4)
            name = "pixel_values_videos" if "pixel_values_videos" in parameters else "pixel_values"
            out[name] = torch.randn(batch, frames, 3, height, width)
        elif part == "wave":
            out["input_values"] = torch.randn(batch, 1600 + 160 * length)
        elif part == "wave1":
            out["input_values"] = torch.randn(batch, 1, 1600 + 160 * length)
        elif part == "mel":  # (batch, bins, frames), whisper's layout
            bins = _first(config, ("num_mel_bins", "feature_size", "n_mels"), 80)
            frames = 2 * _first(config, ("max_source_positions",), 32)
            out["input_features"] = torch.randn(batch, bins, frames)
        elif part == "frames":  # (batch, frames, features)
            names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim")
            bins = _first(config, names, 80)
            out["input_features"] = torch.randn(batch, 4 * length, bins)
        elif part == "imagetokens":  # replaces the head of the text by as many image tokens as the model wants
            if _first(config, ("image_token_id", "image_token_index"), None) is None:
                raise ValueError("the model has no image token")
            features = model.get_image_features(pixel_values=out["pixel_values"])
            features = getattr(features, "pooler_output", features)
            parts = features if isinstance(features, (list, tuple)) else [features]
            count = sum(part.flatten(0, -2).shape[0] for part in parts)
            each, token = count // batch, _first(config, ("image_token_id", "image_token_index"), 0)
            ids = torch.cat([torch.full((batch, each), token), out["input_ids"]], 1)
            out.update(input_ids=ids)
    unknown = [name for name in out if name not in parameters]
    if unknown:
        raise ValueError(f"forward has no {unknown}")
    return out


def is_known(model_type: str, class_name: str | None = None) -> bool:
    """Whether the installed transformers has this model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return model_type in CONFIG_MAPPING and (
        model_type in MODEL_MAPPING_NAMES if class_name is None else hasattr(transformers, class_name)
    )


def build(model_type: str, class_name: str | None = None) -> Any:
    """The tiny model in eval mode, weights from the caller's seed."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    config = shrink(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type))
    name = class_name or MODEL_MAPPING_NAMES[model_type]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    return model_class(config).eval()
