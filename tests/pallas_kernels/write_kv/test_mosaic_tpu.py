"""The Mosaic TPU kernel of write_kv in JAX's TPU interpreters against the reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KernelError, write_kv
from tests.pallas_kernels.cases import stored

INTERPRETER = pltpu.InterpretParams(detect_races=True)


# KV heads, pool, tokens; more tokens than a grid step takes, in each order of a page in memory
@pytest.mark.parametrize(
    ("kv_heads", "pool", "tokens", "interpret"),
    [
        pytest.param(8, "bfloat16", 130, INTERPRETER, marks=pytest.mark.slow),
        pytest.param(1, "bfloat16", 3, INTERPRETER),
        pytest.param(4, "int8", 5, True, marks=pytest.mark.slow),
    ],
    ids=["whole tiles", "pairs", "plain interpreter"],
)
def test_rows_land_in_place_and_nothing_else_changes(kv_heads, pool, tokens, interpret, capfd):
    rng = np.random.default_rng(0)
    before = jnp.asarray(stored(rng.standard_normal((10, 16, 2, kv_heads, 128), np.float32), pool))
    k, v = (jnp.asarray(rng.standard_normal((tokens, kv_heads, 128), np.float32)) for _ in "kv")
    places = rng.permutation(160)[:tokens]
    page_ids, offsets = (jnp.asarray(part, jnp.int32) for part in np.divmod(places, 16))
    operands = (before, k, v, page_ids, offsets)
    scale = jnp.float32(0.03) if pool == "int8" else None
    scales = {"k_scale": scale, "v_scale": scale}
    got = write_kv(*operands, **scales, backend="mosaic_tpu", interpret=interpret)
    want = write_kv(*operands, **scales, backend="reference")
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    assert "RACE" not in "".join(capfd.readouterr())


def test_pages_whose_rows_share_words_between_tokens_are_refused():
    row = jnp.zeros((1, 2, 128))
    place = jnp.zeros(1, jnp.int32)
    with pytest.raises(KernelError) as caught:
        write_kv(
            jnp.zeros((2, 16, 2, 2, 128), jnp.int8),
            row,
            row,
            place,
            place,
            k_scale=jnp.float32(1),
            v_scale=jnp.float32(1),
            backend="mosaic_tpu",
        )
    assert caught.value.field == "kv_heads"
