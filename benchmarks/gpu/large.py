"""Section: decode attention at the sizes that are served, against float32 and sampled float64."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.correctness import Programs, run_all
from benchmarks.gpu.problems import Problem, Shape, ragged
from benchmarks.gpu.setting import Section, Setting
from pallas_kernels import AttentionShape, paged_decode_attention
from tests.pallas_kernels.oracle import TOLERANCE, relative_error

SAMPLED_ROWS = 8  # rows that are also computed in float64 on the host


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
    kv_heads, head_dim = problem.kv_pages.shape[3:]
    held = np.asarray(pages_of(problem.kv_pages, problem.page_table[row]), np.float64)
    held = held.reshape(-1, 2, kv_heads, head_dim)[:length]
    held = held[max(0, length - window) if window else 0 :]
    grouped = q.reshape(kv_heads, -1, head_dim)
    scores = scale * np.einsum("kgd,tkd->kgt", grouped, held[:, 0])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgt,tkd->kgd", weights, held[:, 1]).reshape(q.shape)


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
    """One shape by the backend that is chosen, or by the others, with NaN where nobody may look."""
    shape = Shape(*json.loads(case))
    section = Section(columns=("backend", "shape", "rows float32", "rows float64", "tolerance"))
    problem = ragged(shape, seed=0)
    options = {"scale": shape.head_dim**-0.5, "window": shape.window}
    attend = functools.partial(paged_decode_attention, **options)
    in_float32 = problem._replace(q=problem.q.astype(jnp.float32))
    want = np.asarray(jax.jit(functools.partial(attend, backend="reference"))(*in_float32))
    rng = np.random.default_rng(0)
    sampled = [*range(min(shape.slots, 8)), *rng.integers(0, shape.slots, SAMPLED_ROWS)]
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
