"""Reading of config.json: checks of single fields, and the fields that every family has."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import MODEL_DTYPES
from jaxserve.models.mlp import ACTIVATIONS
from jaxserve.models.rope import DEFAULT_THETA, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What transformers takes for keys that are absent from a family's config.json.

    Attributes:
        num_kv_heads: key/value heads; None: as many as query heads.
        head_dim: None: hidden_size / num_heads.
        max_positions: `max_position_embeddings`.
        rms_norm_eps: epsilon of the norms.
        activation_key: which key names the activation of the MLP.
        activation: of the MLP.
        tie_word_embeddings: whether the lm head is the embedding table.
        theta: base of the rotary embedding.
        partial_rotary: whether the family may rotate the first part of a head only.
        bos_token_id, eos_token_id: special tokens.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tie_word_embeddings: bool = False
    theta: float = DEFAULT_THETA
    partial_rotary: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def common_fields(
    architecture: str, config: Mapping[str, Any], defaults: Defaults
) -> dict[str, Any]:
    """The keyword arguments of `ModelConfig` that every family reads alike.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    hidden_size = positive(config, "hidden_size")
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", defaults.num_kv_heads or num_heads)
    if config.get("num_key_value_heads", 0) is None:
        num_kv_heads = num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            "num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} attention heads"
        )
    num_layers = positive(config, "num_hidden_layers")
    max_positions = positive(config, "max_position_embeddings", defaults.max_positions)
    head_size = head_dim(config, hidden_size, num_heads, defaults.head_dim)
    activation = config.get(defaults.activation_key) or defaults.activation
    return {
        "architecture": architecture,
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_size,
        "attention_scale": float(head_size**-0.5),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": positive_float(config, "rms_norm_eps", defaults.rms_norm_eps),
        "hidden_act": one_of(defaults.activation_key, activation, ACTIVATIONS),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", defaults.tie_word_embeddings),
        "windows": (None,) * num_layers,
        "rope": RopeConfig.from_hf(
            config,
            max_positions,
            head_size,
            default_theta=defaults.theta,
            partial=defaults.partial_rotary,
        ),
        "dtype": _dtype(config),
        "bos_token_id": _bos_token_id(config.get("bos_token_id", defaults.bos_token_id)),
        "eos_token_ids": token_ids(
            "eos_token_id", config.get("eos_token_id", defaults.eos_token_id)
        ),
    }


def layered(first: Mapping[str, Any], then: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of `first`, else those of `then`, each read where it lies."""
    return ChainMap(dict(first), then)  # type: ignore[arg-type]


def positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """An integer >= 1; null means the default."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(field, value, "an integer >= 1")
    return value


def positive_float(config: Mapping[str, Any], field: str, default: float | None) -> float:
    """A number > 0."""
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModelError(field, value, "a number > 0")
    return float(value)


def optional_float(config: Mapping[str, Any], field: str, default: float | None) -> float | None:
    """A number > 0, or None where null is given."""
    if config.get(field, default) is None:
        return None
    return positive_float(config, field, default)


def flag(config: Mapping[str, Any], field: str, default: bool = False) -> bool:
    """true or false."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise UnsupportedModelError(field, value, "true or false")
    return value


def one_of(field: str, value: Any, allowed: Collection[str]) -> str:
    """A value among those that are implemented."""
    if not isinstance(value, str) or value not in allowed:
        raise UnsupportedModelError(field, value, f"one of {', '.join(allowed)}")
    return str(value)


def refuse(config: Mapping[str, Any], field: str, *, unless: Any) -> None:
    """Refuses every value of a field but the one that is implemented; absent and null are fine."""
    value = config.get(field)
    if value is not None and value != unless:
        raise UnsupportedModelError(field, value, f"{unless!r} or absent")


def head_dim(
    config: Mapping[str, Any], hidden_size: int, num_heads: int, default: int | None
) -> int:
    """`head_dim`, or hidden_size / num_heads."""
    value = config.get("head_dim", default)
    if value is None:
        if hidden_size % num_heads:
            raise UnsupportedModelError(
                "hidden_size", hidden_size, f"a multiple of {num_heads} heads, or a head_dim"
            )
        value = hidden_size // num_heads
    if isinstance(value, bool) or not isinstance(value, int) or value < 4 or value % 2:
        raise UnsupportedModelError("head_dim", value, "an even integer >= 4")
    return value


def layer_types(
    config: Mapping[str, Any], num_layers: int, window: int | None
) -> tuple[str, ...] | None:
    """The attention of each layer, None when absent.

    Raises:
        UnsupportedModelError: another number than one a layer, an unknown name, or a sliding
            window where `window` is None.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(known):
        raise UnsupportedModelError(
            "layer_types", kinds, f"{num_layers} entries, each one of {', '.join(known)}"
        )
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModelError(
            "layer_types", kinds, "full_attention only, because sliding_window is off"
        )
    return tuple(kinds)


def sliding_window(config: Mapping[str, Any], default: int | None) -> int | None:
    """`sliding_window` in tokens, None when off."""
    window = config.get("sliding_window", default)
    return None if window is None else positive({"sliding_window": window}, "sliding_window")


def refuse_windows(architecture: str, config: Mapping[str, Any], num_layers: int) -> None:
    """Refuses the sliding window of a family that has none.

    transformers would pass it over in silence.

    Raises:
        UnsupportedModelError: `sliding_window` or `layer_types` asks for one.
    """
    layer_types(config, num_layers, None)
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise UnsupportedModelError(
            "sliding_window",
            window,
            f"null, because {architecture} has none and transformers passes it over: "
            'hf_overrides={"sliding_window": null} does so too, and attention_window sets one',
        )


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    """A token id or a list of token ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise UnsupportedModelError(field, value, "a token id or a list of token ids")
    return tuple(ids)


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("dtype")
    if value is None:
        value = config.get("torch_dtype")
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


def part(config: Mapping[str, Any], field: str) -> Mapping[str, Any] | None:
    """An object in a config; None: it has none. Raises UnsupportedModelError: it is none."""
    found = config.get(field)
    if found is not None and not isinstance(found, Mapping):
        raise UnsupportedModelError(field, found, "an object")
    return found


def vocabulary_token(
    config: Mapping[str, Any], names: Sequence[str], default: int, vocab_size: int
) -> int:
    """A token id, by the first of its names that the config has.

    Raises:
        UnsupportedModelError: it is no token of the vocabulary.
    """
    name = next((one for one in names if config.get(one) is not None), names[0])
    token = config.get(name)
    token = default if token is None else token
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise UnsupportedModelError(name, token, f"a token id below {vocab_size}")
    return token
