"""Rotation and write in one operation: against float64 and bit by bit, in place, refusals."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verify.prove import gpu_targets
from pallas_kernels import KernelError, coverage
from pallas_kernels.backends import triton
from pallas_kernels.linear import Norm
from pallas_kernels.rotate_and_write import rotate_and_write
from tests.absent_devices import needs_gpu_compiler
from tests.pallas_kernels.cases import stored
from tests.pallas_kernels.lowering import A100, H200, lowered_for_cuda
from tests.pallas_kernels.rotary.test_rotary import TOLERANCE, normed, rotated
from tests.pallas_kernels.strategies import SEEDS, examples
from tests.pallas_kernels.write_kv.checks import bits

PAGES, FIRST_PAGE = 9, 2


@dataclass(frozen=True)
class Problem:
    """What is static: query heads a KV head, KV heads, the size of a head, types, parts of qkv."""

    group: int
    kv_heads: int
    head_dim: int
    dtype: str
    pool: str
    parts: int = 1
    norms: bool = False
    offset: bool = False
    page_size: int = 8
    tokens: int = 7

    def __str__(self) -> str:
        norms = ("-offset" if self.offset else "-norms") if self.norms else ""
        shape = f"{self.group}x{self.kv_heads}x{self.head_dim}"
        return f"{shape}-{self.dtype}-in-{self.pool}-{self.parts}{norms}"


PROBLEMS = [
    Problem(4, 2, 64, "bfloat16", "bfloat16", parts=4),
    Problem(1, 3, 80, "float32", "float32", norms=True, offset=True),
    Problem(7, 1, 128, "bfloat16", "uint16", norms=True),  # Qwen's group, and how a CPU stores
    Problem(3, 2, 18, "float16", "float32", parts=2, norms=True, page_size=16),
    Problem(8, 1, 256, "float16", "float16", parts=3),
]


def operands(problem: Problem, padding: int, seed: int):
    """Tokens in places of their own; the last `padding` ones all in the first place of a page."""
    rng = np.random.default_rng(seed)
    shape = (problem.parts, problem.tokens, problem.kv_heads, problem.group + 2, problem.head_dim)
    # in steps of 1 / 256, so that no order of the sum rounds
    qkv = np.round(rng.standard_normal(shape) * 256) / 256
    qkv = jnp.asarray(qkv, jnp.float32 if problem.parts > 1 else problem.dtype)
    angles = rng.uniform(0, 100, (problem.tokens, problem.head_dim // 2))
    pool = (FIRST_PAGE + PAGES, problem.page_size, 2, problem.kv_heads, problem.head_dim)
    before = stored(rng.standard_normal(pool, np.float32), problem.pool)
    where = rng.permutation(np.arange(problem.page_size, PAGES * problem.page_size))
    where = where[: problem.tokens].copy()
    where[problem.tokens - padding :] = 0
    norms = [None, None]
    if problem.norms:
        weights = rng.uniform(0.5, 2, (2, problem.head_dim))
        norms = [
            Norm(jnp.asarray(weight, problem.dtype), eps, problem.offset)
            for weight, eps in zip(weights, (1e-6, 1e-2), strict=True)
        ]
    places = [jnp.asarray(part, jnp.int32) for part in np.divmod(where, problem.page_size)]
    return qkv, angles, before, where, places, norms


# the interpreter takes seconds: one problem of its is quick
INTERPRETED = [
    pytest.param(p, "triton", marks=() if p.pool == "uint16" else pytest.mark.slow)
    for p in PROBLEMS
]


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize(
    ("problem", "backend"), [*((p, "xla") for p in PROBLEMS), *INTERPRETED], ids=str
)
@examples(2)
@given(padding=st.integers(0, 7), seed=SEEDS)
def test_against_float64(problem, backend, padding, seed):
    qkv, angles, before, where, places, (q_norm, k_norm) = operands(problem, padding, seed)
    run = functools.partial(
        rotate_and_write,
        dtype=problem.dtype,
        q_norm=q_norm,
        k_norm=k_norm,
        first_page=FIRST_PAGE,
        backend=backend,
        interpret=True if backend == "triton" else None,
    )
    tables = (jnp.asarray(part(angles), jnp.float32) for part in (np.cos, np.sin))
    q, pool = jax.jit(run)(qkv, *tables, jnp.asarray(before), *places)
    group, wide = problem.group, np.asarray(qkv, np.float64).sum(axis=0)
    wide = np.asarray(jnp.asarray(wide, problem.dtype), np.float64)
    want_q = rotated(
        normed(wide[:, :, :group].reshape(problem.tokens, -1, problem.head_dim), q_norm), angles
    )
    assert q.shape == want_q.shape
    assert q.dtype == problem.dtype
    tolerance = TOLERANCE[problem.dtype]
    difference = np.abs(np.asarray(q, np.float64) - want_q).max()
    assert difference <= tolerance * np.abs(want_q).max()

    pool = np.asarray(pool)
    assert (pool.shape, pool.dtype) == (before.shape, before.dtype)
    live = problem.tokens - padding
    after, old = (x.reshape(-1, *before.shape[2:]) for x in (pool, before))
    places_of = where + FIRST_PAGE * problem.page_size
    kept = np.setdiff1d(np.arange(after.shape[0]), places_of)
    np.testing.assert_array_equal(bits(after[kept]), bits(old[kept]))
    written = after[places_of[:live]]
    if problem.pool == "uint16":
        written = written.view(jnp.bfloat16)
    want_k = rotated(normed(wide[:, :, group], k_norm), angles)[:live]
    if live:
        difference = np.abs(np.asarray(written[:, 0], np.float64) - want_k).max()
        assert difference <= tolerance * np.abs(want_k).max()
    want_v = np.asarray(jnp.asarray(wide[:live, :, group + 1], problem.dtype), np.float64)
    np.testing.assert_array_equal(np.asarray(written[:, 1], np.float64), want_v)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("backend", ["xla", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_norm_is_rounded_where_the_model_rounds(backend, offset):
    """Before its weight and behind it, Gemma's behind it alone: what is not turned shows it."""
    rng = np.random.default_rng(0)
    qkv, weight = (jnp.asarray(rng.uniform(0.5, 2, n), "bfloat16") for n in ((1, 9, 2, 3, 40), 40))
    norm, still = Norm(weight, 0.1, offset), (jnp.ones((9, 20)), jnp.zeros((9, 20)))
    index = jnp.arange(9, dtype=jnp.int32)
    found, _ = rotate_and_write(
        qkv, *still, jnp.zeros((9, 8, 2, 2, 40), "bfloat16"), index, index % 8,
        dtype="bfloat16", q_norm=norm, backend=backend,
        interpret=True if backend == "triton" else None,
    )  # fmt: skip
    wanted = jnp.asarray(normed(np.asarray(qkv[0, :, :, 0], np.float64), norm), "bfloat16")
    # the factor is a float32 number, which may turn a tie
    assert np.mean(np.asarray(found) != np.asarray(wanted)) <= 0.005


def abstract(problem: Problem, pages: int):
    shape = jax.ShapeDtypeStruct
    tables = shape((problem.tokens, problem.head_dim // 2), jnp.float32)
    pool = (pages, problem.page_size, 2, problem.kv_heads, problem.head_dim)
    qkv = (problem.parts, problem.tokens, problem.kv_heads, problem.group + 2, problem.head_dim)
    index = shape((problem.tokens,), jnp.int32)
    return (
        shape(qkv, jnp.float32), tables, tables, shape(pool, jnp.dtype(problem.pool)), index, index
    )  # fmt: skip


LLAMA = Problem(4, 8, 128, "bfloat16", "bfloat16", parts=4, page_size=16, tokens=16)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.device_kind)
def test_lowers_for_cuda_without_a_gpu(device):
    run = functools.partial(rotate_and_write, dtype="bfloat16", backend="triton")
    text = lowered_for_cuda(run, *abstract(LLAMA, 64), device=device).as_text()
    assert "rotate_and_write" in text


@needs_gpu_compiler
def test_three_layers_write_the_donated_pool_in_place_on_an_absent_gpu():
    def layers(qkv, cos, sin, pool, pages, offsets):
        for layer in range(3):
            q, pool = rotate_and_write(
                qkv, cos, sin, pool, pages, offsets, dtype="bfloat16", first_page=layer * 1024,
                backend="triton",
            )  # fmt: skip
            qkv = qkv + q.sum()
        return qkv, pool

    operands = abstract(LLAMA, 3 * 1024)
    compiled = gpu_targets.compile_for(
        gpu_targets.gpu_mesh("h200"), layers, *operands, donate_argnums=3
    )
    pool = operands[3]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < pool.size / 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype=int8"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"first_page": 99}, "first_page=99"),
        ({"interpret": True, "backend": "xla"}, "interpret=True"),
        ({"q_norm": Norm(jnp.ones(5, "bfloat16"), 0.1)}, r"q_norm\.weight=bfloat16\(5,\)"),
    ],
)
def test_refusals(changes, message):
    options = {"dtype": "bfloat16", "backend": "triton"} | changes
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(functools.partial(rotate_and_write, **options), *abstract(LLAMA, 64))


def test_refused_operands():
    run = functools.partial(rotate_and_write, dtype="bfloat16", backend="triton")
    qkv, cos, sin, pool, *places = abstract(LLAMA, 64)
    shape = jax.ShapeDtypeStruct
    for refused, message in (
        ((shape(qkv.shape[1:], qkv.dtype), cos, sin, pool, *places), r"qkv\.shape"),
        ((qkv, cos, shape((16, 128), jnp.float32), pool, *places), r"sin=float32\(16, 128\)"),
        ((qkv, cos, sin, shape((64, 16, 2, 4, 128), pool.dtype), *places), r"kv_pages\.shape"),
        ((qkv, cos, sin, shape(pool.shape, jnp.int8), *places), r"kv_pages\.dtype=int8"),
        ((qkv, cos, sin, pool, places[0], shape((3,), jnp.int32)), r"offsets=int32\(3,\)"),
    ):
        with pytest.raises(KernelError, match=message):
            jax.eval_shape(run, *refused)


def test_8_bit_pages_are_the_two_operations():
    shape = coverage.AttentionShape(pool_dtype=jnp.dtype("int8"))
    refusal = triton.covers_rotate_and_write(shape)
    assert refusal is not None
    assert refusal.field == "kv_pages.dtype"
