"""The least time that work takes on a device at its maker's rates: an estimate, not a measurement.

Either the memory or the matrix unit is the bound: Williams, Waterman and Patterson, "Roofline: an
insightful visual performance model for multicore architectures" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.verify.prove.cases import Attention, Matmul
from benchmarks.verify.prove.cost import decode_cost, prefill_cost
from benchmarks.verify.prove.matmul_problem import matmul_cost
from benchmarks.verify.prove.proof import Cost
from benchmarks.verify.prove.targets import TARGETS

# attention heads and the widest product of Llama-3-8B
WORK = {
    "decode, 64 slots of 4,096 tokens": decode_cost(Attention(64, context=4096)),
    "the same, int8 pages": decode_cost(Attention(64, pages="int8", context=4096)),
    "prefill, the first 4,096 tokens of a prompt": prefill_cost(
        Attention(4096, lanes=1, context=4096)
    ),
    "product of 16 rows, int8 weight": matmul_cost(Matmul(16, weight="int8")),
    "product of 2,048 rows, int8 weight": matmul_cost(Matmul(2048, weight="int8")),
    "the same, int8 activations": matmul_cost(Matmul(2048, weight="int8", activations="int8")),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of some work on a device.

    Attributes:
        seconds: by the rates of the data sheet.
        by: "bytes" where memory is the bound, "FLOP" where the matrix unit is.
    """

    seconds: float
    by: str


def bound(cost: Cost, kind: str) -> Bound:
    """The least time of some work on one device.

    Products of float32 are counted at the rate of bfloat16, the nearest that data sheets share: the
    bound holds for them, but is loose.

    Args:
        cost: the work of one device.
        kind: a key of `benchmarks.verify.prove.targets.KINDS`.
    """
    target = TARGETS[kind]
    by_bytes = cost.bytes / target.bandwidth
    by_flops = cost.flops / (target.int8_rate if cost.eight_bit else target.bf16_rate)
    return Bound(by_bytes, "bytes") if by_bytes >= by_flops else Bound(by_flops, "FLOP")


def roofline_table() -> str:
    """A Markdown table: the rates of every kind of device, and the bounds of `WORK` on it."""
    rows = [["estimate, not measured", "MB", "GFLOP", *TARGETS], ["---"] * (3 + len(TARGETS))]
    rates = {
        "*memory, GB/s*": [target.bandwidth / 1e9 for target in TARGETS.values()],
        "*bfloat16, TFLOP/s*": [target.bf16_rate / 1e12 for target in TARGETS.values()],
        "*int8, TOP/s*": [target.int8_rate / 1e12 for target in TARGETS.values()],
    }
    rows += [[name, "", "", *(f"{rate:,.0f}" for rate in of)] for name, of in rates.items()]
    for name, cost in WORK.items():
        least = [bound(cost, kind) for kind in TARGETS]
        cells = [f"{1e6 * one.seconds:,.0f} us, {one.by}" for one in least]
        rows.append([name, f"{cost.bytes / 1e6:,.0f}", f"{cost.flops / 1e9:,.0f}", *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
