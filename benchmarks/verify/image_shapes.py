"""Hugging Face configs of well-known models that read images, with all layers or the first few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.known_shapes import SHAPES

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
_GEMMA: dict[str, Any] = SHAPES["gemma-3-12b"] | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "image_token_id": 151655,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}

IMAGE_SHAPES: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "vision_feature_layer": -2,
        "text_config": SHAPES["llama-2-7b"] | {"vocab_size": 32064},
        "vision_config": _CLIP,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": _GEMMA,
        "vision_config": _SIGLIP,
    },
    "qwen2-vl-7b": _QWEN
    | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584},
    },
    "qwen2.5-vl-7b": _QWEN
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}


def with_layers(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A config.json whose language model has the first layers alone; None: all."""
    if layers is None:
        return dict(config)
    if "text_config" in config:
        return {**config, "text_config": with_layers(config["text_config"], layers)}
    return {**config, "num_hidden_layers": layers}


def with_tower_layers(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A config.json whose tower has the first layers alone; None: all. Where the output of an
    earlier layer than the last is projected, one more is there that is not computed."""
    if layers is None:
        return dict(config)
    tower = config["vision_config"]
    left_out = max(0, -1 - config.get("vision_feature_layer", -1))
    name = "depth" if "depth" in tower else "num_hidden_layers"
    return {**config, "vision_config": {**tower, name: layers + left_out}}
