"""The options of every attention backend besides queries, pages and lengths."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax


class Scores(NamedTuple):
    """Static options of the scores.

    Attributes:
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
        window: sliding window in tokens, or None.
    """

    scale: float
    soft_cap: float | None
    window: int | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sinks", "k_scale", "v_scale", "first_page", "query_lens", "last_seen"),
    meta_fields=("scores", "row_invariant"),
)
@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options of `paged_decode_attention` that no backend does without, and those of prefill.

    Static are `scores` and `row_invariant`. `query_lens` is None where every row has all of its
    queries, and where there is one a row. `last_seen` is of prefill, None where a row sees nothing
    behind itself.
    """

    scores: Scores
    sinks: jax.Array | None  # float32[H]
    k_scale: jax.Array | None  # float32[] or bfloat16[NP, KVH, page_size]
    v_scale: jax.Array | None
    first_page: jax.Array  # int32[]
    query_lens: jax.Array | None = None  # int32[B]
    last_seen: jax.Array | None = None  # int32[C]
    row_invariant: bool = False
