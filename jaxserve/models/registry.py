"""The architectures that jaxserve implements, and what a config.json of each leaves unsaid."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """One Hugging Face architecture as a variation of the same decoder.

    The defaults are those that transformers applies when a key is absent from config.json.

    Attributes:
        architecture: the name in `architectures` of config.json.
        model_type: the name in `model_type`, used when `architectures` is absent.
        qkv_bias: whether q, k and v have biases; None means that `attention_bias` decides.
        output_bias: the same for the output projection of the attention.
        mlp_bias: whether the MLP has biases; None means that `mlp_bias` decides.
        qk_norm: RMS norm over head_dim of every query and key head, before rope.
        default_num_kv_heads: key/value heads when absent; None means as many as query heads.
        default_head_dim: head_dim when absent; None means hidden_size / num_heads.
        default_max_positions: `max_position_embeddings` when absent.
        default_sliding_window: `sliding_window` when absent.
        windows: which layers use the sliding window: "none", "all", or "by_layer_type"
            (`use_sliding_window`, then `layer_types` or `max_window_layers`).
        default_eos_token_id, default_bos_token_id: special tokens when absent.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    default_num_kv_heads: int | None
    default_head_dim: int | None
    default_max_positions: int
    default_sliding_window: int | None
    windows: str
    default_bos_token_id: int | None
    default_eos_token_id: int | None


FAMILIES = (
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        qkv_bias=None,
        output_bias=None,
        mlp_bias=None,
        qk_norm=False,
        default_num_kv_heads=None,
        default_head_dim=None,
        default_max_positions=2048,
        default_sliding_window=None,
        windows="none",
        default_bos_token_id=1,
        default_eos_token_id=2,
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        default_num_kv_heads=8,
        default_head_dim=None,
        default_max_positions=131072,
        default_sliding_window=4096,
        windows="all",
        default_bos_token_id=1,
        default_eos_token_id=2,
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        default_num_kv_heads=32,
        default_head_dim=None,
        default_max_positions=32768,
        default_sliding_window=4096,
        windows="by_layer_type",
        default_bos_token_id=None,
        default_eos_token_id=None,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qkv_bias=None,
        output_bias=None,
        mlp_bias=False,
        qk_norm=True,
        default_num_kv_heads=32,
        default_head_dim=128,
        default_max_positions=32768,
        default_sliding_window=4096,
        windows="by_layer_type",
        default_bos_token_id=None,
        default_eos_token_id=None,
    ),
)


def find_family(architectures: list[str] | None, model_type: str | None) -> Family:
    """Returns the family that a config.json names.

    Args:
        architectures: the `architectures` field; its first supported entry wins.
        model_type: the `model_type` field, looked at only when `architectures` is absent or empty.

    Raises:
        UnsupportedModelError: no implemented architecture is named.
    """
    allowed = f"one of {', '.join(family.architecture for family in FAMILIES)}"
    if architectures:
        for family in FAMILIES:
            if family.architecture in architectures:
                return family
        raise UnsupportedModelError("architectures", architectures, allowed)
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    if model_type is None:
        raise UnsupportedModelError("architectures", architectures, allowed)
    types = ", ".join(family.model_type for family in FAMILIES)
    raise UnsupportedModelError("model_type", model_type, f"one of {types}")
