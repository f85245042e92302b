"""`profiler_config`, as scripts for vLLM give it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ValidationError

FOLDER = "jaxserve-profile"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_iterations(name: str, number: int | None) -> None:
    """Raises ValidationError for steps that are counted: a caller says when to begin and end."""
    if number:
        raise ValidationError(name, number, "0: call start_profile and stop_profile around them")


def check_prefix(name: str | None) -> None:
    """Raises ValidationError for what is no name of one folder; None: no prefix."""
    if name is not None and not (isinstance(name, str) and _PREFIX.fullmatch(name)):
        allowed = "1 to 128 letters, digits, dots, dashes and underscores, the first no mark"
        raise ValidationError("profile_prefix", name, allowed)


def check_session(
    profile_prefix: str | None,
    delay_iterations: int | None,
    max_iterations: int | None,
    profiler_kwargs: Mapping[str, Any] | None,
) -> None:
    """Raises ValidationError for arguments of vLLM's `start_profile` that mean nothing here.

    Args:
        profile_prefix: a folder for the record; None: none of its own.
        delay_iterations, max_iterations: 0 or None.
        profiler_kwargs: None: those of vLLM's are PyTorch's.
    """
    check_prefix(profile_prefix)
    check_iterations("delay_iterations", delay_iterations)
    check_iterations("max_iterations", max_iterations)
    if profiler_kwargs:
        raise ValidationError("profiler_kwargs", profiler_kwargs, "none: the trace is JAX's")


@dataclass
class ProfilerConfig:
    """vLLM's `profiler_config`: where `start_profile` records to.

    Attributes:
        torch_profiler_dir: the folder.
        delay_iterations, max_iterations: 0, since `start_profile` and `stop_profile` say when.
        profiler, ignore_frontend, torch_profiler_..., proton_...: passed over: the trace is JAX's.

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
    torch_profiler_activities: Sequence[str] | None = None
    capture_torch_profiler: bool = False
    proton_profiler_dir: str = ""
    proton_context: str = "shadow"
    proton_data: str = "tree"
    proton_backend: str | None = None
    proton_mode: str | None = None
    proton_hook: str | None = None
    proton_output_format: str | None = None
    proton_graph_attribution: bool = False

    def __post_init__(self) -> None:
        for name in ("delay_iterations", "max_iterations"):
            check_iterations(f"profiler_config.{name}", getattr(self, name))

    @classmethod
    def of(cls, given: Any) -> ProfilerConfig:
        """Of what `LLM(profiler_config=...)` is given: one of these, a mapping, or None."""
        if given is None or isinstance(given, cls):
            return given or cls()
        known = set(cls.__dataclass_fields__)
        if not isinstance(given, Mapping) or not given.keys() <= known:
            raise ValidationError("profiler_config", given, f"a mapping of {sorted(known)}")
        return cls(**given)
