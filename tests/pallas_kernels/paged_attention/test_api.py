"""The refusals of the public functions: they name the operand and the allowed values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KernelError,
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)

INT8 = {
    "kv_pages": jnp.zeros((4, 16, 2, 2, 64), jnp.int8),
    "k_scale": jnp.ones(()),
    "v_scale": jnp.ones(()),
}
COMMON = [
    ({"q": jnp.zeros((3, 64))}, "q.shape"),
    ({"q": jnp.zeros((3, 4, 64), jnp.int32)}, "q.dtype"),
    ({"q": jnp.zeros((3, 5, 64))}, "q.shape"),
    ({"kv_pages": jnp.zeros((4, 16, 2, 2, 32))}, "kv_pages.shape"),
    ({"kv_pages": jnp.zeros((4, 16, 3, 2, 64))}, "kv_pages.shape"),
    ({"kv_pages": jnp.zeros((4, 16, 2, 2, 64), jnp.int16)}, "kv_pages.dtype"),
    ({"kv_pages": jnp.zeros((4, 16, 2, 2, 64), jnp.int8)}, "k_scale"),
    ({"k_scale": jnp.ones(())}, "k_scale"),
    ({**INT8, "k_scale": jnp.ones((4, 3))}, "k_scale"),
    ({**INT8, "v_scale": jnp.ones((), jnp.int32)}, "v_scale"),
    ({**INT8, "k_scale": jnp.ones((4, 2, 16))}, "k_scale"),  # of tokens in bfloat16 alone
    ({**INT8, "v_scale": jnp.ones((4, 2, 16), jnp.bfloat16)}, "v_scale.shape"),
    ({"sinks": jnp.zeros(5)}, "sinks"),
    ({"soft_cap": 0.0}, "soft_cap"),
    ({"tuning": 1}, "tuning"),
    ({"page_table": jnp.zeros((3, 2))}, "page_table"),
    ({"window": 0}, "window"),
    ({"first_page": 4}, "first_page"),
    ({"backend": "cuda"}, "backend"),
]
DECODE = [
    ({"page_table": jnp.zeros((2, 2), jnp.int32)}, "page_table.shape"),
    ({"kv_lens": jnp.zeros(3, jnp.int16)}, "kv_lens"),
    ({"interpret": True}, "interpret"),
    ({"splits": 2}, "splits"),
    ({"backend": "mosaic_gpu"}, "kv_pages.dtype"),  # float32 is not covered there
]
QUERIES = [
    ({"q": jnp.zeros((3, 4, 64)), "query_lens": jnp.ones(3, jnp.int32)}, "query_lens"),
    ({"query_lens": jnp.ones(2, jnp.int32)}, "query_lens"),
    ({"query_lens": jnp.ones((3, 1), jnp.int32)}, "query_lens"),
    ({"query_lens": jnp.ones(3)}, "query_lens"),
    ({"q": jnp.zeros((3, 9, 4, 64))}, "q.shape"),
    ({"q": jnp.zeros((3, 0, 4, 64))}, "q.shape"),
    ({"q": jnp.zeros((3, 1, 2, 4, 64))}, "q.shape"),
    ({"q": jnp.zeros((3, 2, 5, 64))}, "q.shape"),
    ({"sinks": jnp.zeros(2)}, "sinks"),
]
PREFILL = [
    ({"q": jnp.zeros((3, 2, 4, 64))}, "q.shape"),
    ({"page_table": jnp.zeros((2, 2), jnp.int32)}, "lanes.start"),
    ({"backend": "mosaic_gpu"}, "kv_pages.dtype"),  # nor here
]


def operands() -> dict:
    return {
        "q": jnp.zeros((3, 4, 64)),
        "kv_pages": jnp.zeros((4, 16, 2, 2, 64)),
        "page_table": jnp.zeros((3, 2), jnp.int32),
        "scale": 1.0,
        "backend": "xla",
    }


def names(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("change", "field"), COMMON + DECODE, ids=names)
def test_decode_refuses(change, field):
    call = {**operands(), "kv_lens": jnp.zeros(3, jnp.int32), **change}
    with pytest.raises(KernelError, match="is not supported: ") as caught:
        paged_decode_attention(**call)
    assert caught.value.field == field


@pytest.mark.parametrize(("change", "field"), QUERIES, ids=names)
def test_decode_refuses_queries(change, field):
    call = {**operands(), "q": jnp.zeros((3, 2, 4, 64)), "kv_lens": jnp.zeros(3, jnp.int32)}
    with pytest.raises(KernelError, match="is not supported: ") as caught:
        paged_decode_attention(**{**call, **change})
    assert caught.value.field == field


@pytest.mark.slow
def test_one_query_with_and_without_its_axis():
    """The result has the axis that q has; a row without its only query is idle."""
    q = jnp.arange(3 * 4 * 64, dtype=jnp.float32).reshape(3, 4, 64) % 7
    pages = jnp.arange(4 * 16 * 2 * 2 * 64, dtype=jnp.float32).reshape(4, 16, 2, 2, 64) % 5
    call = {**operands(), "kv_pages": pages, "kv_lens": jnp.array([5, 20, 9], jnp.int32)}
    plain = paged_decode_attention(**{**call, "q": q})
    lens = jnp.array([1, 0, 1], jnp.int32)
    several = paged_decode_attention(**{**call, "q": q[:, None]}, query_lens=lens)
    assert several.shape == (3, 1, 4, 64)
    np.testing.assert_array_equal(several[:, 0], plain * lens[:, None, None])
    assert np.asarray(plain[1]).any()


@pytest.mark.parametrize(("change", "field"), COMMON + PREFILL, ids=names)
def test_prefill_refuses(change, field):
    lane = jnp.zeros(3, jnp.int32)
    call = {**operands(), "lanes": PrefillLanes(lane, lane, lane), **change}
    with pytest.raises(KernelError, match="is not supported: ") as caught:
        paged_prefill_attention(**call)
    assert caught.value.field == field


@pytest.mark.slow
def test_import_loads_no_gpu_compiler():
    program = (
        "import sys, pallas_kernels;"
        "print([m for m in sys.modules if m.startswith('jax.experimental') and 'pallas' in m])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("backend", ["native", "xla", "reference"])
def test_rows_of_prefill_may_see_tokens_behind_themselves(backend):
    """Against dense attention, with a window that counts from each row's own position."""
    rng, tokens, window = np.random.default_rng(0), 70, 9
    last = np.arange(tokens)
    for first, behind in ((3, 12), (20, 55), (60, 70)):
        last[first:behind] = behind - 1
    pages = rng.standard_normal((6, 16, 2, 2, 16), np.float32)
    table = jnp.asarray(rng.permutation(6)[:5][None], jnp.int32)
    held = pages[np.asarray(table[0])].reshape(80, 2, 2, 16)[:tokens]
    q = rng.standard_normal((tokens, 4, 16), np.float32)
    key, row = np.arange(tokens), np.arange(tokens)[:, None]
    seen = (key <= last[:, None]) & (row - key < window)
    scores = np.einsum("tkgd,skd->kgts", q.reshape(tokens, 2, 2, 16), held[:, 0]) / 4
    weights = np.where(seen, np.exp(scores - scores.max()), 0)
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("kgts,skd->tkgd", weights, held[:, 1]).reshape(q.shape)
    context = 5  # those before are not among the rows
    lanes = PrefillLanes(*(jnp.array([x], jnp.int32) for x in (2, tokens - context, context)))
    region = np.pad(q[context:], ((2, 3), (0, 0), (0, 0)))
    out = paged_prefill_attention(
        jnp.asarray(region),
        jnp.asarray(pages),
        table,
        lanes,
        scale=0.25,
        window=window,
        last_seen=jnp.asarray(np.pad(last[context:], (2, 3)), jnp.int32),
        backend=backend,
    )
    assert np.abs(np.asarray(out)[2:-3] - wanted[context:]).max() < 2e-5
    with pytest.raises(KernelError, match="last_seen"):
        paged_prefill_attention(
            *(jnp.zeros((8, 4, 64)), jnp.zeros((6, 16, 2, 2, 64)), table, lanes),
            scale=1.0,
            last_seen=jnp.zeros(8, jnp.int32),
            backend="triton",
        )
