"""Section: what the machine is."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

from benchmarks.gpu.setting import Section, Setting


def machine(setting: Setting) -> Section:
    """Versions, driver, clocks and the backends that were chosen."""
    rows: list[Sequence[Any]] = [
        ("device", setting.device_kind),
        ("devices", jax.device_count()),
        ("memory for a section, GiB", round(setting.memory / 2**30, 1)),
        ("python", platform.python_version()),
        ("jax, jaxlib", f"{jax.__version__}, {jaxlib.__version__}"),
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
