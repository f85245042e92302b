"""Sections: how fast attention and the KV write are, next to the device's copy bandwidth."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.problems import Shape, full
from benchmarks.gpu.setting import Section, Setting
from pallas_kernels import (
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
    write_kv,
)

MAX_LAYERS = 28  # layers in one program: no dispatch between them, and no cache holds them all


def decode(setting: Setting) -> Section:
    """One decode attention inside a program of several layers, each with pages of its own."""
    section = Section(
        columns=("backend", "slots", "context", "heads", "layers", "us", "GB/s", "% of copy"),
        notes=["GB/s counts the keys and values that must be read, once each."],
    )
    budget = setting.memory // 3
    grid = itertools.product(
        setting.pick((1, 8, 64, 256), (1, 2)), setting.pick((512, 4096, 16384), (33,))
    )
    main = setting.backends.decode
    shapes = [(main, Shape(slots, context, 32, 8, 128)) for slots, context in grid]
    if setting.dry_run:
        shapes = [(main, Shape(1, 33, 2, 1, 64)), ("xla", Shape(2, 33, 4, 2, 64))]
    else:
        shapes += [(main, Shape(64, 4096, 32, 8, 128, window=1024))]
        shapes += [(main, Shape(64, 4096, 32, 8, 64)), (main, Shape(64, 4096, 32, 32, 128))]
        shapes += [(main, Shape(64, 4096, 32, 8, 128, page_size=size)) for size in (32, 64)]
        shapes += [("xla", Shape(8, 512, 32, 8, 128)), ("xla", Shape(64, 512, 32, 8, 128))]
    for backend, shape in shapes:
        layer_bytes = (shape.slots * shape.pages + 1) * shape.page_size * shape.token_bytes
        layers = min(setting.pick(MAX_LAYERS, 2), budget // layer_bytes)
        if layers < 1:
            section.failures.append(f"{shape} needs {layer_bytes} bytes, more than {budget}")
            continue
        problem = full(shape, layers)
        extra = {"interpret": setting.interpret} if backend == "mosaic_gpu" else {}
        attend = functools.partial(
            paged_decode_attention,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            backend=backend,
            **extra,
        )
        per_layer = shape.slots * shape.pages + 1

        def step(q, kv_pages, page_table, kv_lens, attend=attend, layers=layers, per=per_layer):
            for layer in range(layers):
                q = attend(q, kv_pages, page_table, kv_lens, first_page=layer * per)
            return q

        run = functools.partial(jax.jit(step), *problem)
        seconds = setting.seconds(run) / layers
        speed = shape.read_bytes / seconds / 1e9
        share = 100 * speed / setting.shared["copy_gb_s"]
        name = f"{shape.heads}/{shape.kv_heads}x{shape.head_dim} page {shape.page_size}"
        name += f" window {shape.window}" if shape.window else ""
        section.rows.append(
            (backend, shape.slots, shape.context, name, layers)
            + (round(seconds * 1e6, 1), round(speed, 1), round(share, 1))
        )
    return section


def prefill(setting: Setting) -> Section:
    """Prefill attention of one region: one long chunk, a chunk late in a prompt, many short."""
    section = Section(
        columns=("backend", "lanes", "chunk", "context", "ms", "TFLOP/s"),
        notes=["TFLOP/s counts the visible query-key pairs only."],
    )
    heads, kv_heads, head_dim = setting.pick((32, 8, 128), (2, 1, 64))
    cases = setting.pick(
        [(1, 512, 0), (1, 2048, 0), (1, 2048, 14336), (16, 128, 0), (16, 128, 4096)],
        [(1, 24, 0), (2, 8, 20)],
    )
    for lanes, chunk, context in cases:
        shape = Shape(lanes, chunk + context, heads, kv_heads, head_dim)
        problem = full(shape, layers=1)
        region = lanes * chunk
        q = jax.random.normal(jax.random.key(1), (region, heads, head_dim), shape.dtype)
        places = PrefillLanes(
            jnp.arange(lanes, dtype=jnp.int32) * chunk,
            jnp.full((lanes,), chunk, jnp.int32),
            jnp.full((lanes,), context, jnp.int32),
        )
        backend = setting.backends.prefill
        attend = jax.jit(
            functools.partial(paged_prefill_attention, scale=head_dim**-0.5, backend=backend)
        )
        run = functools.partial(attend, q, problem.kv_pages, problem.page_table, places)
        seconds = setting.seconds(run)
        pairs = lanes * (chunk * context + chunk * (chunk + 1) / 2)
        rate = 4 * heads * head_dim * pairs / seconds / 1e12
        section.rows.append(
            (backend, lanes, chunk, context, round(seconds * 1e3, 3), round(rate, 3))
        )
    return section


def writes(setting: Setting) -> Section:
    """The KV write of every layer of a step, in one program with a donated pool."""
    section = Section(columns=("backend", "tokens", "layers", "us a layer"))
    layers, pages = setting.pick((28, 8192), (2, 8))
    backend = setting.backends.write_kv
    for tokens in setting.pick((1, 64, 256, 2048), (1, 5)):
        pool = jnp.zeros((layers * pages, 16, 2, 8, 128), jnp.bfloat16)
        k = jnp.ones((tokens, 8, 128), jnp.bfloat16)
        places = 16 + np.random.default_rng(0).permutation((pages - 1) * 16)[:tokens]
        page_ids, offsets = (jnp.asarray(part, jnp.int32) for part in np.divmod(places, 16))

        def step(pool, k, page_ids, offsets):
            for layer in range(layers):
                pool = write_kv(pool, k, k, page_ids + layer * pages, offsets, backend=backend)
            return pool

        compiled = jax.jit(step, donate_argnums=0)
        held = [pool]

        def run(compiled=compiled, held=held, operands=(k, page_ids, offsets)):
            held[0] = compiled(held[0], *operands)
            return held[0]

        micro = setting.seconds(run) / layers * 1e6
        section.rows.append((backend, tokens, layers, round(micro, 2)))
    return section
