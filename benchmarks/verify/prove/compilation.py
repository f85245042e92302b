"""Compiling one function for absent devices and judging what the compiler made of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from benchmarks.verify.prove.gpu import compile_on_gpu
from benchmarks.verify.prove.gpu_targets import GPU_TARGETS, CompilerMissingError
from benchmarks.verify.prove.program import copied, counts, exchanged_indices
from benchmarks.verify.prove.proof import Cost, Memory, Proof, Requirements, judge
from benchmarks.verify.prove.row_order import out_of_order
from benchmarks.verify.prove.streamed import fetches
from benchmarks.verify.prove.tpu import compile_on_tpu, xla_cost


def prove(
    name: str,
    function: Callable[..., Any],
    *operands: Any,
    mesh: Mesh,
    kind: str,
    wanted: Requirements,
    cost: Cost | None = None,
    layers: int = 0,
    compiler_options: dict[str, Any] | None = None,
    **jit_options: Any,
) -> Proof:
    """Compiles a function for absent devices and judges what the compiler made of it.

    Args:
        name: for the report.
        function: what jax.jit would take.
        operands: pytrees of ShapeDtypeStructs, with shardings of the mesh or none.
        mesh: from `absent_mesh(kind, ...)`, or another mesh of its devices.
        kind: the kind of these devices.
        wanted: what it must fulfil.
        cost: its work by the shapes of its problem, for the report.
        layers: equal parts of the function, of which one is counted apart.
        compiler_options: options of XLA for this compilation.
        jit_options: such as donate_argnums.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    begin = time.perf_counter()
    jit_options["compiler_options"] = compiler_options or {}
    costs = [cost] if cost else []
    if kind in GPU_TARGETS:
        architecture = GPU_TARGETS[kind].architecture
        wanted = replace(wanted, shared=GPU_TARGETS[kind].block_shared_memory)
        compiled, kernels, launched = compile_on_gpu(
            mesh, architecture, function, *operands, **jit_options
        )
    else:
        launched = None
        compiled, kernels = compile_on_tpu(mesh, function, *operands, **jit_options)
        estimate = xla_cost(compiled)
        costs += [estimate] if estimate else []
    seconds = time.perf_counter() - begin
    hlo = compiled.as_text()
    recomputed = count_recomputed(hlo)
    counted = counts(hlo, layers, launched)
    others = list(out_of_order(hlo, kernels)) if wanted.one_order else []
    if (begun := fetches(hlo)) < wanted.fetches:
        others.append(f"loops begin {begun} of {wanted.fetches} copies from the host")
    analysis = compiled.memory_analysis()
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        results=analysis.output_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
    )
    return Proof(
        name=name,
        device=kind,
        seconds=seconds,
        memory=memory,
        costs=tuple(costs),
        kernels=kernels,
        failures=(
            *judge(kernels, memory, wanted, recomputed, counted, copied(hlo, wanted.quantized)),
            *others,
            *(f"devices exchange indices: {one}" for one in exchanged_indices(hlo)),
        ),
        recomputed=recomputed,
        counts=counted,
    )


def attempt(name: str, kind: str, compilation: Callable[[], Proof]) -> Proof:
    """The proof, or a failed one where the function does not compile.

    One case that a compiler refuses must not hide what became of the others.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    begin = time.perf_counter()
    try:
        return compilation()
    except CompilerMissingError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failure = f"does not compile: {type(error).__name__}: {' '.join(lines[:2])[:300]}"
        return Proof(name, kind, time.perf_counter() - begin, None, (), (), (failure,))


def count_recomputed(hlo: str) -> int:
    """The number of instructions of an optimised module that are repeated to save memory.

    `.rematerialized` is the name of sources that cost nothing, such as a broadcast constant.
    """
    form = r"^\s*(?:ROOT )?%\S*\.remat(?!erialized)\S* = "
    return len(re.findall(form, hlo, re.MULTILINE))
