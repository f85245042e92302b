"""The rotary embedding's kernel of a TPU, interpreted, against XLA's form of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError
from pallas_kernels.linear import Norm
from pallas_kernels.rotary import mosaic_tpu, split_rotate


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((19, 2, 6, 128), "bfloat16", "norm"),
        pytest.param((5, 8, 3, 128), "float32", None, marks=pytest.mark.slow),
        pytest.param((41, 1, 9, 256), "bfloat16", "gemma", marks=pytest.mark.slow),
    ],
)
def test_as_xla_rotates(
    shape: tuple[int, ...], dtype: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles of tokens, of which the last is filled in part."""
    monkeypatch.setattr(mosaic_tpu, "TILE_BYTES", 2 * 4 * 24 * shape[3])
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=shape), dtype)
    angles = rng.uniform(0, 100, (shape[0], shape[3] // 2))
    norms: list[Norm | None] = [None, None]
    if kind is not None:
        weights = [jnp.asarray(rng.uniform(0.5, 2, shape[3]), dtype) for _ in norms]
        norms = [Norm(weight, 1e-6, kind == "gemma") for weight in weights]
    run = functools.partial(split_rotate, q_norm=norms[0], k_norm=norms[1])
    operands = qkv, *(jnp.asarray(part(angles), jnp.float32) for part in (np.cos, np.sin))
    found = jax.jit(functools.partial(run, backend="mosaic_tpu", interpret=True))(*operands)
    for got, want in zip(found, jax.jit(functools.partial(run, backend="xla"))(*operands)):
        assert got.shape == want.shape and got.dtype == want.dtype
        # a sum in another order may round to the next number
        atol = 2e-2 if dtype == "bfloat16" else 2e-6
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=0, atol=atol * 4)


def test_what_it_does_not_rotate_goes_to_the_next() -> None:
    qkv, table = jnp.ones((3, 2, 3, 64)), jnp.ones((3, 32))
    with pytest.raises(KernelError, match=r"qkv\.shape"):
        split_rotate(qkv, table, table, backend="mosaic_tpu")
    q, _, _ = split_rotate(qkv, table, table, backend=("mosaic_tpu", "xla"))
    assert q.shape == (3, 2, 64)
