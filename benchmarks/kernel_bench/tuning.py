"""The static choices of the kernels that are worth trying, and their measurement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.isolated import describe
from benchmarks.kernel_bench import matmul
from benchmarks.kernel_bench.bench import Bench, compiled
from benchmarks.kernel_bench.cases import Case, DecodeCase, MatmulCase, PartsCase, PrefillCase
from benchmarks.kernel_bench.contest import Rotations
from benchmarks.kernel_bench.decode import ours as decode_program
from benchmarks.kernel_bench.operands import make_pool, queries
from benchmarks.kernel_bench.prefill import LAYERS
from benchmarks.kernel_bench.prefill import ours as prefill_program
from benchmarks.kernel_bench.rows import TOO_NOISY
from benchmarks.kernel_bench.timing import (
    interleaved,
    jax_candidate,
    poisons,
    relative_difference,
)
from pallas_kernels.backends.record import Tuning
from pallas_kernels.devices import OPERATIONS
from pallas_kernels.linear import Norm, gpu, xla
from pallas_kernels.quantized_matmul import quantize_int4, quantized_matmul
from pallas_kernels.residual_norm import residual_norm

KINDS = ("parts", "decode", "prefill", "matmul")  # the few choices first: others get their time
# values of each field that are tried; what is not named stays as the table has it
DECODE = {
    "block_tokens": (64, 128),
    "stages": (2, 3, 4),
    "num_warps": (4, 8),
    "waves": (1, 2, 4),
}
PREFILL = {
    "tile_rows": (64, 128, 256),
    "block_tokens": (64, 128),
    "stages": (2, 3, 4),
    "num_warps": (4, 8),
}
MATMUL = {
    "tile_m": (16, 32, 64, 128),
    "tile_n": (64, 128, 256),
    "tile_k": (64, 128, 256),
    "stages": (3, 4, 6),
    "splits": (None, 1, 2, 4, 8),
    "num_warps": (4, 8),
}
PARTS = (1, 2, 4, 8)  # of K, in bfloat16 products
MOST_CHANGES = 3  # fields in which a choice differs from the start
AGREEMENT = 0.02  # of a choice's result with the plain XLA one, as norms
INT4_AGREEMENT = 0.05
DRY_CHOICES = 2
DIVIDED = "gpu"  # the backend of linear layers that leave parts

CASES: dict[str, tuple[Case, ...]] = {
    "decode": (
        DecodeCase(64, 4096, 32, 8),
        DecodeCase(1, 16384, 32, 8),
        DecodeCase(8, 1024, 32, 8),
        DecodeCase(256, 1024, 32, 8),
        DecodeCase(64, 4096, 32, 32),
    ),
    "prefill": (
        PrefillCase(4096, 0, 32, 8),
        PrefillCase(1024, 4096, 32, 8),
        PrefillCase(256, 1024, 32, 8, lanes=16),
    ),
    "matmul": tuple(MatmulCase("gate_up", rows, 4096, 28672) for rows in (1, 16, 64, 256, 2048)),
    # of the products that leave parts: those whose results norms, or rotations, add up
    "parts": tuple(
        PartsCase(name, rows, inputs, outputs)
        for rows in (1, 16)
        for name, inputs, outputs in (("down", 14336, 4096), ("o", 4096, 4096), ("qkv", 4096, 6144))
    ),
}
DRY_CASES: dict[str, tuple[Case, ...]] = {
    "decode": (DecodeCase(2, 40, 4, 2, head_dim=64),),
    "prefill": (PrefillCase(20, 10, 4, 2, lanes=2, head_dim=64),),
    "matmul": (MatmulCase("tiny", 2, 256, 256),),
    "parts": (PartsCase("tiny", 2, 512, 256),),
}


def neighbours(start: Tuning, values: dict[str, tuple[Any, ...]]) -> list[Tuning]:
    """The start, then every choice that differs from it in a few fields, nearest first."""
    found: dict[Tuning, None] = {start: None}
    for count in range(1, MOST_CHANGES + 1):
        for chosen in itertools.combinations(values, count):
            for combination in itertools.product(*(values[name] for name in chosen)):
                found[dataclasses.replace(start, **dict(zip(chosen, combination)))] = None
    return list(found)


def candidates_of(bench: Bench, operation: str) -> tuple[str, list[Tuning]]:
    """The backend to be tuned on a device and its choices; the choices are empty for plain XLA."""
    tuning = bench.backends.tuning
    if operation == "decode":
        backend, start, values = bench.backends.decode, tuning.decode, DECODE
    elif operation == "prefill":
        backend, start, values = bench.backends.prefill, tuning.prefill, PREFILL
    else:
        backend = matmul.backends_of(bench.device_kind, bench.platform)[0]
        start, values = tuning.matmul, MATMUL
    kind = OPERATIONS[operation][backend].tuning
    if kind is None:
        return backend, []
    tried = {f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values}
    # a chip without a row leaves the choice to the kernel: the defaults are where the search begins
    found = neighbours(start if isinstance(start, kind) else kind(), tried)
    return backend, found[:DRY_CHOICES] if bench.dry_run else found


def build(bench: Bench, case: Case) -> tuple[Callable[..., Any], Rotations, int, float]:
    """A program that takes the backend and its options, its operands, its operations and the
    error that it may have."""
    if isinstance(case, PartsCase):
        return parts_program(bench, case)
    if isinstance(case, MatmulCase):
        shape = (case.outputs, case.inputs)
        weight = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * case.inputs**-0.5
        layers = matmul.layer_count(bench, case)
        stored = matmul.copies(jax.jit(functools.partial(quantize_int4, group=128))(weight), layers)
        keys = jax.random.split(jax.random.key(1), layers)
        rows = [jax.random.normal(k, (case.rows, case.inputs), jnp.bfloat16) for k in keys]

        def product(*operands: Any, **kernel: Any) -> Any:
            multiply = functools.partial(quantized_matmul, **kernel)
            return matmul.program_of(multiply, layers)(*operands)

        return product, [(*rows, *stored)], layers, INT4_AGREEMENT
    pages = case.as_decode if isinstance(case, PrefillCase) else case
    pool = make_pool(pages, bench.memory, bench.cold_bytes)
    if isinstance(case, PrefillCase):
        layers = min(LAYERS, pool.layers)
        q = queries(case.lanes * case.chunk, pages)
        return *prefill_program(case, pool, q, layers), layers, AGREEMENT
    return *decode_program(case, pool, queries(case.slots, pages)), pool.layers, AGREEMENT


def parts_program(
    bench: Bench, case: PartsCase
) -> tuple[Callable[..., Any], Rotations, int, float]:
    """Products in parts, each with the norm that adds them, as linear layers are on a GPU."""
    layers = matmul.layer_count(bench, case)
    keys = jax.random.split(jax.random.key(1), layers)
    shape = (case.outputs, case.inputs)
    weight = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * case.inputs**-0.5
    rows = [jax.random.normal(k, (case.rows, case.inputs), jnp.bfloat16) for k in keys]
    stream = jnp.ones((case.rows, case.outputs), jnp.bfloat16)
    norm = Norm(jnp.ones((case.outputs,), jnp.bfloat16), 1e-5)

    def product(*operands: Any, backend: str, parts: int | None = None) -> Any:
        if parts is None:
            parts = gpu.number_of_parts(case.rows, case.outputs, case.inputs, 2)
        # plain XLA, by which the others are judged, adds up itself
        chosen = bench.backends.residual_norm if backend == DIVIDED else None

        def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
            if backend != DIVIDED or parts == 1:
                out = xla.dot(x, w, x.dtype)[None]
            else:
                divided, weights = (m.reshape(m.shape[0], parts, -1) for m in (x, w))
                out = xla.dot(divided, weights, jnp.float32)
            return residual_norm(stream, out, norm, backend=chosen or "xla")[0]

        return matmul.program_of(multiply, layers)(*operands)

    return product, [(*rows, *matmul.copies(weight, layers))], layers, AGREEMENT


def choices_of(bench: Bench, operation: str) -> dict[str, Any]:
    """The backend and every choice that is worth trying, as JSON.

    The first one, empty, leaves the choice to the kernel.
    """
    if operation == "parts":
        divides = bench.backends.linear == DIVIDED or bench.dry_run
        choices = [{}, *({"parts": parts} for parts in PARTS)] if divides else []
        return {"backend": DIVIDED, "choices": choices[::2] if bench.dry_run else choices}
    backend, found = candidates_of(bench, operation)
    choices = [dataclasses.asdict(choice) for choice in found]
    return {"backend": backend, "choices": [{}, *choices] if choices else []}


def alike(backend: str, case: Case, choices: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The choices in groups of which a kernel makes the same program: one of each is enough.

    The tiles of Mosaic GPU's products have no more rows than there are.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for choice in choices:
        made = choice
        if backend == "mosaic_gpu" and isinstance(case, MatmulCase) and "tile_m" in choice:
            made = choice | {"tile_m": min(choice["tile_m"], case.rows)}
        groups.setdefault(json.dumps(made, sort_keys=True), []).append(choice)
    return list(groups.values())


class Tuner:
    """Measures the choices of a case; keeps the operands of the last one."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._built: tuple[Callable[..., Any], Rotations, int, float] | None = None
        self._wanted: Any = None

    def measure(
        self, bench: Bench, case: Case, choices: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """One entry a choice: microseconds, or the reason why it has none.

        A choice is timed only after its result agreed with plain XLA's.
        """
        if case != self._case:
            self._built, self._wanted = None, None  # their memory is needed
            self._built = build(bench, case)
            self._wanted = plain_result(self._built)
            self._case = case
        assert self._built is not None
        program, rotations, operations, limit = self._built
        runs = runs_of(bench, case.operation, program, choices)
        executables, refused = compiled({name: (run, rotations[0]) for name, run in runs.items()})
        right = []
        for name, executable in executables.items():
            try:
                candidate = jax_candidate(
                    name, executable, rotations, operations, short_series=bench.dry_run
                )
                assert candidate.result is not None
                error = relative_difference(candidate.result(), self._wanted)
            except Exception as failure:  # it compiles but does not run
                if poisons(failure):
                    raise
                refused[name] = describe(failure)
                continue
            if error > limit:
                refused[name] = f"WRONG: differs from plain XLA by {error:.1e}"
            else:
                right.append(candidate)
        seconds, failed = interleaved(right, bench.rounds)
        refused |= failed
        entries = []
        for index, choice in enumerate(choices):
            value = seconds.get(str(index), math.nan)
            micro = value * 1e6 if math.isfinite(value) else None
            reason = refused.get(str(index), "" if micro else TOO_NOISY)
            entries.append({"tuning": choice, "us": micro, "reason": reason})
        return entries


def runs_of(
    bench: Bench, operation: str, program: Callable[..., Any], choices: list[dict[str, Any]]
) -> dict[str, Callable[..., Any]]:
    """The program with each of the choices, by the choice's place."""
    if operation == "parts":
        return {
            str(place): functools.partial(program, backend=DIVIDED, **choice)
            for place, choice in enumerate(choices)
        }
    backend = candidates_of(bench, operation)[0]
    kernel: dict[str, Any] = {"backend": backend}
    if bench.backends.interpret is not None:
        kernel["interpret"] = bench.backends.interpret
    kind = OPERATIONS[operation][backend].tuning
    tunings = [kind(**choice) if kind and choice else None for choice in choices]
    return {
        str(place): functools.partial(program, tuning=tuning, **kernel)
        for place, tuning in enumerate(tunings)
    }


def plain_result(built: tuple[Callable[..., Any], Rotations, int, float]) -> np.ndarray:
    """The result of plain XLA: the measure of correctness of every choice."""
    program, rotations, _, _ = built
    found = jax.jit(functools.partial(program, backend="xla"))(*rotations[0])
    first = found[0] if isinstance(found, tuple) else found
    return np.asarray(first.astype(jnp.float32))


def best_of(cases: dict[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """The choice with the best geometric mean over the cases, each relative to the case's best.

    Only choices that ran in every case count. None when there is none.
    """
    relative: dict[str, list[float]] = {}
    for entries in cases.values():
        timed = [entry for entry in entries if entry["us"] is not None]
        for entry in timed:
            least = min(other["us"] for other in timed)
            key = json.dumps(entry["tuning"], sort_keys=True)
            relative.setdefault(key, []).append(math.log(entry["us"] / least))
    complete = {key: sum(logs) for key, logs in relative.items() if len(logs) == len(cases)}
    return json.loads(min(complete, key=lambda key: complete[key])) if complete else None


def kind_of(operation: str, values: dict[str, Any]) -> type[Any]:
    """The type of a tuning that has these fields and no other."""
    kinds = [backend.tuning for backend in OPERATIONS[operation].values() if backend.tuning]
    return next(k for k in kinds if {f.name for f in dataclasses.fields(k)} == set(values))


def table_row(device_kind: str, best: dict[str, dict[str, Any] | None]) -> str:
    """The line of `pallas_kernels/tuning.py` for a chip, fields at their default left out."""
    arguments = []
    for operation, values in best.items():
        # none ran, the kernel's own choice is the best, or it is none of the table's
        if not values or operation not in OPERATIONS:
            continue
        kind = kind_of(operation, values)
        plain = dataclasses.asdict(kind())
        changed = [f"{name}={value!r}" for name, value in values.items() if value != plain[name]]
        if changed:
            arguments.append(f"{operation}={kind.__name__}({', '.join(changed)})")
    chip = device_kind.replace("-", " ").split()
    word = next((word for word in chip if any(letter.isdigit() for letter in word)), chip[-1])
    return f'"{word}": ChipTuning({", ".join(arguments)}),'
