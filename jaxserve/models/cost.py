"""What a model computes and moves for rows of tokens, by its shape: estimates, not measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.boundary.work import Work
from jaxserve.models.config import ModelConfig


class Row(NamedTuple):
    """Tokens of one sequence that a step computes: how many keys are there already, and how many
    tokens follow."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Counts `Work` from the shape of a model.

    Attributes:
        config: the model.
        weight_bytes: parameters that every step reads.
        kv_bytes_per_token: keys and values of one token over all layers.
        devices: that share all of it evenly.
    """

    config: ModelConfig
    weight_bytes: int
    kv_bytes_per_token: int
    devices: int = 1

    def of_step(self, rows: Iterable[Row], num_sampled: int) -> Work:
        """One step of some rows, with so many rows of logits, on each device."""
        rows = list(rows)
        held = sum(start + length for start, length in rows)
        tokens = sum(length for _, length in rows)
        return Work(
            flops_of(self.config, rows, num_sampled) // self.devices,
            (self.weight_bytes + self.kv_bytes_per_token * held) // self.devices,
            self.kv_bytes_per_token * tokens // self.devices,
        )


def flops_of(config: ModelConfig, rows: Iterable[Row], num_sampled: int) -> int:
    """Floating-point operations of some rows and of so many rows of logits.

    Linear layers and attention scores; norms, activations and the sampler are left out.
    """
    rows = list(rows)
    products = config.numbers_per_token * sum(length for _, length in rows)
    products += num_sampled * config.vocab_size * config.hidden_size
    # a query and a key are multiplied once, and so are the score and the value
    scores = 2 * config.num_heads * config.head_dim
    windows = Counter(config.layer_window(layer) for layer in range(config.num_layers))
    for window, layers in windows.items():
        products += layers * scores * sum(seen(row, window) for row in rows)
    return 2 * products


def weight_numbers(config: ModelConfig) -> int:
    """Weights that one token is multiplied with, those of the head among them."""
    return config.numbers_per_token + config.vocab_size * config.hidden_size


def seen(row: Row, window: int | None) -> int:
    """Keys that the queries of a row see, added up over the queries."""
    start, end = row.start, row.start + row.length
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    if start >= window:
        return row.length * window
    return seen(Row(start, window - start), None) + (end - window) * window
