"""What the config.json of Llama, Mistral, Qwen2 and Qwen3 says, and what each leaves unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import (
    Defaults,
    common_fields,
    flag,
    layer_types,
    refuse_windows,
    sliding_window,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One architecture as a variation of Llama.

    Attributes:
        defaults: for absent keys.
        qkv_bias: whether q, k and v have biases; None means that `attention_bias` decides.
        output_bias: the same for the output projection of the attention.
        mlp_bias: whether the MLP has biases; None means that `mlp_bias` decides.
        qk_norm: RMS norm over head_dim of every query and key head, before rope.
        windows: which layers use the sliding window: "none", "all", "all_if_used" (where
            `use_sliding_window` is true) or "by_layer_type" (the same, then `layer_types` or
            `max_window_layers`).
        default_sliding_window: `sliding_window` when absent.
    """

    defaults: Defaults
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: str = "none"
    default_sliding_window: int | None = None

    def read(self, architecture: str, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json.

        Raises:
            UnsupportedModelError: an option or value that is not implemented.
        """
        return ModelConfig(**self.fields(architecture, config))

    def fields(self, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of `ModelConfig`."""
        fields = common_fields(architecture, config, self.defaults)
        return fields | {
            "qkv_bias": _bias(config, "attention_bias", self.qkv_bias),
            "output_bias": _bias(config, "attention_bias", self.output_bias),
            "mlp_bias": _bias(config, "mlp_bias", self.mlp_bias),
            "qk_norm": self.qk_norm,
            "windows": self._windows(architecture, config, fields["num_layers"]),
        }

    def _windows(
        self, architecture: str, config: Mapping[str, Any], num_layers: int
    ) -> tuple[int | None, ...]:
        full: tuple[int | None, ...] = (None,) * num_layers
        if self.windows == "none":
            refuse_windows(architecture, config, num_layers)
            return full
        window = None
        if self.windows == "all" or flag(config, "use_sliding_window"):
            window = sliding_window(config, self.default_sliding_window)
        kinds = layer_types(config, num_layers, window)
        if window is None:
            return full
        if self.windows in ("all", "all_if_used"):
            if kinds is not None and "full_attention" in kinds:
                raise UnsupportedModelError(
                    "layer_types", kinds, f"sliding_attention everywhere in {architecture}"
                )
            return (window,) * num_layers
        if kinds is not None:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UnsupportedModelError("max_window_layers", first, "an integer >= 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))


def _bias(config: Mapping[str, Any], field: str, fixed: bool | None) -> bool:
    return flag(config, field) if fixed is None else fixed


LLAMA = Options(
    defaults=Defaults(bos_token_id=1, eos_token_id=2),
    qkv_bias=None,
    output_bias=None,
    mlp_bias=None,
)
MISTRAL = Options(
    defaults=Defaults(num_kv_heads=8, max_positions=131072, bos_token_id=1, eos_token_id=2),
    windows="all",
    default_sliding_window=4096,
)
QWEN2 = Options(
    defaults=Defaults(num_kv_heads=32, max_positions=32768),
    qkv_bias=True,
    windows="by_layer_type",
    default_sliding_window=4096,
)
QWEN3 = Options(
    defaults=Defaults(num_kv_heads=32, head_dim=128, max_positions=32768),
    qkv_bias=None,
    output_bias=None,
    qk_norm=True,
    windows="by_layer_type",
    default_sliding_window=4096,
)
