"""The config.json that a GGUF file's metadata stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf.file import GGUFFile
from checkpoints.gguf.names import ROPE_FREQUENCIES, SPARSE

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
MIXTRAL = "MixtralForCausalLM"  # "llama" with experts
# of "llama3" rope scaling, of which GGUF stores the divisors of the frequencies alone
LLAMA3_FACTORS = (8.0, 32.0, 2.0, 4.0, 16.0)
LLAMA3_LENGTHS = (8192,)


def hf_architecture(metadata: Mapping[str, Any]) -> str | None:
    """Hugging Face's name of a file's architecture; None: it is not known."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES.get(str(name))


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The fields of Hugging Face's config.json.

    Raises:
        CheckpointError: an architecture or an option that is not read, or a key that is missing.
    """
    metadata, path = file.metadata, file.path
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        allowed = f"one of {', '.join(ARCHITECTURES)}"
        problem = f"general.architecture={architecture!r} is not supported: {allowed}"
        raise CheckpointError(path, problem)

    def need(key: str, kind: type | tuple[type, ...] = int) -> Any:
        value = metadata.get(f"{architecture}.{key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            problem = f"{architecture}.{key}={value!r}: a number is needed"
            raise CheckpointError(path, problem)
        return value

    def maybe(key: str, default: Any) -> Any:
        found = metadata.get(f"{architecture}.{key}")
        return default if found is None else found

    named = hf_architecture(metadata)
    count = maybe("expert_count", 0)
    if count and named not in SPARSE:
        problem = f"{architecture}.expert_count={count}: experts are read of llama and qwen3moe"
        raise CheckpointError(path, problem)
    experts = _experts(file, architecture, need) if count else {}
    heads = need("attention.head_count")
    hidden = need("embedding_length")
    head_dim = maybe("attention.key_length", hidden // heads)
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(path, "it is missing", "token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [named],
        "model_type": {MIXTRAL: "mixtral", "Qwen3MoeForCausalLM": "qwen3_moe"}.get(
            str(named), architecture
        ),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": maybe("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon", float),
        "rope_theta": maybe("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **experts,
    }
    if len(tokens) > embedding.shape[0]:
        problem = f"{len(tokens)} tokens and {embedding.shape[0]} embeddings"
        raise CheckpointError(path, problem)
    if maybe("rope.dimension_count", head_dim) != head_dim:
        problem = (
            f"{architecture}.rope.dimension_count={maybe('rope.dimension_count', None)}: only all "
            f"{head_dim} dimensions of a head are rotated"
        )
        raise CheckpointError(path, problem)
    scaling = _scaling(file, maybe, head_dim, float(config["rope_theta"]))
    return config | ({"rope_scaling": scaling} if scaling else {})


def _experts(file: GGUFFile, architecture: str, need: Callable[..., Any]) -> dict[str, Any]:
    """The fields of sparse layers."""
    count, chosen = need("expert_count"), need("expert_used_count")
    for key in ("expert_shared_count", "leading_dense_block_count"):
        if file.metadata.get(f"{architecture}.{key}"):
            problem = f"{architecture}.{key}={file.metadata[f'{architecture}.{key}']}: only 0"
            raise CheckpointError(file.path, problem)
    if architecture == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": chosen}
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": need("expert_feed_forward_length"),
        # ggml's graph of this architecture knows nothing else
        "norm_topk_prob": True,
    }


def _dtype(file: GGUFFile) -> str:
    """Of activations: that of the floats among the matrices, bfloat16 beside quantised ones."""
    kinds = {info.type.name for info in file.tensors.values() if len(info.shape) > 1}
    return (
        {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16")
        if len(kinds) == 1
        else "bfloat16"
    )


def _scaling(
    file: GGUFFile, maybe: Callable[[str, Any], Any], head_dim: int, theta: float
) -> dict[str, Any] | None:
    kind = maybe("rope.scaling.type", "none")
    if ROPE_FREQUENCIES in file.tensors:
        return _llama3(file, head_dim, theta)
    if kind == "none":
        return None
    original = maybe("rope.scaling.original_context_length", None)
    if kind not in ("linear", "yarn"):
        problem = f"rope.scaling.type={kind!r} is not supported: none, linear or yarn"
        raise CheckpointError(file.path, problem)
    scaling = {"rope_type": kind, "factor": float(maybe("rope.scaling.factor", 1.0))}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, from a file's divisors of the frequencies."""
    info = file.tensors[ROPE_FREQUENCIES]
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(file.path, "no vector of float32 divisors", ROPE_FREQUENCIES)
    found = file.rows(ROPE_FREQUENCIES, 0, 1).reshape(-1).view(np.float32)
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    for factor in LLAMA3_FACTORS:
        for length in LLAMA3_LENGTHS:
            waves = 2 * math.pi / frequencies
            smooth = (length / waves - 1.0) / (4.0 - 1.0)
            between = 1 / ((1 - smooth) / factor + smooth)
            long, short = waves > length / 1.0, waves < length / 4.0
            wanted = np.where(long, factor, np.where(short, 1.0, between))
            if np.allclose(found, wanted, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": length,
                }
    raise CheckpointError(
        file.path,
        "its divisors are those of no Llama 3 rope scaling that is known",
        ROPE_FREQUENCIES,
    )
