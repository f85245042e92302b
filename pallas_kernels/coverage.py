"""The facts by which attention backends take or refuse a problem, and how a refusal is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The static facts by which a backend takes or refuses an attention problem.

    A fact that is None is not judged: a device can be asked before its model is known.

    Attributes:
        head_dim: size of a head.
        page_size: tokens a page.
        group: query heads a KV head.
        pool_dtype: element type of the pages; uint16 and uint8 stand for what their bits hold.
        query_dtype: type of the queries.
        kv_heads: KV heads of one device.
        head_rows: rows of the pool that a head is, see `paged_decode_attention`.
        token_scales: whether 8-bit pages have a scale a token and KV head, see `write_kv_scaled`;
            otherwise one for the whole pool.
    """

    head_dim: int | None = None
    page_size: int | None = None
    group: int | None = None
    pool_dtype: np.dtype | None = None
    query_dtype: np.dtype | None = None
    kv_heads: int | None = None
    head_rows: int | None = None
    token_scales: bool = False

    @staticmethod
    def of(q: jax.Array, kv_pages: jax.Array, k_scale: jax.Array | None = None) -> AttentionShape:
        """The facts of q [rows, H, D] or [rows, Q, H, D], and of kv_pages and their scale.

        kv_pages are [NP, page_size, 2, KVH, D], or have several rows a head.
        """
        _, page_size, _, rows, width = kv_pages.shape
        heads, head_dim = q.shape[-2:]
        head_rows = head_dim // width
        return AttentionShape(
            head_dim=head_dim,
            page_size=page_size,
            group=heads * head_rows // rows,
            pool_dtype=jnp.dtype(kv_pages.dtype),
            query_dtype=jnp.dtype(q.dtype),
            kv_heads=rows // head_rows,
            head_rows=head_rows,
            token_scales=k_scale is not None and k_scale.ndim > 0,
        )


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What the size of a pool on one device follows from, but for the number of its pages.

    Attributes:
        rows: of keys and values of a page: tokens, both, KV heads of one device, and all layers
            that have a place in the page.
        head_dim: elements of a row.
        itemsize: bytes of an element.
    """

    rows: int
    head_dim: int
    itemsize: int


def refused(field: str, value: Any, allowed: Sequence[Any], unit: str = "") -> KernelError | None:
    """The refusal of a fact that is known and none of those allowed, of which there are several."""
    if value is None or value in allowed:
        return None
    names = [str(one) for one in allowed]
    return KernelError(field, value, f"{', '.join(names[:-1])} or {names[-1]}{unit}")


def refuse(refusal: KernelError | None, backend: str, q: jax.Array, kv_pages: jax.Array) -> None:
    """Raises a refusal with the shapes that were refused.

    Raises:
        KernelError: `refusal` is one.
    """
    if refusal is not None:
        raise KernelError(
            refusal.field,
            refusal.value,
            f"the {backend} backend takes {refusal.allowed}; "
            f"q is {q.dtype}{q.shape}, kv_pages {kv_pages.dtype}{kv_pages.shape}",
        )


def require(
    covers: Callable[[AttentionShape], KernelError | None],
    backend: str,
    q: jax.Array,
    kv_pages: jax.Array,
    k_scale: jax.Array | None,
) -> None:
    """Refuses operands of `AttentionShape.of` that a backend does not cover.

    Raises:
        KernelError: it does not; names the fact and the shapes.
    """
    refuse(covers(AttentionShape.of(q, kv_pages, k_scale)), backend, q, kv_pages)
