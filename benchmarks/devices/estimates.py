"""The compiler's estimates of kernels on a TPU that is not there. No figure here is measured."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.isolated import describe
from benchmarks.kernel_bench.cases import Case, DecodeCase, MatmulCase, PrefillCase
from benchmarks.verify.prove import Cost, bound
from benchmarks.verify.prove.tpu_targets import compile_for, tpu_mesh
from pallas_kernels import PrefillLanes, paged_decode_attention, paged_prefill_attention
from pallas_kernels.quantized_matmul import quantize_int8, quantized_matmul

BACKEND = "mosaic_tpu"


def abstract(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An operand that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype)


def program_of(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """One call of our kernel, and its operands; the pool holds exactly the pages that are read."""
    if isinstance(case, MatmulCase):
        weight = jax.eval_shape(quantize_int8, abstract(case.outputs, case.inputs))
        multiply = functools.partial(quantized_matmul, backend=BACKEND)
        return multiply, (abstract(case.rows, case.inputs), weight)
    shape = case.as_decode if isinstance(case, PrefillCase) else case
    pool = abstract(shape.slots * shape.pages, shape.page_size, 2, shape.kv_heads, shape.head_dim)
    table = abstract(shape.slots, shape.pages, dtype=jnp.int32)
    vector = abstract(shape.slots, dtype=jnp.int32)
    options = {"scale": shape.head_dim**-0.5, "backend": BACKEND}
    if isinstance(case, DecodeCase):
        q = abstract(case.slots, case.heads, case.head_dim)
        return functools.partial(paged_decode_attention, **options), (q, pool, table, vector)
    q = abstract(case.lanes * case.chunk, case.heads, case.head_dim)
    lanes = PrefillLanes(vector, vector, vector)
    return functools.partial(paged_prefill_attention, **options), (q, pool, table, lanes)


def estimate(kind: str, case: Case) -> dict[str, Any]:
    """Microseconds from the executable's operations and bytes at the maker's rates, or a reason.

    Operations and bytes are the compiler's, and not less than the case needs: what it counts of a
    kernel is what the kernel declares.
    """
    entry: dict[str, Any] = {"label": case.label, "us": None, "reason": ""}
    try:
        program, operands = program_of(case)
        cost = compile_for(tpu_mesh(kind), program, *operands).cost_analysis() or {}
    except Exception as error:  # it is not covered, or the compiler is not there: told in the row
        entry["reason"] = describe(error)
        return entry
    moved, flops = cost.get("bytes accessed", 0.0), cost.get("flops", 0.0)
    if isinstance(case, DecodeCase):
        moved = max(moved, case.read_bytes)
    else:
        flops = max(flops, case.flops)
    least = bound(Cost(int(flops), int(moved), "XLA"), kind)
    entry["us"] = 1e6 * least.seconds
    work = f"{moved / 1e6:.1f} MB and {flops / 1e9:.2f} GFLOP"
    entry["reason"] = f"estimated from {work} ({least.by})"
    return entry
