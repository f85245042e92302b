"""The XLA backends under jax.shard_map with the heads split over two devices."""

from __future__ import annotations

import textwrap

import pytest

from tests.fake_devices import said

PROGRAM = textwrap.dedent(
    """
    import functools
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, PartitionSpec as P
    from pallas_kernels import (
        PrefillLanes, paged_decode_attention, paged_prefill_attention, write_kv)
    from tests.pallas_kernels import oracle
    from tests.pallas_kernels.cases import packed_lanes, paged_case

    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model", None), P(None, None, None, "model", None)
    shape = dict(heads=8, kv_heads=2, head_dim=32, page_size=16)
    rng = np.random.default_rng(0)
    for pool, window in (("float32", None), ("uint16", 20)):
        case = paged_case(rng, [70, 33, 0, 1], pool=pool, **shape)
        decode = functools.partial(
            paged_decode_attention, scale=0.2, window=window, backend="xla")
        sharded = jax.jit(jax.shard_map(
            decode, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads))
        got = sharded(case.q, case.kv_pages, case.page_table, case.lengths)
        assert len(got.sharding.device_set) == 2
        want = oracle.decode(*case[:4], scale=0.2, window=window)
        assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
        idle = sharded(case.q, case.kv_pages, case.page_table, case.lengths * 0)
        assert not np.asarray(idle, np.float32).any()

        case = paged_case(rng, [70, 33, 0, 2], pool=pool, queries=3, share=False, **shape)
        counts = jnp.array([3, 1, 2, 3], jnp.int32)
        of_queries = P(None, None, "model", None)
        sharded = jax.jit(jax.shard_map(
            lambda *given: decode(*given[:4], query_lens=given[4]), mesh=mesh,
            in_specs=(of_queries, pages, P(), P(), P()), out_specs=of_queries))
        got = sharded(case.q, case.kv_pages, case.page_table, case.lengths, counts)
        want = oracle.decode(*case[:4], query_lens=counts, scale=0.2, window=window)
        assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]

        lanes, region = packed_lanes(rng, [30, 0, 5], [10, 0, 40], gaps=True)
        case = paged_case(rng, [40, 0, 45], pool=pool, rows=region, share=False, **shape)
        prefill = functools.partial(paged_prefill_attention, scale=0.2, backend="xla")
        sharded = jax.jit(jax.shard_map(
            prefill, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads))
        got = sharded(case.q, case.kv_pages, case.page_table, lanes)
        want = oracle.prefill(case.q, case.kv_pages, case.page_table, lanes, scale=0.2)
        assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]

        k = jnp.asarray(rng.standard_normal((3, 2, 32), np.float32))
        where = jnp.array([1, 2, 0], jnp.int32)
        write = functools.partial(write_kv, backend="xla")
        sharded = jax.jit(jax.shard_map(
            write, mesh=mesh, in_specs=(pages, heads, heads, P(), P()), out_specs=pages))
        got = sharded(case.kv_pages, k, k + 1, where, where)
        want = write(case.kv_pages, k, k + 1, where, where)
        assert np.array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    print("sharded kernels agree")
    """
)


@pytest.mark.slow
def test_heads_sharded_over_two_devices():
    assert said(2, "-c", PROGRAM) == ["sharded kernels agree"]
