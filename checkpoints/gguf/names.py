"""GGUF's names of tensors as Hugging Face's, and the order of rows that its converter changes."""

from __future__ import annotations

import re

import numpy as np

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# of sparse layers: (MLP, gate, up, down) by Hugging Face's architecture
SPARSE = {
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ROUTER = "ffn_gate_inp"
ROPE_FREQUENCIES = "rope_freqs.weight"  # read into the config
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Hugging Face's name; one that is not known stays as it is: no model has a place for it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, module, kind = match.groups()
    if layer is None:
        return f"{TOP[module]}.{kind}" if module in TOP else name
    return f"model.layers.{layer}.{LAYER[module]}.{kind}" if module in LAYER else name


def expert_names(name: str, architecture: str, count: int) -> list[str] | None:
    """Hugging Face's names of what a tensor of a sparse layer holds: one an expert, or the router.

    Args:
        name: GGUF's.
        architecture: Hugging Face's.
        count: experts of a layer.

    Returns:
        None for a tensor of no sparse layer.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[1] is None or architecture not in SPARSE:
        return None
    module, *projections = SPARSE[architecture]
    prefix = f"model.layers.{match[1]}.{module}"
    if match[2] == ROUTER:
        return [f"{prefix}.gate.{match[3]}"]
    if match[2] not in EXPERTS:
        return None
    projection = projections[EXPERTS.index(match[2])]
    return [f"{prefix}.experts.{expert}.{projection}.{match[3]}" for expert in range(count)]


def interleaved_rows(name: str, architecture: str, heads: int, kv_heads: int) -> int | None:
    """Heads of a tensor if the converter interleaves its rows for ggml's rotary; None: it does not.

    It does so with the queries and keys of "llama" alone.
    """
    match = _NAME.fullmatch(name)
    if architecture != "llama" or match is None:
        return None
    return {"attn_q": heads, "attn_k": kv_heads}.get(match[2])


def row_order(rows: int, heads: int) -> np.ndarray:
    """For each of Hugging Face's rows its place in the file, where halves of a head alternate."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
