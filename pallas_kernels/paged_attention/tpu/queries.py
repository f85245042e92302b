"""The queries of a slot in a TPU kernel: which keys each sees, and how many are attended at once.

The rows of the query matrix are the heads of query 0, padded to whole tiles, then those of query 1,
and so on. What differs between queries is two scalars, the ends of the keys that they see, so a
mask of one query's heads serves all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends.mosaic_tpu import TpuDecodeTuning
from pallas_kernels.paged_attention.tpu.ring import block_shape
from pallas_kernels.tpu_pages import LANES, PageView

SCORE_BYTES = 2 << 20  # of the float32 scores of the queries that are attended at once
QUERY_RING_BYTES = 4 << 20  # of VMEM for pages beside several queries


def stacked(parts: Iterable[jax.Array]) -> jax.Array:
    """Rows of several queries as one matrix."""
    given = list(parts)
    return given[0] if len(given) == 1 else jnp.concatenate(given, axis=0)


def query_block(
    view: PageView, itemsize: int, rows: int, tuning: TpuDecodeTuning
) -> tuple[int, int]:
    """Pages of a block and stages for several queries a slot, of so many rows each.

    Blocks are smaller than those of one query where two queries' scores take more than half of
    SCORE_BYTES, or two stages all of QUERY_RING_BYTES.
    """
    tokens, stages = tuning.block_tokens, tuning.stages
    pages, stages = block_shape(view, itemsize, tokens, stages, QUERY_RING_BYTES)

    def fits() -> bool:
        page_bytes = 2 * view.page_size * view.kv_heads * view.head_dim * itemsize
        scores = 2 * rows * pages * view.page_rows * 4
        return scores <= SCORE_BYTES // 2 and stages * pages * page_bytes <= QUERY_RING_BYTES

    while pages % 2 == 0 and pages // 2 * view.page_rows % LANES == 0 and not fits():
        pages //= 2
    return pages, stages


@dataclass(frozen=True)
class Queries:
    """The queries of a core's slot at a step.

    Attributes:
        number: Q, queries of every slot.
        rows: rows of one query: heads, padded.
        columns: columns of a block's scores.
        length: tokens of the slot, its queries included.
        count: queries that the slot has; its last tokens.
        window: sliding window in tokens, or None.
    """

    number: int
    rows: int
    columns: int
    length: Any
    count: Any
    window: int | None

    def chunks(self) -> list[range]:
        """The queries that are attended at once, as many as VMEM holds scores of.

        Two at least, so that a chunk begins with a whole tile of 16-bit rows.
        """
        size = self.number
        while size > 2 and size * self.rows * self.columns * 4 > SCORE_BYTES:
            size = -(-size // 4) * 2  # half, rounded up to an even number
        return [
            range(first, min(first + size, self.number)) for first in range(0, self.number, size)
        ]

    def of(self, matrix: jax.Array, queries: range) -> jax.Array:
        """The rows of some queries of a matrix that has those of all."""
        if len(queries) == self.number:
            return matrix
        return matrix[queries.start * self.rows : queries.stop * self.rows]

    def end(self, query: int) -> Any:
        """The end of the keys that a query sees; 0 or less for none."""
        return jnp.where(query < self.count, self.length - self.count + query + 1, 0)

    def keys(self, query: int, low: Any, high: Any) -> tuple[Any, Any]:
        """First and end of the keys in low .. high - 1 that a query sees."""
        if self.number == 1:
            return low, high
        end = self.end(query)
        first = low if self.window is None else jnp.maximum(low, end - self.window)
        return first, jnp.minimum(end, high)

    def existing(self, query: int, rows: jax.Array) -> jax.Array:
        """The result of a query; zeros for one that sees nothing beside others that do."""
        return rows if self.number == 1 else jnp.where(self.end(query) > 0, rows, 0.0)
