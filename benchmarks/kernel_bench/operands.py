"""Random pages on the device, more of them than any cache holds."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_bench.cases import DecodeCase

LONGEST_PROGRAM = 16  # operations in one program
PROGRAM_SECONDS = 1e-3  # of an operation after which fewer are enough
MOST_ROTATIONS = 64
SAMPLE_PAGES = 4096  # random pages that are made; the pool repeats them
INT8_SCALE = 1 / 32  # value of 1 in int8 pages


class Pool(NamedTuple):
    """Layers of pages, as an engine holds them, and the tables that name them.

    Attributes:
        kv_pages: every layer's pages behind one another; page 0 has no owner.
        tables: int32[B, P] for each rotation: the pages of its first layer.
        layer_pages: pages of one layer, which is what the next layer's page ids are ahead.
        layers: operations of one program; layer l reads the pages of layer l % copies.
        copies: layers that have pages of their own within one rotation.
    """

    kv_pages: jax.Array  # [NP, page_size, 2, KVH, D]
    tables: list[jax.Array]
    layer_pages: int
    layers: int
    copies: int

    def first_page(self, layer: int) -> int:
        """The number that a program adds to the page ids of a layer."""
        return layer % self.copies * self.layer_pages


def layout(case: DecodeCase, memory: int, cold_bytes: int) -> tuple[int, int, int]:
    """Layers of one program, layers with pages of their own in it, and rotations.

    Raises:
        MemoryError: one layer's pages do not fit.
    """
    if case.layer_bytes > memory:
        need, have = case.layer_bytes / 2**30, memory / 2**30
        raise MemoryError(f"one layer has {need:.1f} GiB of pages, {have:.1f} GiB are there")
    wanted = math.ceil(cold_bytes / case.layer_bytes)
    copies = max(1, min(wanted, memory // case.layer_bytes))
    guess = case.layer_bytes / 3e12  # seconds; only the length of a program depends on it
    layers = max(2, min(LONGEST_PROGRAM, math.ceil(PROGRAM_SECONDS / max(guess, 1e-9))))
    distinct = min(layers, copies)
    return layers, distinct, max(1, min(MOST_ROTATIONS, copies // distinct))


def make_pool(case: DecodeCase, memory: int, cold_bytes: int) -> Pool:
    """Random pages in random order for every token of the case."""
    layers, distinct, rotations = layout(case, memory, cold_bytes)
    layer_pages = case.slots * case.pages
    total = layer_pages * distinct * rotations + 1
    sample = min(total, SAMPLE_PAGES)

    @jax.jit
    def build() -> jax.Array:
        shape = (sample, case.page_size, 2, case.kv_heads, case.head_dim)
        tile = jax.random.normal(jax.random.key(0), shape, jnp.float32)
        if case.dtype == "int8":
            tile = jnp.clip(jnp.round(tile / INT8_SCALE), -127, 127)
        return tile.astype(case.dtype)[jnp.arange(total) % sample]

    tables = page_tables(case, rotations, distinct * layer_pages)
    return Pool(build(), tables, layer_pages, layers, distinct)


def page_tables(case: DecodeCase, rotations: int, step: int) -> list[jax.Array]:
    """int32[B, P] for each rotation, `step` pages apart; entries behind a request's pages are 0."""
    order = 1 + np.random.default_rng(0).permutation(case.slots * case.pages).astype(np.int32)
    counts = [-(-length // case.page_size) for length in case.lengths]
    held = np.arange(max(counts)) < np.array(counts)[:, None]
    table = np.zeros(held.shape, np.int32)
    table[held] = order[: sum(counts)]
    return [jnp.asarray(np.where(held, table + turn * step, 0)) for turn in range(rotations)]


def queries(rows: int, case: DecodeCase) -> jax.Array:  # [rows, H, D]
    """Random queries with the usual factor of the scores inside: every candidate's scale is 1."""
    key = jax.random.key(1)
    plain = jax.random.normal(key, (rows, case.heads, case.head_dim), jnp.float32)
    return (plain * case.head_dim**-0.5).astype(case.dtype)
