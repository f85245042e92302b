"""Sections: the kernels' results on this device, against float32 on it and float64 on the host."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.problems import Problem, Shape, ragged
from benchmarks.gpu.setting import Section, Setting
from pallas_kernels import (
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
    storage_dtype,
    write_kv,
)

# softmax weights are rounded to the type of the pages; everything else is float32
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
SAMPLED_ROWS = 8  # rows that are also computed in float64 on the host


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude; infinite where got is not finite."""
    difference = np.abs(got.astype(np.float64) - want)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / max(np.abs(want).max(), 1e-30))


def float64_row(problem: Problem, row: int, scale: float, window: int | None) -> np.ndarray:
    """Attention of one slot in NumPy, float64: [H, D]."""
    length = int(problem.kv_lens[row])
    q = np.asarray(problem.q[row].astype(jnp.float32), np.float64)
    if length == 0:
        return np.zeros_like(q)
    page_size, _, kv_heads, head_dim = problem.kv_pages.shape[1:]
    pages = problem.page_table[row, : -(-length // page_size)]
    held = np.asarray(problem.kv_pages[pages].astype(jnp.float32), np.float64)
    held = held.reshape(-1, 2, kv_heads, head_dim)[:length]
    held = held[max(0, length - window) if window else 0 :]
    grouped = q.reshape(kv_heads, -1, head_dim)
    scores = scale * np.einsum("kgd,tkd->kgt", grouped, held[:, 0])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgt,tkd->kgd", weights, held[:, 1]).reshape(q.shape)


def decode_shapes(setting: Setting) -> list[Shape]:
    """Groups 1, 4, 8 x head_dim 64, 128, both types, page sizes, windows; then the large ones."""
    slots, context = setting.pick((33, 2048), (9, 80))
    shapes = []
    for index, (group, head_dim) in enumerate(itertools.product((1, 4, 8), (64, 128))):
        shapes.append(
            Shape(
                slots,
                context,
                heads=2 * group,
                kv_heads=2,
                head_dim=head_dim,
                page_size=(16, 32, 64)[index % 3],
                dtype=("bfloat16", "float16")[index % 2],
                window=(None, context // 3)[index // 2 % 2],
            )
        )
    if not setting.dry_run:
        shapes += [
            Shape(256, 16384, 8, 1, 64),
            Shape(256, 4096, 32, 8, 128),
            Shape(64, 16384, 32, 8, 128),
            Shape(8, 16384, 32, 8, 128, window=4096),
            Shape(1, 16384, 32, 8, 128),
            Shape(1, 17, 32, 8, 128),
            Shape(16, 4096, 32, 32, 128),
            Shape(16, 4096, 64, 1, 128),
        ]
    return shapes


def decode(setting: Setting) -> Section:
    """The chosen decode backend and the XLA one, with NaN wherever nobody may look."""
    section = Section(columns=("backend", "shape", "rows float32", "rows float64", "tolerance"))
    rng = np.random.default_rng(0)
    for seed, shape in enumerate(decode_shapes(setting)):
        problem = ragged(shape, seed)
        scale = shape.head_dim**-0.5
        options = {"scale": scale, "window": shape.window}
        attend = functools.partial(paged_decode_attention, **options)
        oracle = problem._replace(q=problem.q.astype(jnp.float32))
        want = np.asarray(jax.jit(functools.partial(attend, backend="reference"))(*oracle))
        edge = min(shape.slots, 8)
        sampled = [*range(edge), *rng.integers(0, shape.slots, SAMPLED_ROWS)]
        exact = np.stack([float64_row(problem, row, **options) for row in sampled])
        for backend in dict.fromkeys((setting.backends.decode, "xla")):
            extra = {"interpret": setting.interpret} if backend == "mosaic_gpu" else {}
            run = jax.jit(functools.partial(attend, backend=backend, **extra))
            got = np.asarray(run(*problem).astype(jnp.float32))
            errors = relative_error(got, want), relative_error(got[sampled], exact)
            limit = TOLERANCE[shape.dtype]
            section.rows.append((backend, str(shape), *(f"{e:.1e}" for e in errors), limit))
            if max(errors) > limit:
                section.failures.append(f"{backend} {shape}: errors {errors} > {limit}")
            if got[np.asarray(problem.kv_lens) == 0].any():
                section.failures.append(f"{backend} {shape}: an idle slot is not zero")
    return section


def prefill(setting: Setting) -> Section:
    """Packed chunks of several requests against the reference, and rows of no lane are zero."""
    section = Section(columns=("backend", "type", "chunks", "contexts", "error", "tolerance"))
    chunks, contexts = setting.pick(
        ([700, 0, 1, 129, 64], [0, 5, 3000, 513, 64]), ([20, 0, 1, 9], [0, 5, 40, 17])
    )
    pages = 1 + -(-max(map(sum, zip(chunks, contexts))) // 16)
    for dtype, window in (("bfloat16", None), ("float16", 100), ("float32", None)):
        problem = ragged(Shape(len(chunks), pages * 16, 8, 2, 64, dtype=dtype), seed=1)
        pool = jnp.nan_to_num(problem.kv_pages)
        starts = np.cumsum([2, *chunks[:-1]])
        lanes = PrefillLanes(*(jnp.asarray(part, jnp.int32) for part in (starts, chunks, contexts)))
        region = int(sum(chunks)) + 5
        q = jax.random.normal(jax.random.key(3), (region, 8, 64), jnp.float32)
        attend = functools.partial(paged_prefill_attention, scale=0.125, window=window)
        reference = jax.jit(functools.partial(attend, backend="reference"))
        rounded = q.astype(dtype)
        want = np.asarray(reference(rounded.astype(jnp.float32), pool, problem.page_table, lanes))
        run = jax.jit(functools.partial(attend, backend=setting.backends.prefill))
        got = np.asarray(run(rounded, pool, problem.page_table, lanes).astype(jnp.float32))
        error, limit = relative_error(got, want), TOLERANCE[dtype]
        section.rows.append(
            (setting.backends.prefill, dtype, chunks, contexts, f"{error:.1e}", limit)
        )
        if error > limit:
            section.failures.append(f"prefill {dtype}: error {error} > {limit}")
        if got[:2].any() or got[-3:].any():
            section.failures.append(f"prefill {dtype}: rows of no lane are not zero")
    return section


def writes(setting: Setting) -> Section:
    """New keys and values land in place, bit for bit, and nothing else changes."""
    section = Section(columns=("type", "tokens", "pages", "equal", "bytes copied"))
    tokens, pages = setting.pick((2048, 65536), (40, 16))
    rng = np.random.default_rng(0)
    for dtype in ("bfloat16", "float16", "float32"):
        platform = "cpu" if setting.dry_run else "gpu"
        pool = jnp.zeros((pages, 16, 2, 4, 64), storage_dtype(dtype, platform))
        k, v = jax.random.normal(jax.random.key(0), (2, tokens, 4, 64), dtype)
        places = rng.permutation(np.arange(16, pages * 16))[:tokens]
        where = [jnp.asarray(part, jnp.int32) for part in np.divmod(places, 16)]
        operands = (pool, k, v, *where)
        write = functools.partial(write_kv, backend=setting.backends.write_kv)
        want = np.asarray(jax.jit(functools.partial(write_kv, backend="reference"))(*operands))
        compiled = jax.jit(write, donate_argnums=0).lower(*operands).compile()
        memory = compiled.memory_analysis()
        size = pool.nbytes
        got = np.asarray(compiled(*operands))
        equal = bool((got.view(np.uint8) == want.view(np.uint8)).all())
        section.rows.append((dtype, tokens, pages, equal, memory.temp_size_in_bytes))
        if not equal:
            section.failures.append(f"write_kv {dtype}: other bits than the reference")
        if memory.alias_size_in_bytes < size or memory.temp_size_in_bytes > size // 2:
            section.failures.append(f"write_kv {dtype}: the pool is copied")
    return section
