"""Proof, without an accelerator, that the kernels compile: `python -m benchmarks.verify.prove`.

Every kernel is compiled down to machine code for GPUs and TPUs that need not be there, and the
compiler is asked what it used. A kernel that spills registers, has lost its matrix instructions or
copies the page pool fails the proof. Nothing is run: speed and results are for a machine with the
device.
"""

from benchmarks.verify.prove.cases import CASES, Attention, Case, cases_for
from benchmarks.verify.prove.compilation import attempt, prove
from benchmarks.verify.prove.problems import prove_case
from benchmarks.verify.prove.program import Counts
from benchmarks.verify.prove.proof import Cost, KernelUse, Memory, Proof, Requirements
from benchmarks.verify.prove.report import (
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    LEGEND,
    ended,
    markdown,
    versions,
    write_json,
)
from benchmarks.verify.prove.roofline import Bound, bound, roofline_table
from benchmarks.verify.prove.targets import (
    KINDS,
    absent_mesh,
    device_memory,
    device_name,
    platform_of,
)

__all__ = [
    "CASES",
    "EXIT_FAILED",
    "EXIT_UNAVAILABLE",
    "KINDS",
    "LEGEND",
    "Attention",
    "Bound",
    "Case",
    "Cost",
    "Counts",
    "KernelUse",
    "Memory",
    "Proof",
    "Requirements",
    "absent_mesh",
    "attempt",
    "bound",
    "cases_for",
    "device_memory",
    "device_name",
    "ended",
    "markdown",
    "platform_of",
    "prove",
    "prove_case",
    "roofline_table",
    "versions",
    "write_json",
]
