"""Proof, without an accelerator, that the kernels compile: `python -m pallas_kernels.prove`.

Every kernel is compiled down to machine code for GPUs and TPUs that need not be there, and the
compiler is asked what it used. A kernel that spills registers, has lost its matrix instructions or
copies the page pool fails the proof. Nothing is run: speed and results are for a machine with the
device.
"""

from pallas_kernels.prove.cases import CASES, MATRIX_INSTRUCTION, Attention, Case, cases_for
from pallas_kernels.prove.compilation import attempt, prove
from pallas_kernels.prove.problems import prove_case
from pallas_kernels.prove.program import Counts
from pallas_kernels.prove.proof import Cost, KernelUse, Memory, Proof, Requirements
from pallas_kernels.prove.report import LEGEND, markdown, versions, write_json
from pallas_kernels.prove.roofline import Bound, bound, roofline_table
from pallas_kernels.prove.targets import (
    KINDS,
    absent_mesh,
    device_memory,
    device_name,
    platform_of,
)

EXIT_FAILED = 1
EXIT_UNAVAILABLE = 3

__all__ = [
    "CASES",
    "EXIT_FAILED",
    "EXIT_UNAVAILABLE",
    "KINDS",
    "LEGEND",
    "MATRIX_INSTRUCTION",
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
    "markdown",
    "platform_of",
    "prove",
    "prove_case",
    "roofline_table",
    "versions",
    "write_json",
]
