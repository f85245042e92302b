"""Hugging Face configs of well-known models, by the names that benchmarks and plans take.

A plan for one of them needs neither a folder nor the hub.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, length: int
) -> dict[str, Any]:
    return _LLAMA | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }


# a billion parameters a token, three billion in all
_SPARSE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-125m": _shape(12, 768, 2048, 12, 4, 32000, 2048),
    "llama-1b": _shape(22, 2048, 5632, 32, 4, 32000, 2048),
    "llama-2-7b": _shape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-3-8b": _shape(32, 4096, 14336, 32, 8, 128256, 8192) | {"rope_theta": 500000.0},
    "llama-3-70b": _shape(80, 8192, 28672, 64, 8, 128256, 8192) | {"rope_theta": 500000.0},
    "llama-3-405b": _shape(126, 16384, 53248, 128, 8, 128256, 131072) | {"rope_theta": 500000.0},
    "mixtral-8x7b": _shape(32, 4096, 14336, 32, 8, 32000, 32768)
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    "qwen3-30b-a3b": _shape(48, 2048, 6144, 32, 4, 151936, 40960)
    | _SPARSE
    | {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "rope_theta": 1e6,
    },
    # its text model
    "gemma-3-12b": _shape(48, 3840, 15360, 16, 8, 262208, 131072)
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "qwen3-moe-3b": _shape(20, 2048, 5632, 16, 4, 32000, 4096) | _SPARSE,
}

# ids on the hub of models that have one of these shapes
HUB_IDS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama-3-70b",
    "meta-llama/Llama-3.1-405B": "llama-3-405b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama-3-405b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
}


def shape_of(name: str) -> dict[str, Any] | None:
    """The config.json of a model that is known by name, or by its id on the hub; else None."""
    return SHAPES.get(HUB_IDS.get(name, name))
