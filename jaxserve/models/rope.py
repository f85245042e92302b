"""Rotary position embedding: the frequencies of every supported rope type.

Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear position interpolation); the dynamic NTK
scaling of the LocalLLaMA community; Peng et al. 2023 (YaRN); the Llama 3.1 release (llama3).
Frequencies are computed once in float64 on the host; only `dynamic` depends on the request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10_000.0

# Known keys of the rope dictionary; those that a rope type does not use have no effect on it.
_KNOWN_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # a note of early YaRN checkpoints about how they were made
    }
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding, as read from a Hugging Face config.json.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the geometric series of wavelengths.
        factor: how much longer than the original the context is (all types but default).
        original_length: tokens of context before scaling.
        low_freq_factor, high_freq_factor: llama3; wavelengths beyond original_length / low are
            stretched by `factor`, those below original_length / high are kept.
        beta_fast, beta_slow: yarn; rotations over original_length at which a dimension stops
            being interpolated, and at which it is interpolated in full.
        truncate: yarn; round the two ends of the ramp to whole dimensions.
        attention_factor: yarn; multiplies cosines and sines.
    """

    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            UnsupportedModelError: a rope type or value that is not implemented.
        """
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            raise UnsupportedModelError(name, given, "a dictionary")
        fields = {key: value for key, value in given.items() if value is not None}
        for key, value in fields.items():
            if isinstance(value, Mapping):
                raise UnsupportedModelError(f"{name}.{key}", value, "one set for all layers")
        rope_type = fields.get("rope_type", fields.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"{name}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}"
            )
        for key in fields:
            if key not in _KNOWN_KEYS:
                raise UnsupportedModelError(
                    f"{name}.{key}", fields[key], f"keys among {', '.join(sorted(_KNOWN_KEYS))}"
                )
        partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial is not None and partial != 1:
            raise UnsupportedModelError("partial_rotary_factor", partial, "1 (all of head_dim)")
        theta = _number(f"{name}.rope_theta", fields.get("rope_theta", config.get("rope_theta")))
        theta = DEFAULT_THETA if theta is None else theta
        if theta <= 1:
            raise UnsupportedModelError("rope_theta", theta, "a number > 1")
        if rope_type == "default":
            return cls(theta=theta)

        def number(key: str, default: float | None = None) -> float:
            value = _number(f"{name}.{key}", fields.get(key))
            if value is None and default is None:
                raise UnsupportedModelError(
                    f"{name}.{key}", None, f"a number; rope type {rope_type} needs it"
                )
            return default if value is None else value  # type: ignore[return-value]

        factor = number("factor")
        if factor <= 0:
            raise UnsupportedModelError(f"{name}.factor", factor, "a number > 0")
        if rope_type in ("linear", "dynamic"):
            return cls(rope_type, theta, factor, max_position_embeddings)
        original = config.get("original_max_position_embeddings")
        if original is None:
            original = number("original_max_position_embeddings", max_position_embeddings)
        if type(original) not in (int, float) or original < 1:
            raise UnsupportedModelError(
                "original_max_position_embeddings", original, "an integer >= 1"
            )
        if rope_type == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if not 0 < low < high:
                raise UnsupportedModelError(
                    f"{name}.high_freq_factor", high, f"a number > low_freq_factor ({low}) > 0"
                )
            return cls(
                rope_type,
                theta,
                factor,
                int(original),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        return cls(
            rope_type,
            theta,
            factor,
            int(original),
            # Zero means the default too, as in transformers.
            beta_fast=number("beta_fast", 32.0) or 32.0,
            beta_slow=number("beta_slow", 1.0) or 1.0,
            truncate=bool(fields.get("truncate", True)),
            attention_factor=number(
                "attention_factor",
                _yarn_attention_factor(
                    factor, number("mscale", 0.0), number("mscale_all_dim", 0.0)
                ),
            ),
        )

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Angle per position of each pair of dimensions: float64 [head_dim / 2].

        For `dynamic` these are the frequencies within the original length.
        """
        inv_freq = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.rope_type == "linear":
            return inv_freq / self.factor
        if self.rope_type == "llama3":
            return self._llama3(inv_freq)
        if self.rope_type == "yarn":
            return self._yarn(inv_freq, head_dim)
        return inv_freq

    def _llama3(self, inv_freq: np.ndarray) -> np.ndarray:
        rotations = self.original_length * inv_freq / (2 * math.pi)
        keep = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return (1 - keep) * inv_freq / self.factor + keep * inv_freq

    def _yarn(self, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
        def dimension(rotations: float) -> float:
            # The (fractional) pair index whose wavelength fits `rotations` times.
            length = self.original_length / (rotations * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        interpolate = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
        return inv_freq * (1 - interpolate) + inv_freq / self.factor * interpolate


def _number(field: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModelError(field, value, "a number")
    return float(value)


def _yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array, rope_lengths: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every token.

    Only `dynamic` reads `rope_lengths`. Its rule is a function of the request alone, so that a
    token is rotated alike however its prompt was cut into chunks: a token sees the frequencies of
    length max(original_length, rope_length), where the rope length of a prompt token is the
    length of the WHOLE prompt and that of a generated token its position + 1. This is what
    transformers computes for a fresh `generate` call with a KV cache: the prompt is rotated for
    its full length, every later token for the length at its step, and cached keys stay as they
    are. Two prompts of different lengths beyond `original_length` therefore have different keys
    even where their tokens agree.

    Args:
        rope: parameters.
        head_dim: even.
        positions: int32 [T], absolute position of each token in its request.
        rope_lengths: int32 [T], max(prompt length, position + 1) of each token's request;
            positions + 1 when None.

    Returns:
        (cos, sin), float32 [T, head_dim / 2], multiplied by the attention factor.
    """
    inv_freq = jnp.asarray(rope.inv_freq(head_dim), dtype=jnp.float32)[None, :]  # [1, D/2]
    if rope.rope_type == "dynamic":
        lengths = positions + 1 if rope_lengths is None else rope_lengths
        lengths = jnp.maximum(lengths, rope.original_length).astype(jnp.float32)
        stretch = rope.factor * lengths / rope.original_length - (rope.factor - 1)
        # theta * stretch**(D / (D-2)), folded into the exponent: exact for stretch 1.
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
        inv_freq = inv_freq * jnp.exp(-jnp.log(stretch)[:, None] * exponent[None, :])
    angles = positions.astype(jnp.float32)[:, None] * inv_freq  # [T, D/2]
    scale = rope.attention_factor
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
