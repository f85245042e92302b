"""Section: how fast the device's memory is for plain XLA programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.gpu.setting import Section, Setting


def bandwidth(setting: Setting) -> Section:
    """Copy (read and write) and sum (read) of an array far larger than any cache."""
    size = setting.pick(min(4 * 2**30, setting.memory // 4), 2**20)
    source = jnp.ones((size // 4,), jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    total = jax.jit(jnp.sum)
    copied = 2 * size / setting.seconds(lambda: copy(source)) / 1e9
    read = size / setting.seconds(lambda: total(source)) / 1e9
    setting.shared["copy_gb_s"] = copied
    return Section(
        columns=("operation", "GiB", "GB/s"),
        rows=[
            ("copy, read + write", size / 2**30, round(copied, 1)),
            ("sum, read", size / 2**30, round(read, 1)),
        ],
    )
