"""What stays on the device between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.kv_cache import KVCache, KVPages


class DeviceState(NamedTuple):
    """Donated to every program and returned by it.

    S is `max_num_seqs`; row S of the tables is the trash row that unused rows read and write.

    Attributes:
        kv: the KV cache.
        page_table: int32[S + 1, P * G] page ids by slot, see `memory.manager.PageManager`.
        history: int32[S + 1, max_model_len + 1] token ids by slot and position.
        lengths: int32[S + 1] tokens of each slot whose keys and values are in pages; one more is
            known, which the slot's next decode row begins with.
        features: what features keep, by their names, see `Feature.zero_state`.
    """

    kv: KVPages
    page_table: jax.Array
    history: jax.Array
    lengths: jax.Array
    features: dict[str, Any]


@dataclass(frozen=True)
class StateShape:
    """The sizes of a device state.

    Attributes:
        cache: the KV cache.
        max_num_seqs: slots.
        max_model_len: tokens a slot.
        features: arrays (shape and dtype) of the features that keep any, by their names.
    """

    cache: KVCache
    max_num_seqs: int
    max_model_len: int
    features: dict[str, Any]

    def zeros(self) -> DeviceState:
        """A new state. Pages start as zeros: uninitialised memory could hold NaN."""
        shapes = self._shapes()
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    @property
    def table_bytes(self) -> int:
        """Bytes of all but the KV cache: tables with the trash row, and what features keep."""
        _, *rest = self._shapes()
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(rest))

    def shardings(self, mesh: Mesh) -> Any:
        """A `DeviceState` of shardings: KV heads over "model", the rest everywhere."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda _: everywhere, self._shapes())
        return shardings._replace(kv=self.cache.shardings(mesh))

    def abstract(self, mesh: Mesh) -> DeviceState:
        """The shapes, types and shardings, to compile for."""
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            self._shapes(),
            self.shardings(mesh),
        )

    def make(self, mesh: Mesh) -> DeviceState:
        """A new state on the devices of a mesh."""
        return jax.jit(self.zeros, out_shardings=self.shardings(mesh))()

    def _shapes(self) -> DeviceState:
        slots, pages = self.max_num_seqs + 1, -(-self.max_model_len // self.cache.page_size)
        pages *= self.cache.groups.pages.num_groups

        def array(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        return DeviceState(
            kv=self.cache.shapes(),
            page_table=array(slots, pages),
            history=array(slots, self.max_model_len + 1),
            lengths=array(slots),
            features=self.features,
        )
