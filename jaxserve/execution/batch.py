"""One step's input as a flat int32 blob: one layout table, written by NumPy, read inside the step.

A step takes everything that changes from the host in ONE array, because every further array from
the host costs a compiled call tens of microseconds. Floats travel as their bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.variant import Variant

# Columns of `row_params`; the first six are sampling parameters, the rest penalties.
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
TOP_K, SEED_HIGH, SEED_LOW = range(6, 9)
NUM_ROW_PARAMS = 9
FLOAT_COLUMNS = 6


class Field(NamedTuple):
    """Where one array lies in the blob."""

    offset: int
    size: int
    shape: tuple[int, ...]
    is_float: bool


def _place(wanted: list[tuple[str, tuple[int, ...], bool]]) -> dict[str, Field]:
    """Lay arrays, given as (name, shape, is_float), one behind the other."""
    table, offset = {}, 0
    for name, shape, is_float in wanted:
        table[name] = Field(offset, math.prod(shape), shape, is_float)
        offset += table[name].size
    return table


def _views(fields: dict[str, Field], flat: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of a flat int32 array, by name."""
    views = {}
    for name, (offset, size, shape, is_float) in fields.items():
        part = flat[offset : offset + size]
        views[name] = (part.view(np.float32) if is_float else part).reshape(shape)
    return views


@dataclass(frozen=True)
class StepShape:
    """The static shape of one program.

    Attributes:
        num_decode: B, decode rows.
        num_prefill: C, tokens of the prefill region; 0 for a decode program.
        num_lanes: N, requests that may share the region; 0 for a decode program.
        variant: what the sampler computes.
    """

    num_decode: int
    num_prefill: int
    num_lanes: int
    variant: Variant

    @property
    def num_rows(self) -> int:
        """R, rows that sample: decode rows, then lanes."""
        return self.num_decode + self.num_lanes

    @property
    def name(self) -> str:
        kind = f"decode[{self.num_decode}]"
        if self.num_prefill:
            kind = f"mixed[{self.num_decode}, {self.num_prefill}]"
        return f"{kind} {self.variant.name.lower()}"


@dataclass(frozen=True)
class BlobLayout:
    """The layout table: field name -> place in the blob.

    Fields (R rows, C region tokens, N lanes, U page updates, V vocabulary):
        slot int32[R]: row of the device state; `max_num_seqs` (the trash row) where unused.
        position int32[R]: position of the last computed token; the sampled one follows it.
        prompt_len int32[R]: tokens of the row's prompt.
        updates int32[3, U]: page-table entries (slot, index, page) to write first.
        params int32[R, 9]: sampling parameters by column.
        token, token_lane, token_position int32[C]: the region; unused tokens have lane N.
        lane_start, lane_length, lane_context int32[N]: see `pallas_kernels.PrefillLanes`.
        target int32[C]: the prompt token after each region token, for prompt logprobs.
        bias float32[R, V]: added to the logits.
    """

    shape: StepShape
    page_size: int
    vocab_size: int

    @property
    def num_updates(self) -> int:
        """Most page-table entries a step can touch: one a decode row, the pages of all chunks."""
        s = self.shape
        return s.num_decode + s.num_prefill // self.page_size + 2 * s.num_lanes

    @cached_property
    def fields(self) -> dict[str, Field]:
        s = self.shape
        rows, region, lanes = (s.num_rows,), (s.num_prefill,), (s.num_lanes,)
        wanted: list[tuple[str, tuple[int, ...], bool]] = [
            ("slot", rows, False),
            ("position", rows, False),
            ("prompt_len", rows, False),
            ("updates", (3, self.num_updates), False),
        ]
        if s.variant >= Variant.PLAIN:
            wanted.append(("params", (s.num_rows, NUM_ROW_PARAMS), False))
        if s.num_prefill:
            wanted += [(name, region, False) for name in ("token", "token_lane", "token_position")]
            wanted += [(n, lanes, False) for n in ("lane_start", "lane_length", "lane_context")]
        if s.variant >= Variant.SCORED:
            wanted.append(("target", region, False))
        if s.variant >= Variant.MASKED:
            wanted.append(("bias", (s.num_rows, self.vocab_size), True))
        return _place(wanted)

    @cached_property
    def size(self) -> int:
        return sum(field.size for field in self.fields.values())

    def views(self, blob: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of a NumPy blob, by field name."""
        return _views(self.fields, blob)

    def read(self, blob: jax.Array) -> dict[str, jax.Array]:
        """The fields of a blob inside a traced step, by field name."""
        out = {}
        for name, field in self.fields.items():
            flat = blob[field.offset : field.offset + field.size]
            if field.is_float:
                flat = jax.lax.bitcast_convert_type(flat, jnp.float32)
            out[name] = flat.reshape(field.shape)
        return out


@dataclass(frozen=True)
class ResultLayout:
    """One step's output as a flat int32 array (R rows, K top logprobs, C region tokens).

    Fields: token [R]; with logprobs also logprob, rank [R], top_id, top_logprob [R, K]; a SCORED
    program adds the same four for the region's tokens, prefixed `prompt_`.
    """

    shape: StepShape
    num_logprobs: int

    @cached_property
    def fields(self) -> dict[str, Field]:
        s = self.shape
        wanted: list[tuple[str, tuple[int, ...], bool]] = [("token", (s.num_rows,), False)]
        if s.variant >= Variant.RICH:
            wanted += self._logprob_fields("", s.num_rows)
        if s.variant >= Variant.SCORED:
            wanted += self._logprob_fields("prompt_", s.num_prefill)
        return _place(wanted)

    def _logprob_fields(self, prefix: str, rows: int) -> list[tuple[str, tuple[int, ...], bool]]:
        top = (rows, self.num_logprobs)
        return [
            (prefix + "logprob", (rows,), True),
            (prefix + "rank", (rows,), False),
            (prefix + "top_id", top, False),
            (prefix + "top_logprob", top, True),
        ]

    @cached_property
    def size(self) -> int:
        return sum(field.size for field in self.fields.values())

    def write(self, values: dict[str, Any]) -> jax.Array:
        """Concatenate traced arrays into the result."""
        parts = []
        for name, field in self.fields.items():
            value = values[name]
            if field.is_float:
                value = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
            parts.append(value.astype(jnp.int32).reshape(-1))
        return jnp.concatenate(parts)

    def views(self, result: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a fetched result, by name."""
        return _views(self.fields, result)
