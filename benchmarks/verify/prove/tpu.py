"""Compilation for an absent TPU, with the vector memory of every kernel."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from benchmarks.verify.prove.proof import Cost, KernelUse
from benchmarks.verify.prove.tpu_targets import compile_for

# operations of Mosaic TPU; a serialised module names each operation that it holds once
TPU_OPERATIONS = {"matmul": b"tpu.matmul", "dma": b"tpu.enqueue_dma"}
VECTOR_MEMORY = "1"  # number of the memory space in XLA's text


def compile_on_tpu(
    mesh: Mesh, function: Callable[..., Any], *operands: Any, **jit_options: Any
) -> tuple[Any, tuple[KernelUse, ...]]:
    """The executable for the TPUs of a mesh, and the kernels of this package in it.

    Args:
        mesh: from `tpu_mesh`.
        function: what jax.jit would take.
        operands: pytrees of ShapeDtypeStructs; one without a sharding is replicated.
        jit_options: such as donate_argnums.

    Raises:
        CompilerMissingError: libtpu is not installed.
    """
    compiled = compile_for(mesh, function, *operands, **jit_options)
    return compiled, tuple(mosaic_uses(compiled.as_text()))


def mosaic_uses(hlo: str) -> Iterator[KernelUse]:
    """The Mosaic kernels of an optimised module; kernels of one name and size are one."""
    seen = set()
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.sub(r"[.\d]+$", "", line.split("=", 1)[0].strip().lstrip("%"))
        used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
        vmem = sum(
            int(size)
            for space, size in re.findall(
                r'"memory_space":"(\d+)","offset":"\d+","size":"(\d+)"',
                used.group(1) if used else "",
            )
            if space == VECTOR_MEMORY
        )
        body = re.search(r'"body":"([^"]+)"', line)
        module = base64.b64decode(body.group(1)) if body else b""
        mix = {kind: 1 for kind, operation in TPU_OPERATIONS.items() if operation in module}
        if (name, vmem, tuple(mix)) not in seen:
            seen.add((name, vmem, tuple(mix)))
            yield KernelUse(name, "mosaic_tpu", vmem=vmem, instructions=mix)


def xla_cost(compiled: Any) -> Cost | None:
    """XLA's own estimate of an executable's work; None where it makes none."""
    analysis = compiled.cost_analysis()
    if not analysis or "flops" not in analysis:
        return None
    return Cost(int(analysis["flops"]), int(analysis.get("bytes accessed", 0)), "XLA")
