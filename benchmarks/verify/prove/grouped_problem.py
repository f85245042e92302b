"""Makes a function with operands, and its cost, of a case of grouped_linear: experts' products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.verify.prove.cases import Case, Experts
from benchmarks.verify.prove.proof import Cost
from pallas_kernels.backends.mosaic_tpu import LENGTH_MULTIPLE
from pallas_kernels.grouped_linear import Blocks, block_sizes, linear_in_blocks
from pallas_kernels.grouped_linear.blocks import block_size, most_blocks
from pallas_kernels.quantized_matmul import Fp8Weight, Int4Weight
from pallas_kernels.quantized_matmul.formats import NIBBLES, packed_columns


def abstract_experts(p: Experts, backend: str) -> tuple[Any, jax.ShapeDtypeStruct | None]:
    """The weight [experts, outputs, inputs] as `linear_in_blocks` takes it, and scales beside it.

    On a TPU a row of 4 bits is filled up, with the scales of its groups.
    """
    shape = jax.ShapeDtypeStruct
    matrices, by_output = (p.experts, p.outputs, p.inputs), (p.experts, p.outputs)
    quantized: Any = {"int4": Int4Weight, "fp8": Fp8Weight}.get(p.weight)
    if p.weight == "int4":
        words = packed_columns(p.inputs)
        kept = -(-words // LENGTH_MULTIPLE) * LENGTH_MULTIPLE if backend == "mosaic_tpu" else words
        groups = (p.inputs if kept == words else NIBBLES * kept) // p.group
        scales = shape((p.experts, groups, p.outputs), jnp.float32)
        return quantized(shape((*by_output, kept), jnp.uint16), scales, None), None
    if p.weight == "fp8":
        values = shape(matrices, jnp.float8_e4m3fn)
        return quantized(values, shape(by_output, jnp.float32)), None
    if p.weight == "int8":
        return shape(matrices, jnp.int8), shape(by_output, jnp.float32)
    return shape(matrices, p.dtype), None


def grouped_call(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """The function and its operands: the first product of experts where gated, else the second."""
    p, backend = case.problem, case.backend
    assert isinstance(p, Experts)
    shape = jax.ShapeDtypeStruct
    sizes = block_sizes(backend)
    assert sizes is not None
    chosen = p.rows * p.choices
    size = block_size(chosen, p.experts, sizes)
    count = most_blocks(chosen, p.experts, size)
    of_blocks = shape((count,), jnp.int32)
    described: Any = Blocks
    blocks = described(shape((count, size), jnp.int32), of_blocks, of_blocks)
    weight, scale = abstract_experts(p, backend)
    options = {"activations": "int8" if p.weight == "int8" else "float", "backend": backend}

    def first(x: Any, weight: Any, scale: Any, blocks: Any) -> Any:
        options.update(scale=scale, sources=p.choices, gated=True)
        return linear_in_blocks(x, weight, blocks, **options)

    def second(x: Any, weight: Any, scale: Any, blocks: Any, weights: Any) -> Any:
        return linear_in_blocks(x, weight, blocks, scale=scale, weights=weights, **options)

    if p.gated:
        return first, (shape((p.rows, p.inputs), p.dtype), weight, scale, blocks)
    x = shape((count * size, p.inputs), p.dtype)
    weights = shape((p.rows, p.choices), jnp.float32)
    return second, (x, weight, scale, blocks, weights)


def weight_elements(p: Experts, backend: str) -> frozenset[int]:
    """Elements of the weight as it is stored and as numbers, of all experts and of one: an array of
    so many that a program writes is a copy."""
    stored = jax.tree.leaves(abstract_experts(p, backend)[0])[0].size
    every = {stored, p.experts * p.outputs * p.inputs}
    if p.weight == "int4":
        every.add(NIBBLES * stored)
    return frozenset(size // by for size in every for by in (1, p.experts))


def grouped_cost(p: Experts) -> Cost:
    """As many experts as tokens may choose, once each; rows come and go once a choice."""
    chosen = p.rows * p.choices
    stored = sum(
        leaf.size * leaf.dtype.itemsize // p.experts
        for leaf in jax.tree.leaves(abstract_experts(p, "triton"))
    )
    rows = chosen * (p.inputs + p.outputs) * jnp.dtype(p.dtype).itemsize
    flops = 2 * chosen * p.inputs * p.outputs
    read = min(chosen, p.experts) * stored
    return Cost(flops, read + rows, "shapes", eight_bit=p.weight == "int8")
