"""`profiler_config`, as scripts for vLLM give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ValidationError

FOLDER = "jaxserve-profile"


@dataclass
class ProfilerConfig:
    """vLLM's `profiler_config`: where `start_profile` records to.

    Attributes:
        torch_profiler_dir: the folder.
        delay_iterations, max_iterations: 0, since `start_profile` and `stop_profile` say when.
        profiler, ignore_frontend, torch_profiler_...: passed over: the trace is JAX's.

    Raises:
        ValidationError: other iterations.
    """

    profiler: str | None = None
    torch_profiler_dir: str = FOLDER
    delay_iterations: int = 0
    max_iterations: int = 0
    ignore_frontend: bool = False
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True

    def __post_init__(self) -> None:
        for name in ("delay_iterations", "max_iterations"):
            if getattr(self, name):
                allowed = "0: call start_profile and stop_profile around the steps"
                raise ValidationError(f"profiler_config.{name}", getattr(self, name), allowed)

    @classmethod
    def of(cls, given: Any) -> ProfilerConfig:
        """Of what `LLM(profiler_config=...)` is given: one of these, a mapping, or None."""
        if given is None or isinstance(given, cls):
            return given or cls()
        known = set(cls.__dataclass_fields__)
        if not isinstance(given, Mapping) or not given.keys() <= known:
            raise ValidationError("profiler_config", given, f"a mapping of {sorted(known)}")
        return cls(**given)
