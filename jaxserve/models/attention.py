"""How the model reaches the paged KV cache: rotate, write the new rows, then attend to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache, KVPages
from jaxserve.models.protocol import Attend, Layer, Rotation, alike
from jaxserve.parallel.mesh import is_divided
from pallas_kernels import PrefillLanes


class GroupTables(NamedTuple):
    """The pages of one group of layers, see `LayerGroups`.

    Attributes:
        write_pages: int32[T] of each token.
        decode_table: int32[B, P] of each decode row.
        lane_table: int32[N, P] of each prefill lane; None in a decode program.
    """

    write_pages: jax.Array
    decode_table: jax.Array
    lane_table: jax.Array | None


class PagedBatch(NamedTuple):
    """Where the T = B * Q + C tokens of a step lie in the cache, and what they may look at.

    Attributes:
        tables: of each group of layers.
        write_offsets: int32[T] row of each token in its page.
        decode_lens: int32[B] tokens of each decode row's sequence, the row's own included; 0 when
            idle.
        query_lens: int32[B] tokens of each decode row, up to Q; None where all have one.
        lanes: the prefill lanes; None in a decode program.
        last_seen: int32[C] position of the last token that each token of the region attends to;
            None: its own.
        looks_ahead: bool[] whether one of them attends to a later one; None without `last_seen`.
    """

    tables: tuple[GroupTables, ...]
    write_offsets: jax.Array
    decode_lens: jax.Array
    query_lens: jax.Array | None
    lanes: PrefillLanes | None
    last_seen: jax.Array | None = None
    looks_ahead: jax.Array | None = None


def all_as_lanes(batch: PagedBatch, pages: GroupTables) -> tuple[jax.Array, PrefillLanes]:
    """The page table and lanes of a region of all tokens, in which a decode row is a lane of one.

    A kernel of prefill attends to a token of a lane in one order, whatever the lane's length.
    """
    assert batch.query_lens is None and batch.last_seen is None
    lens = batch.decode_lens
    rows = jnp.arange(len(lens), dtype=jnp.int32)
    decode = PrefillLanes(rows, jnp.minimum(lens, 1), jnp.maximum(lens - 1, 0))
    if batch.lanes is None or pages.lane_table is None:
        return pages.decode_table, decode
    behind = batch.lanes._replace(start=batch.lanes.start + len(lens))
    lanes = PrefillLanes(*(jnp.concatenate(both) for both in zip(decode, behind, strict=True)))
    return jnp.concatenate([pages.decode_table, pages.lane_table]), lanes


def make_attend(
    config: ModelConfig, cache: KVCache, batch: PagedBatch, mesh: Mesh, num_queries: int = 1
) -> Attend[KVPages]:
    """The `attend` callable of one traced step, whose decode rows have `num_queries` tokens.

    With several devices the heads are sharded over the mesh axis "model" and each device runs the
    kernels on its own heads.
    """
    num_decode = batch.decode_lens.shape[0] * num_queries
    backends = cache.backends

    def by_row(x: jax.Array) -> jax.Array:
        """The decode rows of [T, H, D]: [B, H, D], or [B, Q, H, D] where rows have several."""
        rows = x[:num_decode]
        return rows if num_queries == 1 else rows.reshape(-1, num_queries, *x.shape[1:])

    def attend(
        held: KVPages, layer: Layer, qkv: jax.Array, rotation: Rotation, dtype: Any
    ) -> tuple[jax.Array, KVPages]:
        norms = (rotation.q_norm, rotation.k_norm)

        def on_local_heads(
            held: KVPages,
            qkv: jax.Array,
            tables: tuple[jax.Array, jax.Array],
            weights: list[jax.Array | None],
            batch: PagedBatch,
        ) -> tuple[jax.Array, KVPages]:
            q_norm, k_norm = (
                None if norm is None or weight is None else norm._replace(weight=weight)
                for norm, weight in zip(norms, weights, strict=True)
            )
            pages = batch.tables[cache.groups.place(layer)[0]]
            where = pages.write_pages, batch.write_offsets
            head_dim, padding = qkv.shape[4], cache.head_dim - qkv.shape[4]
            if backends.rotate_and_write:
                normed = {"dtype": dtype, "q_norm": q_norm, "k_norm": k_norm}
                q, held = cache.rotate_and_write(held, layer, qkv, *tables, *where, **normed)
            else:
                local = Rotation(*tables, q_norm, k_norm, *rotation[4:])
                # zeros behind a stored head change no score, and their own output is dropped
                q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding))) for x in local.split(qkv))
                # where one kernel attends and writes, only prefill rows are written beforehand
                first = num_decode if backends.decode_and_write else 0
                if first < q.shape[0]:
                    held = cache.write(held, layer, *(x[first:] for x in (k, v, *where)))
            options: dict[str, Any] = {
                "scale": config.attention_scale,
                "soft_cap": config.attention_soft_cap,
                "window": config.layer_window(alike(layer)),
            }
            if backends.one_program:
                every = all_as_lanes(batch, pages)
                options |= {"last_seen": None, "looks_ahead": None}
                out = cache.prefill(held, layer, q, *every, **options)
                return out[:, :, :head_dim], held
            table = pages.decode_table, batch.decode_lens
            of_decode = {**options, "query_lens": batch.query_lens}
            if backends.decode_and_write:
                rows = (by_row(x) for x in (q, k, v))
                out, held = cache.decode_and_write(held, layer, *rows, *table, **of_decode)
            else:
                out = cache.decode(held, layer, by_row(q), *table, **of_decode)
            out = out.reshape(num_decode, *out.shape[-2:])
            if batch.lanes is not None and pages.lane_table is not None:
                lanes = pages.lane_table, batch.lanes
                options |= {"last_seen": batch.last_seen, "looks_ahead": batch.looks_ahead}
                region = cache.prefill(held, layer, q[num_decode:], *lanes, **options)
                out = jnp.concatenate([out, region])
            return out[:, :, :head_dim], held

        weights = [None if norm is None else norm.weight for norm in norms]
        operands = (held, qkv, (rotation.cos, rotation.sin), weights, batch)
        if not is_divided(mesh.size):
            return on_local_heads(*operands)
        everywhere, pool = PartitionSpec(), cache.specs()
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
