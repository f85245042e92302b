"""The least time of a decode step: the sum over its operations, each bound by bytes or by FLOPs."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.kernel_bench.rows import Ceilings
from jaxserve.models.config import ModelConfig

PRODUCTS, ATTENTION = "products", "attention"  # classes of benchmarks.gpu.kernel_classes
ITEM = 2  # bytes of a bfloat16


class Operation(NamedTuple):
    """One operation of a step, and how often the step has it."""

    name: str
    kind: str
    moved: float
    flops: float
    count: int


def operations(config: ModelConfig, rows: int, tokens: int) -> list[Operation]:
    """The products and the attention of a decode step of so many rows.

    Args:
        config: the model, in bfloat16.
        rows: rows of the step.
        tokens: that all rows together see, the new ones included.
    """
    hidden, layers = config.hidden_size, config.num_layers
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {  # inputs, outputs, how often
        "qkv": (hidden, query + 2 * keys, layers),
        "o": (query, hidden, layers),
        "gate_up": (hidden, 2 * config.intermediate_size, layers),
        "down": (config.intermediate_size, hidden, layers),
        "logits": (hidden, config.vocab_size, 1),
    }
    found = [
        Operation(name, PRODUCTS, ITEM * (n * k + rows * (n + k)), 2 * rows * n * k, count)
        for name, (k, n, count) in sizes.items()
    ]
    moved = ITEM * (2 * keys * tokens + 2 * query * rows)
    return [*found, Operation("attention", ATTENTION, moved, 4 * query * tokens, layers)]


def least_by_kind(found: list[Operation], ceilings: Ceilings) -> dict[str, float]:
    """Seconds of each kind of operation at least."""
    least: dict[str, float] = {}
    for operation in found:
        seconds = operation.count * ceilings.seconds(operation.moved, operation.flops)
        least[operation.kind] = least.get(operation.kind, 0.0) + seconds
    return least
