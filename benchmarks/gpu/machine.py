"""Sections: what the machine is, and what it can do at most."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
import jaxlib

from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.bench import measure_ceilings


def machine(setting: Setting) -> Section:
    """Versions, driver, clocks and the backends that were chosen."""
    rows: list[Sequence[Any]] = [
        ("device", setting.device_kind),
        ("devices", jax.device_count()),
        ("memory for a section, GiB", round(setting.memory / 2**30, 1)),
        ("python", platform.python_version()),
        ("jax, jaxlib", f"{jax.__version__}, {jaxlib.__version__}"),
        ("CUDA toolkit", os.environ.get("CUDA_ROOT", "JAX's own choice")),
        ("decode", setting.backends.decode),
        ("prefill", setting.backends.prefill),
        ("write_kv", setting.backends.write_kv),
        ("because", setting.backends.reason),
    ]
    if shutil.which("nvidia-smi"):
        wanted = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
        query = subprocess.run(
            ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,  # facts for the reader: a machine without them can be measured
            timeout=20,
        )
        rows.append((wanted, query.stdout.strip()))
    return Section(columns=("fact", "value"), rows=rows)


def bandwidth(setting: Setting) -> Section:
    """Copy of an array far larger than any cache, and a large bf16 product."""
    ceilings = measure_ceilings(setting.memory, setting.dry_run)
    setting.shared |= asdict(ceilings)
    return Section(
        columns=("operation", "rate", "unit"),
        rows=[
            ("copy, read + write", round(ceilings.copy_gb_s, 1), "GB/s"),
            ("dense bf16 product", round(ceilings.matmul_tflop_s, 1), "TFLOP/s"),
        ],
    )
