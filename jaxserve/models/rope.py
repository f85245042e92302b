"""Rotary position embedding: the frequencies of every supported rope type.

Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear position interpolation); the dynamic NTK
scaling of the LocalLLaMA community; Peng et al. 2023 (YaRN); the Llama 3.1 release (llama3); Ding
et al. 2024 (LongRoPE). Frequencies are computed once in float64 on the host; only `dynamic` and
`longrope` depend on the request.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
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
        "short_factor",
        "long_factor",
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
        attention_factor: yarn and longrope; multiplies cosines and sines.
        short_factors, long_factors: longrope; what the frequency of each pair is divided by within
            the original length and beyond it.
        rotary_dim: dimensions of a head that are rotated; None: all. The others have the cosine 1
            and the sine 0, see `half_split_order`.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotary_dim: int | None = None

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        max_position_embeddings: int,
        head_dim: int,
        *,
        default_theta: float = DEFAULT_THETA,
        partial: bool = False,
    ) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Args:
            config: the parsed config.json.
            max_position_embeddings: its value or default, in tokens.
            head_dim: of the model.
            default_theta: when absent.
            partial: whether the family may rotate a part of each head.

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
        share = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        rotary_dim = _rotary_dim(share, head_dim, partial)
        theta = _number(f"{name}.rope_theta", _theta(fields, config))
        theta = default_theta if theta is None else theta
        if theta <= 1:
            raise UnsupportedModelError("rope_theta", theta, "a number > 1")
        if rope_type == "default":
            return cls(theta=theta, rotary_dim=rotary_dim)
        if rotary_dim is not None and rope_type != "longrope":
            raise UnsupportedModelError("partial_rotary_factor", share, f"1 with rope {rope_type}")

        def number(key: str, default: float | None = None) -> float:
            value = _number(f"{name}.{key}", fields.get(key))
            if value is None and default is None:
                raise UnsupportedModelError(
                    f"{name}.{key}", None, f"a number; rope type {rope_type} needs it"
                )
            return default if value is None else value  # type: ignore[return-value]

        # longrope's is the ratio of the two lengths if absent
        factor = number("factor", 1.0 if rope_type == "longrope" else None)
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
        if rope_type == "longrope":
            factor = number("factor", max_position_embeddings / original)
        scaled = functools.partial(cls, rope_type, theta, factor, int(original))
        if rope_type == "longrope":
            pairs = (rotary_dim or head_dim) // 2
            grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return scaled(
                attention_factor=number("attention_factor", grown),
                short_factors=_factors(f"{name}.short_factor", fields.get("short_factor"), pairs),
                long_factors=_factors(f"{name}.long_factor", fields.get("long_factor"), pairs),
                rotary_dim=rotary_dim,
            )
        if rope_type == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if not 0 < low < high:
                raise UnsupportedModelError(
                    f"{name}.high_freq_factor", high, f"a number > low_freq_factor ({low}) > 0"
                )
            return scaled(low_freq_factor=low, high_freq_factor=high)
        return scaled(
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

    def cache_key(self, num_prompt: int) -> str:
        """What a request's keys depend on beside tokens and positions, see `rope_tables`.

        Two requests whose keys are rotated by other tables have another one.

        Args:
            num_prompt: tokens of the request's prompt.
        """
        if num_prompt > self.original_length:
            if self.rope_type == "longrope":
                return "long"
            if self.rope_type == "dynamic":
                return str(num_prompt)
        return ""

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Angle per position of each pair of dimensions: float64 [head_dim / 2].

        For `dynamic` and `longrope` these are the frequencies within the original length. Pairs
        that are not rotated have the frequency 0.
        """
        rotated = self.rotary_dim or head_dim
        inv_freq = self.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        if self.rope_type == "longrope":
            inv_freq = inv_freq / np.array(self.short_factors)
        if rotated < head_dim:
            return np.append(inv_freq, np.zeros((head_dim - rotated) // 2))
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


def _rotary_dim(share: Any, head_dim: int, partial: bool) -> int | None:
    """Rotated dimensions of a head, None for all, of `partial_rotary_factor`."""
    if share is None or share == 1:
        return None
    if not partial:
        raise UnsupportedModelError("partial_rotary_factor", share, "1 (all of head_dim)")
    number = _number("partial_rotary_factor", share)
    rotary_dim = 0 if number is None else int(head_dim * number)
    if rotary_dim % 2 or not 2 <= rotary_dim < head_dim:
        raise UnsupportedModelError(
            "partial_rotary_factor", share, f"an even part of the {head_dim} dimensions of a head"
        )
    return rotary_dim


def _factors(field: str, values: Any, pairs: int) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or len(values) != pairs:
        raise UnsupportedModelError(field, values, f"{pairs} numbers, one a rotated pair")
    numbers = tuple(_number(field, value) for value in values)
    if any(number is None or number <= 0 for number in numbers):
        raise UnsupportedModelError(field, values, "numbers > 0")
    return tuple(float(number) for number in numbers if number is not None)


def _theta(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Of the set that is read; else of the config, or of the set that the first one replaces."""
    if "rope_theta" in fields:
        return fields["rope_theta"]  # and the config's own is not read
    theta = config.get("rope_theta")
    if theta is None and isinstance(replaced := config.get("rope_parameters"), Mapping):
        theta = replaced.get("rope_theta")
    return theta


def half_split_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...] | None:
    """Order in which the dimensions of a checkpoint's query and key heads are stored.

    The kernels pair dimension i with i + head_dim / 2. A checkpoint that rotates the first R
    dimensions pairs i with i + R / 2, so its heads are reordered on loading: scores do not change
    when queries and keys are permuted alike. None where the order is the checkpoint's own.
    """
    if rope.rotary_dim is None:
        return None
    rotated, half = rope.rotary_dim, rope.rotary_dim // 2
    middle = rotated + (head_dim - rotated) // 2
    first = [*range(half), *range(rotated, middle)]
    return (*first, *range(half, rotated), *range(middle, head_dim))


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array, rope_lengths: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every token.

    Only `dynamic` and `longrope` read `rope_lengths`. Their rule is a function of the request
    alone, so that a token is rotated alike however its prompt was cut into chunks: a token sees the
    frequencies of its rope length, which of a prompt token is the length of the WHOLE prompt and of
    a generated token its position + 1. `dynamic` stretches them for lengths beyond
    `original_length`, `longrope` takes its long factors there. This is what transformers computes
    for a forward call with a KV cache: the prompt is rotated for its full length, every later token
    for the length at its step, and cached keys stay as they are. (For Phi-3 its `generate` computes
    the cache again when a request grows beyond the original length; here such a request keeps the
    keys that it has.) Two prompts of different lengths may therefore have different keys even where
    their tokens agree.

    Args:
        rope: parameters.
        head_dim: even.
        positions: int32 [T], absolute position of each token in its request.
        rope_lengths: int32 [T], max(prompt length, position + 1) of each token's request;
            positions + 1 when None.

    Returns:
        (cos, sin), float32 [T, head_dim / 2], multiplied by the attention factor.
    """
    short = rope.inv_freq(head_dim)
    inv_freq = jnp.asarray(short, dtype=jnp.float32)[None, :]  # [1, D/2]
    lengths = positions + 1 if rope_lengths is None else rope_lengths
    if rope.rope_type == "longrope":
        ratio = np.divide(rope.short_factors, rope.long_factors)
        long = short * np.append(ratio, np.ones(head_dim // 2 - len(ratio)))
        is_long = (lengths > rope.original_length)[:, None]
        inv_freq = jnp.where(is_long, jnp.asarray(long, dtype=jnp.float32), inv_freq)
    if rope.rope_type == "dynamic":
        lengths = jnp.maximum(lengths, rope.original_length).astype(jnp.float32)
        stretch = rope.factor * lengths / rope.original_length - (rope.factor - 1)
        # theta * stretch**(D / (D-2)), folded into the exponent: exact for stretch 1.
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
        inv_freq = inv_freq * jnp.exp(-jnp.log(stretch)[:, None] * exponent[None, :])
    angles = positions.astype(jnp.float32)[:, None] * inv_freq  # [T, D/2]
    scale: Any = rope.attention_factor
    if rope.rotary_dim is not None:  # pairs that are not rotated keep their length
        scale = np.where(short > 0, scale, 1.0).astype(np.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
