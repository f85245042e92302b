"""Compilation for an absent GPU, with the assembler's report on every function."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from benchmarks.verify.prove.deviceless import environment
from benchmarks.verify.prove.gpu_targets import compile_for, require_compiler
from benchmarks.verify.prove.proof import KernelUse
from benchmarks.verify.prove.row_order import atomics

PTX_INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",  # matrix product of a warpgroup, Hopper
    "tcgen05": r"\btcgen05\.mma",  # matrix product of Blackwell
    "mma": r"\bmma\.(?:sync|sp)",  # matrix product of a warp, Ampere and later
    "tma": r"\bcp\.async\.bulk\.tensor",  # copy of a tile by the tensor memory accelerator
    "cp_async": r"\bcp\.async\.c[ag]",  # copy of up to 16 bytes a thread, Ampere
}
# "setmaxnreg ignored" and "wgmma serialized": the kernel runs, far slower than it was written
SLOWED = re.compile(r"\bC75(?:08|10)\b|'?setmaxnreg'? ignored|wgmma\.mma_async.* serialized")


def compile_on_gpu(
    mesh: Mesh,
    architecture: str,
    function: Callable[..., Any],
    *operands: Any,
    compiler_options: dict[str, Any],
    **jit_options: Any,
) -> tuple[Any, tuple[KernelUse, ...], str]:
    """The executable for the GPUs of a mesh, its functions, and XLA's list of what it launches.

    Args:
        mesh: from `gpu_mesh`.
        architecture: the `-arch` of ptxas.
        function: what jax.jit would take.
        operands: pytrees of ShapeDtypeStructs.
        compiler_options: options of XLA for this compilation.
        jit_options: such as donate_argnums.

    Raises:
        CompilerMissingError: JAX's CUDA plugin or ptxas is not installed.
    """
    with tempfile.TemporaryDirectory() as dump:
        mosaic, xla = Path(dump) / "mosaic", Path(dump) / "xla"
        mosaic.mkdir()
        with environment(MOSAIC_GPU_DUMP_TO=str(mosaic)):
            compiled = compile_for(
                mesh,
                function,
                *operands,
                # PTX alone: the logs of all emitters take five times as long as the compilation
                compiler_options={
                    **compiler_options,
                    "xla_dump_to": str(xla),
                    "xla_dump_emitter_re": "ptx",
                },
                **jit_options,
            )
        names = triton_kernels(compiled.as_text())
        assembled_here = tuple(mosaic_uses(mosaic))
        reused = reused_uses(compiled.as_text(), assembled_here)
        kernels = (*assembled_here, *reused, *xla_uses(xla, names, architecture))
        # the second is there where XLA made graphs of a part
        launches = sorted(xla.glob("*.thunk_sequence*.txt"))
        launched = launches[-1].read_text()
    return compiled, kernels, launched


def reused_uses(hlo: str, assembled: Iterable[KernelUse]) -> Iterator[KernelUse]:
    """The Mosaic GPU kernels of an optimised module that nothing was assembled for."""
    lines = [line for line in hlo.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    places = [re.search(r'op_name="[^"]*?([^"/]+)/[^"/]+"', line) for line in lines]
    functions = [kernel.name for kernel in assembled]
    for name in dict.fromkeys(place.group(1) for place in places if place):
        own = re.compile(rf"{re.escape(name)}(_mosaic_gpu\w*)?")
        if not any(own.fullmatch(function) for function in functions):
            yield KernelUse(name, "mosaic_gpu", reused=True)


def instruction_mix(ptx: str) -> dict[str, int]:
    """The count of each instruction of `PTX_INSTRUCTIONS` in a piece of PTX."""
    counts = {name: len(re.findall(form, ptx)) for name, form in PTX_INSTRUCTIONS.items()}
    return {name: count for name, count in counts.items() if count}


def assembler_report(report: str) -> dict[str, tuple[int, int, int]]:
    """Registers, bytes spilled and bytes of fixed shared memory by function, from `ptxas -v`."""
    form = (
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers(?:.*?(\d+) bytes smem)?"
    )
    return {
        name: (int(registers), int(stores) + int(loads), int(fixed or 0))
        for name, stores, loads, registers, fixed in re.findall(form, report)
    }


def remarks(report: str, name: str) -> tuple[str, ...]:
    """The assembler's remarks on a function that cost it its pipeline or its registers."""
    found = [line.strip() for line in report.splitlines() if SLOWED.search(line)]
    return tuple(line for line in found if "function '" not in line or f"'{name}'" in line)


def mosaic_uses(folder: Path) -> Iterator[KernelUse]:
    """The kernels that Mosaic GPU left in its dump folder: PTX, ptxas report, resources.

    Lowering and assembling number the files of a kernel apart, so where one program holds several
    of one name, each is said to ask for the most shared memory that one of them asks for.
    """
    requested: dict[str, int] = {}
    for resources in folder.glob("*.resources.txt"):
        asked = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())
        name = _unnumbered(resources.name.removesuffix(".resources.txt"))
        requested[name] = max(requested.get(name, 0), int(asked.group(1)) if asked else 0)
    for ptx in sorted(folder.glob("*.ptx")):
        asked_for = requested[_unnumbered(ptx.stem)]
        text = ptx.read_text()
        mix = instruction_mix(text)
        report = ptx.with_suffix(".ptxas").read_text()
        for name, (registers, spilled, fixed) in assembler_report(report).items():
            yield KernelUse(
                name,
                "mosaic_gpu",
                registers,
                spilled,
                fixed + asked_for,
                instructions=mix,
                remarks=remarks(report, name),
                atomics=atomics(text),
            )


def _unnumbered(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def triton_kernels(hlo: str) -> set[str]:
    """The names of the Pallas Triton kernels of an optimised module."""
    lines = [line for line in hlo.splitlines() if '"__gpu$xla.gpu.triton"' in line]
    return {name for line in lines for name in re.findall(r'\bname = "([^"]+)"', line)}


def xla_uses(folder: Path, own: set[str], architecture: str) -> Iterator[KernelUse]:
    """The functions in XLA's dump folder; only those named in `own` are assembled once more."""
    shared = dict[str, int]()
    for sequence in folder.glob("*thunk_sequence.txt"):
        for name, size in re.findall(
            r"(\S+) grid: .*?shared_memory: (\d+) bytes", sequence.read_text()
        ):
            shared[name] = int(size)
    for ptx in sorted(folder.glob("*.ptx")):
        text = ptx.read_text()
        bodies = re.split(r"\.entry\s+", text)[1:]
        functions = {re.split(r"[\s(]", body, maxsplit=1)[0]: body for body in bodies}
        ours = {name for name in functions if is_named(name, own)}
        report = assembled(ptx, architecture) if ours else ""
        found = assembler_report(report)
        for name, body in functions.items():
            registers, spilled, fixed = found.get(name, (None, None, 0))
            yield KernelUse(
                name=name,
                source="triton" if name in ours else "xla",
                registers=registers if name in ours else None,
                spilled=spilled if name in ours else None,
                shared=fixed + shared.get(name, 0),
                instructions=instruction_mix(body),
                remarks=remarks(report, name) if name in ours else (),
                atomics=atomics(body),
            )


def is_named(function: str, names: set[str]) -> bool:
    """Whether a function has one of the names, or XLA's numbering of a repeated one."""
    return function in names or re.sub(r"_+\d+$", "", function) in names


def assembled(ptx: Path, architecture: str) -> str:
    """The assembler's report on the functions of a PTX file."""
    run = subprocess.run(
        [require_compiler(), f"-arch={architecture}", "-v", "-o", ptx.with_suffix(".cubin"), ptx],
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stderr
