"""Proofs as a Markdown table and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.verify.prove.proof import Cost, Proof
from benchmarks.verify.prove.roofline import Bound, bound

COMPILERS = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "nvidia-cuda-nvcc",
    "jax-cuda12-plugin",
    "nvidia-cuda-nvcc-cu12",
    "libtpu",
)
EXIT_FAILED = 1
EXIT_UNAVAILABLE = 3
COLUMNS = (
    "function",
    "device",
    "seconds",
    "kernels",
    "registers",
    "spilled B",
    "shared or VMEM B",
    "instructions",
    "temporaries B",
    "GFLOP",
    "MB moved",
    "estimate: us at least",
    "XLA: GFLOP",
    "XLA: MB",
    "verdict",
)
LEGEND = """\
Compiled, not run. `kernels` counts the device functions, those that XLA wrote for a GPU included;
registers, spills and shared memory (VMEM on TPU) are the largest, and instructions the sum, of the
kernels of `pallas_kernels` alone. Of a TPU kernel only the presence of an instruction is known.
GFLOP and MB are computed from the shapes, with every request at its longest context, and from them
the least time at the rates of the data sheet, an estimate and no measurement. XLA's are its own
cost analysis, which there is for TPU only and which counts each operand of a kernel as read whole.
A dash: not known.
"""


def versions() -> dict[str, str]:
    """The installed versions of what compiles."""
    found = {}
    for package in COMPILERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cost(cost: Cost | None) -> tuple[str | None, str | None]:
    if cost is None:
        return None, None
    return f"{cost.flops / 1e9:.1f}", f"{cost.bytes / 1e6:.1f}"


def _least(proof: Proof) -> Bound | None:
    """By the work that the shapes need, where it is known."""
    return next(
        (bound(cost, proof.device) for cost in proof.costs if cost.source == "shapes"), None
    )


def markdown(proofs: Sequence[Proof]) -> str:
    """A table of one line a compiled function and device."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for proof in proofs:
        mix = ", ".join(f"{name} {count}" for name, count in proof.instructions().items())
        close = proof.most("shared")
        costs = {cost.source: cost for cost in proof.costs}
        least = _least(proof)
        cells = [
            proof.name,
            proof.device,
            f"{proof.seconds:.1f}",
            len(proof.kernels) or None,
            proof.most("registers"),
            proof.most("spilled"),
            proof.most("vmem") if close is None else close,
            mix or None,
            proof.memory.temporaries if proof.memory else None,
            *_cost(costs.get("shapes")),
            f"{1e6 * least.seconds:.1f} ({least.by})" if least else None,
            *_cost(costs.get("XLA")),
            "; ".join(proof.failures).replace("|", "/") or "ok",
        ]
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write_json(path: Path, proofs: Sequence[Proof]) -> None:
    """Everything that is known of the proofs, with the versions of what made them."""
    rows = []
    for proof in proofs:
        least = _least(proof)
        rows.append(asdict(proof) | {"estimated_least": asdict(least) if least else None})
    content = {"versions": versions(), "proofs": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


def ended(proofs: Sequence[Proof], missing: Sequence[str]) -> int:
    """Tells what failed and what is missing; the exit status of the command."""
    for line in missing:
        print(line, file=sys.stderr)
    for proof in proofs:
        for failure in proof.failures:
            print(f"FAILED: {proof.name} on {proof.device}: {failure}", file=sys.stderr)
    if any(proof.failures for proof in proofs):
        return EXIT_FAILED
    return EXIT_UNAVAILABLE if missing else 0
