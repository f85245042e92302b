"""XLA by whole pages: the write where tokens of a TPU share words."""

from __future__ import annotations

from pallas_kernels.backends.record import TPU, Backend, Implementation
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.errors import KernelError
from pallas_kernels.tpu_pages import Order, memory_order


def covers(shape: AttentionShape) -> KernelError | None:
    """Why pages are not written whole on a TPU; None where XLA would copy the pool for one token.

    The scatter of whole pages takes every pool, but moves more than one of tokens.
    """
    pool, heads = shape.pool_dtype, shape.kv_heads
    if pool is None or heads is None or memory_order(heads, pool) is not Order.HEADS:
        return KernelError("kv_heads", heads, "of 8-bit pages, neither 4 nor a multiple of 8")
    return None


BACKEND = Backend(
    "xla_pages",
    (Implementation("write_kv", "write_kv.xla_pages", covers, (TPU,), whole_pages=True),),
)
