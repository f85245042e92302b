"""Triton: kernels for NVIDIA GPUs since Ampere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pallas_kernels.backends.record import GPUS, Backend, Implementation, Tuning
from pallas_kernels.coverage import AttentionShape, PageFacts, refused
from pallas_kernels.errors import KernelError
from pallas_kernels.pages import is_quantized

if TYPE_CHECKING:
    import jax

    from pallas_kernels.quantized_matmul.coverage import MatmulShape
    from pallas_kernels.route.coverage import RouteShape

MOST_TOKENS, MOST_SCORES = 64, 8192  # of one thread block that routes


@dataclass(frozen=True, slots=True)
class TritonDecodeTuning(Tuning):
    """The division of work of decode in Triton.

    Attributes:
        block_tokens: keys a step of the inner loop, a power of two.
        stages: blocks of keys and values on their way or being attended.
        num_warps: warps of a program.
        waves: thread blocks wanted for every multiprocessor: rows are split to have as many.
    """

    block_tokens: int = 64
    stages: int = 4
    num_warps: int = 4
    waves: int = 2


@dataclass(frozen=True, slots=True)
class TritonPrefillTuning(Tuning):
    """The division of work of prefill in Triton.

    Attributes:
        tile_rows: rows of queries (a row is one token of one query head) a thread block.
        block_tokens: keys a step of the inner loop.
        stages: blocks of keys and values on their way or being attended.
        num_warps: warps of a program.
    """

    tile_rows: int = 128
    block_tokens: int = 64
    stages: int = 2
    num_warps: int = 8


@dataclass(frozen=True, slots=True)
class TritonMatmulTuning(Tuning):
    """The division of work of a quantised product in Triton.

    Attributes:
        tile_m: rows of activations a thread block.
        tile_n: rows of the weight (output channels).
        tile_k: contracted elements a step of the inner loop.
        stages: blocks on their way or being multiplied.
        splits: parts into which the contraction is divided; None chooses from the shapes.
        num_warps: warps of a program.
    """

    tile_m: int = 64
    tile_n: int = 128
    tile_k: int = 128
    stages: int = 4
    splits: int | None = None
    num_warps: int = 4


def most_pages(page: PageFacts, wanted: int) -> int:
    """How many pages of a pool the kernels address rightly, up to a wanted number.

    They count rows in int32. JAX's Triton lowering counts elements in 64 bits when a pool has more
    than 2 ** 32 bytes, else in 32 bits with a sign: too few for 2 to 4 GiB of 1-byte elements.
    """
    wanted = min(wanted, (2**31 - 1) // page.rows)
    elements = page.rows * page.head_dim
    if page.itemsize == 1 and 2**31 < wanted * elements <= 2**32:
        return 2**31 // elements
    return wanted


def covers_attention(shape: AttentionShape) -> KernelError | None:
    """Why the Triton kernels do not cover a shape; None when they do."""
    if shape.head_dim is not None and not 16 <= shape.head_dim <= 256:
        return KernelError("head_dim", shape.head_dim, "16 to 256")
    if shape.group is not None and shape.group > 64:
        return KernelError("heads / kv_heads", shape.group, "at most 64")
    return refused("page_size", shape.page_size, (8, 16, 32, 64, 128), " tokens")


def covers_rotate_and_write(shape: AttentionShape) -> KernelError | None:
    """Why the Triton kernel does not rotate and write at once; None when it does.

    8-bit pages need scales: there the two operations are called.
    """
    if shape.pool_dtype is not None and is_quantized(shape.pool_dtype):
        return KernelError("kv_pages.dtype", shape.pool_dtype, "float32, float16 or bfloat16")
    return covers_attention(shape)


def covers_matmul(shape: MatmulShape) -> KernelError | None:
    """Why the Triton kernel does not cover a product; None when it does."""
    if shape.activations == "fp8":
        return KernelError("activations", "'fp8'", "'float' or 'int8'")
    return None


def covers_grouped(weight: jax.Array) -> KernelError | None:
    """Why the Triton kernel does not multiply with the elements of a weight; None when it does.

    JAX's lowering counts elements in 64 bits in arrays of more than 2 ** 32 bytes, else in 32 bits
    with a sign.
    """
    if weight.dtype.itemsize == 1 and 2**31 < weight.size <= 2**32:
        allowed = "8-bit weights of at most 2 ** 31 elements, or of more than 2 ** 32"
        return KernelError("weight.shape", weight.shape, allowed)
    return None


def covers_route(shape: RouteShape) -> KernelError | None:
    """Why the Triton kernel does not choose the experts of tokens; None when it does.

    One thread block holds the scores of all of them in registers.
    """
    if shape.tokens > MOST_TOKENS or shape.padded > MOST_SCORES:
        allowed = f"at most {MOST_TOKENS} tokens and {MOST_SCORES} scores, both padded"
        return KernelError("scores.shape", (shape.tokens, shape.groups), allowed)
    return None


BACKEND = Backend(
    "triton",
    (
        Implementation(
            "decode",
            "paged_attention.triton.decode",
            covers_attention,
            GPUS,
            True,
            TritonDecodeTuning,
            most_pages,
            launches=2,
            instruction="mma",
        ),
        Implementation(
            "prefill",
            "paged_attention.triton.prefill",
            covers_attention,
            GPUS,
            True,
            TritonPrefillTuning,
            most_pages,
            in_one_order=True,
            launches=4,
            instruction="mma",
        ),
        Implementation(
            "rotate_and_write",
            "rotate_and_write.triton",
            covers_rotate_and_write,
            GPUS,
            True,
            most_pages=most_pages,
        ),
        Implementation(
            "matmul",
            "quantized_matmul.triton",
            covers_matmul,
            GPUS,
            True,
            TritonMatmulTuning,
            converts_every=64,
            instruction="mma",
        ),
        Implementation("threshold", "kept_threshold.triton", runs=GPUS, interprets=True),
        Implementation("residual_norm", "residual_norm.triton", runs=GPUS, interprets=True),
        Implementation("finish_rows", "finish_rows.triton", runs=GPUS, interprets=True),
        Implementation(
            "grouped_linear",
            "grouped_linear.triton",
            covers_grouped,
            GPUS,
            True,
            instruction="mma",
        ),
        Implementation("route", "route.triton", covers_route, GPUS, interprets=True),
    ),
)
