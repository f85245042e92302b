"""Section: products with quantised weights against float64 NumPy."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.correctness import Programs
from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.bench import compiled
from benchmarks.kernel_bench.matmul import backends_of
from pallas_kernels.quantized_matmul import (
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantized_matmul,
)
from tests.pallas_kernels.oracle import relative_error

# name: quantiser, activations
FORMATS: dict[str, tuple[Any, str]] = {
    "int8": (quantize_int8, "float"),
    "int8 x int8": (quantize_int8, "int8"),
    "int4 g128": (lambda w: quantize_int4(w, 128), "float"),
    "int4 g64 zeros": (lambda w: quantize_int4(w, 64, asymmetric=True), "float"),
    "int4 g32": (lambda w: quantize_int4(w, 32), "float"),
    "fp8": (quantize_fp8, "float"),
    "fp8 x fp8": (quantize_fp8, "fp8"),
}
ROWS = (1, 16, 300)
SHAPE = (640, 2048)  # outputs, inputs
REFUSALS = "KernelError"
TOLERANCE = 1e-2  # bfloat16 operands, float32 sums, a bfloat16 result


def case_of(setting: Setting, format_name: str) -> str:
    """A format by the backend that the device's family has first, as JSON."""
    if setting.dry_run:
        return json.dumps(("xla", format_name, (64, 256)))
    return json.dumps((backends_of(setting.device_kind, "gpu")[0], format_name, SHAPE))


def cases(setting: Setting, chosen: bool) -> list[str]:
    """Backend, format and shape as JSON; each is run for every number of rows."""
    if setting.dry_run:
        return [json.dumps(("xla" if chosen else "reference", "int4 g128", (64, 256)))]
    backends = backends_of(setting.device_kind, "gpu")
    backends = backends[:1] if chosen else backends[1:]
    return [json.dumps((*pair, SHAPE)) for pair in itertools.product(backends, FORMATS)]


def backend_of(case: str) -> str:
    """The backend of a case: when it crashes, the others go on."""
    return json.loads(case)[0]


def wanted(x: jax.Array, weight: Any, activations: str) -> np.ndarray:
    """The product in float64; with rounded activations, of what the reference rounds them to."""
    if activations != "float":
        exact = quantized_matmul(
            x, weight, activations=activations, out_dtype=jnp.float32, backend="reference"
        )
        return np.asarray(exact, np.float64)
    full = np.asarray(dequantize(weight, x.shape[1]), np.float64)
    return np.asarray(x.astype(jnp.float32), np.float64) @ full.T


def programs_of(setting: Setting, case: str) -> Programs:
    """One format and shape by one backend, for every number of rows."""
    backend, name, (outputs, inputs) = json.loads(case)
    quantize, activations = FORMATS[name]
    w = jax.random.normal(jax.random.key(0), (outputs, inputs), jnp.float32) * inputs**-0.5
    weight = jax.jit(quantize)(w)
    programs: Programs = {}
    for rows in setting.pick(ROWS, (2,)):
        x = jax.random.normal(jax.random.key(rows), (rows, inputs), jnp.bfloat16)
        multiply = functools.partial(quantized_matmul, activations=activations, backend=backend)
        programs[f"{backend} {name} {rows} x {inputs} x {outputs}"] = multiply, (x, weight)
    return programs


def products(setting: Setting, case: str) -> Section:
    """One format and shape by one backend; a refusal is a row."""
    section = Section(columns=("backend, format, rows x inputs x outputs", "error"))
    programs = programs_of(setting, case)
    activations = FORMATS[json.loads(case)[1]][1]
    executables, refused = compiled(programs)
    # a backend may refuse a format; one that serves none at all shows in the table
    section.rows += [(what, f"refused: {reason}") for what, reason in refused.items()]
    for what, executable in executables.items():
        operands = programs[what][1]
        got = executable(*operands).astype(jnp.float32)
        error = relative_error(got, wanted(*operands, activations))
        section.rows.append((what, f"{error:.1e}"))
        if not error <= TOLERANCE:
            section.failures.append(f"{what}: error {error:.2g} > {TOLERANCE}")
    unexpected = [what for what, reason in refused.items() if not reason.startswith(REFUSALS)]
    section.failures += [f"{what}: {refused[what]}" for what in unexpected]
    return section
