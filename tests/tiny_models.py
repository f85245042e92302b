"""Tiny random models in Hugging Face format, one for every family and option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VOCAB_SIZE = 199
LONG = 64  # tokens of context before rope scaling in the cases that scale

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# of Gemma 3: images of 36 pixels, 12 x 12 patches, 3 x 3 places
_IMAGES = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 36,
        "patch_size": 3,
    },
    "mm_tokens_per_image": 9,
    "image_token_index": VOCAB_SIZE - 1,
    "boi_token_index": VOCAB_SIZE - 2,
    "eoi_token_index": VOCAB_SIZE - 3,
}

# of LLaVA: images of 28 pixels, 4 x 4 patches
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}

# of LLaVA-NeXT: 2 to 4 tiles of it
_PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]}

# of Qwen2-VL and Qwen2.5-VL: patches of 4 pixels, squares of 2 x 2, windows of 2 x 2 squares
_QWEN_TOWER = {
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.15,
}
_QWEN_TOWERS = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64},
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "phi3",
    "gemma2",
    "gemma3",
    "gemma3_images",
    "llava",
    "llava_next",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_moe",
    "mixtral",
)


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}


def _longrope(pairs: int, **values: Any) -> dict[str, Any]:
    short = [1.0 + 0.1 * i for i in range(pairs)]
    return _rope("longrope", short_factor=short, long_factor=[3 * x for x in short], **values)


# name -> (family, overrides of the Hugging Face config)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_gqa": ("llama", {}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_head_dim": ("llama", {"head_dim": 32}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "llama_gelu_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama_relu": ("llama", {"hidden_act": "relu"}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama_rope_linear": ("llama", _rope("linear", factor=4.0)),
    "llama_rope_dynamic": (
        "llama",
        _rope("dynamic", factor=2.0) | {"max_position_embeddings": LONG},
    ),
    "llama_rope_llama3": (
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=LONG,
        ),
    ),
    "llama_rope_yarn": (
        "llama",
        _rope("yarn", factor=8.0, original_max_position_embeddings=LONG),
    ),
    "llama_rope_yarn_mscale": (
        "llama",
        _rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=LONG,
            mscale=1.0,
            mscale_all_dim=0.5,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "llama_rope_yarn_attention_factor": (
        "llama",
        _rope("yarn", factor=8.0, original_max_position_embeddings=LONG, attention_factor=0.8),
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 17}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "qwen2_yarn": ("qwen2", _rope("yarn", factor=4.0, original_max_position_embeddings=LONG)),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_tied_biases": (
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_window": (
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2_biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 17}),
    "phi3_longrope": (
        "phi3",
        _longrope(8) | {"pad_token_id": 0, "original_max_position_embeddings": LONG},
    ),
    "phi4_mini": (
        "phi3",
        _longrope(6, partial_rotary_factor=0.75)
        | {
            "pad_token_id": 0,
            "original_max_position_embeddings": LONG,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 17,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 17,
            # transformers heeds the second of these alone
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_unnormalized": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen3_moe_window": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 17}),
    "gemma3_images": (
        "gemma3_images",
        {
            "head_dim": 16,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_biases": ("gemma3", {"attention_bias": True, "head_dim": 8, "sliding_window": 5}),
}

# those that read images, whose tests are their own
IMAGE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {}),
    "llava_full": (
        "llava",
        {"vision_feature_select_strategy": "full", "vision_feature_layer": [-1, 0, -2]},
    ),
    "llava_mistral": ("llava", {"model_type": "mistral", "sliding_window": 17}),
    "llava_next": ("llava_next", {}),
    "qwen2_vl": ("qwen2_vl", _rope("default", mrope_section=[2, 3, 3])),
    "qwen2_5_vl": ("qwen2_5_vl", _rope("default", mrope_section=[4, 1, 3])),
}


def _llava_config(kind: Any, more: dict[str, Any], given: dict[str, Any]) -> Any:
    """A LLaVA's config: what is not of LLaVA's own is of the language model."""
    own = {name: given.pop(name) for name in [*given] if name.startswith("vision_feature")}
    text = {"model_type": "llama", **given}
    own |= more | {"image_token_index": VOCAB_SIZE - 1}
    return kind(vision_config=_CLIP, text_config=text, **own)


def _qwen_config(kind: Any, tower: str, text: dict[str, Any]) -> Any:
    """A config of Qwen2-VL or Qwen2.5-VL."""
    vision = _QWEN_TOWER | _QWEN_TOWERS[tower]
    return kind(vision_config=vision, text_config=text, image_token_id=VOCAB_SIZE - 1)


def make_hf_model(
    folder: str | Path,
    family: str,
    *,
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
    seed: int = 0,
    classifies: bool = False,
    **overrides: Any,
) -> Path:
    """Saves a random model as config.json and safetensors, and returns its folder.

    Norms and biases are random too and the weights are large, so that a wrong option is visible
    in the logits and greedy tokens have a clear margin.

    Args:
        folder: where to; made when absent.
        family: one of `FAMILIES`.
        dtype: of the saved weights.
        max_shard_size: "200KB", for example, gives several files and an index.
        seed: of the weights.
        classifies: with a head of labels in the place of the lm head.
        overrides: fields of the Hugging Face config over the defaults of this file.
    """
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        Gemma2Config,
        Gemma2ForCausalLM,
        Gemma3Config,
        Gemma3ForCausalLM,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        MistralConfig,
        MistralForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Olmo2Config,
        Olmo2ForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    classes: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
        "olmo2": (Olmo2Config, Olmo2ForCausalLM),
        "phi3": (Phi3Config, Phi3ForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
        "gemma3_images": (
            lambda **text: Gemma3Config(text_config=text, **_IMAGES),
            Gemma3ForConditionalGeneration,
        ),
        "llava": (
            lambda **text: _llava_config(LlavaConfig, {}, text),
            LlavaForConditionalGeneration,
        ),
        "llava_next": (
            lambda **text: _llava_config(LlavaNextConfig, _PINPOINTS, text),
            LlavaNextForConditionalGeneration,
        ),
        "qwen2_vl": (
            lambda **text: _qwen_config(Qwen2VLConfig, family, text),
            Qwen2VLForConditionalGeneration,
        ),
        "qwen2_5_vl": (
            lambda **text: _qwen_config(Qwen2_5_VLConfig, family, text),
            Qwen2_5_VLForConditionalGeneration,
        ),
    }
    config_class, model_class = classes[family]
    if classifies:
        model_class = AutoModelForSequenceClassification.from_config
    torch.manual_seed(seed)
    model = model_class(config_class(**(_BASE | overrides)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1.0 + 0.3 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
            elif re.search("multi_modal_projector.(linear|mm_input)", name):
                weight.copy_(0.2 * torch.randn_like(weight))
    model = model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size, safe_serialization=True)
    if family == "gemma3_images":
        save_whole_processor(Path(folder), _IMAGES["vision_config"]["image_size"])
    elif family == "llava":
        save_image_processor(Path(folder), _CLIP["image_size"])
    elif family == "llava_next":
        save_tile_processor(Path(folder), _CLIP["image_size"])
    elif family in _QWEN_TOWERS:
        save_patch_processor(Path(folder))
    return Path(folder)


def save_image_processor(folder: Path, side: int) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    square = {"height": side, "width": side}
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square).save_pretrained(folder)


def save_tile_processor(folder: Path, side: int) -> None:
    """Of images that are cut into tiles."""
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    square = {"height": side, "width": side}
    made = LlavaNextImageProcessorPil(size={"shortest_edge": side}, crop_size=square, **_PINPOINTS)
    made.save_pretrained(folder)


def save_whole_processor(folder: Path, side: int) -> None:
    """Of images that are made squares whatever their shape."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    Gemma3ImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)


def save_patch_processor(folder: Path) -> None:
    """Of images of 4 to 24 squares of 8 x 8 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 4 * 64, "longest_edge": 24 * 64}
    Qwen2VLImageProcessorPil(size=size, patch_size=4).save_pretrained(folder)


def make_case(folder: str | Path, case: str, **overrides: Any) -> Path:
    """Saves the model of one of `CASES` or `IMAGE_CASES`; see `make_hf_model`."""
    family, options = (CASES | IMAGE_CASES)[case]
    return make_hf_model(folder, family, **(options | overrides))
