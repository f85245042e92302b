"""split_rotate: the public function and the explicit choice of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import first_that_covers
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.linear.api import Norm
from pallas_kernels.pages import FLOAT_DTYPES


def split_rotate(
    qkv: jax.Array,  # [T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    *,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    backend: str | Sequence[str],
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, KVH * G, D], [T, KVH, D], [T, KVH, D]
    """Queries, keys and values of a fused projection; queries and keys rotated by their position.

    Dimension i is paired with i + D / 2 (Su et al., "RoFormer", 2021, in the half-split form); the
    rotation is done in float32.

    Args:
        qkv: for each KV head its G query heads, its key and its value.
        cos, sin: cosine and sine of each token's angles.
        q_norm, k_norm: RMS norm over D before the rotation.
        backend: "xla" (any device), "native" (CPU, C++) or "mosaic_tpu" (TPU), or several, of which
            the first that covers the projection is taken.
        interpret: None compiles; otherwise the parameters of the interpreter of a kernel.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.shape[3] % 2:
        raise KernelError("qkv.shape", qkv.shape, "[tokens, kv_heads, group + 2, even head_dim]")
    if qkv.dtype not in FLOAT_DTYPES:
        raise KernelError("qkv.dtype", qkv.dtype, "float32, float16 or bfloat16")
    half = (qkv.shape[0], qkv.shape[3] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        check_array(name, table, jnp.float32, half)
    chosen = first_that_covers("rotary", backend, qkv)
    options = chosen.options(interpret=interpret if chosen.interprets else None)
    q, k, v = chosen.load().split_rotate(qkv, cos, sin, q_norm=q_norm, k_norm=k_norm, **options)
    return q, k, v
