"""grouped_linear: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import resolve
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.grouped_linear.blocks import GPU_SIZES, TPU_SIZES, Blocks, Sizes
from pallas_kernels.grouped_linear.layer import Layer, elements_of, sizes_of
from pallas_kernels.linear.api import EIGHT_BITS, Weight
from pallas_kernels.native.paths import Path
from pallas_kernels.native.weights import NativeWeight
from pallas_kernels.pages import FLOAT_DTYPES
from pallas_kernels.quantized_matmul import Rounding, Rows
from pallas_kernels.quantized_matmul.formats import (
    FP8_GROUP,
    GROUPS,
    NIBBLES,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    packed_columns,
)


def grouped_linear(
    x: jax.Array,  # [M, K]
    weight: Weight,  # [E, N, K]
    sizes: jax.Array,  # int32[E]
    *,
    scale: jax.Array | None = None,  # float32[E, N]
    activations: str = "float",
    gated: bool = False,
    out_dtype: DTypeLike | None = None,
    row_invariant: bool = False,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """Multiplies the first sizes[0] rows of x with weight[0], the sizes[1] behind them with
    weight[1], and so on; rows behind the last group give zeros.

    Shapes do not depend on the sizes, and every row of a group is computed, however many it has.

    Args:
        x: activations, sorted by group: float32, float16 or bfloat16.
        weight: a matrix a group, in the type of x or of 8 bits as `linear` takes them; or a
            quantised weight as `linear` takes it, with a first axis of groups in each array (of a
            `NativeWeight`'s scales a second one). A row of 4 bits may be filled up with words
            behind its inputs; then scales and zeros are those of the whole row.
        sizes: rows of each group, not negative, M at most in all.
        scale: given exactly for an array of 8 bits: what its rows are multiplied with.
        activations: for a quantised weight, as `linear`.
        gated: outputs 2 i and 2 i + 1 are gate and up, as in `linear`.
        out_dtype: type of the result; that of x by default.
        row_invariant: as for `linear`; of "native" alone.
        backend: "xla" (any device), "native" (CPU, C++), "triton" (NVIDIA GPUs), "mosaic_tpu" (TPU)
            or "reference" (any device, every weight times every row).
        interpret: None compiles; otherwise the parameters of the interpreter of a kernel.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    chosen = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    groups = _check(x, weight, scale, gated, chosen, backend)
    check_array("sizes", sizes, jnp.int32, (groups,))
    implementation = resolve("grouped_linear", backend)
    if row_invariant and backend != "native":
        raise KernelError("row_invariant", row_invariant, "True with the native backend alone")
    options: dict[str, Any] = {"path": Path.ONE_ORDER} if row_invariant else {}
    options |= implementation.options(interpret=interpret)
    layer = Layer(weight, scale, activations, gated, chosen)
    return implementation.load().grouped_linear(x, sizes, layer, **options)


def refusal(
    weight: Weight, backend: str, part: jax.ShapeDtypeStruct | None = None
) -> KernelError | None:
    """Why a backend does not multiply with a weight [E, N, K]; None when it does.

    Args:
        weight: with all its experts; layers of several may be stacked before them.
        backend: a name.
        part: its elements on a device; None: all of them.

    Raises:
        KernelError: there is no such backend.
    """
    implementation, elements = resolve("grouped_linear", backend), elements_of(weight)
    by_group = isinstance(weight, (Int8Weight, Fp8Weight)) and weight.scale.ndim == elements.ndim
    if by_group and backend == "mosaic_tpu":
        return KernelError("weight.scale", "by group", "one an output, for 8 bits")
    return implementation.covers(elements if part is None else part)


def block_sizes(backend: str) -> Sizes | None:
    """Least and most places of a block where a backend has `linear_in_blocks`: the kernels of GPUs
    and TPUs; else None."""
    return {"triton": GPU_SIZES, "mosaic_tpu": TPU_SIZES}.get(backend)


def linear_in_blocks(
    x: Rows,  # [M / sources, K], or [B * R or more, K] where sources is None
    weight: Weight,  # [E, N, K]
    blocks: Blocks,
    *,
    scale: jax.Array | None = None,  # float32[E, N]
    activations: str = "float",
    sources: int | None = None,
    weights: jax.Array | None = None,  # float32[T, choices]
    gated: bool = False,
    out_dtype: DTypeLike | None = None,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # [B * R or more, N], half as wide when gated; float32[T, N] with weights
    """Multiplies the rows of each block with the weight of its group.

    Results lie as the places of the blocks do; where no block holds a row they are anything.

    Args:
        x, weight, scale, gated, out_dtype, interpret: as for `grouped_linear`; x may be rounded as
            `experts_rounding` says.
        activations: likewise; "fp8" is taken for "float", the weights alone stay of 8 bits.
        blocks: which row goes to which group, of a size among the backend's `block_sizes`.
        sources: rows of the blocks that read one row of x: row r reads x[r // sources]. None: x
            lies as the places of the blocks do.
        weights: of the rows; result t is the sum of those of the rows t * choices + i, each times
            its weight, in float32. Not where gated.
        backend: one that has `block_sizes`: "triton" (NVIDIA GPUs) or "mosaic_tpu" (TPU).

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    chosen = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, weight, scale, gated, chosen, backend)
    if block_sizes(backend) is None:
        allowed = "one with a kernel for blocks: 'triton' or 'mosaic_tpu'"
        raise KernelError("backend", repr(backend), allowed)
    if weights is not None:
        if gated:
            raise KernelError("gated", gated, "False where results are added")
        check_array("weights", weights, jnp.float32, weights.shape[:2])
    kernel = resolve("grouped_linear", backend).load().in_blocks
    layer = Layer(weight, scale, activations, gated, chosen)
    out: jax.Array = kernel(x, blocks, layer, sources=sources, weights=weights, interpret=interpret)
    return out


def experts_rounding(scale: jax.Array | None, activations: str) -> Rounding | None:
    """What `linear_in_blocks` rounds rows to before it multiplies; None: it takes them as they are.

    Args:
        scale, activations: as for `grouped_linear`.
    """
    return Rounding("int8") if scale is not None or activations == "int8" else None


def _check(
    x: Rows,
    weight: Weight,
    scale: jax.Array | None,
    gated: bool,
    out_dtype: jnp.dtype,
    backend: str,
) -> int:
    """Judges the operands; the number of groups."""
    if x.ndim != 2:
        raise KernelError("x.shape", x.shape, "[rows, inputs]")
    if x.dtype not in FLOAT_DTYPES:
        raise KernelError("x.dtype", x.dtype, "float32, float16 or bfloat16")
    eight_bits = False
    if not isinstance(weight, (NativeWeight, Int4Weight, Int8Weight, Fp8Weight)):
        if weight.ndim != 3 or weight.shape[2] != x.shape[1]:
            raise KernelError("weight.shape", weight.shape, f"[groups, outputs, {x.shape[1]}]")
        if weight.dtype not in (x.dtype, *EIGHT_BITS):
            raise KernelError("weight.dtype", weight.dtype, f"that of x, {x.dtype}, int8 or uint8")
        eight_bits = weight.dtype in EIGHT_BITS
    if (uncovered := refusal(weight, backend)) is not None:
        raise uncovered
    groups, outputs = sizes_of(weight)
    if (scale is not None) != eight_bits:
        raise KernelError("scale", scale, "given exactly for an array of 8 bits")
    if scale is not None:
        check_array("scale", scale, jnp.float32, (groups, outputs))
    if isinstance(weight, (Int4Weight, Int8Weight, Fp8Weight)):
        _check_quantized(weight, x.shape[1])
    if gated and outputs % 2:
        raise KernelError("weight", f"{outputs} outputs", "an even number when gated")
    if out_dtype not in FLOAT_DTYPES:
        raise KernelError("out_dtype", out_dtype, "float32, float16 or bfloat16")
    return groups


def _check_quantized(weight: Int4Weight | Int8Weight | Fp8Weight, inputs: int) -> None:
    """Judges the arrays of a weight [E, N, inputs], whose rows of 4 bits may be filled up."""
    (groups, outputs), held = sizes_of(weight), inputs
    if isinstance(weight, Int4Weight):
        words = weight.packed.shape[2]
        if words < packed_columns(inputs):
            allowed = f"at least {packed_columns(inputs)} words of {inputs} inputs"
            raise KernelError("weight.packed", weight.packed.shape, allowed)
        if words > packed_columns(inputs):
            held = NIBBLES * words
        shapes = [(groups, held // size, outputs) for size in GROUPS if inputs % size == 0]
        kind = weight.scales.dtype if weight.scales.dtype in FLOAT_DTYPES else jnp.float32
        check_array("weight.scales", weight.scales, kind, (groups, 1, outputs), *shapes)
        if weight.zeros is not None:
            check_array("weight.zeros", weight.zeros, jnp.uint8, weight.scales.shape)
        return
    if weight.values.shape[2] != inputs:
        raise KernelError("weight.values", weight.values.shape, f"[groups, outputs, {inputs}]")
    by_group = [] if inputs % FP8_GROUP else [(groups, inputs // FP8_GROUP, outputs)]
    check_array("weight.scale", weight.scale, jnp.float32, (groups, outputs), *by_group)
