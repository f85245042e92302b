"""Makes a function with operands, and its cost, of a case of quantized_matmul or linear_layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.verify.prove.cases import Case, Matmul
from benchmarks.verify.prove.proof import Cost
from pallas_kernels.linear import Norm, linear
from pallas_kernels.quantized_matmul import Fp8Weight, Int4Weight, Int8Weight, quantized_matmul
from pallas_kernels.quantized_matmul.formats import FP8_GROUP, packed_columns


def abstract_weight(problem: Matmul) -> Any:
    """The quantised weight [outputs, inputs] as ShapeDtypeStructs."""
    shape = jax.ShapeDtypeStruct
    outputs, inputs = problem.outputs, problem.inputs
    weight: Any = {"int8": Int8Weight, "int4": Int4Weight}.get(problem.weight, Fp8Weight)
    if problem.weight == "int4":
        by_group = (inputs // problem.group, outputs)
        zeros = shape(by_group, jnp.uint8) if problem.asymmetric else None
        packed = shape((outputs, packed_columns(inputs)), jnp.uint16)
        return weight(packed, shape(by_group, problem.scales), zeros)
    stored = jnp.int8 if problem.weight == "int8" else jnp.float8_e4m3fn
    grouped = problem.weight == "fp8 by group"
    scale = (inputs // FP8_GROUP, outputs) if grouped else (outputs,)
    return weight(shape((outputs, inputs), stored), shape(scale, jnp.float32))


def matmul_call(case: Case, kind: str) -> tuple[Any, tuple[Any, ...]]:
    """The function and its operands; a layer norms, gates and adds a residual as well."""
    problem = case.problem
    assert isinstance(problem, Matmul)
    shape = jax.ShapeDtypeStruct
    x = shape((problem.rows, problem.inputs), problem.dtype)

    def function(x: Any, weight: Any) -> Any:
        return quantized_matmul(x, weight, activations=problem.activations, backend=case.backend)

    def layer(x: Any, weight: Any, factor: Any, residual: Any) -> Any:
        return linear(
            x,
            weight,
            activations=problem.activations,
            matmul=(case.backend,),
            norm=Norm(factor, 1e-5),
            residual=residual,
            gated=True,
            backend="xla",
        )

    if case.operation == "linear_layer":
        residual = shape((problem.rows, problem.outputs // 2), problem.dtype)
        factor = shape((problem.inputs,), problem.dtype)
        return layer, (x, abstract_weight(problem), factor, residual)
    return function, (x, abstract_weight(problem))


def matmul_cost(problem: Matmul) -> Cost:
    """The stored weight, the activations and the result are moved once."""
    stored = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_weight(problem))
    )
    rows = problem.rows * (problem.inputs + problem.outputs) * jnp.dtype(problem.dtype).itemsize
    flops = 2 * problem.rows * problem.inputs * problem.outputs
    return Cost(flops, stored + rows, "shapes", eight_bit=problem.activations != "float")
