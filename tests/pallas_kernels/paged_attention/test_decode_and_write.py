"""Attention and the write of the step's tokens in one call, against float64 and the reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, paged_decode_and_write
from pallas_kernels.backends.mosaic_tpu import TpuDecodeTuning
from pallas_kernels.write_kv.api import stored_rows
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import paged_case, stored
from tests.pallas_kernels.tpu_interpreter import INTERPRETER, no_races

# small blocks, so that short contexts have several and the ring of buffers turns
ONE_CORE = TpuDecodeTuning(block_tokens=128, stages=3, cores=1)
TWO_CORES = TpuDecodeTuning(block_tokens=128, stages=2, cores=2)
EVERYTHING = {"window": 140, "soft_cap": 5.0, "sinks": True}

# heads, kv_heads, head_dim, page size, pool, options; one for each order of a page in memory
QUICK = (4, 1, 128, 32, "bfloat16", EVERYTHING)
CASES = [
    (8, 8, 128, 16, "bfloat16", {}),
    (16, 8, 128, 32, "float32", EVERYTHING),
    (8, 2, 128, 16, "bfloat16", {"sinks": True}),
    (9, 3, 128, 64, "bfloat16", {"window": 1}),
    (6, 6, 128, 16, "float32", {"soft_cap": 3.0}),
    (8, 8, 256, 16, "bfloat16", {"window": 20}),
    (16, 8, 128, 16, "int8", {"window": 50}),
    (8, 4, 128, 32, "int8", EVERYTHING),
    (8, 8, 128, 16, "float8_e4m3fn", {"sinks": True}),
    # heads of 256 as two rows
    (4, 1, 256, 16, "bfloat16", {"window": 50}),
    (8, 4, 256, 32, "bfloat16", EVERYTHING),
    (6, 3, 256, 16, "float32", {"sinks": True}),
    (8, 2, 256, 32, "int8", {}),
]


def boundary_lengths(page_size):
    """With idle slots, and with first, last and inner rows of a page as new tokens."""
    return [299, 300, 0, 1, page_size - 1, page_size, page_size + 1, 0]


def check(shape, lengths, *, counts=None, backend="mosaic_tpu", trash=False, **call):
    """Compares with float64 over the pool as it must be afterwards, and the pool by its bits.

    With `counts`, how many of 5 tokens of each slot are new, q has an axis of queries.
    """
    heads, kv_heads, head_dim, page_size, pool, options = shape
    rng = np.random.default_rng(0)
    first_page = 3
    q, pages, table, kv_lens, _, scales = paged_case(
        rng,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        first_page=first_page,
        per_token=False,
        queries=counts and 5,
        share=counts is None,
    )
    first = np.asarray(lengths) - (1 if counts is None else np.asarray(counts))
    places = first[:, None] + np.arange(5 if counts else 1)  # in the slot, of each new token
    exists = (places >= 0) & (places < np.asarray(lengths)[:, None])
    new = rng.standard_normal((2, *places.shape, kv_heads, head_dim), np.float32)
    new[:, ~exists] = np.nan  # an idle slot has no token
    k, v = (jnp.asarray(part.reshape(-1, *part.shape[2:]), q.dtype) for part in new)
    rows = np.asarray(stored_rows(pages, k, v, scales.get("k_scale"), scales.get("v_scale")))
    rows = rows.reshape(*places.shape, *rows.shape[1:])
    k, v = (part.reshape(*q.shape[:-2], *part.shape[1:]) for part in (k, v))
    before, after = np.array(pages), np.array(pages)
    for slot, token in np.argwhere(exists):
        page = first_page + int(table[slot, places[slot, token] // page_size])
        before[page, places[slot, token] % page_size] = stored(np.float32(np.nan), pool)
        after[page, places[slot, token] % page_size] = rows[slot, token]

    options = {**options, "scale": head_dim**-0.5, "first_page": first_page, **scales}
    if counts is not None:
        options["query_lens"] = jnp.asarray(counts, jnp.int32)
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    head_rows = 2 if head_dim == 256 and kv_heads % 8 else 1
    held = before.reshape(*before.shape[:3], kv_heads * head_rows, head_dim // head_rows)
    out, written = paged_decode_and_write(
        q, k, v, jnp.asarray(held), table, kv_lens, backend=backend, **call, **options
    )
    want = oracle.decode(q, after, table, kv_lens, **options)
    assert out.dtype == q.dtype
    assert oracle.relative_error(out, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(out, np.float32)[np.asarray(lengths) == 0].any()
    written = np.array(written).reshape(after.shape)
    if trash:  # where a backend may write for idle slots
        written[first_page] = after[first_page]
    np.testing.assert_array_equal(written.view(np.uint8), after.view(np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_the_two_operations(backend):
    check((4, 2, 16, 16, "float32", {"window": 20}), [40, 17, 0, 16], backend=backend, trash=True)


COUNTS = [5, 0, 3, 1, 5, 2, 4, 5]  # for boundary_lengths and the like


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_the_two_operations_of_several_tokens(backend):
    """New tokens on both sides of a page's end, and rows with fewer tokens than they have."""
    shape = (4, 2, 16, 16, "float32", {"window": 20, "sinks": True})
    check(shape, [40, 17, 0, 18], counts=COUNTS[:4], backend=backend, trash=True)


@pytest.mark.slow
def test_one_kernel_of_several_tokens(capfd):
    call = {"tuning": ONE_CORE, "interpret": INTERPRETER}
    check(QUICK, [66, 300, 2, 33], counts=COUNTS[:4], **call)
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_one_kernel_of_several_tokens_of_every_kind(shape, capfd):
    size = shape[3]
    lengths = [299, 300, 0, 1, size + 2, size, size + 1, 3]
    check(shape, lengths, counts=COUNTS, tuning=TWO_CORES, interpret=INTERPRETER)
    assert no_races(capfd)


@pytest.mark.slow
def test_one_kernel(capfd):
    check(QUICK, [66, 0, 33, 32], tuning=ONE_CORE, interpret=INTERPRETER)
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_one_kernel_of_every_kind(shape, capfd):
    lengths = boundary_lengths(shape[3])
    check(shape, lengths, tuning=TWO_CORES, interpret=INTERPRETER)
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 200, 0], [1, 0, 1]], ids=str)
def test_slots_without_pages_to_read_between_two_cores(lengths, capfd):
    shape = (8, 2, 128, 16, "bfloat16", EVERYTHING)
    check(shape, lengths, tuning=TWO_CORES, interpret=INTERPRETER)
    assert no_races(capfd)


@pytest.mark.slow
def test_one_kernel_in_the_plain_interpreter():
    check((8, 8, 128, 16, "bfloat16", {}), [40, 0, 17], interpret=True)


def operands(kv_heads=8, pool="bfloat16", **changes):
    row = jnp.zeros((3, kv_heads, 128), jnp.bfloat16)
    scales = {"k_scale": jnp.float32(1), "v_scale": jnp.float32(1)} if pool == "int8" else {}
    pages = jnp.zeros((4, 16, 2, kv_heads, 128), pool)
    table, lengths = jnp.zeros((3, 2), jnp.int32), jnp.zeros(3, jnp.int32)
    given = {"q": row, "k": row, "v": row, "kv_pages": pages, "page_table": table}
    given |= {"kv_lens": lengths, "scale": 1.0, "backend": "mosaic_tpu", **scales}
    return {**given, **changes}


BY_TOKEN = jnp.ones((4, 8, 16), jnp.bfloat16)
REFUSED = [
    (operands(kv_heads=2, pool="int8"), "kv_heads"),
    (operands(backend="triton"), "backend"),
    (operands(k=jnp.zeros((2, 8, 128), jnp.bfloat16)), "k.shape"),
    (operands(v=jnp.zeros((3, 4, 128), jnp.bfloat16)), "v.shape"),
    (operands(q=jnp.zeros((3, 2, 8, 128), jnp.bfloat16)), "k.shape"),
    (operands(query_lens=jnp.zeros(3, jnp.int32)), "query_lens"),
    (operands(kv_lens=jnp.zeros(2, jnp.int32)), "kv_lens"),
    (operands(backend="xla", interpret=True), "interpret"),
    (operands(pool="int8", k_scale=BY_TOKEN, v_scale=BY_TOKEN), "k_scale"),
    (operands(tuning=TpuDecodeTuning(block_tokens=64)), "tuning.block_tokens"),
]


@pytest.mark.parametrize(("given", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_refusals_name_what_is_refused(given, field):
    with pytest.raises(KernelError) as caught:
        paged_decode_and_write(**given)
    assert caught.value.field == field
