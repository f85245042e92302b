"""Records blocks of each of ggml's types and what gguf's own dequantiser makes of them.

Run where the package gguf is installed, which the tests do not need:
`python -m tests.checkpoints.gguf.record`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("dequantized.npz")
# where a block's float16 are, in halves, and how large: all other bytes may have any value
HALVES = {
    "Q4_0": ((0,), 1e-2), "Q4_1": ((0, 1), 1e-2), "Q5_0": ((0,), 5e-3), "Q5_1": ((0, 1), 5e-3),
    "Q8_0": ((0,), 1e-3), "Q2_K": ((40, 41), 4e-3), "Q3_K": ((54,), 1e-3), "Q4_K": ((0, 1), 3e-4),
    "Q5_K": ((0, 1), 1e-4), "Q6_K": ((104,), 3e-5), "IQ4_NL": ((0,), 1e-3), "IQ4_XS": ((0,), 5e-5),
}  # fmt: skip
BLOCKS = {32: 16, 256: 3}  # of a type, by the numbers of a block


def main() -> None:
    """Writes the file."""
    import gguf

    rng, arrays = np.random.default_rng(0), {}
    for name, (halves, size) in HALVES.items():
        type = gguf.GGMLQuantizationType[name]
        elements, width = gguf.GGML_QUANT_SIZES[type]
        blocks = rng.integers(0, 256, (BLOCKS[elements], width), np.uint8)
        scales = rng.uniform(size / 2, size, (len(blocks), len(halves)))
        blocks.view(np.float16)[:, list(halves)] = scales
        arrays[f"{name}.blocks"] = blocks
        arrays[f"{name}.values"] = gguf.dequantize(blocks, type)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
