"""What the config.json of Gemma 2 says; Gemma 3's says most of the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import (
    Defaults,
    common_fields,
    flag,
    layer_types,
    optional_float,
    positive_float,
    refuse,
    sliding_window,
)

DEFAULTS = Defaults(
    num_kv_heads=4,
    head_dim=256,
    max_positions=8192,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """A Gemma's config.

    Attributes:
        logits_soft_cap: bound of the logits, cap * tanh(logit / cap); None: none.
    """

    logits_soft_cap: float | None


def gemma_fields(
    architecture: str,
    config: Mapping[str, Any],
    defaults: Defaults,
    *,
    pattern: int,
    soft_caps: tuple[float | None, float | None],
) -> dict[str, Any]:
    """The keyword arguments of `GemmaConfig`.

    Every `pattern`-th layer attends to everything where `layer_types` is absent; `soft_caps` are
    those of the scores and of the logits where theirs are.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    refuse(config, "use_bidirectional_attention", unless=False)
    fields = common_fields(architecture, config, defaults)
    layers, bias = fields["num_layers"], flag(config, "attention_bias")
    window = sliding_window(config, 4096)
    kinds = layer_types(config, layers, window) or tuple(
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(layers)
    )
    return fields | {
        "attention_scale": positive_float(config, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": optional_float(config, "attn_logit_softcapping", soft_caps[0]),
        "logits_soft_cap": optional_float(config, "final_logit_softcapping", soft_caps[1]),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "qkv_bias": bias,
        "output_bias": bias,
    }


def read_config(architecture: str, config: Mapping[str, Any]) -> GemmaConfig:
    """Reads a parsed config.json.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    fields = gemma_fields(architecture, config, DEFAULTS, pattern=2, soft_caps=(50.0, 30.0))
    return GemmaConfig(**fields)
