"""The paged KV cache: what it holds, how large it is, and how a traced step writes and reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.models.protocol import Layer
from pallas_kernels import (
    AttentionShape,
    Backends,
    PageFacts,
    PrefillLanes,
    ScaledPages,
    paged_decode_and_write,
    paged_decode_attention,
    paged_prefill_attention,
    rotate_and_write,
    scales_shape,
    storage_dtype,
    write_kv,
    write_kv_scaled,
)


class KVPages(NamedTuple):
    """The arrays of the cache.

    A page has L places, one for each layer of a group (`LayerGroups`); the n-th place of all pages
    is `n * num_pages` .. of the first axis.

    Attributes:
        pages: [L * num_pages, page_size, 2, num_kv_heads, head_dim] keys and values; a head may be
            several rows that lie side by side (`Backends.head_rows`).
        k_scale, v_scale: bfloat16, or its bits, [L * num_pages, num_kv_heads * page_size] scales of
            8-bit keys and values; None where tokens have none of their own. Heads and tokens are
            one axis, for a TPU would not hold the pages of three axes in their order.
    """

    pages: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    def of_layers(self, num_layers: int, page_ids: jax.Array) -> jax.Array:
        """int32[L, N]: where pages int32[N] of L layers each lie, on the first axis."""
        layers = jnp.arange(num_layers) * (self.pages.shape[0] // num_layers)
        return layers[:, None] + page_ids

    def take(self, places: jax.Array) -> KVPages:
        """The pages in some places of any shape, with their scales."""
        return jax.tree.map(lambda array: array[places], self)

    def put(self, places: jax.Array, pages: KVPages) -> KVPages:
        """The cache with other pages in some places."""
        return jax.tree.map(lambda array, new: array.at[places].set(new), self, pages)


class KVScales(NamedTuple):
    """One scale a layer for keys and for values, which the checkpoint or the engine has fixed."""

    k: tuple[float, ...]
    v: tuple[float, ...]


class KVFormat(NamedTuple):
    """How keys and values are stored.

    Attributes:
        dtype: of a stored number.
        token_scales: whether each token has a scale for each KV head, which its numbers decide.
    """

    dtype: np.dtype
    token_scales: bool = False

    @staticmethod
    def of(kv_cache_dtype: str, dtype: str) -> KVFormat:
        """The format of the setting `kv_cache_dtype` for a model of a type.

        Integers have no range of their own, so each token brings a scale. 8-bit floats have an
        exponent: one scale a layer suffices, and all kernels of all devices take it.
        """
        if kv_cache_dtype == "auto":
            return KVFormat(jnp.dtype(dtype))
        if kv_cache_dtype == "int8":
            return KVFormat(jnp.dtype("int8"), token_scales=True)
        return KVFormat(jnp.dtype("float8_e4m3fn"))

    @property
    def static_scales(self) -> bool:
        """Whether a layer's numbers have one scale."""
        return self.dtype.itemsize == 1 and not self.token_scales

    def attention_shape(
        self, model: ModelConfig, dtype: str, platform: str, page_size: int | None, shards: int
    ) -> AttentionShape:
        """The facts by which kernels take or refuse the model's attention over such a cache.

        Args:
            model: whose attention it is.
            dtype: of its activations.
            platform: JAX platform name.
            page_size: tokens a page.
            shards: devices over which the heads are divided.
        """
        return AttentionShape(
            head_dim=model.head_dim,
            page_size=page_size,
            group=model.num_heads // model.num_kv_heads,
            pool_dtype=storage_dtype(self.dtype, platform),
            query_dtype=jnp.dtype(dtype),
            kv_heads=model.num_kv_heads // shards,
            token_scales=self.token_scales,
        )


@dataclass(frozen=True)
class KVCache:
    """Everything that is fixed about a KV cache, and its operations inside a traced step.

    Attributes:
        groups: of the layers.
        num_kv_heads: of the model.
        head_dim: as it is stored, see `Backends.stored_head_dim`.
        page_size: tokens a page.
        format: of the numbers.
        platform: JAX platform name, which decides how a CPU stores some numbers as their bits.
        backends: the kernels that write and attend.
        scales: of a format with static scales; None for all others.
        num_pages: trash page included; 0 before memory is planned.
    """

    groups: LayerGroups
    num_kv_heads: int
    head_dim: int
    page_size: int
    format: KVFormat
    platform: str
    backends: Backends
    scales: KVScales | None = None
    num_pages: int = 0

    @staticmethod
    def of(
        model: ModelConfig,
        format: KVFormat,
        backends: Backends,
        *,
        platform: str,
        page_size: int,
        scales: KVScales | None = None,
        groups: LayerGroups | None = None,
    ) -> KVCache:
        """The cache of a model; `num_pages` is to be planned.

        Static scales that are not given are 1: numbers are stored as they are. Where no groups are
        given all layers are one.
        """
        if format.static_scales and scales is None:
            scales = KVScales((1.0,) * model.num_layers, (1.0,) * model.num_layers)
        return KVCache(
            groups=groups or LayerGroups.one(model.num_layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=backends.stored_head_dim(model.head_dim),
            page_size=page_size,
            format=format,
            platform=platform,
            backends=backends,
            scales=scales if format.static_scales else None,
        )

    def __str__(self) -> str:
        if self.format.token_scales:
            return f"{self.format.dtype} with a scale a token and head"
        if self.scales is None:
            return str(self.format.dtype)
        told = "of 1" if set(self.scales.k + self.scales.v) == {1.0} else "of the checkpoint"
        return f"{self.format.dtype} with a scale a layer {told}"

    def with_pages(self, num_pages: int) -> KVCache:
        """The same of another size."""
        return replace(self, num_pages=num_pages)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """Of `KVPages.pages`."""
        places = self.groups.layers_per_page * self.num_pages
        rows = self.backends.head_rows
        return places, self.page_size, 2, self.num_kv_heads * rows, self.head_dim // rows

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and devices, scales included."""
        return len(self.groups.places) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Of a token in one layer."""
        scale = 2 if self.format.token_scales else 0
        return 2 * self.num_kv_heads * (self.head_dim * self.format.dtype.itemsize + scale)

    def page_bytes(self, shards: int) -> int:
        """Bytes of one page on each of so many devices that share its heads."""
        return self.page_size * self.groups.layers_per_page * self._row_bytes // shards

    def addressable(self, num_pages: int, shards: int) -> int:
        """How many pages the kernels of a device address, up to `num_pages`."""
        rows = self.groups.layers_per_page * self.page_size * 2 * self.num_kv_heads // shards
        page = PageFacts(rows, self.head_dim, self.format.dtype.itemsize)
        return self.backends.most_pages(page, num_pages)

    def shapes(self) -> KVPages:
        """Shapes and types of the arrays."""

        def array(shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, storage_dtype(dtype, self.platform))

        pages = array(self.pool_shape, self.format.dtype)
        if not self.format.token_scales:
            return KVPages(pages)
        places, *of_page = scales_shape(self.pool_shape)
        scale = array((places, math.prod(of_page)), jnp.bfloat16)
        return KVPages(pages, scale, scale)

    def specs(self) -> KVPages:
        """How tensor parallelism divides the arrays: by KV heads."""
        pages = PartitionSpec(None, None, None, "model", None)
        scale = PartitionSpec(None, "model") if self.format.token_scales else None
        specs: Any = KVPages  # of descriptions of arrays, not of arrays
        return specs(pages, scale, scale)

    def shardings(self, mesh: Mesh) -> KVPages:
        """The same as shardings on a mesh."""
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs())

    # what follows is traced, on the heads of one device

    def write(
        self,
        held: KVPages,
        layer: Layer,
        k: jax.Array,  # [T, KVH, head_dim]
        v: jax.Array,
        page_ids: jax.Array,  # int32[T]
        offsets: jax.Array,  # int32[T]
    ) -> KVPages:
        """The cache with T tokens of a layer written, see `pallas_kernels.write_kv`."""
        options = {"first_page": self._first_page(layer), **self.backends.write_options}
        rows = k.shape[1] * self.backends.head_rows, self.head_dim // self.backends.head_rows
        k, v = (part.reshape(-1, *rows) for part in (k, v))
        if self.format.token_scales:
            pages = ScaledPages(held.pages, *_by_head(held))
            written = write_kv_scaled(pages, k, v, page_ids, offsets, **options)
            scales = (scale.reshape(scale.shape[0], -1) for scale in written[1:])
            return KVPages(written.kv_pages, *scales)
        options |= self._static(layer)
        return KVPages(write_kv(held.pages, k, v, page_ids, offsets, **options))

    def rotate_and_write(
        self, held: KVPages, layer: Layer, *operands: jax.Array, **options: Any
    ) -> tuple[jax.Array, KVPages]:
        """`pallas_kernels.rotate_and_write`: qkv, cos and sin, page ids and offsets -> q, cache."""
        qkv, cos, sin, *where = operands
        options |= {"first_page": self._first_page(layer), **self.backends.rotate_and_write_options}
        q, pages = rotate_and_write(qkv, cos, sin, held.pages, *where, **options)
        return q, KVPages(pages)

    def decode(
        self,
        held: KVPages,
        layer: Layer,
        q: jax.Array,  # [B, H, head_dim] or [B, Q, H, head_dim]
        page_table: jax.Array,  # int32[B, P]
        kv_lens: jax.Array,  # int32[B]
        **options: Any,
    ) -> jax.Array:
        """Attention of decode rows, see `pallas_kernels.paged_decode_attention`."""
        options |= self._read_options(held, layer) | self.backends.decode_options
        return paged_decode_attention(q, held.pages, page_table, kv_lens, **options)

    def decode_and_write(
        self, held: KVPages, layer: Layer, *operands: jax.Array, **options: Any
    ) -> tuple[jax.Array, KVPages]:
        """`pallas_kernels.paged_decode_and_write`: q, k, v, page table, lengths -> out, cache."""
        q, k, v, *where = operands
        options |= self._read_options(held, layer) | self.backends.decode_and_write_options
        out, pages = paged_decode_and_write(q, k, v, held.pages, *where, **options)
        return out, KVPages(pages)

    def prefill(
        self,
        held: KVPages,
        layer: Layer,
        q: jax.Array,  # [C, H, head_dim]
        page_table: jax.Array,  # int32[N, P]
        lanes: PrefillLanes,
        last_seen: jax.Array | None,  # int32[C]
        looks_ahead: jax.Array | None,  # bool[]
        **options: Any,
    ) -> jax.Array:
        """Attention of packed chunks, see `pallas_kernels.paged_prefill_attention`.

        A kernel whose rows cannot look ahead computes every step in which none does.
        """
        options |= self._read_options(held, layer)

        def attend(last_seen: jax.Array | None) -> jax.Array:
            chosen = options | self.backends.prefill_options(ahead=last_seen is not None)
            chosen["last_seen"] = last_seen
            return paged_prefill_attention(q, held.pages, page_table, lanes, **chosen)

        if last_seen is None or self.backends.sees_ahead:
            return attend(last_seen)
        assert looks_ahead is not None
        attended: jax.Array = lax.cond(looks_ahead, lambda: attend(last_seen), lambda: attend(None))
        return attended

    def _first_page(self, layer: Layer) -> int | jax.Array:
        return self.groups.place(layer)[1] * self.num_pages

    def _static(self, layer: Layer) -> dict[str, Any]:
        if self.scales is None:
            return {}
        both = {"k_scale": self.scales.k, "v_scale": self.scales.v}
        if isinstance(layer, int):
            return {name: jnp.float32(of_layers[layer]) for name, of_layers in both.items()}
        return {name: jnp.array(of, jnp.float32)[layer.number] for name, of in both.items()}

    def _read_options(self, held: KVPages, layer: Layer) -> dict[str, Any]:
        scales = self._static(layer)
        if self.format.token_scales:
            scales = dict(zip(("k_scale", "v_scale"), _by_head(held), strict=True))
        return {"first_page": self._first_page(layer), **scales}


def _by_head(held: KVPages) -> tuple[jax.Array, jax.Array]:
    """The scales of keys and values as kernels take them, [places, kv_heads, page_size]."""
    assert held.k_scale is not None and held.v_scale is not None
    by_head = scales_shape(held.pages.shape)
    return held.k_scale.reshape(by_head), held.v_scale.reshape(by_head)
