"""Tiles and bytes of a model's linear layers and attention on one core with AMX, counted.

    python -m benchmarks.verify.tile_counts
    python -m benchmarks.verify.tile_counts --shapes llama-125m --rows 64 512 --bits 16 8 4

The kernels' own source runs against an emulated matrix unit (`emulated_tiles.h` of the tests), and
every line that a tile reads or writes goes through a model of one core's caches: set-associative,
the least recently used line leaves, a prefetch brings into the second level. So this needs no such
CPU, and says nothing of time. The lm head gets at most 64 rows: those that are sampled.

Results are counted beside: cache lines that are written in parts, and bytes that are copied in
memory on the way to a product (rows that are rounded to 8 bits) or from its sums to the results
(gated ones of 16 bits wait for the rest of their line). Prompts of as many tokens as rows come
first: their attention, one layer, with the lines of keys, values and queries that are packed.

What is ideal: every tile of sums meets every tile of inputs once (products), one tile load a
product, and weights and x come from memory once.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from benchmarks.verify.tile_counts.counting import (
    Caches,
    Counts,
    Emulator,
    Layer,
    Prompt,
    TileCounts,
)

MIB = 1 << 20
GROUP = 128  # inputs that share a scale of 4-bit weights
HEAD, SAMPLED = "lm head", 64  # its name, and the most rows it gets


@dataclass(frozen=True)
class Named:
    name: str
    depth: int
    outputs: int
    gated: bool = False


def linear_layers(shape: dict[str, int]) -> list[Named]:
    """The products of a decoder layer as the engine calls them, and the lm head."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim = shape.get("head_dim", hidden // heads)
    return [
        Named("qkv", hidden, (heads + 2 * kv_heads) * head_dim),
        Named("output", heads * head_dim, hidden),
        Named("gate and up", hidden, 2 * inner, gated=True),
        Named("down", inner, hidden),
        Named(HEAD, hidden, shape["vocab_size"]),
    ]


def row(named: Named, layer: Layer, counts: Counts) -> str:
    """A line of the table."""
    ideal = layer.ideal_products
    needed = layer.weight_bytes + layer.row_bytes
    read = counts.memory + counts.ahead_memory
    cells = [
        named.name,
        f"{layer.depth} x {layer.outputs}",
        str(layer.bits),
        str(layer.rows),
        f"{counts.loads:,}",
        f"{counts.products:,}",
        f"{counts.products / ideal:.2f}",
        f"{counts.loads / counts.products:.2f}",
        *(f"{size / MIB:.2f}" for size in (counts.first, counts.second, counts.third)),
        f"{read / MIB:.2f}",
        f"{read / needed:.2f}",
        f"{counts.partial_lines:,}",
        f"{counts.copied / MIB:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def prompt_of(shape: dict[str, int], tokens: int) -> Prompt:
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim", shape["hidden_size"] // heads)
    return Prompt(tokens, 0, heads, shape["num_key_value_heads"], head_dim)


def prompt_row(prompt: Prompt, counts: TileCounts) -> str:
    """A line of the table of prompts."""
    numbers = (
        prompt.tokens,
        counts.loads,
        counts.products,
        counts.stores,
        counts.packed_lines,
        counts.partial_lines,
        counts.copied,
    )
    return f"| {' | '.join(f'{n:,}' for n in numbers)} |"


PROMPT_HEADING = (
    "| prompt | tile loads | products | stores | packed lines | partial lines | copied, bytes |"
)
HEADING = (
    "| product | K x N | bits | M | tile loads | products | of the ideal | loads a product | "
    "L1, MiB | L2 | L3 | memory | of the ideal | partial lines | copied, MiB |"
)


def main(words: list[str] | None = None) -> int:
    # imported where it is used: the shapes come with the engine
    from jaxserve.models.known_shapes import SHAPES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verify.tile_counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ["llama-125m", "llama-1b"]
    parser.add_argument("--shapes", nargs="+", default=default, choices=sorted(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--bits", nargs="+", type=int, default=[16, 8], choices=[16, 8, 4])
    parser.add_argument(
        "--cache-kib",
        nargs=3,
        type=int,
        default=[48, 2048, 16384],
        metavar=("L1", "L2", "L3"),
        help="of one core, the third level its share (default: %(default)s)",
    )
    options = parser.parse_args(words)
    if min(options.rows) < 1:
        parser.error("--rows are numbers above 0")
    caches = Caches(tuple(1024 * size for size in options.cache_kib), (12, 16, 16))
    if not caches.valid:
        parser.error(
            f"--cache-kib {options.cache_kib}: no power of two of sets of 12, 16 and 16 ways"
        )
    emulator = Emulator()
    for name in options.shapes:
        print(f"\n{name}\n\n{PROMPT_HEADING}\n|{'---|' * 7}")
        for tokens in options.rows:
            prompt = prompt_of(SHAPES[name], tokens)
            print(prompt_row(prompt, emulator.count_prompt(prompt)), flush=True)
        print(f"\n{HEADING}\n|{'---|' * 15}")
        for named in linear_layers(SHAPES[name]):
            for bits in options.bits:
                if bits == 4 and (named.name == HEAD or named.depth % GROUP):
                    continue  # the head is not quantised to 4 bits
                for rows in options.rows:
                    if named.name == HEAD and rows > SAMPLED:
                        continue
                    group = GROUP if bits == 4 else named.depth
                    layer = Layer(rows, named.depth, named.outputs, bits, group, named.gated)
                    print(row(named, layer, emulator.count(layer, caches)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
