"""The facts of one compiled function, and its faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.verify.prove.program import Counts

# where an instruction is asked for, these do as well: the newer tensor cores do what the older did
STRONGER = {"mma": ("mma", "wgmma", "tcgen05"), "wgmma": ("wgmma",), "tcgen05": ("tcgen05",)}
# backends with kernels of this package; "xla" marks a function that XLA wrote
OWN = ("mosaic_gpu", "triton", "mosaic_tpu")


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The compiler's report on one device function.

    Attributes:
        name: name of the function.
        source: "mosaic_gpu", "triton" or "mosaic_tpu" for a kernel of this package, "xla" for a
            function that XLA wrote.
        registers: registers a thread; None where the compiler does not report them.
        spilled: bytes of register spills, stores and loads together; None likewise.
        shared: bytes of shared memory a thread block; None on TPU.
        vmem: bytes of vector memory; None on GPU.
        instructions: how often each kind of instruction stands in the PTX. In a TPU kernel's
            module only presence can be seen: 1.
        remarks: of the assembler, that it gave up what the kernel was written for.
        atomics: how often each atomic instruction stands in the PTX; a TPU has none.
        reused: assembled for an earlier program of this process, and judged with that: JAX 0.12
            assembles equal kernels once, so nothing else is known of it here.
    """

    name: str
    source: str
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    vmem: int | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    atomics: Mapping[str, int] = field(default_factory=dict)
    reused: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call on one device.

    Attributes:
        flops: multiplications and additions of matrix products; XLA counts the others too.
        bytes: that must move between device memory and the chip.
        source: "shapes" (computed from the problem) or "XLA" (its cost analysis, which takes
            every operand of a kernel as read whole).
        eight_bit: whether 8-bit numbers are multiplied, which devices do at a rate of their own.
    """

    flops: int
    bytes: int
    source: str
    eight_bit: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory of one executable on each device, in bytes.

    Attributes:
        arguments: operands.
        results: outputs, those that reuse operands included.
        temporaries: beyond operands and results.
        aliased: operands that results reuse.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int

    @property
    def total(self) -> int:
        """The memory that the executable occupies while it runs."""
        return self.arguments + self.results - self.aliased + self.temporaries


@dataclass(frozen=True, slots=True)
class Requirements:
    """The demands on a compiled function.

    Attributes:
        instructions: of the kernels with the key in their name, one must use the instruction.
        own_kernel: whether a kernel of this package must be in the executable.
        in_place: bytes of donated operands that the results must reuse.
        max_temporaries: bytes of device memory; None for no limit.
        capacity: bytes of memory of a device; None is not judged.
        recomputed: instructions that the compiler may repeat to save memory; None for no limit.
        shared: bytes of shared memory that a thread block may have; None is not judged.
        registers: that a thread of this package's kernels may have; None is not judged.
        a_layer: kernels that one of the equal parts may launch; None for no limit.
        quantized: elements of the quantised weights on a device, of which no copy may be written.
        one_order: whether each row has to be summed in one order, see `row_order`.
        fetches: asynchronous copies from the host that its loops must begin, see `streamed`.
    """

    instructions: Mapping[str, str] = field(default_factory=dict)
    own_kernel: bool = False
    in_place: int = 0
    max_temporaries: int | None = None
    capacity: int | None = None
    recomputed: int | None = None
    shared: int | None = None
    registers: int | None = None
    a_layer: int | None = None
    quantized: frozenset[int] = frozenset()
    one_order: bool = False
    fetches: int = 0


@dataclass(frozen=True, slots=True)
class Proof:
    """One compiled function.

    Attributes:
        name: what was compiled.
        device: for which kind of device.
        seconds: of tracing, lowering and compilation.
        memory: None where it did not compile.
        costs: estimates of its work, each with its source; none where it is not known.
        kernels: its device functions.
        failures: what is wrong with it, in words; empty when it passed.
        recomputed: instructions that the compiler repeats to save memory.
        counts: what it launches; None where it did not compile.
    """

    name: str
    device: str
    seconds: float
    memory: Memory | None
    costs: tuple[Cost, ...]
    kernels: tuple[KernelUse, ...]
    failures: tuple[str, ...]
    recomputed: int = 0
    counts: Counts | None = None

    def most(self, attribute: str) -> int | None:
        """The largest value of a field of this package's kernels; None where it is not known."""
        values = [getattr(kernel, attribute) for kernel in self.kernels if kernel.source in OWN]
        return max((value for value in values if value is not None), default=None)

    def instructions(self) -> dict[str, int]:
        """The instruction counts of this package's kernels, added up."""
        total: dict[str, int] = {}
        for kernel in self.kernels:
            for name, count in kernel.instructions.items() if kernel.source in OWN else ():
                total[name] = total.get(name, 0) + count
        return total


def judge(
    kernels: tuple[KernelUse, ...],
    memory: Memory,
    wanted: Requirements,
    recomputed: int = 0,
    launches: Counts | None = None,
    copies: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """The faults of a compiled function, in words.

    Spills of functions that XLA wrote are not held against it: without a GPU XLA does not
    autotune, so they are not what runs there.
    """
    own = [kernel for kernel in kernels if kernel.source in OWN]
    failures = [f"{kernel.name} spills {kernel.spilled} bytes" for kernel in own if kernel.spilled]
    failures += [f"{kernel.name}: {remark}" for kernel in own for remark in kernel.remarks]
    for kernel in own:
        if wanted.shared is not None and (kernel.shared or 0) > wanted.shared:
            failures.append(f"{kernel.name} asks for {kernel.shared} bytes of shared memory")
        if wanted.registers is not None and (kernel.registers or 0) > wanted.registers:
            failures.append(
                f"{kernel.name} has {kernel.registers} registers, not {wanted.registers}"
            )
    if wanted.own_kernel and not own:
        failures.append("no kernel of pallas_kernels is in the executable")
    for part, instruction in wanted.instructions.items():
        accepted = STRONGER.get(instruction, (instruction,))
        named = [kernel for kernel in own if part in kernel.name]
        if not any(k.reused or k.instructions.get(name) for k in named for name in accepted):
            failures.append(f"no kernel{f' named {part}' if part else ''} uses {instruction}")
    if memory.aliased < wanted.in_place:
        failures.append(f"only {memory.aliased} of {wanted.in_place} bytes are in place")
    if wanted.max_temporaries is not None and memory.temporaries > wanted.max_temporaries:
        failures.append(f"{memory.temporaries} bytes of temporaries > {wanted.max_temporaries}")
    if wanted.capacity is not None and memory.total > wanted.capacity:
        failures.append(f"needs {memory.total} of {wanted.capacity} bytes of device memory")
    if wanted.recomputed is not None and recomputed > wanted.recomputed:
        failures.append(f"{recomputed} instructions are computed again to save memory")
    of_layer = {} if launches is None else launches.a_layer
    if wanted.a_layer is not None and sum(of_layer.values()) > wanted.a_layer:
        of_them = ", ".join(f"{name} {count}" for name, count in sorted(of_layer.items()))
        failures.append(f"a layer launches more than {wanted.a_layer} kernels: {of_them}")
    if copies:
        failures.append(f"{len(copies)} quantised weights are copied: {', '.join(copies[:3])}")
    return tuple(failures)
