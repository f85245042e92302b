"""Sections: new keys and values land in their pages, in place; and how long that takes."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.setting import Section, Setting
from pallas_kernels import ScaledPages, storage_dtype, write_kv, write_kv_scaled

TYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
QUANTIZED = ("int8", "float8_e4m3fn")


def correctness(setting: Setting) -> Section:
    """New keys and values land in place, bit for bit, and nothing else changes."""
    section = Section(columns=("type", "scales", "tokens", "pages", "equal", "bytes copied"))
    tokens, pages = setting.pick((2048, 65536), (40, 512))
    rng = np.random.default_rng(0)
    backend = setting.backends.write_kv
    for dtype in setting.pick(TYPES, TYPES[:1] + TYPES[3:4]):
        platform = "cpu" if setting.dry_run else "gpu"
        pool = jnp.zeros((pages, 16, 2, 4, 64), storage_dtype(jnp.dtype(dtype), platform))
        k, v = jax.random.normal(jax.random.key(0), (2, tokens, 4, 64), jnp.bfloat16)
        places = rng.permutation(np.arange(16, pages * 16))[:tokens]
        where = [jnp.asarray(part, jnp.int32) for part in np.divmod(places, 16)]
        scale = {"k_scale": jnp.float32(0.03), "v_scale": jnp.float32(0.02)}
        write = functools.partial(write_kv, **(scale if dtype in QUANTIZED else {}))
        told = "one" if dtype in QUANTIZED else "none"
        _compare(section, (dtype, told), write, backend, (pool, k, v, *where))
        if dtype in QUANTIZED:
            scales = jnp.zeros((pages, 4, 16), storage_dtype(jnp.bfloat16, platform))
            held = ScaledPages(pool, scales, jnp.array(scales))
            _compare(section, (dtype, "by token"), write_kv_scaled, backend, (held, k, v, *where))
    return section


def _compare(
    section: Section, what: tuple[str, str], write: Any, backend: str, operands: tuple[Any, ...]
) -> None:
    pool = jax.tree.leaves(operands[0])[0]
    plain = jax.jit(functools.partial(write, backend="reference"))
    want = [np.asarray(leaf) for leaf in jax.tree.leaves(plain(*operands))]
    run = jax.jit(functools.partial(write, backend=backend), donate_argnums=0)
    compiled = run.lower(*operands).compile()
    memory: Any = compiled.memory_analysis()
    given = jax.tree.map(jnp.copy, operands[0])  # it is donated
    got = [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(given, *operands[1:]))]
    equal = all((a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(got, want))
    sizes = (operands[1].shape[0], pool.shape[0])
    section.rows.append((*what, *sizes, equal, memory.temp_size_in_bytes))
    name = f"write_kv {what[0]}, scales {what[1]}"
    if not equal:
        section.failures.append(f"{name}: other bits than the reference")
    copied = memory.temp_size_in_bytes > pool.nbytes // 2
    if memory.alias_size_in_bytes < pool.nbytes or copied:
        section.failures.append(f"{name}: the pool is copied")


def speed(setting: Setting) -> Section:
    """The KV write of every layer of a step, in one program with a donated pool."""
    section = Section(columns=("backend", "tokens", "layers", "us a layer"))
    layers, pages = setting.pick((28, 8192), (2, 8))
    backend = setting.backends.write_kv

    def step(pool: jax.Array, k: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
        for layer in range(layers):
            pool = write_kv(pool, k, k, page_ids + layer * pages, offsets, backend=backend)
        return pool

    compiled = jax.jit(step, donate_argnums=0)
    platform = "cpu" if setting.dry_run else "gpu"
    pool = jnp.zeros((layers * pages, 16, 2, 8, 128), storage_dtype("bfloat16", platform))
    for tokens in setting.pick((1, 64, 256, 2048), (1, 5)):
        k = jnp.ones((tokens, 8, 128), jnp.bfloat16)
        places = 16 + np.random.default_rng(0).permutation((pages - 1) * 16)[:tokens]
        where = [jnp.asarray(part, jnp.int32) for part in np.divmod(places, 16)]
        pool = jax.block_until_ready(compiled(pool, k, *where))
        repeats = setting.pick(20, 2)
        begin = time.perf_counter()
        for _ in range(repeats):
            pool = compiled(pool, k, *where)
        jax.block_until_ready(pool)
        micro = (time.perf_counter() - begin) / repeats / layers * 1e6
        section.rows.append((backend, tokens, layers, round(micro, 2)))
    return section
