"""A model over the pages of a KV cache: all tokens of one request in one traced step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models import Model
from jaxserve.models.attention import GroupTables, PagedBatch, make_attend
from jaxserve.models.kv_cache import KVCache, KVFormat
from jaxserve.models.protocol import TokenRows
from jaxserve.parallel import make_mesh
from pallas_kernels import Backends

XLA = Backends(decode="xla", prefill="xla", write_kv="xla", reason="portable")
PAGE_SIZE = 8


def paged_logits(model: Model, tokens: np.ndarray, kv_cache_dtype: str) -> np.ndarray:
    """float32[T, V]. Every token is a decode row that sees what the rows before it have written."""
    cache = KVCache.of(
        model.config,
        KVFormat.of(kv_cache_dtype, "float32"),
        XLA,
        platform="cpu",
        page_size=PAGE_SIZE,
    ).with_pages(-(-len(tokens) // PAGE_SIZE))
    graph, state = nnx.split(model)
    return np.asarray(_logits(graph, cache, state, jnp.asarray(tokens, jnp.int32)))


@partial(jax.jit, static_argnums=(0, 1))
def _logits(graph: Any, cache: KVCache, state: Any, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    table = jnp.tile(jnp.arange(cache.num_pages, dtype=jnp.int32), (len(tokens), 1))
    pages, offsets = jnp.divmod(positions, PAGE_SIZE)
    tables = (GroupTables(pages, table, None),)
    batch = PagedBatch(tables, offsets, positions + 1, query_lens=None, lanes=None)
    attend = make_attend(model.config, cache, batch, make_mesh(1))
    held = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache.shapes())
    hidden, _ = model.layers(model.embed(tokens), TokenRows(positions[None]), held, attend)
    return model.logits(hidden)
