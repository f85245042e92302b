"""What each attention backend covers, judged without importing its compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError
from pallas_kernels.native import availability
from pallas_kernels.pages import is_quantized
from pallas_kernels.tpu_pages import Order, memory_order

MOSAIC_GPU_POOLS = tuple(
    jnp.dtype(name) for name in ("bfloat16", "float16", "int8", "float8_e4m3fn")
)
TPU_TABLE_ENTRIES = 192 << 10  # of 4 bytes, in 1 MiB of scalar memory with the rest of the scalars


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
        kv_heads: KV heads of one device.
    """

    head_dim: int | None = None
    page_size: int | None = None
    group: int | None = None
    pool_dtype: np.dtype | None = None
    query_dtype: np.dtype | None = None
    kv_heads: int | None = None

    @staticmethod
    def of(q: jax.Array, kv_pages: jax.Array) -> AttentionShape:
        """The facts of q [rows, H, D] or [rows, Q, H, D] and of kv_pages.

        kv_pages are [NP, page_size, 2, KVH, D].
        """
        _, page_size, _, kv_heads, head_dim = kv_pages.shape
        return AttentionShape(
            head_dim=head_dim,
            page_size=page_size,
            group=q.shape[-2] // kv_heads,
            pool_dtype=jnp.dtype(kv_pages.dtype),
            query_dtype=jnp.dtype(q.dtype),
            kv_heads=kv_heads,
        )


def mosaic_gpu_prefill(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic GPU prefill kernel does not cover a shape; None when it does."""
    pool, query = shape.pool_dtype, shape.query_dtype
    if pool is not None and pool not in MOSAIC_GPU_POOLS:
        return KernelError("kv_pages.dtype", pool, "bfloat16, float16, int8 or float8_e4m3fn")
    if query is not None and query not in (jnp.bfloat16, jnp.float16):
        return KernelError("q.dtype", query, "bfloat16 or float16")
    if query is not None and pool is not None and not is_quantized(pool) and query != pool:
        return KernelError("q.dtype", query, f"that of the pages, {pool}")
    if shape.head_dim is not None and shape.head_dim not in (64, 80, 96, 128, 256):
        return KernelError("head_dim", shape.head_dim, "64, 80, 96, 128 or 256")
    if shape.page_size is not None and shape.page_size not in (16, 32, 64, 128):
        return KernelError("page_size", shape.page_size, "16, 32, 64 or 128 tokens")
    return None


def mosaic_gpu_decode(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic GPU decode kernel does not cover a shape; None when it does."""
    refusal = mosaic_gpu_prefill(shape)
    if refusal is None and shape.group is not None and shape.group > 64:
        return KernelError("heads / kv_heads", shape.group, "at most 64")
    return refusal


def mosaic_tpu(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernels do not cover a shape; None when they do."""
    pools = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "int8", "float8_e4m3fn"))
    if shape.pool_dtype is not None and shape.pool_dtype not in pools:
        return KernelError(
            "kv_pages.dtype", shape.pool_dtype, "float32, bfloat16, int8 or float8_e4m3fn"
        )
    if shape.query_dtype is not None and shape.query_dtype not in pools[:2]:
        return KernelError("q.dtype", shape.query_dtype, "float32 or bfloat16")
    # another size is padded in memory, and XLA would bring the pool into another order for a kernel
    if shape.head_dim is not None and shape.head_dim not in (128, 256):
        return KernelError("head_dim", shape.head_dim, "128 or 256")
    if shape.head_dim == 256 and shape.kv_heads is not None and shape.kv_heads % 8:
        return KernelError("kv_heads", shape.kv_heads, "a multiple of 8 where head_dim is 256")
    if shape.page_size is not None and shape.page_size not in (16, 32, 64, 128):
        return KernelError("page_size", shape.page_size, "16, 32, 64 or 128 tokens")
    return None


def mosaic_tpu_write(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernels do not write pages in place; None when they do."""
    refusal = mosaic_tpu(shape)
    if refusal is not None or shape.pool_dtype is None or shape.kv_heads is None:
        return refusal
    # four tokens share a 32-bit row there, and a DMA writes whole ones
    if memory_order(shape.kv_heads, shape.pool_dtype) is Order.HEADS:
        return KernelError("kv_heads", shape.kv_heads, "4 or a multiple of 8 for 8-bit pages")
    return None


def xla_pages_write(shape: AttentionShape) -> KernelError | None:
    """Why pages are not written whole on a TPU; None where XLA would copy the pool for one token.

    The scatter of whole pages takes every pool, but moves more than one of tokens.
    """
    pool, heads = shape.pool_dtype, shape.kv_heads
    if pool is None or heads is None or memory_order(heads, pool) is not Order.HEADS:
        return KernelError("kv_heads", heads, "of 8-bit pages, neither 4 nor a multiple of 8")
    return None


def mosaic_tpu_table(shape: tuple[int, ...]) -> KernelError | None:
    """Why a page table [rows, pages] does not fit the scalar memory of a TPU; None when it does."""
    if math.prod(shape) > TPU_TABLE_ENTRIES:
        return KernelError("page_table.shape", shape, f"at most {TPU_TABLE_ENTRIES} entries")
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


def triton_rotate_and_write(shape: AttentionShape) -> KernelError | None:
    """Why the Triton kernel does not rotate and write at once; None when it does.

    8-bit pages need scales: there the two operations are called.
    """
    if shape.pool_dtype is not None and is_quantized(shape.pool_dtype):
        return KernelError("kv_pages.dtype", shape.pool_dtype, "float32, float16 or bfloat16")
    return triton_decode(shape)


def native(shape: AttentionShape) -> KernelError | None:
    """Why the native kernels cannot be called on this machine; None when they can.

    They take every shape and type. The first call on a machine compiles them.
    """
    del shape
    state = availability()
    if state.available:
        return None
    return KernelError("backend", "'native'", f"another backend, because {state.reason}")


def native_linear(shape: AttentionShape) -> KernelError | None:
    """Why the native linear layers cannot be used; None when they can."""
    if shape.query_dtype is not None and shape.query_dtype not in (jnp.bfloat16, jnp.float32):
        return KernelError("dtype", shape.query_dtype, "bfloat16 or float32")
    return native(shape)


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
    "mosaic_tpu": mosaic_tpu,
    "native": native,
    "triton": triton_decode,
}
DECODE_AND_WRITE: dict[str, Callable[[AttentionShape], KernelError | None]] = {
    "mosaic_tpu": mosaic_tpu_write,
}
ROTATE_AND_WRITE: dict[str, Callable[[AttentionShape], KernelError | None]] = {
    "triton": triton_rotate_and_write,
}
PREFILL: dict[str, Callable[[AttentionShape], KernelError | None]] = {
    "mosaic_gpu": mosaic_gpu_prefill,
    "mosaic_tpu": mosaic_tpu,
    "native": native,
    "triton": triton_prefill,
}
WRITE: dict[str, Callable[[AttentionShape], KernelError | None]] = {
    "mosaic_tpu": mosaic_tpu_write,
    "native": native,
    "xla_pages": xla_pages_write,
}
LINEAR: dict[str, Callable[[AttentionShape], KernelError | None]] = {
    "native": native_linear,
}
OPERATIONS = {
    "decode": DECODE,
    "decode_and_write": DECODE_AND_WRITE,
    "rotate_and_write": ROTATE_AND_WRITE,
    "residual_norm": {},  # every shape and type of a stream
    "prefill": PREFILL,
    "write_kv": WRITE,
    "linear": LINEAR,
}
