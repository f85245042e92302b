"""The device memory that compiled steps need, as a Markdown document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.verify.prove import Proof, device_memory, device_name, versions
from jaxserve.bench.measure import commit

COLUMNS = (
    "step",
    "device",
    "kernels",
    "weights",
    "KV pool",
    "temporaries",
    "in place",
    "in all",
    "of the device",
    "compiler's CPU s",
    "verdict",
)
TEXT = """\
# Device memory of whole steps

What the compiler says of the engine's programs: bytes of one device, bfloat16 weights and pages.
Nothing was run: the numbers are the memory analysis of executables that were compiled without a
device. GiB are 2^30 bytes, MiB 2^20. Where there is a GPU, XLA times several matrix products and
chooses one, so the temporaries there may differ by the workspace of these.

- *KV pool*: keys and values of all layers, in pages of the device's default size, as many as the
  engine plans for at 90 % of the device (and no more than 256 requests of 8,192 tokens can use); in
  brackets the tokens that it holds.
- *temporaries*: activations, gathered keys, logits. A step that copied the pool would show it here.
- *in place*: donated state (pool, page table, history) whose memory the results reuse.
- *in all*: arguments, results that reuse none of them, and temporaries together.
- *compiler's CPU s*: processor time of tracing and compiling all layers, on the machine that made
  this page.
"""


@dataclass(frozen=True, slots=True)
class StepProof:
    """One compiled step and what it was made of.

    Attributes:
        shape: name of the model shape.
        layers: how many were compiled.
        devices: over which the heads and weights are divided.
        step: name of the program.
        backends: of decode and of prefill; None where the program has no prefill region.
        pool_tokens: tokens that the KV pool holds.
        weights: bytes of parameters on one device.
        pool: bytes of the KV pool on one device.
        proof: what the compiler made of it.
        cpu_seconds: processor time of tracing and compiling, of this process and its children.
        blob: bytes that the host sends for the step.
        quantization: of the linear layers' weights; None: they have the type of the model.
        rows: of a decode step; None where it has a prefill region.
    """

    shape: str
    layers: int
    devices: int
    step: str
    backends: tuple[str, str | None]
    pool_tokens: int
    weights: int
    pool: int
    proof: Proof
    cpu_seconds: float
    blob: int
    quantization: str | None = None
    rows: int | None = None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _row(step: StepProof) -> str:
    memory = step.proof.memory
    decode, prefill = step.backends
    cells = [
        step.step,
        f"{step.devices} x {device_name(step.proof.device)}",
        f"decode {decode}" + (f", prefill {prefill}" if prefill else ""),
        _gib(step.weights),
        f"{_gib(step.pool)} ({step.pool_tokens:,})",
        f"{memory.temporaries / 2**20:.1f} MiB" if memory else "-",
        _gib(memory.aliased) if memory else "-",
        _gib(memory.total) if memory else "-",
        f"{memory.total / device_memory(step.proof.device):.0%}" if memory else "-",
        f"{step.cpu_seconds:.0f}",
        "; ".join(step.proof.failures).replace("|", "/") or "ok",
    ]
    return "| " + " | ".join(cells) + " |"


def memory_document(steps: Sequence[StepProof]) -> str:
    """The document: a table a model."""
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    made_by += f", at commit {commit()}"
    lines = [TEXT, f"Made by `python -m benchmarks.verify.prove_step --full` with {made_by}."]
    models = dict.fromkeys((step.shape, step.layers, step.devices) for step in steps)
    for shape, layers, devices in models:
        parallel = f", tensor parallel over {devices}" if devices > 1 else ""
        lines += ["", f"## {shape}, {layers} layers{parallel}", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += [
            _row(step)
            for step in steps
            if (step.shape, step.layers, step.devices) == (shape, layers, devices)
        ]
    return "\n".join(lines) + "\n"
