"""A model run over whole sequences by the kernels of a deterministic engine on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm
from jaxserve.models.protocol import Attend, Layer, Rotation, alike
from pallas_kernels import PrefillLanes, paged_prefill_attention, write_kv

BACKEND = "native"
# every row is summed in one order, which that of the engine's programs is as well
FORM = LinearForm(backend=BACKEND, row_invariant=True)
PAGE_SIZE = 16  # tokens; results do not depend on it


def packed_attend(config: ModelConfig, sequences: int, length: int) -> Attend[None]:
    """Attention of so many sequences of one length, which lie one behind the other in the rows.

    Keys and values are written to pages and read from there, as an engine's are, whose
    `kv_cache_dtype` is "auto"; a layer's pages are gone after it. The cache is None.
    """
    pages = -(-length // PAGE_SIZE)  # of a sequence
    numbers = jnp.arange(sequences, dtype=jnp.int32)
    table = numbers[:, None] * pages + jnp.arange(pages, dtype=jnp.int32)  # [sequences, pages]
    place = jnp.arange(length, dtype=jnp.int32)
    page_ids = (numbers[:, None] * pages + place // PAGE_SIZE).reshape(-1)  # [sequences * length]
    offsets = jnp.tile(place % PAGE_SIZE, sequences)
    lanes = PrefillLanes(numbers * length, jnp.full_like(numbers, length), 0 * numbers)

    def attend(
        cache: None, layer: Layer, qkv: jax.Array, rotation: Rotation, dtype: Any
    ) -> tuple[jax.Array, None]:
        q, k, v = rotation.split(qkv)
        pool = jnp.zeros((sequences * pages, PAGE_SIZE, 2, *k.shape[1:]), dtype)
        pool = write_kv(pool, k, v, page_ids, offsets, backend=BACKEND)
        out = paged_prefill_attention(
            q,
            pool,
            table,
            lanes,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            window=config.layer_window(alike(layer)),
            row_invariant=True,
            backend=BACKEND,
        )
        return out, cache

    return attend
