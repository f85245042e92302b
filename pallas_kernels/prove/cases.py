"""What is proved: one line a kernel, shape and option."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

HOPPER = ("h200", "h100")
OLDER = ("a100", "l4", "b200")  # GPUs for which the Triton kernels are
GPUS = ("h200", "h100", "a100", "l4", "b200")
TPUS = ("v5e", "v5p", "v6e")
# the instruction for matrix products that a kernel of each backend must not lose
MATRIX_INSTRUCTION = {"mosaic_gpu": "wgmma", "triton": "mma", "mosaic_tpu": "matmul"}


def changed_options(problem: Any, shown: tuple[str, ...]) -> list[str]:
    """The fields of a dataclass, those in `shown` left out, that are not at their defaults."""
    values = {
        field.name: (getattr(problem, field.name), field.default) for field in fields(problem)
    }
    return [
        name if value is True else f"{name}={value}"
        for name, (value, default) in values.items()
        if name not in shown and value != default
    ]


@dataclass(frozen=True, slots=True)
class Attention:
    """The shapes and options of an attention problem, or of a write into its pages.

    Attributes:
        rows: slots of decode, rows of a prefill region, tokens of a write.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: size of a head.
        page_size: tokens a page.
        dtype: of queries, and of new keys and values.
        pages: element type of the pages; None for `dtype`.
        scales: of 8-bit pages: "tensor" or "page" (by page and KV head).
        window: sliding window in tokens.
        soft_cap: bound of the scores.
        sinks: whether each head has a sink.
        splits: of decode; None lets the kernel choose.
        lanes: requests in a prefill region.
        context: tokens that a row of the page table can name.
        shards: devices over which the heads are divided.
        queries: query positions of a slot of decode, some of which it may be without.
    """

    rows: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    pages: str | None = None
    scales: str = "tensor"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    splits: int | None = None
    lanes: int = 16
    context: int = 16384
    shards: int = 1
    queries: int = 1

    def words(self) -> str:
        """The shapes, and the options that are not at their defaults."""
        shapes = [f"rows={self.rows} heads={self.heads}/{self.kv_heads}"]
        shapes += [f"head_dim={self.head_dim} page={self.page_size} {self.dtype}"]
        shown = ("rows", "heads", "kv_heads", "head_dim", "page_size", "dtype")
        return " ".join(shapes + changed_options(self, shown))


@dataclass(frozen=True, slots=True)
class Matmul:
    """The shapes and options of a product with a quantised weight: by default Llama-3-8B's.

    Attributes:
        rows: of the activations.
        inputs: contracted elements.
        outputs: output channels.
        dtype: of the activations.
        weight: "int4", "int8" or "fp8".
        group: inputs that share a scale, of 4-bit weights.
        asymmetric: whether groups of 4-bit weights have zero points.
        activations: "float", or what they are rounded to: "int8" or "fp8".
        shards: devices; 1.
    """

    rows: int = 16
    inputs: int = 4096
    outputs: int = 28672
    dtype: str = "bfloat16"
    weight: str = "int4"
    group: int = 128
    asymmetric: bool = False
    activations: str = "float"
    shards: int = 1

    def words(self) -> str:
        """The shapes, and the options that are not at their defaults."""
        shapes = [f"rows={self.rows} {self.inputs}x{self.outputs} {self.dtype} {self.weight}"]
        shown = ("rows", "inputs", "outputs", "dtype", "weight")
        return " ".join(shapes + changed_options(self, shown))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The weights that a sampler draws from: by default Llama-3-8B's.

    Attributes:
        rows: of the weights.
        vocab: tokens.
        dtype: of the weights.
        shards: devices; 1.
    """

    rows: int = 64
    vocab: int = 128256
    dtype: str = "float32"
    shards: int = 1

    def words(self) -> str:
        """The shapes."""
        return f"rows={self.rows} vocab={self.vocab}"


@dataclass(frozen=True, slots=True)
class Case:
    """A function that is compiled for every one of some kinds of devices.

    Attributes:
        operation: "decode", "decode_and_write", "prefill", "write_kv", "write_kv_scaled",
            "rotate_and_write", "quantized_matmul" or "kept_threshold".
        backend: of the operation.
        kinds: keys of `pallas_kernels.prove.targets.KINDS`.
        problem: shapes and options.
        requires: the instruction that its kernel must use; None for none.
        quick: the kinds for which it is compiled in a quick run.
    """

    operation: str
    backend: str
    kinds: tuple[str, ...]
    problem: Attention | Matmul | Sampling
    requires: str | None = None
    quick: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Operation, backend, shapes, and the options that are not at their defaults."""
        return f"{self.operation} {self.backend} {self.problem.words()}"


CASES = (
    # decode on Hopper
    Case("decode", "mosaic_gpu", HOPPER, Attention(rows=1), "wgmma", quick=("h200",)),
    Case("decode", "mosaic_gpu", HOPPER, Attention(), "wgmma", quick=HOPPER),
    Case("decode", "mosaic_gpu", HOPPER, Attention(rows=256, window=4096), "wgmma", ("h200",)),
    Case("decode", "mosaic_gpu", HOPPER, Attention(head_dim=64, dtype="float16"), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 32, 32, page_size=32), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 16, 2, 64, 64, window=1024), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 64, 1, splits=7), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 32, 32, 80, 32), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 24, 8, 96, 64), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 16, 8, 256, soft_cap=50.0), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(64, 64, 8, 64, sinks=True), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(page_size=128), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, queries=4), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, queries=8), "wgmma", quick=("h200",)),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, 16, 8, 256, queries=8), "wgmma"),
    Case(
        "decode",
        "mosaic_gpu",
        HOPPER,
        Attention(16, queries=8, pages="int8", scales="page"),
        "wgmma",
    ),
    Case("decode", "mosaic_gpu", HOPPER, Attention(16, queries=8, pages="float8_e4m3fn"), "wgmma"),
    Case("decode", "mosaic_gpu", HOPPER, Attention(pages="int8"), "wgmma"),
    Case(
        "decode", "mosaic_gpu", HOPPER, Attention(pages="int8", scales="page"), "wgmma", ("h200",)
    ),
    Case("decode", "mosaic_gpu", HOPPER, Attention(pages="float8_e4m3fn"), "wgmma", ("h200",)),
    Case("decode", "mosaic_gpu", HOPPER, Attention(64, 64, shards=8), "wgmma", ("h200",)),
    # prefill on Hopper
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048), "wgmma", quick=HOPPER),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(256, lanes=1), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, head_dim=64, dtype="float16"), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, 32, 32, 80, 32), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, 24, 8, 96, 64), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, 16, 8, 256, soft_cap=50.0), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, window=1024, sinks=True), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, page_size=128), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, 64, shards=8), "wgmma"),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, pages="int8"), "wgmma"),
    Case(
        "prefill",
        "mosaic_gpu",
        HOPPER,
        Attention(2048, pages="int8", scales="page"),
        "wgmma",
        ("h200",),
    ),
    Case("prefill", "mosaic_gpu", HOPPER, Attention(2048, pages="float8_e4m3fn"), "wgmma"),
    Case(
        "prefill",
        "mosaic_gpu",
        HOPPER,
        Attention(2048, 32, 32, 80, 32, pages="float8_e4m3fn", scales="page"),
        "wgmma",
    ),
    Case(
        "prefill",
        "mosaic_gpu",
        HOPPER,
        Attention(2048, 16, 8, 256, soft_cap=50.0, pages="float8_e4m3fn", scales="page"),
        "wgmma",
    ),
    Case(
        "prefill",
        "mosaic_gpu",
        HOPPER,
        Attention(2048, 64, 8, 64, 64, pages="int8", scales="page", window=1024, sinks=True),
        "wgmma",
    ),
    # decode where there is no wgmma
    Case("decode", "triton", OLDER, Attention(rows=1), "mma"),
    Case("decode", "triton", OLDER, Attention(), "mma", quick=("a100",)),
    Case("decode", "triton", OLDER, Attention(256, window=4096), "mma"),
    Case("decode", "triton", OLDER, Attention(head_dim=64, dtype="float16"), "mma"),
    Case("decode", "triton", OLDER, Attention(16, 32, 32, 80, 32), "mma"),
    Case("decode", "triton", OLDER, Attention(16, 24, 8, 96, 64), "mma"),
    Case("decode", "triton", OLDER, Attention(16, 16, 8, 256, soft_cap=50.0), "mma"),
    Case("decode", "triton", OLDER, Attention(16, 64, 1, splits=7), "mma"),
    Case("decode", "triton", OLDER, Attention(64, 64, 8, 64, sinks=True), "mma"),
    Case("decode", "triton", OLDER, Attention(page_size=128), "mma"),
    Case("decode", "triton", OLDER, Attention(pages="int8", scales="page"), "mma", ("a100",)),
    Case("decode", "triton", OLDER, Attention(pages="float8_e4m3fn"), "mma"),
    Case("decode", "triton", (*HOPPER, *OLDER), Attention(dtype="float32")),
    Case("decode", "triton", OLDER, Attention(64, 64, shards=8), "mma"),
    Case("decode", "triton", OLDER, Attention(queries=4), "mma"),
    Case("decode", "triton", OLDER, Attention(queries=8), "mma", quick=("a100",)),
    Case("decode", "triton", OLDER, Attention(16, 64, 4, 64, queries=8, sinks=True), "mma"),
    Case("decode", "triton", OLDER, Attention(16, 32, 32, 80, 32, queries=8), "mma"),
    Case("decode", "triton", OLDER, Attention(16, 16, 8, 256, queries=8, window=1024), "mma"),
    Case("decode", "triton", OLDER, Attention(queries=8, pages="int8", scales="page"), "mma"),
    Case("decode", "triton", OLDER, Attention(queries=8, pages="float8_e4m3fn"), "mma"),
    Case("decode", "triton", OLDER, Attention(queries=8, dtype="float32")),
    Case("decode", "triton", OLDER, Attention(64, 64, shards=8, queries=4), "mma"),
    # prefill where there is no wgmma
    Case("prefill", "triton", OLDER, Attention(2048), "mma", quick=("a100",)),
    Case("prefill", "triton", OLDER, Attention(256, lanes=1), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, head_dim=64, dtype="float16"), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, 32, 32, 80, 32), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, 24, 8, 96, 64), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, 16, 8, 256, soft_cap=50.0), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, window=1024, sinks=True), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, pages="int8", scales="page"), "mma"),
    Case("prefill", "triton", OLDER, Attention(2048, pages="float8_e4m3fn"), "mma"),
    Case("prefill", "triton", (*HOPPER, *OLDER), Attention(2048, dtype="float32")),
    # decode on TPU
    Case("decode", "mosaic_tpu", TPUS, Attention(rows=1), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(context=8192), "matmul", quick=TPUS),
    Case("decode", "mosaic_tpu", TPUS, Attention(context=8192, window=4096), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 32, 32, page_size=128), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 16, 8, 256, soft_cap=50.0), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 64, 8, sinks=True), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, dtype="float32")),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, pages="int8"), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, pages="int8", scales="page"), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, pages="float8_e4m3fn"), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 64, shards=8), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(queries=4), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(queries=8), "matmul", quick=("v5e", "v6e")),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 32, 32, page_size=128, queries=8), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 28, 4, queries=8, window=4096), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 12, 2, queries=4, sinks=True), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 64, 8, queries=8), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 16, 8, 256, queries=8), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, queries=8, dtype="float32")),
    Case(
        "decode",
        "mosaic_tpu",
        TPUS,
        Attention(16, queries=8, pages="int8", scales="page"),
        "matmul",
    ),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, queries=8, pages="float8_e4m3fn"), "matmul"),
    # decode that writes the step's tokens on TPU
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, queries=4), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(context=8192, queries=8), "matmul"),
    Case(
        "decode_and_write",
        "mosaic_tpu",
        TPUS,
        Attention(16, 32, 32, page_size=128, queries=8),
        "matmul",
    ),
    Case(
        "decode_and_write",
        "mosaic_tpu",
        TPUS,
        Attention(16, 28, 4, window=4096, queries=8),
        "matmul",
    ),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, queries=8, dtype="float32")),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, queries=8, pages="int8"), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(context=8192), "matmul", quick=TPUS),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 32, 32, page_size=128), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 28, 4, window=4096), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 12, 2, sinks=True), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 9, 3), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 16, 8, 256), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, dtype="float32")),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, pages="int8"), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 32, 4, pages="int8"), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, pages="float8_e4m3fn"), "matmul"),
    Case("decode_and_write", "mosaic_tpu", TPUS, Attention(16, 64, shards=8), "matmul"),
    # prefill on TPU
    Case("prefill", "mosaic_tpu", TPUS, Attention(2048), "matmul", quick=TPUS),
    Case("prefill", "mosaic_tpu", TPUS, Attention(256, lanes=1), "matmul"),
    Case("prefill", "mosaic_tpu", TPUS, Attention(2048, 16, 8, 256, soft_cap=50.0), "matmul"),
    Case("prefill", "mosaic_tpu", TPUS, Attention(2048, window=1024, sinks=True), "matmul"),
    Case("prefill", "mosaic_tpu", TPUS, Attention(2048, dtype="float32")),
    Case("prefill", "mosaic_tpu", TPUS, Attention(2048, pages="int8", scales="page"), "matmul"),
    Case("prefill", "mosaic_tpu", TPUS, Attention(2048, pages="float8_e4m3fn"), "matmul"),
    # the write on TPU
    Case("write_kv", "mosaic_tpu", TPUS, Attention(2048), "dma", quick=TPUS),
    Case("write_kv", "mosaic_tpu", TPUS, Attention(16, page_size=128), "dma"),
    Case("write_kv", "mosaic_tpu", TPUS, Attention(2048, pages="int8"), "dma"),
    Case("write_kv", "mosaic_tpu", TPUS, Attention(2048, pages="float8_e4m3fn"), "dma"),
    # the write where tokens share words
    Case("write_kv", "xla_pages", TPUS, Attention(64, 8, 1, pages="int8"), quick=("v5e",)),
    Case("write_kv", "xla_pages", TPUS, Attention(2048, 8, 2, page_size=128, pages="int8")),
    Case("write_kv", "xla_pages", TPUS, Attention(64, 24, 3, 128, 128, pages="float8_e4m3fn")),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 8, 1, pages="int8"), "matmul"),
    Case("decode", "mosaic_tpu", TPUS, Attention(16, 24, 3, 128, 128, pages="int8"), "matmul"),
    # rotation and write, of the parts of a projection
    Case("rotate_and_write", "triton", GPUS, Attention(16), quick=("h200", "a100")),
    Case("rotate_and_write", "triton", GPUS, Attention(2048, 28, 4)),
    Case("rotate_and_write", "triton", GPUS, Attention(64, 16, 8, 256, dtype="float16")),
    Case("rotate_and_write", "triton", GPUS, Attention(64, 64, 8, 80)),
    Case("rotate_and_write", "triton", GPUS, Attention(64, 64, shards=8)),
    # quantised matrix products
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(1), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(), "wgmma", quick=("h200",)),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(asymmetric=True), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(16, 896, 9728, asymmetric=True), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(2048, 4864, 896), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(2048, group=32), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(weight="int8"), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(2048, weight="int8"), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(weight="fp8"), "wgmma"),
    Case("quantized_matmul", "mosaic_gpu", HOPPER, Matmul(2048, weight="fp8"), "wgmma"),
    Case(
        "quantized_matmul",
        "mosaic_gpu",
        HOPPER,
        Matmul(2048, weight="int8", activations="int8"),
        "wgmma",
    ),
    Case(
        "quantized_matmul",
        "mosaic_gpu",
        HOPPER,
        Matmul(2048, weight="fp8", activations="fp8"),
        "wgmma",
    ),
    Case("quantized_matmul", "triton", OLDER, Matmul(1), "mma"),
    Case("quantized_matmul", "triton", OLDER, Matmul(), "mma", quick=("a100",)),
    Case("quantized_matmul", "triton", OLDER, Matmul(2048, asymmetric=True), "mma"),
    Case("quantized_matmul", "triton", OLDER, Matmul(weight="int8"), "mma"),
    Case("quantized_matmul", "triton", OLDER, Matmul(2048, weight="fp8"), "mma"),
    Case(
        "quantized_matmul",
        "triton",
        OLDER,
        Matmul(2048, weight="int8", activations="int8"),
        "mma",
    ),
    Case("quantized_matmul", "mosaic_tpu", TPUS, Matmul(), "matmul", quick=("v5e",)),
    Case("quantized_matmul", "mosaic_tpu", TPUS, Matmul(2048, asymmetric=True), "matmul"),
    Case("quantized_matmul", "mosaic_tpu", TPUS, Matmul(weight="int8"), "matmul"),
    Case("quantized_matmul", "mosaic_tpu", TPUS, Matmul(2048, weight="fp8"), "matmul"),
    # the sampler's filters
    Case("kept_threshold", "triton", GPUS, Sampling(), quick=("h200", "a100")),
    Case("kept_threshold", "triton", GPUS, Sampling(1)),
    Case("kept_threshold", "triton", GPUS, Sampling(16, 262144)),
    Case("kept_threshold", "xla", GPUS + TPUS, Sampling(16), quick=("v5e",)),
    # what every device can run
    Case("decode", "xla", GPUS + TPUS, Attention()),
    Case("decode", "xla", HOPPER + TPUS, Attention(pages="int8", scales="page", sinks=True)),
    Case("prefill", "xla", GPUS + TPUS, Attention(2048)),
    Case("write_kv", "xla", GPUS + TPUS, Attention(2048), quick=("a100", "v5e")),
    Case("write_kv", "xla", HOPPER + TPUS, Attention(2048, pages="float8_e4m3fn")),
    Case("write_kv_scaled", "xla", HOPPER, Attention(2048, pages="int8")),
)


def cases_for(kind: str, *, quick: bool = False, backend: str | None = None) -> tuple[Case, ...]:
    """The cases of one kind of device.

    Args:
        kind: a key of `pallas_kernels.prove.targets.KINDS`.
        quick: only those of a quick run.
        backend: only those of this backend.
    """
    return tuple(
        case
        for case in CASES
        if kind in (case.quick if quick else case.kinds) and backend in (None, case.backend)
    )
