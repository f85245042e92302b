"""Numbers out of 32-bit words: every 8-bit number, in each place of a word."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention.tpu.heads import _unpacked


@pytest.mark.parametrize("dtype", [np.dtype("int8"), np.dtype(ml_dtypes.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("place", range(4))
def test_every_8_bit_number(dtype, place):
    codes = np.arange(256, dtype=np.uint8)
    others = np.random.default_rng(0).integers(0, 256, (256, 4), np.uint8)
    others[:, place] = codes
    words = jnp.asarray(others.view("<i4")[:, 0])
    got = np.asarray(_unpacked(words, place, dtype))
    np.testing.assert_array_equal(got, codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize("place", range(2))
def test_bfloat16(place):
    numbers = np.random.default_rng(1).standard_normal((100, 2)).astype(ml_dtypes.bfloat16)
    words = jnp.asarray(numbers.view("<i4")[:, 0])
    got = np.asarray(_unpacked(words, place, jnp.dtype("bfloat16")))
    np.testing.assert_array_equal(got, numbers[:, place].astype(np.float32))
