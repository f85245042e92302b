"""ModelConfig: the shape and options of a model, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import UnsupportedModelError, ValidationError
from jaxserve.models.registry import Family, find_family
from jaxserve.models.rope import RopeConfig

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
MODEL_DTYPES = ("float32", "float16", "bfloat16")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a model that is not a weight. Hashable, so that it can be static in jit.

    Attributes:
        architecture: Hugging Face name, for example "LlamaForCausalLM".
        vocab_size, hidden_size, intermediate_size, num_layers: sizes of the network.
        num_heads, num_kv_heads, head_dim: attention heads; num_heads % num_kv_heads == 0.
        max_position_embeddings: the checkpoint's own value, in tokens.
        rms_norm_eps: epsilon of every RMS norm.
        hidden_act: activation of the MLP, one of `ACTIVATIONS`.
        tie_word_embeddings: the lm head is the embedding table.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norm over head_dim of queries and keys before rope.
        windows: sliding window of each layer in tokens, None for full attention.
        rope: parameters of the rotary embedding.
        dtype: type of the checkpoint's weights, one of `MODEL_DTYPES`.
        bos_token_id: first token of a text, None when the model has none.
        eos_token_ids: tokens that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def max_context_length(self) -> int:
        """Longest context that the checkpoint claims, in tokens, with rope scaling counted in."""
        if self.rope.rope_type in ("linear", "dynamic", "yarn"):
            return int(self.rope.original_length * self.rope.factor)
        return self.max_position_embeddings

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens: key j is visible to query i if i - j < window."""
        return self.windows[layer]

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Reads `config.json` of a model folder; `generation_config.json` adds its EOS tokens.

        Raises:
            ValidationError: the folder holds no readable config.json.
            UnsupportedModelError: the config asks for something that is not implemented.
        """
        folder = Path(path)
        config = _read_json(folder / "config.json")
        if config is None:
            raise ValidationError("model", str(path), "a folder with a config.json")
        generation = _read_json(folder / "generation_config.json") or {}
        own = _token_ids("eos_token_id", config.get("eos_token_id"))
        more = _token_ids("eos_token_id", generation.get("eos_token_id"))
        if more:
            config = {**config, "eos_token_id": [*own, *(t for t in more if t not in own)]}
        return cls.from_hf(config)

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed Hugging Face config.json, with transformers' defaults for absent keys.

        Raises:
            UnsupportedModelError: an architecture, option or value that is not implemented.
        """
        config = config_json
        family = find_family(config.get("architectures"), config.get("model_type"))
        if config.get("quantization_config"):
            raise UnsupportedModelError(
                "quantization_config",
                config["quantization_config"],
                "unquantized checkpoints (float32, float16, bfloat16)",
            )
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(
            config, "num_key_value_heads", family.default_num_kv_heads or num_heads
        )
        if config.get("num_key_value_heads", 0) is None:
            num_kv_heads = num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                "num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} attention heads"
            )
        num_layers = _positive(config, "num_hidden_layers")
        max_positions = _positive(config, "max_position_embeddings", family.default_max_positions)
        activation = config.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                "hidden_act", activation, f"one of {', '.join(ACTIVATIONS)}"
            )
        return cls(
            architecture=family.architecture,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, family, hidden_size, num_heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            hidden_act=activation,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=_family_flag(config, "attention_bias", family.qkv_bias),
            output_bias=_family_flag(config, "attention_bias", family.output_bias),
            mlp_bias=_family_flag(config, "mlp_bias", family.mlp_bias),
            qk_norm=family.qk_norm,
            windows=_windows(config, family, num_layers),
            rope=RopeConfig.from_hf(config, max_positions),
            dtype=_dtype(config),
            bos_token_id=_bos_token_id(config.get("bos_token_id", family.default_bos_token_id)),
            eos_token_ids=_token_ids(
                "eos_token_id", config.get("eos_token_id", family.default_eos_token_id)
            ),
        )


def resolve_dtype(dtype: str, config: ModelConfig) -> str:
    """Returns one of `MODEL_DTYPES` for a user's dtype ("auto" takes the checkpoint's).

    Raises:
        ValidationError: an unknown dtype.
    """
    if dtype == "auto":
        return config.dtype
    resolved = _DTYPE_ALIASES.get(dtype, dtype)
    if resolved not in MODEL_DTYPES:
        allowed = ("auto", *MODEL_DTYPES, *_DTYPE_ALIASES)
        raise ValidationError("dtype", dtype, f"one of {', '.join(allowed)}")
    return resolved


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValidationError("model", str(file), f"valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValidationError("model", str(file), "a JSON object")
    return parsed


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(field, value, "an integer >= 1")
    return value


def _positive_float(config: Mapping[str, Any], field: str, default: float) -> float:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModelError(field, value, "a number > 0")
    return float(value)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise UnsupportedModelError(field, value, "true or false")
    return value


def _family_flag(config: Mapping[str, Any], field: str, fixed: bool | None) -> bool:
    return _flag(config, field) if fixed is None else fixed


def _head_dim(config: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    value = config.get("head_dim", family.default_head_dim)
    if value is None:
        if hidden_size % num_heads:
            raise UnsupportedModelError(
                "hidden_size", hidden_size, f"a multiple of {num_heads} heads, or a head_dim"
            )
        value = hidden_size // num_heads
    if isinstance(value, bool) or not isinstance(value, int) or value < 4 or value % 2:
        raise UnsupportedModelError("head_dim", value, "an even integer >= 4")
    return value


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.windows == "none":
        return full
    window = config.get("sliding_window", family.default_sliding_window)
    if family.windows == "by_layer_type" and not _flag(config, "use_sliding_window"):
        window = None
    if window is not None:
        window = _positive({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        _check_layer_types(kinds, window, num_layers)
    if window is None:
        return full
    if family.windows == "all":
        if kinds is not None and "full_attention" in kinds:
            raise UnsupportedModelError(
                "layer_types", kinds, f"sliding_attention everywhere in {family.architecture}"
            )
        return (window,) * num_layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise UnsupportedModelError("max_window_layers", first, "an integer >= 0")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _check_layer_types(kinds: Any, window: int | None, num_layers: int) -> None:
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(known):
        raise UnsupportedModelError(
            "layer_types", kinds, f"{num_layers} entries, each one of {', '.join(known)}"
        )
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModelError(
            "layer_types", kinds, "full_attention only, because sliding_window is off"
        )


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in MODEL_DTYPES:
        raise UnsupportedModelError("dtype", value, f"one of {', '.join(MODEL_DTYPES)}")
    return name


def _bos_token_id(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise UnsupportedModelError("bos_token_id", value, "a token id or null")
    return value


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise UnsupportedModelError(field, value, "a token id or a list of token ids")
    return tuple(ids)
