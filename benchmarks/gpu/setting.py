"""The setting of every section of gpu_check: the device, the backends to test, and a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks.kernel_bench.rows import Ceilings
from pallas_kernels import AttentionShape, Backends, choose_backends
from pallas_kernels.compat import mosaic_gpu_interpreter
from pallas_kernels.devices import OPERATIONS, candidates, device_family

USABLE_MEMORY = 0.6  # of the device: the pool, and what building it needs


@dataclass(slots=True)
class Setting:
    """The machine under test.

    Attributes:
        device_kind: as JAX names it.
        backends: what choose_backends says for it.
        decode: every decode backend of the device's family, with its interpreter in a dry run.
        prefill: likewise.
        memory: bytes of device memory that a section may fill.
        seconds_left: how long the section may go on; one that has many cases begins none later.
        dry_run: run every line on a CPU with tiny shapes; the numbers mean nothing then.
        shared: figures by name, which later sections and parts use, such as the bandwidth.
        held: what the cases of a section keep for one another in this process.
    """

    device_kind: str
    backends: Backends
    decode: Sequence[tuple[str, Any]]
    prefill: Sequence[tuple[str, Any]]
    memory: int
    seconds_left: float = 600.0
    dry_run: bool = False
    shared: dict[str, float] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def ceilings(self) -> Ceilings:
        """The measured ceilings; NaN where their section failed: others keep their times."""
        names = ("copy_gb_s", "matmul_tflop_s")
        return Ceilings(**{name: self.shared.get(name, math.nan) for name in names})

    def pick(self, real: Any, tiny: Any) -> Any:
        """A size for the GPU, or the one for a dry run."""
        return tiny if self.dry_run else real

    def covering(
        self, operation: str, shape: AttentionShape, chosen: bool
    ) -> list[tuple[str, Any]]:
        """The first backend of "decode" or "prefill" that covers a shape, or all the others.

        With their interpreters. The first is what the engine runs; the others must not cost its
        result when one of them crashes, nor it theirs.
        """
        offered = self.decode if operation == "decode" else self.prefill
        found = [
            (name, interpret)
            for name, interpret in offered
            if OPERATIONS[operation][name].covers(shape) is None
        ]
        return found[:1] if chosen else found[1:]


@dataclass(slots=True)
class Section:
    """The results of a section.

    Attributes:
        columns: heads of its table.
        rows: rows of the table, a value a column.
        failures: what is wrong, in words; any makes gpu_check fail.
        notes: what a reader of the table must know.
    """

    columns: Sequence[str] = ()
    rows: list[Sequence[Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def join(self, other: Section) -> None:
        """Adds what another case of the same section found."""
        self.columns = other.columns or self.columns
        self.rows += other.rows
        self.failures += other.failures
        self.notes += [note for note in other.notes if note not in self.notes]


def gpu_setting(shared: dict[str, float], seconds_left: float) -> Setting | None:
    """The first GPU of this machine; None where there is none."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    known = (device.device_kind, device.platform)
    capability = device.compute_capability
    family = device_family(*known, capability)
    limit = (device.memory_stats() or {})["bytes_limit"]
    return Setting(
        device_kind=device.device_kind,
        backends=choose_backends(*known, capability=capability),
        decode=[(name, None) for name in candidates("decode", family)],
        prefill=[(name, None) for name in candidates("prefill", family)],
        memory=int(limit * USABLE_MEMORY),
        seconds_left=seconds_left,
        shared=shared,
    )


def dry_setting(shared: dict[str, float], seconds_left: float) -> Setting:
    """Tiny shapes on the CPU; the Mosaic GPU decode kernel too where JAX has an interpreter."""
    interpreter = mosaic_gpu_interpreter()
    kernel = [("mosaic_gpu", interpreter())] if interpreter else []
    return Setting(
        device_kind="dry run",
        backends=choose_backends("cpu", "cpu"),
        decode=[*kernel, ("xla", None), ("reference", None)],
        prefill=[("xla", None), ("reference", None)],
        memory=2**30,
        seconds_left=seconds_left,
        dry_run=True,
        shared=shared,
    )


def bare_setting(dry_run: bool, shared: dict[str, float], seconds_left: float) -> Setting:
    """For a section that leaves the device to another process: nothing here touches it."""
    return Setting(
        device_kind="left to another process",
        backends=Backends("xla", "xla", "xla", "left to another process"),
        decode=(),
        prefill=(),
        memory=0,
        seconds_left=seconds_left,
        dry_run=dry_run,
        shared=shared,
    )
