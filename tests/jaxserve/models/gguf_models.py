"""Tiny models as GGUF files, beside folders of the floats that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from checkpoints import bundled_model_path
from tests.checkpoints.gguf.files import gguf_place, interleaved, write_gguf

FILE = "model.safetensors"


def in_order(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts by their numbers."""
    return dict(sorted(tensors.items(), key=lambda item: (gguf_place(item[0])[1] or 0, item[0])))


def as_gguf(
    model: Path, folder: Path, types: Mapping[str, str], metadata: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Converts a folder of floats, as llama.cpp's converter does.

    Args:
        model: of a llama, qwen2, qwen3, qwen3_moe or mixtral.
        folder: where to.
        types: ggml types of matrices, by parts of their Hugging Face names; F32 for others.
        metadata: more of it.

    Returns:
        The GGUF file, and a folder of the floats that it stands for.
    """
    config = json.loads((model / "config.json").read_text())
    name = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}.get(
        config["model_type"], config["model_type"]
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    values = {
        "general.architecture": name,
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": kv_heads,
        f"{name}.attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | dict(metadata or {})
    tensors, renamed = in_order(load_file(model / FILE)), {}
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        values |= {
            f"{name}.expert_count": experts,
            f"{name}.expert_used_count": config["num_experts_per_tok"],
            f"{name}.expert_feed_forward_length": config.get("moe_intermediate_size", 0),
        }
    for tensor, value in tensors.items():
        permuted = {"q_proj.weight": heads, "k_proj.weight": kv_heads} if name == "llama" else {}
        count = next((n for part, n in permuted.items() if tensor.endswith(part)), None)
        kind = next((t for part, t in types.items() if part in tensor and value.ndim > 1), "F32")
        stored = value if count is None else interleaved(value, count)
        own, expert = gguf_place(tensor)
        if expert is None:
            renamed[own] = (kind, np.ascontiguousarray(stored))
        else:
            before = renamed[own][1] if expert else np.empty((0, *stored.shape), stored.dtype)
            renamed[own] = (kind, np.concatenate([before, stored[None]]))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.gguf"
    numbers = write_gguf(file, values, renamed)
    floats = folder / "floats"
    shutil.copytree(model, floats)
    dequantized = {}
    for tensor in tensors:
        own, expert = gguf_place(tensor)
        found = numbers[own] if expert is None else numbers[own][expert]
        if name == "llama" and tensor.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads if "q_proj" in tensor else kv_heads
            split = found.reshape(count, -1, 2, found.shape[1])
            found = split.swapaxes(1, 2).reshape(found.shape)
        dequantized[tensor] = np.ascontiguousarray(found)
    save_file(dequantized, floats / FILE, {"format": "pt"})
    return file, floats


def bundled_gguf(folder: Path) -> tuple[Path, Path]:
    """The bundled model at Q8_0 with its tokenizer, and a folder of the floats it stands for."""
    bundled = bundled_model_path()
    tokenizer = json.loads((bundled / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    template = json.loads((bundled / "tokenizer_config.json").read_text())["chat_template"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": template,
    }
    return as_gguf(bundled, folder, {"_proj": "Q8_0", "embed": "Q8_0"}, metadata)
