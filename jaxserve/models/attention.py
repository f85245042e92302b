"""How the model reaches the paged KV cache: write the new rows, then decode and prefill kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models.config import ModelConfig
from pallas_kernels import (
    Backends,
    PrefillLanes,
    paged_decode_and_write,
    paged_decode_attention,
    paged_prefill_attention,
    write_kv,
)

# attend(kv_pages, layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> (out [T, H, D], kv_pages)
Attend = Callable[[jax.Array, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class PagedBatch(NamedTuple):
    """Where the T = B + C tokens of a step lie in the cache, and what they may look at.

    Attributes:
        write_pages, write_offsets: int32[T] page (of layer 0) and row in it of each token.
        decode_table: int32[B, P] page ids of each decode row.
        decode_lens: int32[B] tokens each decode row attends to, itself included; 0 when idle.
        lane_table: int32[N, P] page ids of each prefill lane; None in a decode program.
        lanes: the prefill lanes; None in a decode program.
    """

    write_pages: jax.Array
    write_offsets: jax.Array
    decode_table: jax.Array
    decode_lens: jax.Array
    lane_table: jax.Array | None
    lanes: PrefillLanes | None


def make_attend(
    config: ModelConfig, batch: PagedBatch, num_pages: int, backends: Backends, mesh: Mesh
) -> Attend:
    """The `attend` callable of one traced step.

    Layer l owns pages `l * num_pages` .. of the flat pool, so its trash page is `l * num_pages`.
    With several devices the heads are sharded over the mesh axis "model" and each device runs the
    kernels on its own heads.
    """
    num_decode = batch.decode_table.shape[0]

    def attend(
        kv_pages: jax.Array, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        first_page = layer * num_pages

        def on_local_heads(
            kv_pages: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch
        ) -> tuple[jax.Array, jax.Array]:
            # zeros behind a stored head change no score, and their own output is dropped
            head_dim, padding = q.shape[2], kv_pages.shape[4] - q.shape[2]
            q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding))) for x in (q, k, v))
            # where one kernel attends and writes, only prefill rows are written beforehand
            first = num_decode if backends.decode_and_write else 0
            if first < q.shape[0]:
                kv_pages = write_kv(
                    kv_pages,
                    k[first:],
                    v[first:],
                    batch.write_pages[first:],
                    batch.write_offsets[first:],
                    first_page=first_page,
                    **backends.write_options,
                )
            options: dict[str, Any] = {
                "scale": config.attention_scale,
                "window": config.layer_window(layer),
                "first_page": first_page,
            }
            table, lengths = batch.decode_table, batch.decode_lens
            if backends.decode_and_write:
                out, kv_pages = paged_decode_and_write(
                    q[:num_decode],
                    k[:num_decode],
                    v[:num_decode],
                    kv_pages,
                    table,
                    lengths,
                    **options,
                    **backends.decode_and_write_options,
                )
            else:
                out = paged_decode_attention(
                    q[:num_decode], kv_pages, table, lengths, **options, **backends.decode_options
                )
            if batch.lanes is not None and batch.lane_table is not None:
                region = paged_prefill_attention(
                    q[num_decode:],
                    kv_pages,
                    batch.lane_table,
                    batch.lanes,
                    **options,
                    **backends.prefill_options,
                )
                out = jnp.concatenate([out, region])
            return out[:, :, :head_dim], kv_pages

        if mesh.size == 1:
            return on_local_heads(kv_pages, q, k, v, batch)
        heads = PartitionSpec(None, "model", None)
        pool = kv_pages_spec()
        sharded = jax.shard_map(
            on_local_heads,
            mesh=mesh,
            in_specs=(pool, heads, heads, heads, PartitionSpec()),
            out_specs=(heads, pool),
            check_vma=False,
        )
        return sharded(kv_pages, q, k, v, batch)

    return attend


def kv_pages_spec() -> PartitionSpec:
    """Sharding of the pool `[num_layers * num_pages, page_size, 2, num_kv_heads, head_dim]`."""
    return PartitionSpec(None, None, None, "model", None)
