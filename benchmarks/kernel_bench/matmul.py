"""Products with quantised weights, next to the same product in bf16 by the vendor's library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_bench.bench import Bench
from benchmarks.kernel_bench.cases import MatmulCase
from benchmarks.kernel_bench.contest import Entries, Program
from benchmarks.kernel_bench.rows import BF16, INT4, missing
from pallas_kernels.devices import candidates, device_family
from pallas_kernels.quantized_matmul import (
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantized_matmul,
)

COLD_WEIGHTS = 2**29  # bytes of weights in one program
MOST_LAYERS = 16
TRIED = 2
MOST_RESULTS = 2**29  # bytes of results of one program
# name, quantiser, activations, bits of an element, norm of the rounding error allowed
FORMATS: tuple[tuple[str, Callable[..., Any], str, float, float], ...] = (
    (INT4, functools.partial(quantize_int4, group=128), "float", 4.25, 0.2),
    ("int8", quantize_int8, "float", 8, 0.03),
    ("int8 x int8", quantize_int8, "int8", 8, 0.05),
    ("fp8", quantize_fp8, "float", 8, 0.06),
    ("fp8 x fp8", quantize_fp8, "fp8", 8, 0.1),
)


def backends_of(device_kind: str, platform: str) -> list[str]:
    """The backends that exist for a device, the most specialised first."""
    return candidates("matmul", device_family(device_kind, platform))


def program_of(multiply: Callable[[jax.Array, Any], jax.Array], layers: int) -> Callable[..., Any]:
    """Products of several layers; each has rows of its own, so that XLA cannot join them."""

    def program(*operands: Any) -> tuple[jax.Array, ...]:
        return tuple(multiply(x, w) for x, w in zip(operands[:layers], operands[layers:]))

    return program


def bf16_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [M, K] times weight [N, K], as the engine's linear layers have it."""
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    ).astype(x.dtype)


def copies(weight: Any, count: int) -> list[Any]:
    """The same weight at several places in memory."""
    return [weight, *(jax.tree.map(jnp.copy, weight) for _ in range(count - 1))]


def layer_count(bench: Bench, case: MatmulCase) -> int:
    """Products in one program: so many that the cache holds none of the weights."""
    cold = min(COLD_WEIGHTS, bench.cold_bytes)
    # the results of several programs are alive at the same time
    room = min(
        bench.memory // (2 * case.weight_bytes(16)), MOST_RESULTS // (2 * case.rows * case.outputs)
    )
    return max(2, min(MOST_LAYERS, math.ceil(cold / case.weight_bytes(4)), int(room)))


def entries(bench: Bench, case: MatmulCase) -> Entries:
    """Every format by every backend of the device, beside the product in bf16."""
    full = case.weight_bytes(16)
    if 2 * full > bench.memory:
        reason = f"two weights of {full / 2**30:.1f} GiB do not fit"
        return Entries(missing=[missing(case, INT4, reason)])
    keys = jax.random.split(jax.random.key(0), MOST_LAYERS + 1)
    shape = (case.outputs, case.inputs)
    weight = jax.random.normal(keys[0], shape, jnp.bfloat16) * case.inputs**-0.5
    layers = layer_count(bench, case)
    rows = [
        jax.random.normal(key, (case.rows, case.inputs), jnp.bfloat16) for key in keys[1:][:layers]
    ]
    programs: dict[str, Program] = {
        BF16: (program_of(bf16_product, layers), [(*rows, *copies(weight, layers))], "XLA")
    }
    tolerances, bits = {}, {}
    offered = backends_of(bench.device_kind, bench.platform)
    for name, quantize, activations, size, tolerance in FORMATS:
        bits[name] = size
        stored = copies(jax.jit(quantize)(weight), layers)
        # without peers the most specialised, and the next one where it refuses the format
        for backend in offered[: None if bench.peers else TRIED]:
            multiply = functools.partial(quantized_matmul, activations=activations, backend=backend)
            setting = f"{name}, {backend}"
            programs[setting] = program_of(multiply, layers), [(*rows, *stored)], backend
            tolerances[setting] = tolerance
    return Entries(programs, layers, [], bits, tolerances)
