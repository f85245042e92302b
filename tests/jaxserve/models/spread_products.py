"""Run as a program on eight fake CPU devices: quantised products that are spread over 2, 4 and 8.

usage: python -m tests.jaxserve.models.spread_products BACKEND INTERPRETER
BACKEND of `quantized_matmul`, INTERPRETER "none", "plain" or "hopper". Prints one JSON object, see
`errors`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.quantized import ELEMENTS, Encoding
from jaxserve.models.linear import LinearForm, Projection
from jaxserve.models.quant_array import QuantArray, WeightFormat
from jaxserve.parallel import ShardingRules, make_mesh
from jaxserve.parallel.spread import Spread
from pallas_kernels.compat import mosaic_gpu_interpreter
from pallas_kernels.linear import mosaic_tpu, xla
from pallas_kernels.quantized_matmul import quantized_matmul

ROWS = 3
FORMATS = {
    "int4": Encoding("int4", 128),
    "int4 zeros": Encoding("int4", 64, zeros="integer"),
    "int4 row": Encoding("int4"),
    "int8": Encoding("int8"),
    "w8a8": Encoding("int8", activations="int8"),
    "fp8": Encoding("fp8"),
    "w8a8 fp8": Encoding("fp8", activations="fp8"),
}
# outputs, inputs, logical axes: inputs divided, into parts of 1536, 768 and 384; outputs divided
SHAPES = {"row": (128, 3072, ("hidden", "heads")), "column": (1024, 256, ("heads", "hidden"))}


def make_weight(
    rng: np.random.Generator, shape: tuple[int, int], format: WeightFormat
) -> tuple[QuantArray, np.ndarray]:
    """A weight, and the float64 matrix that it stands for."""
    stored, (outputs, inputs) = format.stored, shape
    scales = rng.uniform(0.5, 2, (outputs, stored.groups(inputs))).astype(np.float32)
    zeros, middle = None, 8 if stored.kind == "int4" else 0
    if stored.kind == "int4":
        elements = rng.integers(0, 16, shape).astype(ELEMENTS["int4"])
    elif stored.kind == "int8":
        elements = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        elements = rng.uniform(-448, 448, shape).astype(ELEMENTS["fp8"])
    if stored.zeros == "integer":
        zeros = rng.integers(0, 17, scales.shape).astype(np.uint8)
    spread = inputs // scales.shape[1]
    offsets = middle if zeros is None else np.repeat(zeros, spread, axis=1).astype(np.float64)
    wide = (elements.astype(np.float64) - offsets) * np.repeat(scales, spread, axis=1)
    kept, kept_zeros = format.as_kept(elements, scales, zeros)
    empty = QuantArray.empty(shape, format)
    return empty.with_arrays(kept, scales, kept_zeros, None, None), wide


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Rows as their product takes them, in float64."""
    if kind == "float":
        return x.astype(np.float64)
    largest = {"int8": 127, "fp8": 448}[kind]
    factor = np.float32(largest) / np.abs(x).max(axis=1, keepdims=True)
    stretched = np.clip(x * factor, -largest, largest)
    nearest = np.rint(stretched) if kind == "int8" else stretched.astype(ELEMENTS["fp8"])
    return nearest.astype(np.float64) / factor


def error(name: str, way: str, devices: int, backend: str) -> float:
    """The largest difference from float64, over the largest number of its row."""
    rng = np.random.default_rng(devices)
    outputs, inputs, axes = SHAPES[way]
    stored = FORMATS[name]
    mesh = make_mesh(devices)
    spread = Spread(mesh, ShardingRules())
    format = WeightFormat(stored, native=False)
    if way == "row":
        format = format.divided(inputs, devices)
    form = LinearForm(backend="xla", matmul=(backend, "xla"), spread=spread)
    layer = Projection(inputs, (outputs,), axes=axes, bias=True, dtype=jnp.bfloat16, form=form)
    weight, wide = make_weight(rng, (outputs, inputs), format)
    bias = jnp.asarray(rng.standard_normal(outputs) * 100, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((ROWS, inputs)), jnp.bfloat16)
    for variable, value in ((layer.weight, weight), (layer.bias, bias)):
        variable.set_value(value)
        placed = jax.device_put(value, spread.rules.shardings(mesh, variable))
        variable.set_value(placed)
    graph, state = nnx.split(layer)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x, out_dtype=jnp.float32))
    got = np.asarray(call(state, x), np.float64)
    parts = np.split(np.arange(inputs), devices if way == "row" else 1)
    rows = np.asarray(x, np.float32)
    products = [rounded(rows[:, own], stored.activations) @ wide[:, own].T for own in parts]
    wanted = sum(products) + np.asarray(bias, np.float64)
    return float((np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)).max())


def errors(backend: str, interpreter: str) -> dict[str, float]:
    """The error of every product that the backend has, by format, way and devices."""
    interpret: Any = {"none": None, "plain": True, "hopper": mosaic_gpu_interpreter()}[interpreter]
    used: set[str] = set()
    layer = mosaic_tpu.layer

    def interpreted(*operands: Any, backend: str, **options: Any) -> jax.Array:
        used.add(backend)
        if backend != "xla":
            given = interpret() if callable(interpret) else interpret
            options |= {"interpret": given}
        return quantized_matmul(*operands, backend=backend, **options)

    def whole(*operands: Any, **options: Any) -> jax.Array:
        used.add("mosaic_tpu")
        return layer(*operands, **options, interpret=interpret)

    xla.quantized_matmul, mosaic_tpu.layer = interpreted, whole
    found = {}
    for name in FORMATS:
        for way in SHAPES:
            for devices in (2, 4, 8):
                used.clear()
                off = error(name, way, devices, backend)
                found[f"{name}, {way}, {devices}, {'+'.join(sorted(used))}"] = off
    return found


if __name__ == "__main__":
    print(json.dumps(errors(sys.argv[1], sys.argv[2])))
