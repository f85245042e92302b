"""The rotary embedding against float64 NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError, native
from pallas_kernels.linear import Norm
from pallas_kernels.rotary import split_rotate
from tests.pallas_kernels.strategies import SEEDS, examples, numbers

TOLERANCE = {"bfloat16": 8e-3, "float32": 1e-6, "float16": 2e-3}
KINDS = (None, "norm", "gemma")
# tokens, KV heads, parts (queries, key, value), head_dim; a native task is 16384 elements, so the
# simplest shape has one token more than two tasks
SHAPES = st.tuples(
    numbers((65, 64, 1, 300), most=70),
    numbers((2, 1, 4), most=4),
    numbers((4, 3, 9), most=9, least=3),
    numbers((32, 1, 40, 18), most=40).map(lambda half: 2 * half),
)


def normed(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    """Rounded to the type of the weight before it is multiplied with it, as all backends do, but
    for Gemma's."""
    if norm is None:
        return x
    weight = np.asarray(norm.weight, np.float64)
    rows = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps)
    if norm.offset:
        return rows * (1 + weight)
    return np.asarray(jnp.asarray(rows, norm.weight.dtype), np.float64) * weight


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Pairs (i, i + D / 2) of x [T, heads, D] as complex numbers, turned by angles [T, D / 2]."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(("backend", "count"), [("native", 12), ("xla", 4)])
def test_against_float64(backend, count):
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")

    @examples(count)
    @given(SHAPES, st.sampled_from(tuple(TOLERANCE)), st.sampled_from(KINDS), SEEDS)
    def check(shape, dtype, kind, seed):
        rng = np.random.default_rng(seed)
        tokens, _, parts, head_dim = shape
        angles = rng.uniform(0, 100, (tokens, head_dim // 2))
        qkv = jnp.asarray(rng.standard_normal(shape), dtype)
        q_norm = k_norm = None
        if kind:
            q_norm, k_norm = (
                Norm(jnp.asarray(rng.uniform(0.5, 2, head_dim), dtype), eps, kind == "gemma")
                for eps in (1e-6, 1e-2)
            )
        run = functools.partial(split_rotate, q_norm=q_norm, k_norm=k_norm, backend=backend)
        tables = (jnp.asarray(part(angles), jnp.float32) for part in (np.cos, np.sin))
        found = jax.jit(run)(qkv, *tables)
        wide = np.asarray(qkv, np.float64)
        q, k, v = wide[:, :, : parts - 2], wide[:, :, parts - 2], wide[:, :, parts - 1]
        q = q.reshape(tokens, -1, head_dim)
        wanted = (rotated(normed(q, q_norm), angles), rotated(normed(k, k_norm), angles), v)
        for got, want in zip(found, wanted):
            assert got.shape == want.shape
            assert got.dtype == dtype
            difference = np.abs(np.asarray(got, np.float64) - want).max()
            assert difference <= TOLERANCE[dtype] * np.abs(want).max()

    check()


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_a_norm_is_rounded_where_the_model_rounds(backend, offset):
    """Before its weight and behind it, Gemma's behind it alone: what is not turned shows it."""
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    rng = np.random.default_rng(0)
    qkv, weight = (jnp.asarray(rng.uniform(0.5, 2, n), "bfloat16") for n in ((9, 2, 3, 40), 40))
    norm, still = Norm(weight, 0.1, offset), (jnp.ones((9, 20)), jnp.zeros((9, 20)))
    found, _, _ = split_rotate(qkv, *still, q_norm=norm, k_norm=None, backend=backend)
    wanted = jnp.asarray(normed(np.asarray(qkv[:, :, 0], np.float64), norm), "bfloat16")
    # the factor is a float32 number, which may turn a tie
    assert np.mean(np.asarray(found) != np.asarray(wanted)) <= 0.005


def test_refusals():
    tables = jnp.zeros((2, 32))
    with pytest.raises(KernelError, match=r"cos=float32\(2, 32\).*\[2, 16\]"):
        split_rotate(jnp.zeros((2, 1, 3, 32)), tables, tables, backend="xla")
    with pytest.raises(KernelError, match=r"qkv\.shape"):
        split_rotate(jnp.zeros((2, 1, 2, 64)), tables, tables, backend="xla")
    with pytest.raises(KernelError, match="backend='cuda'"):
        split_rotate(jnp.zeros((2, 1, 3, 64)), tables, tables, backend="cuda")
