"""Reference: the plainest words for each operation, which the others are compared with."""

from __future__ import annotations

from pallas_kernels.backends.record import Backend, Implementation

BACKEND = Backend(
    "reference",
    (
        Implementation("decode", "paged_attention.reference"),
        Implementation("decode_and_write", "paged_attention.reference"),
        Implementation("prefill", "paged_attention.reference", sees_ahead=True),
        Implementation("write_kv", "write_kv.reference"),
        Implementation("matmul", "quantized_matmul.reference"),
        Implementation("threshold", "kept_threshold.reference"),
        Implementation("grouped_linear", "grouped_linear.reference"),
    ),
)
