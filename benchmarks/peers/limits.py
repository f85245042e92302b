"""Whether a figure is possible: the least work of a cell against what the machine can do.

    python -m benchmarks.peers.limits --bytes 250000000

prints the machine's limits as JSON. The work is a lower bound for any engine without a cache of
prompts: every prompt token and all outputs but the last pass through the linear layers once, and a
step reads every weight once. A figure beyond the limits says that something was not computed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cores import use_cores
from benchmarks.peers.workload import Cell
from jaxserve.bench.device_limits import Limits, Product, measure_limits, usable_cores
from jaxserve.models.config import ModelConfig
from jaxserve.models.cost import Row, flops_of, weight_numbers

BITS = {"bfloat16": 16, "float32": 32, "int8": 8, "q8_0": 8}
LEAST_BITS = 4  # of a weight in any other format
KV_BYTES = 1  # of a number in the KV cache at least


@dataclass(frozen=True, slots=True)
class LeastWork:
    """The least work of a cell: floating-point operations, and bytes that are read."""

    flops: int
    read_bytes: int


def weight_bits(dtype: str, settings: Mapping[str, Any]) -> int:
    """Bits of a weight in an engine of these settings."""
    chosen = settings.get("quantization") or settings.get("weights") or dtype
    return BITS.get(chosen, LEAST_BITS)


def least_work(cell: Cell, config: ModelConfig, bits: int) -> LeastWork:
    """The least that serving a cell takes, with weights of so many bits."""
    lengths = [(len(p), o) for p, o in zip(cell.prompts, cell.output_lens, strict=True)]
    # the last token of a request is sampled and passes through nothing
    rows = [Row(0, prompt + output - 1) for prompt, output in lengths]
    steps = max(*cell.output_lens, -(-cell.output_tokens // cell.in_flight))
    held = sum(o * p + o * (o - 1) // 2 for p, o in lengths)
    kv_numbers = 2 * config.num_kv_heads * config.head_dim
    full = sum(window is None for window in config.windows)
    return LeastWork(
        flops_of(config, rows, cell.output_tokens),
        steps * weight_numbers(config) * bits // 8 + held * full * kv_numbers * KV_BYTES,
    )


def probe(working_set: int, threads: int) -> Limits:
    """The limits of this machine with so many cores, measured by a process of their own."""
    command = [sys.executable, "-m", "benchmarks.peers.limits", "--bytes", str(working_set)]
    command += ["--threads", str(threads)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True
    )
    return Limits(**json.loads(done.stdout))


def torch_products(side: int) -> dict[str, Product]:
    """Products by torch's libraries, which may be the faster ones; none where it is not here."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch  # an extra's, and takes seconds

    if torch.cuda.is_available():  # the device's own library is XLA's choice too
        return {}
    found: dict[str, Product] = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.ones((side, side), dtype=dtype)
        found[f"torch {str(dtype).removeprefix('torch.')}"] = lambda x=left: (x @ x).shape[0]  # type: ignore[misc]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, required=True, help="of the working set")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="cores that are used")
    options = parser.parse_args()
    use_cores(options.threads)
    limits = measure_limits(options.bytes, more=torch_products)
    print(json.dumps(asdict(limits)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
