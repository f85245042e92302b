"""Section: what the device can do at most: its memory, and its matrix units."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.bench import measure_ceilings, seconds_of_one

CALLS = 5  # queued at once


def bandwidth(setting: Setting) -> Section:
    """Copy (read and write), sum (read) of an array far larger than any cache, bf16 product."""
    ceilings = measure_ceilings(setting.memory, setting.dry_run)
    setting.shared["copy_gb_s"] = ceilings.copy_gb_s
    size = setting.pick(min(4 * 2**30, setting.memory // 4), 2**20)
    source = jnp.ones((size // 4,), jnp.float32)
    total = functools.partial(jax.jit(jnp.sum), source)
    read = size / seconds_of_one(total, CALLS) / 1e9
    return Section(
        columns=("operation", "rate", "unit"),
        rows=[
            ("copy, read + write", round(ceilings.copy_gb_s, 1), "GB/s"),
            ("sum, read", round(read, 1), "GB/s"),
            ("dense bf16 product", round(ceilings.matmul_tflop_s, 1), "TFLOP/s"),
        ],
    )
