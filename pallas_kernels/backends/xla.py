"""XLA: plain JAX, which every device compiles."""

from __future__ import annotations

from pallas_kernels.backends.problems import Attention, Sampling
from pallas_kernels.backends.record import (
    ANYWHERE,
    GPU_CHIPS,
    HOPPER_CHIPS,
    TPU_CHIPS,
    Backend,
    Implementation,
    ProofCase,
)

BACKEND = Backend(
    "xla",
    (
        Implementation(
            "decode",
            "paged_attention.xla.decode",
            runs=ANYWHERE,
            chips=GPU_CHIPS + TPU_CHIPS,
            proved=(
                ProofCase(Attention()),
                ProofCase(
                    Attention(pages="int8", scales="token", sinks=True),
                    kinds=HOPPER_CHIPS + TPU_CHIPS,
                ),
            ),
        ),
        Implementation("decode_and_write", "paged_attention.xla.decode"),
        Implementation(
            "prefill",
            "paged_attention.xla.prefill",
            runs=ANYWHERE,
            chips=GPU_CHIPS + TPU_CHIPS,
            proved=(ProofCase(Attention(2048)),),
        ),
        Implementation(
            "write_kv",
            "write_kv.xla",
            runs=ANYWHERE,
            chips=GPU_CHIPS + TPU_CHIPS,
            proved=(
                ProofCase(Attention(2048), quick=("a100", "v5e")),
                ProofCase(Attention(2048, pages="float8_e4m3fn"), kinds=HOPPER_CHIPS + TPU_CHIPS),
                ProofCase(
                    Attention(2048, pages="int8"),
                    kinds=HOPPER_CHIPS + TPU_CHIPS,
                    operation="write_kv_scaled",
                ),
            ),
        ),
        Implementation(
            "threshold",
            "kept_threshold.xla",
            runs=ANYWHERE,
            chips=GPU_CHIPS + TPU_CHIPS,
            proved=(ProofCase(Sampling(16), quick=("v5e",)),),
        ),
        Implementation("matmul", "quantized_matmul.xla", runs=ANYWHERE),
        Implementation("linear", "linear.xla", runs=ANYWHERE),
        Implementation("grouped_linear", "grouped_linear.xla", runs=ANYWHERE),
        Implementation("route", "route.xla", runs=ANYWHERE),
        Implementation("rotary", "rotary.xla"),
        Implementation("rotate_and_write", "rotate_and_write.xla"),
        Implementation("residual_norm", "residual_norm.xla"),
        Implementation("finish_rows", "finish_rows.xla"),
    ),
)
