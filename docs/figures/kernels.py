"""The parts of each kernel, and what moves between them, as docs/kernels.md tells it."""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """A part: `place` is "memory" (of the device), "chip" (beside the arithmetic) or "compute"."""

    name: str
    place: str
    text: str


class Kernel(NamedTuple):
    """A figure: rows of boxes (None: nothing there), and arrows between their names."""

    name: str
    title: str
    rows: tuple[tuple[Box | None, ...], ...]
    arrows: tuple[tuple[str, str, str], ...]


def memory(name: str, text: str) -> Box:
    return Box(name, "memory", text)


def chip(name: str, text: str) -> Box:
    return Box(name, "chip", text)


def compute(name: str, text: str) -> Box:
    return Box(name, "compute", text)


KERNELS = (
    Kernel(
        "decode",
        "paged_decode_attention on Hopper (mosaic_gpu)",
        (
            (
                memory("pages", "KV pages\n[pages, page_size,\n2, KVH, D]"),
                chip("ring", "ring of stages\nin shared memory"),
                compute("scores", "S = K · Q^T\n[tokens, G]"),
                compute("values", "O += V^T · P^T\n[D, G]"),
            ),
            (
                memory("table", "page table,\nwork list of pieces"),
                chip("fetch", "fetching warp"),
                compute("softmax", "exp2, running max\nand sum, float32"),
                memory(
                    "result",
                    "row in one piece: result\nelse: partials, merged by\nthe block that ends last",
                ),
            ),
        ),
        (
            ("table", "fetch", "ids"),
            ("pages", "ring", "TMA a page"),
            ("fetch", "ring", "issues the copies"),
            ("ring", "scores", "ready"),
            ("scores", "softmax", ""),
            ("softmax", "values", "P^T"),
            ("values", "result", ""),
        ),
    ),
    Kernel(
        "prefill",
        "paged_prefill_attention on Hopper (mosaic_gpu)",
        (
            (
                memory("pages", "KV pages"),
                chip("ring", "ring of K and V"),
                compute("one", "consumer 1: 64 rows\nS = Q K^T, exp2, O += P V"),
                memory("result", "result: whole groups\nof 8 rows by TMA,\nragged ones row by row"),
            ),
            (
                memory("table", "work table of tiles,\nlongest first"),
                chip("producer", "producer warpgroup"),
                compute("two", "consumer 2: 64 rows,\nin turn"),
                None,
            ),
        ),
        (
            ("table", "producer", "page ids"),
            ("pages", "ring", "TMA a page"),
            ("producer", "ring", ""),
            ("ring", "one", ""),
            ("ring", "two", ""),
            ("one", "result", ""),
            ("two", "result", ""),
        ),
    ),
    Kernel(
        "tpu-decode",
        "paged_decode_and_write on TPUs (mosaic_tpu)",
        (
            (
                memory("pages", "HBM pages,\nwithout the new token"),
                chip("ring", "ring of 4 blocks\nin VMEM"),
                compute("mxu", "[H, D] x [tokens·KVH, D]^T\non the MXU, softmax"),
                memory("result", "result of slot b"),
            ),
            (
                memory("new", "new K and V\nof slot b"),
                chip("vmem", "VMEM"),
                compute("begin", "the slot's softmax\nbegins with them"),
                memory("place", "their place in the page,\nthe pool in place"),
            ),
        ),
        (
            ("pages", "ring", "DMA a page"),
            ("ring", "mxu", ""),
            ("mxu", "result", ""),
            ("new", "vmem", ""),
            ("vmem", "begin", ""),
            ("begin", "mxu", ""),
            ("begin", "place", "one DMA"),
        ),
    ),
    Kernel(
        "native",
        "attention on CPUs (native)",
        (
            (
                memory("pages", "KV pages"),
                chip("keys", "64 keys, transposed\nonce for all heads\nof the group"),
                compute("dots", "dot products,\nonline softmax,\nvalues"),
                memory("result", "the row's result"),
            ),
            (
                memory("items", "(slot, KV head, part),\nlongest first"),
                chip("threads", "threads of\nXLA's pool"),
                compute("parts", "sums of parts of\n512 tokens: the last\npart adds them"),
                None,
            ),
        ),
        (
            ("items", "threads", ""),
            ("threads", "keys", ""),
            ("pages", "keys", ""),
            ("keys", "dots", ""),
            ("dots", "result", ""),
            ("dots", "parts", "long rows"),
            ("parts", "result", ""),
        ),
    ),
    Kernel(
        "quantized-matmul",
        "quantized_matmul on Hopper (mosaic_gpu)",
        (
            (
                memory("weights", "weights: int8, e4m3,\nor int4 in groups"),
                chip("ring", "ring in\nshared memory"),
                compute("wide", "registers: widened\nto bfloat16"),
                compute("wgmma", "wgmma:\nout^T = W x^T"),
            ),
            (
                memory("x", "x [M, K]"),
                chip("inputs", "x^T in\nshared memory"),
                memory("out", "out; divided K:\nparts in float32"),
                compute("scale", "groups: each one's\nsum scaled in float32"),
            ),
        ),
        (
            ("weights", "ring", "TMA"),
            ("ring", "wide", ""),
            ("wide", "wgmma", "operand A"),
            ("x", "inputs", ""),
            ("inputs", "wgmma", "operand B"),
            ("wgmma", "scale", ""),
            ("scale", "out", ""),
        ),
    ),
    Kernel(
        "layer",
        "a layer's step on a GPU: what stands between the products adds parts and rounds rows",
        (
            (
                compute("qkv", "product qkv"),
                compute("rotate", "rotate_and_write"),
                compute("attend", "attention"),
                compute("out", "product out"),
            ),
            (
                compute("norm2", "residual_norm"),
                memory("pool", "KV pool, in place"),
                None,
                compute("norm1", "residual_norm"),
            ),
            (
                compute("down", "product down"),
                compute("silu", "finish_rows:\nsilu(gate) · up\n(one bf16 part: XLA)"),
                None,
                compute("gate", "product gate, up"),
            ),
        ),
        (
            ("qkv", "rotate", "parts"),
            ("rotate", "attend", "q"),
            ("rotate", "pool", "K and V rows"),
            ("attend", "out", "finish_rows"),
            ("out", "norm1", "parts"),
            ("norm1", "gate", "rows"),
            ("gate", "silu", "parts"),
            ("silu", "down", "rows"),
            ("down", "norm2", "parts"),
            ("norm2", "qkv", "next layer"),
        ),
    ),
    Kernel(
        "triton",
        "paged attention on Ampere, Ada and Blackwell (triton): decode and prefill",
        (
            (
                memory("pages", "KV pages, seen as\n[token rows, D]"),
                chip("blocks", "two blocks under way\nin shared memory"),
                compute("scores", "S = Q · K^T\nmax(16, group) rows\nx a block of tokens"),
                compute("softmax", "online softmax,\nO += P · V, float32"),
            ),
            (
                memory("table", "page table"),
                chip("ids", "page ids, read\na block ahead"),
                compute("merge", "merge kernel"),
                memory("result", "one part: result\nelse: partials"),
            ),
        ),
        (
            ("table", "ids", ""),
            ("ids", "blocks", "row numbers"),
            ("pages", "blocks", "cp.async"),
            ("blocks", "scores", "K"),
            ("scores", "softmax", ""),
            ("softmax", "result", ""),
            ("result", "merge", "partials"),
        ),
    ),
    Kernel(
        "matrix-unit",
        "linear on a CPU with AMX (native): one panel of 32 outputs",
        (
            (
                memory("weight", "weight [out, in],\n32 rows as they lie"),
                chip("panel", "panel in the caches\nwhile all rows pass"),
                compute("tiles", "2 x 2 tiles of sums,\na load a product"),
                compute("rest", "gate, residual,\nrounding"),
            ),
            (
                memory("x", "x [rows, in],\nrows with tokens"),
                chip("packed", "norm, packed as tiles\nonce a call"),
                memory("sums", "sums, where the inputs\ncome in blocks"),
                memory("out", "out [rows, out]"),
            ),
        ),
        (
            ("weight", "panel", ""),
            ("panel", "tiles", ""),
            ("x", "packed", ""),
            ("packed", "tiles", "16 rows"),
            ("tiles", "sums", "and back"),
            ("tiles", "rest", ""),
            ("rest", "out", ""),
        ),
    ),
    Kernel(
        "kept-threshold",
        "kept_threshold on NVIDIA GPUs (triton): one thread block a row",
        (
            (
                memory("row", "row of weights [V]"),
                compute("bounds", "14 bounds: tokens and\nmass that reach each"),
                chip("spans", "two spans: floor (top-k,\nmin-p), border (top-p)"),
                compute("narrow", "over 4,096 tokens\nleft: 8 times\nnarrower, twice at most"),
            ),
            (
                memory("bound", "bound: the least\nweight that is kept"),
                compute("halve", "halving on the list"),
                memory("list", "list of the tokens\nin the spans,\nmass above"),
                None,
            ),
        ),
        (
            ("row", "bounds", "read 1"),
            ("bounds", "spans", ""),
            ("spans", "narrow", "reads 2, 3"),
            ("spans", "list", "last read"),
            ("list", "halve", ""),
            ("halve", "bound", ""),
        ),
    ),
    Kernel(
        "grouped-linear",
        "grouped_linear: rows sorted by group, a weight a group",
        (
            (
                memory("rows", "rows sorted\nby group"),
                chip("block", "block of 8 to 128\nrows of one group"),
                compute("product", "dense product"),
                memory("out", "out, same order"),
            ),
            (
                memory("sizes", "rows a group"),
                chip("count", "blocks, counted on\nthe device"),
                memory("weight", "weight of that\ngroup alone"),
                None,
            ),
        ),
        (
            ("rows", "block", ""),
            ("block", "product", ""),
            ("product", "out", ""),
            ("sizes", "count", ""),
            ("count", "block", ""),
            ("weight", "product", ""),
        ),
    ),
)
