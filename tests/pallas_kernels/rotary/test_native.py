"""The native rotary embedding against the one in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError
from pallas_kernels.linear import Norm
from pallas_kernels.rotary import split_rotate
from tests.pallas_kernels.native.requirements import require_native

require_native()


@pytest.mark.parametrize(
    ("shape", "dtype", "tolerance", "normed"),
    [
        ((1, 2, 3, 64), "float32", 1e-6, False),
        ((37, 4, 5, 64), "bfloat16", 8e-3, False),
        ((37, 2, 5, 64), "bfloat16", 8e-3, True),
        ((300, 1, 9, 80), "float32", 1e-6, True),
    ],
    ids=str,
)
def test_equals_xla(shape, dtype, tolerance, normed):
    rng = np.random.default_rng(0)
    tokens, _, _, head_dim = shape
    angles = rng.uniform(0, 100, (tokens, head_dim // 2))
    qkv = jnp.asarray(rng.standard_normal(shape), dtype)
    norms = {}
    if normed:
        norms = {
            name: Norm(jnp.asarray(rng.uniform(0.5, 2, head_dim), dtype), eps)
            for name, eps in (("q_norm", 1e-6), ("k_norm", 1e-2))
        }
    tables = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    found = split_rotate(qkv, *tables, **norms, backend="native")
    want = split_rotate(qkv, *tables, **norms, backend="xla")
    for got, expected in zip(found, want):
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        expected = np.asarray(expected, np.float64)
        difference = np.abs(np.asarray(got, np.float64) - expected).max()
        assert difference <= tolerance * np.abs(expected).max()


def test_refusals():
    tables = jnp.zeros((2, 32))
    with pytest.raises(KernelError, match=r"cos=float32\(2, 32\).*\[2, 16\]"):
        split_rotate(jnp.zeros((2, 1, 3, 32)), tables, tables, backend="xla")
    with pytest.raises(KernelError, match=r"qkv\.shape"):
        split_rotate(jnp.zeros((2, 1, 2, 64)), tables, tables, backend="xla")
    with pytest.raises(KernelError, match="backend='cuda'"):
        split_rotate(jnp.zeros((2, 1, 3, 64)), tables, tables, backend="cuda")
