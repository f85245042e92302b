"""What every section of gpu_check is given: the device, the chosen backends, and a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pallas_kernels import Backends


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine under test.

    Attributes:
        device_kind: as JAX names it.
        backends: what choose_backends says for it.
        memory: bytes of device memory that a section may fill.
        dry_run: run every line on a CPU with tiny shapes; the numbers mean nothing then.
        interpret: parameters of the Mosaic GPU interpreter in a dry run, None on a GPU.
        shared: results of earlier sections that later ones use, such as the copy bandwidth.
    """

    device_kind: str
    backends: Backends
    memory: int
    dry_run: bool = False
    interpret: Any = None
    shared: dict[str, float] = field(default_factory=dict)

    def pick(self, real: Any, tiny: Any) -> Any:
        """A size for the GPU, or the one for a dry run."""
        return tiny if self.dry_run else real

    def seconds(self, call: Callable[[], Any], *, repeats: int = 20) -> float:
        """The median time of a call that has been compiled and run before, in seconds."""
        jax.block_until_ready(call())
        samples = []
        for _ in range(self.pick(repeats, 2)):
            begin = time.perf_counter()
            jax.block_until_ready(call())
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)


@dataclass(slots=True)
class Section:
    """What a section found.

    Attributes:
        columns: heads of its table.
        rows: the table.
        failures: what is wrong, in words; any makes gpu_check fail.
        notes: what a reader of the table must know.
    """

    columns: Sequence[str] = ()
    rows: list[Sequence[Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
