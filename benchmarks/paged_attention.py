#!/usr/bin/env python3
"""The cost of paging in decode attention: pages in random order against contiguous arrays.

Four candidates take turns on the same numbers of rows and tokens: the engine's kernel with the
pages of each request scattered over the pool, and with them in order; the same kernel with one page
a request, as long as its context, which is a contiguous cache; and plain XLA over contiguous arrays
[rows, tokens, heads, head_dim]. Each has as many copies of the data as exceed the caches. Printed
are microseconds a call, the first candidate's time over each other's, and GB/s; a figure beyond
what this device reads is an error.

    python -m benchmarks.paged_attention --rows 1 16 64 --contexts 128 1024 4096
    python -m benchmarks.paged_attention --quick
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_bench.timing import (
    Candidate,
    interleaved,
    jax_candidate,
    relative_difference,
)
from jaxserve.bench.device_limits import measure_limits
from jaxserve.bench.measure import describe, environment, write_report
from pallas_kernels import choose_backends, paged_decode_attention

SCATTERED, ORDERED, ONE_PAGE, PLAIN = "pages", "pages in order", "one page", "contiguous, XLA"
NAMES = (SCATTERED, ORDERED, ONE_PAGE, PLAIN)
COLUMNS = ("rows", "context", *(f"{name}, us" for name in NAMES), "paging costs", "GB/s")
TOLERANCE = 0.02  # of bfloat16 sums in another order
ITEM = 2  # bytes of a bfloat16
MOST_COPIES = 64


def contiguous(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attention over arrays [B, L, KVH, D]: float32 sums, as the kernels have."""
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, keys.shape[2], -1, dim)
    scores = jnp.einsum("bkgd,blkd->bkgl", grouped, keys, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(scores * dim**-0.5, axis=-1).astype(values.dtype)
    out = jnp.einsum("bkgl,blkd->bkgd", shares, values, preferred_element_type=jnp.float32)
    return out.reshape(rows, heads, dim).astype(q.dtype)


def candidates(rows: int, context: int, options: argparse.Namespace) -> list[Candidate]:
    """All of one case, with equal keys and values."""
    heads, kv_heads, dim = options.heads, options.kv_heads, options.head_dim
    read = rows * context * 2 * kv_heads * dim * ITEM
    copies = max(1, min(MOST_COPIES, math.ceil((options.cold_mib << 20) / read)))
    pages = context // options.page_size
    rng = np.random.default_rng(0)
    keys_of = [jax.random.key(number) for number in range(copies)]
    shape = (rows, context, 2, kv_heads, dim)
    held = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys_of]
    q = jax.random.normal(jax.random.key(-1), (rows, heads, dim), jnp.bfloat16)
    lengths = jnp.full(rows, context, jnp.int32)
    device = jax.devices()[0]
    backend = choose_backends(device.device_kind, device.platform).decode
    attend = jax.jit(functools.partial(paged_decode_attention, scale=dim**-0.5, backend=backend))

    def paged(one: jax.Array, page: int, order: np.ndarray) -> tuple[Any, ...]:
        parts = one.reshape(-1, page, 2, kv_heads, dim)
        pool = jnp.zeros((len(parts) + 1, *parts.shape[1:]), one.dtype).at[1 + order].set(parts)
        return q, pool, jnp.asarray(1 + order, jnp.int32).reshape(rows, -1), lengths

    in_order = np.arange(rows * pages)
    given = {
        SCATTERED: [paged(o, options.page_size, rng.permutation(rows * pages)) for o in held],
        ORDERED: [paged(o, options.page_size, in_order) for o in held],
        ONE_PAGE: [paged(o, context, np.arange(rows)) for o in held],
        PLAIN: [(q, jnp.array(o[:, :, 0]), jnp.array(o[:, :, 1])) for o in held],
    }
    return [
        jax_candidate(
            name,
            jax.jit(contiguous) if name == PLAIN else attend,
            operands,
            1,
            short_series=options.quick,
        )
        for name, operands in given.items()
    ]


def measure(rows: int, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table.

    Raises:
        AssertionError: the candidates' results differ by more than rounding.
    """
    found = candidates(rows, context, options)
    results = [candidate.result() for candidate in found if candidate.result is not None]
    for candidate, result in zip(found, results, strict=True):
        difference = relative_difference(result, results[0])
        assert difference < TOLERANCE, f"{candidate.name} differs by {difference:.3f}"
    seconds, failed = interleaved(found)
    assert not failed, failed
    read = rows * context * 2 * options.kv_heads * options.head_dim * ITEM
    least = min(seconds[name] for name in NAMES if name != SCATTERED)
    values = (
        rows,
        context,
        *(1e6 * seconds[name] for name in NAMES),
        seconds[SCATTERED] / least - 1,
        read / seconds[SCATTERED] / 1e9,
    )
    return dict(zip(COLUMNS, values, strict=True))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paged_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 16, 64])
    add("--contexts", type=int, nargs="+", default=[128, 1024, 4096], help="tokens of every row")
    add("--heads", type=int, default=12)
    add("--kv-heads", type=int, default=4)
    add("--head-dim", type=int, default=64)
    add("--page-size", type=int, default=16)
    add("--cold-mib", type=int, default=128, help="of the copies of a case: more than the caches")
    add("--quick", action="store_true", help="one tiny case, whose figures mean nothing")
    add("--output-json", type=Path)
    return parser


def main(words: list[str] | None = None) -> int:
    """1 where a figure is beyond what this device reads."""
    parser = build_parser()
    options = parser.parse_args(words)
    if options.quick:
        options.rows, options.contexts, options.cold_mib = [2], [64], 1
    sizes = (options.heads, options.kv_heads, options.head_dim, options.page_size, options.cold_mib)
    if min(*options.rows, *options.contexts, *sizes) < 1 or options.heads % options.kv_heads:
        parser.error("all sizes are above 0, and --heads is a multiple of --kv-heads")
    if wrong := [c for c in options.contexts if c % options.page_size]:
        parser.error(f"--contexts {wrong}: multiples of --page-size {options.page_size}")
    limits = measure_limits(options.cold_mib << 20, quick=options.quick)
    print(f"{describe(environment())}, {limits.text()}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows, impossible = [], []
    for context in options.contexts:
        for count in options.rows:
            row = measure(count, context, options)
            rows.append(row)
            *told, cost, rate = row.values()
            cells = [f"{value:.0f}" for value in told]
            print(f"| {' | '.join(cells)} | {cost:+.1%} | {rate:.1f} |", flush=True)
            seconds = row[f"{SCATTERED}, us"] / 1e6
            if not options.quick:
                what = f"{count} rows of {context}"
                impossible += limits.beyond(what, seconds, 0, rate * 1e9 * seconds, 16)
    for line in impossible:
        print(f"IMPOSSIBLE: {line}", file=sys.stderr)
    machine = {"machine": limits.text()}
    write_report(options.output_json, rows=rows, environment=machine)
    return 1 if impossible else 0


if __name__ == "__main__":
    sys.exit(main())
