"""XLA: plain JAX, which every device compiles."""

from __future__ import annotations

from pallas_kernels.backends.record import ANYWHERE, Backend, Implementation
from pallas_kernels.coverage import AttentionShape


def any_rows(shape: AttentionShape) -> int:
    """It takes heads of any number of rows, and wants one."""
    return 1


BACKEND = Backend(
    "xla",
    (
        Implementation("decode", "paged_attention.xla.decode", runs=ANYWHERE),
        Implementation("decode_and_write", "paged_attention.xla.decode"),
        Implementation(
            "prefill",
            "paged_attention.xla.prefill",
            runs=ANYWHERE,
            head_rows=any_rows,
            sees_ahead=True,
        ),
        Implementation("write_kv", "write_kv.xla", runs=ANYWHERE),
        Implementation("threshold", "kept_threshold.xla", runs=ANYWHERE),
        Implementation("matmul", "quantized_matmul.xla", runs=ANYWHERE),
        Implementation("linear", "linear.xla", runs=ANYWHERE),
        Implementation("grouped_linear", "grouped_linear.xla", runs=ANYWHERE),
        Implementation("route", "route.xla", runs=ANYWHERE),
        Implementation("rotary", "rotary.xla", runs=ANYWHERE),
        Implementation("rotate_and_write", "rotate_and_write.xla"),
        Implementation("residual_norm", "residual_norm.xla"),
        Implementation("finish_rows", "finish_rows.xla"),
    ),
)
