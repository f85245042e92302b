"""Proof, without a GPU, that the kernels compile for one: `python -m pallas_kernels.prove`.

Every kernel is compiled down to machine code for a GPU that need not be there, and the assembler
is asked what it used. A kernel that spills registers, has lost its matrix instructions or copies
the page pool fails the proof. Nothing is run: speed and results are for a machine with a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.gpu_targets import (
    GPU_TARGETS,
    CompilerMissingError,
    compile_for,
    environment,
    gpu_mesh,
    require_compiler,
)
from pallas_kernels.paged_attention import (
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.write_kv import write_kv

EXIT_FAILED = 1
EXIT_UNAVAILABLE = 3


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What the assembler says of one GPU function, and what its PTX holds.

    Attributes:
        name: the function.
        source: "mosaic" for a kernel of this package, "xla" for one that XLA wrote.
        registers: a thread.
        spilled: bytes of register spills, stores and loads together.
        shared: bytes of shared memory, fixed and asked for at launch together.
        wgmma: matrix instructions of Hopper in the PTX.
    """

    name: str
    source: str
    registers: int
    spilled: int
    shared: int
    wgmma: int


@dataclass(frozen=True, slots=True)
class Proof:
    """One compiled function.

    Attributes:
        name: what was compiled.
        seconds: of lowering and compilation.
        temporaries: bytes of device memory beyond operands and results.
        aliased: bytes of operands that results reuse.
        kernels: its GPU functions.
        failures: what is wrong with it, in words; empty when it passed.
    """

    name: str
    seconds: float
    temporaries: int
    aliased: int
    kernels: tuple[KernelUse, ...]
    failures: tuple[str, ...]


def _assembler_report(
    ptx: Path, source: str, architecture: str, requested: int
) -> Iterator[KernelUse]:
    """Assembles a PTX file and reads the report on each of its functions."""
    run = subprocess.run(
        [require_compiler(), f"-arch={architecture}", "-v", "-o", ptx.with_suffix(".cubin"), ptx],
        capture_output=True,
        text=True,
        check=True,
    )
    text = ptx.read_text()
    pattern = (
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers(?:.*?(\d+) bytes smem)?"
    )
    for name, stores, loads, registers, fixed in re.findall(pattern, run.stderr):
        body = text.split(name, 1)[-1]
        yield KernelUse(
            name=name,
            source=source,
            registers=int(registers),
            spilled=int(stores) + int(loads),
            shared=int(fixed or 0) + requested,
            wgmma=body.count("wgmma.mma_async"),
        )


def _dumped_kernels(folder: Path, architecture: str) -> Iterator[KernelUse]:
    """The GPU functions that Mosaic GPU and XLA left in their dump folders."""
    for ptx in sorted((folder / "mosaic").glob("*.ptx")):
        resources = ptx.with_suffix(".resources.txt").read_text()
        asked = re.search(r"smem_scratch_bytes=(\d+)", resources)
        yield from _assembler_report(
            ptx, "mosaic", architecture, int(asked.group(1)) if asked else 0
        )
    for ptx in sorted((folder / "xla").glob("*.ptx")):
        yield from _assembler_report(ptx, "xla", architecture, 0)


def prove(
    name: str,
    function: Callable[..., Any],
    *operands: Any,
    mesh: Mesh,
    kind: str = "h200",
    wgmma: bool = False,
    in_place: int = 0,
    max_temporaries: int | None = None,
    **jit_options: Any,
) -> Proof:
    """Compiles a function for absent GPUs and judges what the compiler made of it.

    Args:
        name: for the report.
        function: what jax.jit would take.
        operands: pytrees of ShapeDtypeStructs, with shardings of the mesh or none.
        mesh: from gpu_mesh(kind, ...).
        kind: a key of GPU_TARGETS.
        wgmma: whether the function must use Hopper's matrix instructions.
        in_place: bytes of donated operands that the results must reuse.
        max_temporaries: bytes of device memory that it may need; None for no limit.
        jit_options: such as donate_argnums.

    Raises:
        CompilerMissingError: JAX's CUDA plugin or ptxas is not installed.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as dump:
        folder = Path(dump)
        (folder / "mosaic").mkdir()
        with environment(MOSAIC_GPU_DUMP_TO=str(folder / "mosaic"), MOSAIC_GPU_DUMP_PTX="1"):
            compiled = compile_for(
                mesh,
                function,
                *operands,
                compiler_options={
                    "xla_dump_to": str(folder / "xla"),
                    "xla_dump_emitter_re": ".*",
                },
                **jit_options,
            )
        seconds = time.perf_counter() - begin
        kernels = tuple(_dumped_kernels(folder, GPU_TARGETS[kind].architecture))
    memory = compiled.memory_analysis()
    failures = [
        f"{kernel.name} spills {kernel.spilled} bytes"
        for kernel in kernels
        # what XLA generates without autotuning is not what it generates where a GPU is
        if kernel.spilled and kernel.source == "mosaic"
    ]
    if wgmma and not any(kernel.wgmma for kernel in kernels):
        failures.append("no kernel uses wgmma")
    if memory.alias_size_in_bytes < in_place:
        failures.append(f"only {memory.alias_size_in_bytes} of {in_place} bytes are in place")
    if max_temporaries is not None and memory.temp_size_in_bytes > max_temporaries:
        failures.append(f"{memory.temp_size_in_bytes} bytes of temporaries > {max_temporaries}")
    return Proof(
        name=name,
        seconds=seconds,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        kernels=kernels,
        failures=tuple(failures),
    )


def _operands(
    slots: int, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Decode operands over a pool of 1 GiB and a table for 16,384 tokens a slot."""
    row = 2 * kv_heads * head_dim * jnp.dtype(dtype).itemsize
    pages = 2**30 // (row * page_size)
    shape = jax.ShapeDtypeStruct
    return (
        shape((slots, heads, head_dim), dtype),
        shape((pages, page_size, 2, kv_heads, head_dim), dtype),
        shape((slots, 16384 // page_size), jnp.int32),
        shape((slots,), jnp.int32),
    )


# slots, heads, KV heads, head_dim, page size, type, window
DECODE_CASES = [
    (1, 32, 8, 128, 16, "bfloat16", None),
    (64, 32, 8, 128, 16, "bfloat16", None),
    (256, 32, 8, 128, 16, "bfloat16", 4096),
    (64, 32, 8, 64, 16, "float16", None),
    (16, 32, 32, 128, 32, "bfloat16", None),
    (16, 16, 2, 64, 64, "bfloat16", 1024),
    (16, 64, 1, 128, 16, "bfloat16", None),
]


def kernel_proofs(kind: str) -> Iterator[Proof]:
    """The proofs of every operation of this package that runs on the GPU."""
    mesh = gpu_mesh(kind)
    shape = jax.ShapeDtypeStruct
    for slots, heads, kv_heads, head_dim, page_size, dtype, window in DECODE_CASES:
        options = {"scale": head_dim**-0.5, "window": window}
        yield prove(
            f"decode B={slots} H={heads}/{kv_heads} D={head_dim} page={page_size} {dtype}"
            + (f" window={window}" if window else ""),
            functools.partial(paged_decode_attention, **options, backend="mosaic_gpu"),
            *_operands(slots, heads, kv_heads, head_dim, page_size, dtype),
            mesh=mesh,
            kind=kind,
            wgmma=True,
            max_temporaries=2**26,
        )
    decode = functools.partial(paged_decode_attention, scale=0.1, backend="xla")
    q, pool, table, lens = _operands(64, 32, 8, 128, 16, "bfloat16")
    yield prove("decode xla B=64", decode, q, pool, table, lens, mesh=mesh, kind=kind)
    lane: Any = shape((16,), jnp.int32)
    prefill = functools.partial(paged_prefill_attention, scale=0.1, backend="xla")
    yield prove(
        "prefill xla C=2048",
        prefill,
        shape((2048, 32, 128), jnp.bfloat16),
        pool,
        shape((16, table.shape[1]), jnp.int32),
        PrefillLanes(lane, lane, lane),
        mesh=mesh,
        kind=kind,
    )
    token = shape((2048, 8, 128), jnp.bfloat16)
    index = shape((2048,), jnp.int32)
    yield prove(
        "write_kv xla T=2048",
        functools.partial(write_kv, backend="xla"),
        pool,
        token,
        token,
        index,
        index,
        mesh=mesh,
        kind=kind,
        in_place=2**30,
        max_temporaries=2**26,
        donate_argnums=0,
    )
    yield _sharded_decode_proof(kind)


def _sharded_decode_proof(kind: str) -> Proof:
    mesh = gpu_mesh(kind, 8)
    q, pool, table, lens = _operands(64, 64, 8, 128, 16, "bfloat16")
    heads, pages = PartitionSpec(None, "model"), PartitionSpec(None, None, None, "model")
    decode = functools.partial(paged_decode_attention, scale=0.1, backend="mosaic_gpu")
    everywhere = PartitionSpec()

    def placed(operand: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=sharding)

    return prove(
        "decode B=64 H=64/8 D=128, heads over 8 GPUs",
        jax.shard_map(
            decode,
            mesh=mesh,
            in_specs=(heads, pages, everywhere, everywhere),
            out_specs=heads,
        ),
        placed(q, heads),
        placed(pool, pages),
        table,
        lens,
        mesh=mesh,
        kind=kind,
        wgmma=True,
        max_temporaries=2**26,
    )


def markdown(proofs: list[Proof]) -> str:
    """A table of one line a compiled function; numbers are the largest of its GPU functions."""
    lines = [
        "| function | compiled in s | kernels | registers | spilled bytes | shared bytes | wgmma "
        "| temporaries bytes | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for proof in proofs:
        most = [
            max((getattr(kernel, field) for kernel in proof.kernels), default=0)
            for field in ("registers", "spilled", "shared", "wgmma")
        ]
        cells = [proof.name, f"{proof.seconds:.1f}", len(proof.kernels), *most]
        cells += [proof.temporaries, "; ".join(proof.failures) or "ok"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the proofs; 0 when all pass, 1 when one fails, 3 when this machine cannot compile."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.prove", description=__doc__)
    parser.add_argument("--device", choices=["h200", "h100"], default="h200")
    parser.add_argument("--json", type=Path, help="also write the proofs to this file")
    options = parser.parse_args(arguments)
    # compilation is on the host; without this JAX would look for a driver
    jax.config.update("jax_platforms", "cpu")
    try:
        proofs = list(kernel_proofs(options.device))
    except CompilerMissingError as error:
        print(f"cannot prove anything here: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    print(f"jax {jax.__version__}, {GPU_TARGETS[options.device].name}\n\n{markdown(proofs)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(proof) for proof in proofs], indent=1))
    return EXIT_FAILED if any(proof.failures for proof in proofs) else 0


if __name__ == "__main__":
    sys.exit(main())
