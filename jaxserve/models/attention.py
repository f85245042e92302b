"""How the model reaches the paged KV cache: rotate, write the new rows, then attend to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import Attend, Rotation
from pallas_kernels import (
    Backends,
    PrefillLanes,
    paged_decode_and_write,
    paged_decode_attention,
    paged_prefill_attention,
    rotate_and_write,
    write_kv,
)
from pallas_kernels.linear import Norm


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
) -> Attend[jax.Array]:
    """The `attend` callable of one traced step.

    Layer l owns pages `l * num_pages` .. of the flat pool, so its trash page is `l * num_pages`.
    With several devices the heads are sharded over the mesh axis "model" and each device runs the
    kernels on its own heads.
    """
    num_decode = batch.decode_table.shape[0]

    def attend(
        kv_pages: jax.Array, layer: int, qkv: jax.Array, rotation: Rotation, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        first_page = layer * num_pages
        norms = (rotation.q_norm, rotation.k_norm)

        def on_local_heads(
            kv_pages: jax.Array,
            qkv: jax.Array,
            tables: tuple[jax.Array, jax.Array],
            weights: list[jax.Array | None],
            batch: PagedBatch,
        ) -> tuple[jax.Array, jax.Array]:
            q_norm, k_norm = (
                None if norm is None or weight is None else Norm(weight, norm.eps)
                for norm, weight in zip(norms, weights, strict=True)
            )
            head_dim, padding = qkv.shape[4], kv_pages.shape[4] - qkv.shape[4]
            if backends.rotate_and_write:
                q, kv_pages = rotate_and_write(
                    qkv,
                    *tables,
                    kv_pages,
                    batch.write_pages,
                    batch.write_offsets,
                    dtype=dtype,
                    q_norm=q_norm,
                    k_norm=k_norm,
                    first_page=first_page,
                    **backends.rotate_and_write_options,
                )
            else:
                local = Rotation(*tables, q_norm, k_norm, rotation.backend)
                # zeros behind a stored head change no score, and their own output is dropped
                q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding))) for x in local.split(qkv))
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

        weights = [None if norm is None else norm.weight for norm in norms]
        operands = (kv_pages, qkv, (rotation.cos, rotation.sin), weights, batch)
        if mesh.size == 1:
            return on_local_heads(*operands)
        everywhere, pool = PartitionSpec(), kv_pages_spec()
        projection = PartitionSpec(None, None, "model", None, None)
        sharded = jax.shard_map(
            on_local_heads,
            mesh=mesh,
            in_specs=(pool, projection, everywhere, everywhere, everywhere),
            out_specs=(PartitionSpec(None, "model", None), pool),
            check_vma=False,
        )
        return sharded(*operands)

    return attend


def kv_pages_spec() -> PartitionSpec:
    """Sharding of the pool `[num_layers * num_pages, page_size, 2, num_kv_heads, head_dim]`."""
    return PartitionSpec(None, None, None, "model", None)
