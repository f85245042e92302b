"""The number of rows from which each native product of a linear layer is fastest, on this machine.

    python -m benchmarks.native_crossover
    python -m benchmarks.native_crossover --depth 2048 --outputs 5632 --rows 1 4 8 16 64

Dot products of rows, rows as lanes and, where the CPU has one, the matrix unit multiply the same
weights in turn, more of them than the caches hold; medians count. The last lines are the fewest
rows from which a product is never slower than the one before it: the limits of
`pallas_kernels/native/sources/paths.h`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import native as native_linear
from pallas_kernels.native import build, require
from pallas_kernels.native.paths import Path
from pallas_kernels.native.weights import NativeWeight, pack_native

CACHED_BYTES = 64 << 20  # of weights: more than what the caches hold
GROUP = 128
TYPES = ("bfloat16", "int8", "int4")


def has_tiles() -> bool:
    return {"amx_tile", "amx_bf16", "amx_int8"} <= build.cpu_features()


def weights(kind: str, outputs: int, depth: int, total: int) -> list[tuple]:
    """Weights of one type, `total` bytes of them or more, with their scales."""
    rng = np.random.default_rng(0)
    size = outputs * depth * {"bfloat16": 16, "int8": 8, "int4": 4}[kind] // 8
    made: list[tuple] = []
    for _ in range(-(-total // size)):
        if kind == "bfloat16":
            values = rng.standard_normal((outputs, depth), np.float32)
            made.append((jnp.asarray(values, jnp.bfloat16), None))
        elif kind == "int8":
            values = rng.integers(1, 256, (outputs, depth), np.uint8)
            made.append((jnp.asarray(values), jnp.ones(outputs, jnp.float32)))
        else:
            values = rng.integers(0, 16, (outputs, depth), np.uint8)
            stored = jnp.asarray(pack_native(values, nibbles=True))
            made.append((NativeWeight(stored, jnp.ones((depth // GROUP, outputs))), None))
    return made


def product(path: Path, kind: str) -> Callable[..., jax.Array]:
    """One product, compiled: (x, weight, scale) -> [rows, outputs]."""
    call = partial(
        native_linear.linear,
        activations="int8" if kind == "int4" else "float",
        bias=None,
        norm=None,
        residual=None,
        gated=False,
        out_dtype=jnp.dtype("bfloat16"),
        path=path,
    )
    return jax.jit(lambda x, weight, scale: call(x, weight, scale=scale))


def milliseconds(kind: str, rows: int, held: list[tuple], depth: int, rounds: int) -> dict:
    """The median of a call by path; rounds alternate between the paths."""
    paths = [Path.DOTS] if kind == "int4" else [Path.DOTS, Path.LANES]
    paths += [Path.TILES] if has_tiles() else []
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, depth)), jnp.bfloat16)
    calls = {path: product(path, kind) for path in paths}
    times: dict[Path, list[float]] = {path: [] for path in paths}
    for number in range(rounds + 1):  # the first compiles
        for path, call in calls.items():
            begin = time.perf_counter()
            for weight, scale in held:
                out = call(x, weight, scale)
            jax.block_until_ready(out)
            if number:
                times[path].append((time.perf_counter() - begin) / len(held) * 1e3)
    return {path: statistics.median(found) for path, found in times.items()}


def crossover(table: dict[int, dict], slower: Path, faster: Path) -> int | None:
    """The fewest rows from which on `faster` is never the slower of the two."""
    found = None
    for rows in sorted(table, reverse=True):
        if table[rows][faster] > table[rows][slower]:
            break
        found = rows
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.native_crossover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--depth", type=int, default=768, help=f"inputs, a multiple of {GROUP}")
    add("--outputs", type=int, default=4096)
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 64])
    add("--types", nargs="+", choices=TYPES, default=list(TYPES))
    add("--rounds", type=int, default=5)
    add("--weight-mib", type=int, default=CACHED_BYTES >> 20, help="of all weights of a type")
    options = parser.parse_args(words)
    if min(options.rows) < 1 or options.depth < 1 or options.depth % GROUP:
        parser.error(f"--rows are above 0 and --depth is a multiple of {GROUP}")
    if min(options.outputs, options.rounds, options.weight_mib) < 1:
        parser.error("--outputs, --rounds and --weight-mib are above 0")
    require()
    for kind in options.types:
        held = weights(kind, options.outputs, options.depth, options.weight_mib << 20)
        table = {
            rows: milliseconds(kind, rows, held, options.depth, options.rounds)
            for rows in options.rows
        }
        paths = list(table[options.rows[0]])
        print(f"\n{kind}, K {options.depth}, N {options.outputs}: ms a call\n")
        names = " | ".join(path.name.lower() for path in paths)
        print(f"| M | {names} |\n|{'---|' * (len(paths) + 1)}")
        for rows, found in table.items():
            print(f"| {rows} | {' | '.join(f'{found[path]:.3f}' for path in paths)} |")
        for slower, faster in pairwise(paths):
            rows_from = crossover(table, slower, faster)
            words_of = f"from {rows_from} rows on" if rows_from else "for none of these rows"
            print(
                f"\n{faster.name.lower()} rather than {slower.name.lower()}: {words_of}", flush=True
            )
    if not has_tiles():
        print("\nThis CPU has no matrix unit (amx_tile, amx_bf16, amx_int8).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
