"""Native: C++ for the vector and matrix units of a CPU."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.backends.record import CPU, Backend, Implementation
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.errors import KernelError
from pallas_kernels.native import availability


def covers(shape: AttentionShape) -> KernelError | None:
    """Why the native kernels cannot be called on this machine; None when they can.

    They take every shape and type. The first call on a machine compiles them.
    """
    del shape
    state = availability()
    if state.available:
        return None
    return KernelError("backend", "'native'", f"another backend, because {state.reason}")


def covers_linear(shape: AttentionShape) -> KernelError | None:
    """Why the native linear layers cannot be used; None when they can."""
    if shape.query_dtype is not None and shape.query_dtype not in (jnp.bfloat16, jnp.float32):
        return KernelError("dtype", shape.query_dtype, "bfloat16 or float32")
    return covers(shape)


BACKEND = Backend(
    "native",
    (
        Implementation("decode", "paged_attention.native", covers, (CPU,)),
        Implementation(
            "prefill", "paged_attention.native", covers, (CPU,), sees_ahead=True, in_one_order=True
        ),
        Implementation("write_kv", "write_kv.native", covers, (CPU,)),
        Implementation("linear", "linear.native", covers_linear, (CPU,), stores="uint8"),
        Implementation("grouped_linear", "grouped_linear.native", stores="uint8"),
        Implementation("rotary", "rotary.native"),
    ),
)
