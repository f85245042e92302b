"""Compilation for TPUs that are not there: the kernels fit, and none copies the pool."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from benchmarks.verify.prove.tpu_targets import CompilerMissingError, compile_for, tpu_mesh
from pallas_kernels import (
    KernelError,
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
    write_kv,
)
from pallas_kernels.tuning import chip_tuning
from tests.absent_devices import needs_tpu_compiler

# heads, kv_heads, head_dim, pool; each order of a page in memory, the last by scales a page
SHAPES = [
    (32, 8, 128, "bfloat16"),
    (8, 1, 128, "bfloat16"),
    (16, 4, 128, "float32"),
    (16, 8, 256, "bfloat16"),
    (32, 8, 128, "float8_e4m3fn"),
    (32, 8, 128, "int8"),
]
PAGES, PAGE_SIZE, SLOTS, LANES, REGION = 512, 128, 16, 4, 256


def two_layers(kind, by_page):
    """A step's kernels: writes, decode and prefill of two layers in one donated pool."""
    tuning = chip_tuning({"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}[kind])

    def step(pool, q, chunk, k, v, where, table, lens, lanes_table, lanes, *scales):
        options = {"backend": "mosaic_tpu", "scale": 0.1}
        named = dict(zip(("k_scale", "v_scale"), scales))
        writes = {name: scale[0, 0] if by_page else scale for name, scale in named.items()}
        for layer in range(2):
            base = layer * (PAGES // 2)
            pool = write_kv(pool, k, v, where + base, where, **writes, backend="mosaic_tpu")
            options |= {"first_page": base, **named}
            q = paged_decode_attention(q, pool, table, lens, tuning=tuning.decode, **options)
            chunk = paged_prefill_attention(
                chunk, pool, lanes_table, lanes, tuning=tuning.prefill, **options
            )
        return pool, q, chunk

    return step


def operands(heads, kv_heads, head_dim, pool, by_page):
    shape = jax.ShapeDtypeStruct
    row = "float32" if pool == "float32" else "bfloat16"
    new = shape((SLOTS, kv_heads, head_dim), row)
    lane = shape((LANES,), jnp.int32)
    scale = shape((PAGES, kv_heads) if by_page else (), jnp.float32)
    return (
        shape((PAGES, PAGE_SIZE, 2, kv_heads, head_dim), pool),
        shape((SLOTS, heads, head_dim), row),
        shape((REGION, heads, head_dim), row),
        new,
        new,
        shape((SLOTS,), jnp.int32),
        shape((SLOTS, 16), jnp.int32),
        shape((SLOTS,), jnp.int32),
        shape((LANES, 16), jnp.int32),
        PrefillLanes(lane, lane, lane),
        *([scale] * 2 if jnp.dtype(pool).itemsize == 1 else []),
    )


def check(kind, shape):
    by_page = shape[-1] == "int8"
    given = operands(*shape, by_page)
    compiled = compile_for(tpu_mesh(kind), two_layers(kind, by_page), *given, donate_argnums=0)
    memory = compiled.memory_analysis()
    size = given[0].size * given[0].dtype.itemsize
    assert memory.alias_size_in_bytes == size
    # a copy of the pool would be as large as it is
    assert memory.temp_size_in_bytes < size / 4
    text = compiled.as_text()
    for name in ("paged_decode", "paged_prefill", "write_kv"):
        assert f"%{name}" in text
    pool = ",".join(map(str, given[0].shape))
    assert not [line for line in text.splitlines() if " copy(" in line and f"[{pool}]" in line]
    return compiled


@needs_tpu_compiler
def test_a_step_compiles_for_an_absent_tpu():
    compiled = check("v5e", SHAPES[0])
    assert compiled.cost_analysis()["bytes accessed"] > 0


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("v5p", SHAPES[0]), ("v6e", SHAPES[0]), *(("v5e", shape) for shape in SHAPES[1:])],
    ids=str,
)
def test_every_kind_of_tpu_and_of_pool(kind, shape):
    check(kind, shape)


def test_without_libtpu_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompilerMissingError, match="libtpu"):
        tpu_mesh("v5e")
    with pytest.raises(CompilerMissingError, match="libtpu"):
        compile_for(None, lambda: None)


@pytest.mark.parametrize(
    ("arguments", "field"), [({"kind": "v9"}, "kind"), ({"kind": "v5e", "devices": 9}, "devices")]
)
def test_unknown_targets_are_refused(arguments, field):
    with pytest.raises(KernelError) as caught:
        tpu_mesh(**arguments)
    assert caught.value.field == field
