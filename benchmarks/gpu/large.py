"""Section: decode attention at the sizes that are served, against float32 and sampled float64.

The problems are random and made on the device.
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.correctness import Programs, run_all
from benchmarks.gpu.setting import Section, Setting
from pallas_kernels import AttentionShape, paged_decode_attention
from tests.pallas_kernels.oracle import TOLERANCE, attend_one, relative_error

SAMPLED_ROWS = 8  # rows that are also computed in float64 on the host


class Shape(NamedTuple):
    """Static sizes of a decode problem."""

    slots: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None

    @property
    def pages(self) -> int:
        """Columns of the page table."""
        return -(-self.context // self.page_size)


class Problem(NamedTuple):
    """Operands of paged_decode_attention."""

    q: jax.Array  # [B, H, D]
    kv_pages: jax.Array  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array  # int32[B, P]
    kv_lens: jax.Array  # int32[B]


def page_tables(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """int32[B, P]: page ids in random order, none of them 0."""
    ids = 1 + rng.permutation(shape.slots * shape.pages)
    return ids.reshape(shape.slots, shape.pages).astype(np.int32)


def ragged(shape: Shape, seed: int) -> Problem:
    """Boundary and random lengths; every place that no slot may see holds NaN."""
    rng = np.random.default_rng(seed)
    page, longest = shape.page_size, shape.context
    lengths = rng.integers(0, longest + 1, shape.slots)
    edges = [longest, 0, 1, page - 1, page, page + 1, longest - 1]
    count = min(shape.slots, len(edges))
    lengths[:count] = edges[:count]
    table = page_tables(rng, shape)
    if shape.slots > 7:
        table[7] = table[0]  # two slots that share every page
        lengths[7] = longest // 2
    total = shape.slots * shape.pages + 1
    key_q, key_pool = jax.random.split(jax.random.key(seed))

    @jax.jit
    def build(page_table: jax.Array, kv_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jnp.arange(shape.pages * page)
        live = token < kv_lens[:, None]  # [B, tokens]
        ids = jnp.where(live, page_table[:, token // page], total)  # the others are dropped
        seen = jnp.zeros((total, page), bool).at[ids, token % page].set(True, mode="drop")
        pool = jax.random.normal(
            key_pool, (total, page, 2, shape.kv_heads, shape.head_dim), shape.dtype
        )
        q = jax.random.normal(key_q, (shape.slots, shape.heads, shape.head_dim), shape.dtype)
        return q, jnp.where(seen[:, :, None, None, None], pool, jnp.nan)

    page_table = jnp.asarray(table)
    kv_lens = jnp.asarray(lengths, jnp.int32)
    q, pool = build(page_table, kv_lens)
    return Problem(q, pool, page_table, kv_lens)


@jax.jit
def pages_of(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The named pages in float32."""
    return kv_pages[page_ids].astype(jnp.float32)


def float64_row(problem: Problem, row: int, scale: float, window: int | None) -> np.ndarray:
    """Attention of one slot in NumPy, float64: [H, D]."""
    length = int(problem.kv_lens[row])
    q = np.asarray(problem.q[row].astype(jnp.float32), np.float64)
    if length == 0:
        return np.zeros_like(q)
    held = np.asarray(pages_of(problem.kv_pages, problem.page_table[row]), np.float64)
    held = held.reshape(-1, *held.shape[2:])[max(0, length - (window or length)) : length]
    return attend_one(q, held[:, 0], held[:, 1], scale, None, None)


def cases(setting: Setting) -> list[str]:
    """Shapes as JSON: long contexts, many slots, windows, MHA and MQA."""
    shapes = [
        Shape(256, 4096, 32, 8, 128),
        Shape(64, 16384, 32, 8, 128),
        Shape(256, 16384, 8, 1, 64),
        Shape(8, 16384, 32, 8, 128, window=4096),
        Shape(1, 65536, 32, 8, 128),
        Shape(1, 17, 32, 8, 128),
        Shape(16, 4096, 32, 32, 128),
        Shape(16, 4096, 64, 1, 128),
        Shape(33, 2048, 8, 2, 128, page_size=64, dtype="float16"),
    ]
    tiny = [Shape(8, 80, 8, 2, 64, page_size=64, window=26)]
    return [json.dumps(shape) for shape in setting.pick(shapes, tiny)]


def programs_of(setting: Setting, shape: Shape, problem: Problem, chosen: bool) -> Programs:
    """The backend that is chosen for a shape, or the others."""
    attend = functools.partial(
        paged_decode_attention, scale=shape.head_dim**-0.5, window=shape.window
    )
    facts = AttentionShape.of(problem.q, problem.kv_pages)
    return {
        backend: (functools.partial(attend, backend=backend, interpret=interpret), problem)
        for backend, interpret in setting.covering("decode", facts, chosen)
    }


def decode(setting: Setting, case: str, *, chosen: bool) -> Section:
    """One shape by the chosen backend, or by the others, with NaN in all invisible places."""
    shape = Shape(*json.loads(case))
    section = Section(columns=("backend", "shape", "rows float32", "rows float64", "tolerance"))
    problem = ragged(shape, seed=0)
    options = {"scale": shape.head_dim**-0.5, "window": shape.window}
    attend = functools.partial(paged_decode_attention, **options)
    in_float32 = problem._replace(q=problem.q.astype(jnp.float32))
    want = np.asarray(jax.jit(functools.partial(attend, backend="reference"))(*in_float32))
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, shape.slots, SAMPLED_ROWS).tolist()
    sampled = sorted({*range(min(shape.slots, 8)), *drawn})
    exact = np.stack([float64_row(problem, row, **options) for row in sampled])
    programs = programs_of(setting, shape, problem, chosen)
    for backend, got in run_all(section, str(shape), programs):
        errors = relative_error(got, want), relative_error(got[sampled], exact)
        limit = TOLERANCE[shape.dtype]
        section.rows.append((backend, str(shape), *(f"{e:.1e}" for e in errors), limit))
        if not max(errors) <= limit:
            section.failures.append(f"{backend} {shape}: errors {errors} > {limit}")
        if got[np.asarray(problem.kv_lens) == 0].any():
            section.failures.append(f"{backend} {shape}: an idle slot is not zero")
    return section
