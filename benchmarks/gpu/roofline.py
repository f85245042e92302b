"""The least time of a decode step: the sum over its operations, each bound by bytes or by FLOPs."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.kernel_bench.rows import Ceilings
from jaxserve.models.config import ModelConfig
from jaxserve.models.moe import MoeConfig

PRODUCTS, ATTENTION = "products", "attention"  # classes of benchmarks.gpu.kernel_classes
ITEM = 2  # bytes of a bfloat16


class Operation(NamedTuple):
    """One operation of a step, and how often the step has it."""

    name: str
    kind: str
    moved: float
    flops: float
    count: int


def operations(
    config: ModelConfig, rows: int, tokens: int, weight: float = ITEM, page: float = ITEM
) -> list[Operation]:
    """The products and the attention of a decode step of so many rows.

    Args:
        config: the model, in bfloat16.
        rows: rows of the step.
        tokens: that all rows together see, the new ones included.
        weight: bytes of an element of the layers' weights.
        page: bytes of an element of the pages.
    """
    hidden, layers = config.hidden_size, config.num_layers
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner, read, chosen = config.intermediate_size, 1, 1
    if isinstance(config, MoeConfig):  # every token may choose the same experts: these at least
        inner, chosen = config.expert_size, config.experts_per_token
        read = chosen
    sizes = {  # inputs, outputs, weights that are read, that a row meets, bytes, how often
        "qkv": (hidden, query + 2 * keys, 1, 1, weight, layers),
        "o": (query, hidden, 1, 1, weight, layers),
        "gate_up": (hidden, 2 * inner, read, chosen, weight, layers),
        "down": (inner, hidden, read, chosen, weight, layers),
        "logits": (hidden, config.vocab_size, 1, 1, ITEM, 1),
    }
    found = [
        Operation(
            name,
            PRODUCTS,
            size * read * n * k + ITEM * rows * met * (n + k),
            2 * rows * met * n * k,
            count,
        )
        for name, (k, n, read, met, size, count) in sizes.items()
    ]
    moved = page * 2 * keys * tokens + ITEM * 2 * query * rows
    return [*found, Operation("attention", ATTENTION, moved, 4 * query * tokens, layers)]


def least_by_kind(found: list[Operation], ceilings: Ceilings) -> dict[str, float]:
    """Seconds of each kind of operation at least."""
    least: dict[str, float] = {}
    for operation in found:
        seconds = operation.count * ceilings.seconds(operation.moved, operation.flops)
        least[operation.kind] = least.get(operation.kind, 0.0) + seconds
    return least
