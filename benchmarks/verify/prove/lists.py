"""The problems for which each kernel is compiled where its devices are not there."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.verify.prove.shapes import Attention, Experts, Matmul, Sampling

HOPPER_CHIPS, OLDER_CHIPS = ("h200", "h100"), ("a100", "l4", "b200")
GPU_CHIPS = HOPPER_CHIPS + OLDER_CHIPS
TPU_CHIPS = ("v5e", "v5p", "v6e")
SCALED = HOPPER_CHIPS + TPU_CHIPS  # for which XLA's 8-bit pages are compiled


@dataclass(frozen=True, slots=True)
class ProofCase:
    """A problem for which a kernel is compiled.

    Attributes:
        problem: shapes and options.
        quick: devices for which it is compiled in a quick run.
        kinds: devices for which it is compiled; () for all of the kernel's chips.
        operation: where it is not the kernel's own, such as "write_kv_scaled".
    """

    problem: Attention | Matmul | Experts | Sampling
    quick: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Proved:
    """A kernel that is compiled: a backend's implementation of an operation.

    Attributes:
        operation: a key of `pallas_kernels.backends.OPERATIONS`.
        backend: of the operation.
        chips: devices for which it is compiled: keys of `benchmarks.verify.prove.targets.KINDS`.
        problems: for which that is done.
    """

    operation: str
    backend: str
    chips: tuple[str, ...]
    problems: tuple[ProofCase, ...]


# fmt: off
PROVED = (
    Proved("decode", "mosaic_gpu", HOPPER_CHIPS, (
        ProofCase(Attention(rows=1), quick=("h200",)),
        ProofCase(Attention(), quick=HOPPER_CHIPS),
        ProofCase(Attention(rows=256, window=4096), quick=("h200",)),
        ProofCase(Attention(head_dim=64, dtype="float16")),
        ProofCase(Attention(16, 32, 32, page_size=32)),
        ProofCase(Attention(16, 16, 2, 64, 64, window=1024)),
        ProofCase(Attention(16, 64, 1, splits=7)),
        ProofCase(Attention(16, 32, 32, 80, 32)),
        ProofCase(Attention(16, 24, 8, 96, 64)),
        ProofCase(Attention(16, 16, 8, 256, soft_cap=50.0)),
        ProofCase(Attention(64, 64, 8, 64, sinks=True)),
        ProofCase(Attention(page_size=128)),
        ProofCase(Attention(16, queries=4)),
        ProofCase(Attention(16, queries=8), quick=("h200",)),
        ProofCase(Attention(16, 16, 8, 256, queries=8)),
        ProofCase(Attention(16, queries=8, pages="int8")),
        ProofCase(Attention(16, queries=8, pages="float8_e4m3fn")),
        ProofCase(Attention(pages="int8"), quick=("h200",)),
        ProofCase(Attention(pages="float8_e4m3fn"), quick=("h200",)),
        ProofCase(Attention(64, 64, shards=8), quick=("h200",)),
        # of models: Qwen3-0.6B, Gemma-2-27B, Gemma-3-1B and 4B, Phi-4-mini, Mixtral and Llama-405B
        # over 2 and 8 devices, Llama-3.2-1B; groups of 5, 6, 7, 12 and 48 heads
        ProofCase(Attention(64, 16, 8)),
        ProofCase(Attention(64, 32, 16, soft_cap=50.0, window=4096)),
        ProofCase(Attention(64, 4, 1, 256)),
        ProofCase(Attention(64, 8, 4, 256)),
        ProofCase(Attention(64, 24, 8)),
        ProofCase(Attention(64, 16, 4)),
        ProofCase(Attention(64, 16, 1)),
        ProofCase(Attention(64, 32, 8, 64)),
        ProofCase(Attention(64, 40, 8)),
        ProofCase(Attention(64, 48, 8, sinks=True)),
        ProofCase(Attention(64, 28, 4)),
        ProofCase(Attention(64, 24, 2)),
        ProofCase(Attention(64, 48, 1)),
        ProofCase(Attention(16, 24, 8, 64, queries=3)),
        ProofCase(Attention(16, 24, 8, 64, queries=5)),
        ProofCase(Attention(16, 16, 1, queries=8)),
        ProofCase(Attention(page_size=64)),
    )),
    Proved("prefill", "mosaic_gpu", HOPPER_CHIPS, (
        ProofCase(Attention(2048), quick=HOPPER_CHIPS),
        ProofCase(Attention(256, lanes=1)),
        ProofCase(Attention(2048, head_dim=64, dtype="float16")),
        ProofCase(Attention(2048, 32, 32, 80, 32)),
        ProofCase(Attention(2048, 24, 8, 96, 64)),
        ProofCase(Attention(2048, 16, 8, 256, soft_cap=50.0)),
        ProofCase(Attention(2048, window=1024, sinks=True)),
        ProofCase(Attention(2048, page_size=128)),
        ProofCase(Attention(2048, 64, shards=8)),
        ProofCase(Attention(2048, pages="int8"), quick=("h200",)),
        ProofCase(Attention(2048, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, 32, 32, 80, 32, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, 16, 8, 256, soft_cap=50.0, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, 64, 8, 64, 64, pages="int8", window=1024, sinks=True)),
        # of models, likewise: groups of 2, 5, 7, 16 and 48 heads
        ProofCase(Attention(2048, 16, 8)),
        ProofCase(Attention(2048, 40, 8)),
        ProofCase(Attention(2048, 28, 4)),
        ProofCase(Attention(2048, 4, 1, 256)),
        ProofCase(Attention(2048, 16, 1)),
        ProofCase(Attention(2048, 16, 1, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, 32, 2)),
        ProofCase(Attention(2048, 48, 1)),
        ProofCase(Attention(2048, page_size=64)),
    )),
    Proved("matmul", "mosaic_gpu", HOPPER_CHIPS, (
        ProofCase(Matmul(1)),
        ProofCase(Matmul(), quick=("h200",)),
        ProofCase(Matmul(scales="float16", asymmetric=True)),
        ProofCase(Matmul(16, 896, 9728, asymmetric=True)),
        ProofCase(Matmul(2048, 4864, 896)),
        ProofCase(Matmul(2048, group=32)),
        ProofCase(Matmul(weight="int8")),
        ProofCase(Matmul(2048, weight="int8")),
        ProofCase(Matmul(weight="fp8")),
        ProofCase(Matmul(2048, weight="fp8")),
        ProofCase(Matmul(2048, weight="int8", activations="int8")),
        ProofCase(Matmul(2048, weight="fp8", activations="fp8")),
        # of models: Gemma-2-27B, Llama-3.2-1B, Qwen2-7B, Qwen3-4B, SmolLM
        ProofCase(Matmul(16, 36864, 4608)),
        ProofCase(Matmul(16, 2048, 512)),
        ProofCase(Matmul(16, 18944, 3584, group=64, asymmetric=True)),
        ProofCase(Matmul(16, 3072, 5120, group=32)),
        ProofCase(Matmul(16, 1536, 576, weight="fp8")),
        ProofCase(Matmul(1, weight="fp8 by group", activations="fp8")),
        ProofCase(Matmul(2048, weight="fp8 by group", activations="fp8")),
        ProofCase(Matmul(2048, weight="fp8 by group")),
    )),
    Proved("decode", "triton", OLDER_CHIPS, (
        ProofCase(Attention(rows=1)),
        ProofCase(Attention(), quick=("a100",)),
        ProofCase(Attention(256, window=4096)),
        ProofCase(Attention(head_dim=64, dtype="float16")),
        ProofCase(Attention(16, 32, 32, 80, 32)),
        ProofCase(Attention(16, 24, 8, 96, 64)),
        ProofCase(Attention(16, 16, 8, 256, soft_cap=50.0)),
        ProofCase(Attention(16, 64, 1, splits=7)),
        ProofCase(Attention(64, 64, 8, 64, sinks=True)),
        ProofCase(Attention(page_size=128)),
        ProofCase(Attention(pages="int8", scales="token"), quick=("a100",), kinds=GPU_CHIPS),
        ProofCase(Attention(pages="float8_e4m3fn")),
        ProofCase(Attention(dtype="float32"), kinds=GPU_CHIPS),
        ProofCase(Attention(64, 64, shards=8)),
        ProofCase(Attention(queries=4)),
        ProofCase(Attention(queries=8), quick=("a100",)),
        ProofCase(Attention(16, 64, 4, 64, queries=8, sinks=True)),
        ProofCase(Attention(16, 32, 32, 80, 32, queries=8)),
        ProofCase(Attention(16, 16, 8, 256, queries=8, window=1024)),
        ProofCase(Attention(queries=8, pages="int8", scales="token")),
        ProofCase(Attention(queries=8, pages="float8_e4m3fn")),
        ProofCase(Attention(queries=8, dtype="float32")),
        ProofCase(Attention(64, 64, shards=8, queries=4)),
        ProofCase(Attention(64, 4, 1, 256), kinds=("b200",)),
    )),
    Proved("prefill", "triton", OLDER_CHIPS, (
        ProofCase(Attention(2048), quick=("a100",)),
        ProofCase(Attention(256, lanes=1)),
        ProofCase(Attention(2048, head_dim=64, dtype="float16")),
        ProofCase(Attention(2048, 32, 32, 80, 32)),
        ProofCase(Attention(2048, 24, 8, 96, 64)),
        ProofCase(Attention(2048, 16, 8, 256, soft_cap=50.0)),
        ProofCase(Attention(2048, window=1024, sinks=True)),
        ProofCase(Attention(2048, pages="int8", scales="token"), kinds=GPU_CHIPS),
        ProofCase(Attention(2048, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, dtype="float32"), kinds=GPU_CHIPS),
        ProofCase(Attention(2048, 16, 1), kinds=("b200",)),
        ProofCase(Attention(2048, 8, 4, 256), kinds=("b200",)),
    )),
    Proved("rotate_and_write", "triton", GPU_CHIPS, (
        ProofCase(Attention(16), quick=("h200", "a100")),
        ProofCase(Attention(2048, 28, 4)),
        ProofCase(Attention(64, 16, 8, 256, dtype="float16")),
        ProofCase(Attention(64, 64, 8, 80)),
        ProofCase(Attention(64, 64, shards=8)),
        ProofCase(Attention(64, 4, 1, 256)),
    )),
    Proved("matmul", "triton", OLDER_CHIPS, (
        ProofCase(Matmul(1)),
        ProofCase(Matmul(), quick=("a100",)),
        ProofCase(Matmul(2048, asymmetric=True)),
        ProofCase(Matmul(weight="int8")),
        ProofCase(Matmul(2048, weight="fp8")),
        ProofCase(Matmul(2048, weight="int8", activations="int8")),
        ProofCase(Matmul(weight="fp8 by group")),
        ProofCase(Matmul(2048, weight="fp8 by group")),
    )),
    Proved("threshold", "triton", GPU_CHIPS, (
        ProofCase(Sampling(), quick=("h200", "a100")),
        ProofCase(Sampling(1)),
        ProofCase(Sampling(16, 262144)),
    )),
    Proved("decode", "mosaic_tpu", TPU_CHIPS, (
        ProofCase(Attention(rows=1)),
        ProofCase(Attention(context=8192), quick=TPU_CHIPS),
        ProofCase(Attention(context=8192, window=4096)),
        ProofCase(Attention(16, 32, 32, page_size=128)),
        ProofCase(Attention(16, 16, 8, 256, soft_cap=50.0)),
        ProofCase(Attention(16, 64, 8, sinks=True)),
        ProofCase(Attention(16, dtype="float32")),
        ProofCase(Attention(16, pages="int8")),
        ProofCase(Attention(16, pages="int8", scales="token")),
        ProofCase(Attention(16, pages="float8_e4m3fn")),
        ProofCase(Attention(16, 64, shards=8)),
        ProofCase(Attention(queries=4)),
        ProofCase(Attention(queries=8), quick=("v5e", "v6e")),
        ProofCase(Attention(16, 32, 32, page_size=128, queries=8)),
        ProofCase(Attention(16, 28, 4, queries=8, window=4096)),
        ProofCase(Attention(16, 12, 2, queries=4, sinks=True)),
        ProofCase(Attention(16, 64, 8, queries=8)),
        ProofCase(Attention(16, 16, 8, 256, queries=8)),
        ProofCase(Attention(16, queries=8, dtype="float32")),
        ProofCase(Attention(16, queries=8, pages="int8", scales="token")),
        ProofCase(Attention(16, queries=8, pages="float8_e4m3fn")),
        ProofCase(Attention(16, 8, 1, pages="int8")),
        ProofCase(Attention(16, 24, 3, 128, 128, pages="int8")),
        # Gemma-3-1B and 4B, Gemma-2-2B
        ProofCase(Attention(16, 4, 1, 256, 128, head_rows=2, window=512)),
        ProofCase(Attention(16, 8, 4, 256, 128, head_rows=2, soft_cap=50.0)),
        ProofCase(Attention(16, 8, 4, 256, head_rows=2, queries=4)),
        ProofCase(Attention(16, 8, 4, 256, head_rows=2, pages="float8_e4m3fn")),
    )),
    Proved("decode_and_write", "mosaic_tpu", TPU_CHIPS, (
        ProofCase(Attention(16, queries=4)),
        ProofCase(Attention(context=8192, queries=8)),
        ProofCase(Attention(16, 32, 32, page_size=128, queries=8)),
        ProofCase(Attention(16, 28, 4, window=4096, queries=8)),
        ProofCase(Attention(16, queries=8, dtype="float32")),
        ProofCase(Attention(16, queries=8, pages="int8")),
        ProofCase(Attention(context=8192), quick=TPU_CHIPS),
        ProofCase(Attention(16, 32, 32, page_size=128)),
        ProofCase(Attention(16, 28, 4, window=4096)),
        ProofCase(Attention(16, 12, 2, sinks=True)),
        ProofCase(Attention(16, 9, 3)),
        ProofCase(Attention(16, 16, 8, 256)),
        ProofCase(Attention(16, dtype="float32")),
        ProofCase(Attention(16, pages="int8")),
        ProofCase(Attention(16, 32, 4, pages="int8")),
        ProofCase(Attention(16, pages="float8_e4m3fn")),
        ProofCase(Attention(16, 64, shards=8)),
        ProofCase(Attention(16, 4, 1, 256, 128, head_rows=2, window=512)),
        ProofCase(Attention(16, 8, 4, 256, 128, head_rows=2, soft_cap=50.0)),
        ProofCase(Attention(16, 8, 4, 256, head_rows=2, queries=4)),
    )),
    Proved("prefill", "mosaic_tpu", TPU_CHIPS, (
        ProofCase(Attention(2048), quick=TPU_CHIPS),
        ProofCase(Attention(256, lanes=1)),
        ProofCase(Attention(2048, 16, 8, 256, soft_cap=50.0)),
        ProofCase(Attention(2048, window=1024, sinks=True)),
        ProofCase(Attention(2048, dtype="float32")),
        ProofCase(Attention(2048, pages="int8", scales="token")),
        ProofCase(Attention(2048, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, 4, 1, 256, 128, head_rows=2, window=512)),
        ProofCase(Attention(2048, 8, 4, 256, 128, head_rows=2, soft_cap=50.0)),
        ProofCase(Attention(2048, 8, 4, 256, head_rows=2, pages="float8_e4m3fn")),
    )),
    Proved("write_kv", "mosaic_tpu", TPU_CHIPS, (
        ProofCase(Attention(2048), quick=TPU_CHIPS),
        ProofCase(Attention(16, page_size=128)),
        ProofCase(Attention(2048, pages="int8")),
        ProofCase(Attention(2048, pages="float8_e4m3fn")),
        ProofCase(Attention(2048, pages="int8"), quick=("v5e",), operation="write_kv_scaled"),
        ProofCase(Attention(2048, 4, 1, 256, 128, head_rows=2)),
    )),
    Proved("matmul", "mosaic_tpu", TPU_CHIPS, (
        ProofCase(Matmul(), quick=("v5e",)),
        ProofCase(Matmul(1)),
        ProofCase(Matmul(16, 5632, 2048, group=32)),
        ProofCase(Matmul(2048, asymmetric=True)),
        ProofCase(Matmul(weight="int8")),
        ProofCase(Matmul(2048, weight="fp8")),
        # a last block of rows that is not full, of rounded ones too
        ProofCase(Matmul(300)),
        ProofCase(Matmul(40, weight="int8", activations="int8")),
    )),
    Proved("linear_layer", "mosaic_tpu", TPU_CHIPS, (
        ProofCase(Matmul(weight="int8", activations="int8"), quick=("v5e",)),
        ProofCase(Matmul()),
        # the most rows that are held, and no whole tiles of them
        ProofCase(Matmul(88, 14336, 8192, weight="int8", activations="int8")),
        ProofCase(Matmul(248, 5632, 2048, weight="int8", activations="int8")),
        ProofCase(Matmul(120, 4096, 2048)),
    )),
    Proved("grouped_linear", "mosaic_tpu", TPU_CHIPS, (
        # rows of 4 bits that are filled up: few, whose tokens the kernel holds, and many
        ProofCase(Experts(), quick=("v5e",)),
        ProofCase(Experts(512)),
        ProofCase(Experts(16, inputs=2048, outputs=1536, gated=True)),
        ProofCase(Experts(16, inputs=2048, outputs=1536, weight="int8", gated=True)),
        ProofCase(Experts(16, weight="fp8")),
        # the most tokens whose rows and results are held
        ProofCase(Experts(896, inputs=2048, outputs=1536, gated=True)),
        ProofCase(Experts(2048)),
        # Mixtral's
        ProofCase(Experts(16, 8, 2, 4096, 28672, weight="fp8", gated=True)),
        ProofCase(Experts(256, 8, 2, 4096, 28672, weight="int8", gated=True)),
        ProofCase(Experts(256, 8, 2, 14336, 4096, weight="int8")),
        ProofCase(Experts(64, 8, 2, 14336, 4096, weight="")),
    )),
    Proved("grouped_linear", "triton", GPU_CHIPS, (
        ProofCase(Experts(), quick=("h200",)),
        ProofCase(Experts(16, inputs=2048, outputs=1536, weight="int8", gated=True)),
        ProofCase(Experts(64, 8, 2, 14336, 4096, weight="")),
        ProofCase(Experts(2048, 8, 2, 4096, 28672, weight="fp8", gated=True)),
    )),
    Proved("write_kv", "xla_pages", TPU_CHIPS, (
        ProofCase(Attention(64, 8, 1, pages="int8"), quick=("v5e",)),
        ProofCase(Attention(2048, 8, 2, page_size=128, pages="int8")),
        ProofCase(Attention(64, 24, 3, 128, 128, pages="float8_e4m3fn")),
    )),
    Proved("decode", "xla", GPU_CHIPS + TPU_CHIPS, (
        ProofCase(Attention()),
        ProofCase(Attention(pages="int8", scales="token", sinks=True), kinds=SCALED),
    )),
    Proved("prefill", "xla", GPU_CHIPS + TPU_CHIPS, (ProofCase(Attention(2048)),)),
    Proved("write_kv", "xla", GPU_CHIPS + TPU_CHIPS, (
        ProofCase(Attention(2048), quick=("a100", "v5e")),
        ProofCase(Attention(2048, pages="float8_e4m3fn"), kinds=SCALED),
        # on a TPU XLA brings all scales into another order for this: `xla_pages` writes them there
        ProofCase(Attention(2048, pages="int8"), kinds=HOPPER_CHIPS, operation="write_kv_scaled"),
    )),
    Proved("threshold", "xla", GPU_CHIPS + TPU_CHIPS, (
        ProofCase(Sampling(16), quick=("v5e",)),
    )),
)
# fmt: on
