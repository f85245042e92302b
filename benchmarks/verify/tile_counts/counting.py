"""The emulated matrix unit, compiled with the kernels' source and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pallas_kernels.native import build
from tests.pallas_kernels.native import emulated_unit

DRIVER = Path(__file__).with_name("driver.cc")
KERNELS = ("linear.cc", "linear_in_groups.cc", "paged_attention.cc")
LINE = 64  # bytes


@dataclass(frozen=True)
class Caches:
    """Sizes in bytes and ways of the three levels; their sets are powers of two."""

    sizes: tuple[int, ...]
    ways: tuple[int, ...]

    @property
    def valid(self) -> bool:
        sets = [size / (LINE * ways) for size, ways in zip(self.sizes, self.ways)]
        return all(n >= 1 and n.is_integer() and int(n).bit_count() == 1 for n in sets)


@dataclass(frozen=True)
class Layer:
    """One call: x [rows, depth] in bfloat16, a weight [outputs, depth] of `bits`."""

    rows: int
    depth: int
    outputs: int
    bits: int
    group: int
    gated: bool = False
    normed: bool = False

    @property
    def ideal_products(self) -> int:
        """Products of whole tiles that hold the call; a group of few inputs has its own."""
        tile_inputs = 32 if self.bits == 16 else 64
        groups = self.depth // self.group
        return -(-self.rows // 16) * -(-self.outputs // 16) * groups * -(-self.group // tile_inputs)

    @property
    def weight_bytes(self) -> int:
        return self.outputs * self.depth * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Of x as tiles take it."""
        return -(-self.rows // 16) * 16 * self.depth * (2 if self.bits == 16 else 1)


@dataclass(frozen=True)
class Prompt:
    """The attention of a prompt's last `tokens` tokens, behind `context` others, in bfloat16."""

    tokens: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one call, and what is written beside them.

    Attributes:
        asking_steps: steps of products after which lines are asked for ahead.
        packed_lines: lines of 64 bytes that are written for tiles to load.
        partial_lines: lines of results, or of a softmax's weights, that a write covers in part.
        copied: bytes that pass through memory outside tiles on their way to a product, or from
            its sums to results.
    """

    loads: int
    products: int
    stores: int
    asking_steps: int
    packed_lines: int
    partial_lines: int
    copied: int


@dataclass(frozen=True)
class Counts(TileCounts):
    """Also bytes of tiles by where they were found; `ahead` are prefetches."""

    first: int
    second: int
    third: int
    memory: int
    ahead_second: int
    ahead_third: int
    ahead_memory: int


class Emulator:
    """The kernels on the emulated unit.

    Raises:
        BuildError: there is no compiler, or it fails.
    """

    def __init__(self) -> None:
        compiler = build.find_compiler()
        if compiler is None:
            raise build.BuildError(f"no C++ compiler ({', '.join(build.COMPILERS)}) is on PATH")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "tile_counts.so"
            sources = [str(DRIVER), *(str(build.SOURCES / name) for name in KERNELS)]
            # less optimised: it compiles in a third of the time, and what is counted is the same
            command = [str(compiler), *build.FLAGS, "-O1", *emulated_unit.FLAGS, "-shared"]
            command += ["-I", str(build.SOURCES), *sources, "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise build.BuildError(f"compiling the emulated unit failed: {done.stderr[:2000]}")
            self._library = ctypes.CDLL(str(library))
        for function in (self._library.jaxserve_count_tiles, self._library.jaxserve_count_prefill):
            function.restype = ctypes.c_char_p

    def count(self, layer: Layer, caches: Caches) -> Counts:
        """The cost of a call.

        Raises:
            ValueError: the kernel refuses it; says why.
        """
        found = (ctypes.c_int64 * 15)()
        numbers = (layer.rows, layer.depth, layer.outputs, layer.bits, layer.group)
        numbers += (layer.gated, layer.normed)
        refusal = self._library.jaxserve_count_tiles(
            *map(ctypes.c_int64, numbers),
            (ctypes.c_int64 * 3)(*caches.sizes),
            (ctypes.c_int64 * 3)(*caches.ways),
            found,
        )
        if refusal:
            raise ValueError(refusal.decode())
        first, second, third, memory, _, *ahead = (LINE * n for n in found[7:])
        return Counts(*found[:7], first, second, third, memory, *ahead)

    def count_prompt(self, prompt: Prompt) -> TileCounts:
        """The cost of a prompt's attention.

        Raises:
            ValueError: the kernel refuses it; says why.
        """
        found = (ctypes.c_int64 * 7)()
        numbers = (prompt.tokens, prompt.context, prompt.heads, prompt.kv_heads, prompt.head_dim)
        refusal = self._library.jaxserve_count_prefill(*map(ctypes.c_int64, numbers), found)
        if refusal:
            raise ValueError(refusal.decode())
        return TileCounts(*found)

    def multiply(self, product: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """c + a . b as one instruction does; tiles of 16 rows of 64 bytes.

        Args:
            product: 0 bfloat16 (as uint16), 1 unsigned by signed bytes, 2 signed by unsigned.
        """
        out = np.ascontiguousarray(c).copy()
        operands = [np.ascontiguousarray(x) for x in (a, b)] + [out]
        assert all(x.nbytes == 1024 for x in operands)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in operands]
        self._library.jaxserve_multiply_tile(ctypes.c_int64(product), *pointers)
        return out
