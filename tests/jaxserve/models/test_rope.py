"""Frequencies and rotation against transformers, and the rule of dynamic scaling."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxserve.models.rope import RopeConfig, half_split_order, rope_tables
from pallas_kernels.rotary import apply_rope

HEAD_DIM = 64
SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 0.5,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("length", [100, 20000])
def test_frequencies_equal_transformers(
    scaling: dict[str, object], theta: float, length: int
) -> None:
    parameters = {**scaling, "rope_theta": theta}
    config = {"hidden_size": HEAD_DIM, "num_attention_heads": 1, "max_position_embeddings": 16384}
    reference = LlamaConfig(rope_parameters=dict(parameters), **config)
    expected, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](
        reference, torch.device("cpu"), seq_len=length
    )
    rope = RopeConfig.from_hf({"rope_parameters": parameters}, 16384, HEAD_DIM)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    if scaling["rope_type"] == "dynamic":
        # Read off the angle of position 1.
        cos, sin = rope_tables(rope, HEAD_DIM, jnp.ones(1, jnp.int32), jnp.full(1, length))
        found = np.arctan2(np.asarray(sin), np.asarray(cos))[0]
    else:
        found = rope.inv_freq(HEAD_DIM)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)


def test_rotation_keeps_relative_positions() -> None:
    """q(i) . k(j) depends on i - j alone, and position 0 is not rotated."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 2, 16)), jnp.float32) for _ in range(2))

    def at(x: jnp.ndarray, position: int) -> np.ndarray:
        tables = rope_tables(RopeConfig(), 16, jnp.asarray([position], jnp.int32))
        return np.asarray(apply_rope(x, *tables))

    np.testing.assert_array_equal(at(q, 0), q)
    near, far = np.sum(at(q, 9) * at(k, 4)), np.sum(at(q, 105) * at(k, 100))
    assert near == pytest.approx(far, rel=1e-4)
    assert near != pytest.approx(np.sum(at(q, 9) * at(k, 5)), rel=1e-2)


def test_partial_rotation_equals_that_of_the_checkpoints_order() -> None:
    """Heads in the stored order, rotated as all are: scores of the checkpoint's own order."""
    rope = RopeConfig(rotary_dim=12)
    order = half_split_order(rope, 16)
    assert sorted(order) == list(range(16))
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=16) for _ in range(2))

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        """The first 12 dimensions, paired i with i + 6."""
        angle = position * 10_000.0 ** -(np.arange(0, 12, 2) / 12)
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = x[:6], x[6:12]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[12:]])

    def stored(x: np.ndarray, position: int) -> np.ndarray:
        tables = rope_tables(rope, 16, jnp.asarray([position], jnp.int32))
        return np.asarray(apply_rope(jnp.asarray(x[list(order)], jnp.float32)[None, None], *tables))

    found = float(np.sum(stored(q, 9) * stored(k, 4)))
    assert found == pytest.approx(rotated(q, 9) @ rotated(k, 4), rel=1e-5)


def test_longrope_takes_the_factors_of_its_length() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    fields = {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    rope = RopeConfig.from_hf(fields, 256, 16)
    positions = jnp.asarray([3, 3, 70], jnp.int32)
    cos, _ = rope_tables(rope, 16, positions, jnp.asarray([64, 65, 71], jnp.int32))
    angles = np.arccos(np.asarray(cos) / rope.attention_factor)[:, 1:]
    plain = 10_000.0 ** -(np.arange(2, 16, 2) / 16)
    want = np.outer([3, 3, 70], plain) / [[1], [4], [4]]
    np.testing.assert_allclose(np.cos(angles), np.cos(want), atol=1e-5)


def test_dynamic_tables_depend_on_the_request_not_on_the_batch() -> None:
    rope = RopeConfig.from_hf({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64, 16)
    positions = jnp.asarray([0, 63, 64, 90], jnp.int32)
    default = rope_tables(rope, 16, positions)
    own = rope_tables(rope, 16, positions, positions + 1)
    np.testing.assert_array_equal(default, own)
    plain = rope_tables(RopeConfig(), 16, positions)
    np.testing.assert_array_equal(default[0][:2], plain[0][:2])
    assert not np.allclose(default[0][2:], plain[0][2:])
    alone = rope_tables(rope, 16, positions[3:])
    np.testing.assert_array_equal(default[0][3:], alone[0])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "linear"])
def test_prompts_of_one_cache_key_have_the_same_tables(kind: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling = {"rope_type": kind, "factor": 2.0, **(factors if kind == "longrope" else {})}
    scaling |= {"original_max_position_embeddings": 8} if kind == "longrope" else {}
    rope = RopeConfig.from_hf({"rope_scaling": scaling, "max_position_embeddings": 8}, 8, 16)
    positions = jnp.arange(6)
    tables: dict[str, list[np.ndarray]] = {}
    for num_prompt in (6, 8, 9, 10, 20):
        lengths = jnp.full(6, num_prompt)
        cos, _ = rope_tables(rope, 16, positions, lengths)
        tables.setdefault(rope.cache_key(num_prompt), []).append(np.asarray(cos))
    for of_key in tables.values():
        for table in of_key[1:]:
            np.testing.assert_array_equal(table, of_key[0])
    assert len(tables) == {"dynamic": 4, "longrope": 2, "linear": 1}[kind]


def test_another_scaling_keeps_the_theta_of_the_set_that_it_replaces() -> None:
    config = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    assert RopeConfig.from_hf(config, 64, 16).theta == 5e5
    assert RopeConfig.from_hf(config | {"rope_theta": 3e5}, 64, 16).theta == 3e5
