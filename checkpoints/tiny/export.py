"""Hugging Face files of a trained model, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from checkpoints.tiny.model import TinyConfig, TinyLlama
from checkpoints.tiny.tokenizer import BOS_ID, END_ID, PAD_ID

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


def hf_name(path: tuple[object, ...]) -> str:
    """Hugging Face tensor name of the parameter at ``path`` of a TinyLlama."""
    parts = [str(part) for part in path]
    if parts == ["embed_tokens"]:
        return "model.embed_tokens.weight"
    parts = [f"self_attn.{p}" if p in _ATTENTION else f"mlp.{p}" if p in _MLP else p for p in parts]
    return ".".join(["model", *parts])


def config_json(config: TinyConfig) -> dict[str, object]:
    """The ``config.json`` of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def save_model(model: TinyLlama, folder: Path) -> None:
    """Write ``model.safetensors``, ``config.json`` and ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        hf_name(path): np.asarray(param[...], np.float32)
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    # Written aside and renamed, so that a run that is stopped leaves whole files.
    draft = folder / "model.safetensors.tmp"
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.chmod(0o644)  # safetensors creates files that only their owner can read
    draft.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(model.config), indent=2) + "\n")
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_weights(model: TinyLlama, path: Path) -> None:
    """Fill ``model`` from a safetensors file that `save_model` wrote.

    Raises:
        ValueError: the file's tensors are not exactly the model's.
    """
    tensors = load_file(path)
    params = {hf_name(p): param for p, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    if tensors.keys() != params.keys():
        raise ValueError(f"{path}: tensor names differ: {sorted(tensors.keys() ^ params.keys())}")
    for name, param in params.items():
        if tensors[name].shape != param.shape:
            raise ValueError(f"{path}: {name} is {tensors[name].shape}, not {param.shape}")
    state = nnx.state(model, nnx.Param)
    flat = [
        (p, param.replace(jnp.asarray(tensors[hf_name(p)])))
        for p, param in nnx.to_flat_state(state)
    ]
    nnx.update(model, nnx.from_flat_state(flat))


def load_model(folder: Path) -> TinyLlama:
    """The exported model in ``folder`` as a float32 `TinyLlama`."""
    raw = json.loads((folder / "config.json").read_text())
    config = TinyConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        rms_norm_eps=raw["rms_norm_eps"],
    )
    model = TinyLlama(config, nnx.Rngs(0))
    load_weights(model, folder / "model.safetensors")
    return model
