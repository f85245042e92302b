"""What each attention backend covers, judged without importing its compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError
from pallas_kernels.pages import value_dtype


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The static facts by which a backend takes or refuses an attention problem.

    A fact that is None is not judged: a device can be asked before its model is known.

    Attributes:
        head_dim: size of a head.
        page_size: tokens a page.
        group: query heads a KV head.
        pool_dtype: element type of the pages; uint16 and uint8 stand for what their bits hold.
        query_dtype: type of the queries.
    """

    head_dim: int | None = None
    page_size: int | None = None
    group: int | None = None
    pool_dtype: np.dtype | None = None
    query_dtype: np.dtype | None = None

    @staticmethod
    def of(q: jax.Array, kv_pages: jax.Array) -> AttentionShape:
        """The facts of q [rows, H, D] and kv_pages [NP, page_size, 2, KVH, D]."""
        _, page_size, _, kv_heads, head_dim = kv_pages.shape
        return AttentionShape(
            head_dim=head_dim,
            page_size=page_size,
            group=q.shape[1] // kv_heads,
            pool_dtype=jnp.dtype(kv_pages.dtype),
            query_dtype=jnp.dtype(q.dtype),
        )


def mosaic_gpu_decode(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic GPU decode kernel does not cover a shape; None when it does."""
    if shape.pool_dtype is not None and value_dtype(shape.pool_dtype) not in (
        jnp.bfloat16,
        jnp.float16,
    ):
        return KernelError("kv_pages.dtype", shape.pool_dtype, "bfloat16 or float16")
    if None not in (shape.query_dtype, shape.pool_dtype) and shape.query_dtype != shape.pool_dtype:
        return KernelError("q.dtype", shape.query_dtype, f"that of the pages, {shape.pool_dtype}")
    if shape.head_dim is not None and shape.head_dim not in (64, 128):
        return KernelError("head_dim", shape.head_dim, "64 or 128")
    if shape.page_size is not None and shape.page_size not in (16, 32, 64):
        return KernelError("page_size", shape.page_size, "16, 32 or 64 tokens")
    if shape.group is not None and shape.group > 64:
        return KernelError("heads / kv_heads", shape.group, "at most 64")
    return None


def triton_decode(shape: AttentionShape) -> KernelError | None:
    """Why the Triton decode kernel does not cover a shape; None when it does."""
    if shape.head_dim is not None and not 16 <= shape.head_dim <= 256:
        return KernelError("head_dim", shape.head_dim, "16 to 256")
    if shape.page_size is not None and shape.page_size not in (8, 16, 32, 64, 128):
        return KernelError("page_size", shape.page_size, "8, 16, 32, 64 or 128 tokens")
    if shape.group is not None and shape.group > 64:
        return KernelError("heads / kv_heads", shape.group, "at most 64")
    return None


def triton_prefill(shape: AttentionShape) -> KernelError | None:
    """Why the Triton prefill kernel does not cover a shape; None when it does."""
    return triton_decode(shape)


def require(refusal: KernelError | None, backend: str, q: jax.Array, kv_pages: jax.Array) -> None:
    """Raises a refusal with the shapes that were refused.

    Raises:
        KernelError: `refusal` is one.
    """
    if refusal is not None:
        raise KernelError(
            refusal.field,
            refusal.value,
            f"the {backend} backend takes {refusal.allowed}; "
            f"q is {q.dtype}{q.shape}, kv_pages {kv_pages.dtype}{kv_pages.shape}",
        )


# backends whose coverage is limited; "xla" and "reference" take every problem
DECODE: dict[str, Callable[[AttentionShape], KernelError | None]] = {
    "mosaic_gpu": mosaic_gpu_decode,
    "triton": triton_decode,
}
PREFILL: dict[str, Callable[[AttentionShape], KernelError | None]] = {"triton": triton_prefill}
