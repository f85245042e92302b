"""The proved cases: the listed problems with what the records of the backends say of kernels."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from benchmarks.verify.prove.lists import PROVED, Proved
from benchmarks.verify.prove.shapes import Attention, Experts, Matmul, Sampling
from pallas_kernels.backends import BACKENDS, OPERATIONS

# operations that are proved by the names of their functions
FUNCTIONS = {"matmul": "quantized_matmul", "threshold": "kept_threshold"}
OWN = {
    backend.name for backend in BACKENDS if any(one.interprets for one in backend.implementations)
}


@dataclass(frozen=True, slots=True)
class Case:
    """A function that is compiled for every one of some kinds of devices.

    Attributes:
        operation: "decode", "decode_and_write", "prefill", "write_kv", "write_kv_scaled",
            "rotate_and_write", "quantized_matmul", "linear_layer", "grouped_linear" or
            "kept_threshold".
        backend: of the operation.
        kinds: keys of `benchmarks.verify.prove.targets.KINDS`.
        problem: shapes and options.
        requires: the instruction that its kernel must use; None for none.
        quick: the kinds for which it is compiled in a quick run.
        kernel: its kernel, by the operation and the backend of its record.
    """

    operation: str
    backend: str
    kinds: tuple[str, ...]
    problem: Attention | Matmul | Experts | Sampling
    requires: str | None = None
    quick: tuple[str, ...] = ()
    kernel: tuple[str, str] = ("", "")

    @property
    def own(self) -> bool:
        """Whether the backend is a kernel of this package, and not XLA's."""
        return self.backend in OWN

    @property
    def name(self) -> str:
        """Operation, backend, shapes, and the options that are not at their defaults."""
        return f"{self.operation} {self.backend} {self.problem.words()}"


def cases_of(kernel: Proved) -> Iterator[Case]:
    """The cases of a kernel."""
    instruction = OPERATIONS[kernel.operation][kernel.backend].instruction
    for proven in kernel.problems:
        yield Case(
            proven.operation or FUNCTIONS.get(kernel.operation, kernel.operation),
            kernel.backend,
            proven.kinds or kernel.chips,
            proven.problem,
            # float32 is multiplied exactly, without matrix instructions
            None if proven.problem.dtype == "float32" else instruction,
            proven.quick,
            (kernel.operation, kernel.backend),
        )


CASES = tuple(case for kernel in PROVED for case in cases_of(kernel))


def cases_for(
    kind: str,
    *,
    quick: bool = False,
    backend: str | None = None,
    kernels: Container[tuple[str, str]] | None = None,
    share: tuple[int, int] = (1, 1),
) -> tuple[Case, ...]:
    """The cases of one kind of device.

    Args:
        kind: a key of `benchmarks.verify.prove.targets.KINDS`.
        quick: only those of a quick run.
        backend: only those of this backend.
        kernels: all of these, by operation and backend, beside those of a quick run, or alone.
        share: K of N: of the cases that are none of a quick run every N-th, from the K-th on.
    """

    def wanted(case: Case) -> bool:
        if kernels is not None and case.kernel in kernels:
            return kind in case.kinds
        if quick:
            return kind in case.quick
        return kernels is None and kind in case.kinds

    found = [case for case in CASES if wanted(case) and backend in (None, case.backend)]
    first, every = share
    held_out = [case for case in found if kind not in case.quick]
    kept = {id(case) for case in held_out[first - 1 :: every]}
    return tuple(case for case in found if kind in case.quick or id(case) in kept)
