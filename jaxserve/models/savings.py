"""What sparse experts and windows save, beside all experts and all tokens before for each token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.cost import Row, seen, weight_numbers
from jaxserve.models.moe import MoeConfig


def without_savings(config: ModelConfig) -> ModelConfig:
    """The model if its tokens went to all experts and saw all tokens before them."""
    changes: dict[str, Any] = {"windows": (None,) * config.num_layers, "attention_window": None}
    if isinstance(config, MoeConfig):
        changes["experts_per_token"] = config.num_experts
    return replace(config, **changes)


def experts_unread(config: ModelConfig, num_tokens: float) -> float:
    """Share of the experts that no token of a step goes to, if tokens are routed evenly.

    `num_tokens`, those of the step, may be a mean.
    """
    if not isinstance(config, MoeConfig) or config.experts_per_token == config.num_experts:
        return 0.0
    return float((1.0 - config.experts_per_token / config.num_experts) ** num_tokens)


def weights_unread(config: ModelConfig, num_tokens: float) -> float:
    """Share of the numbers of all weights that are those experts': see `experts_unread`."""
    unread, dense = experts_unread(config, num_tokens), without_savings(config)
    if not unread:
        return 0.0
    missed = experts_unread(config, 1)
    experts = (dense.numbers_per_token - config.numbers_per_token) / missed
    return unread * experts / weight_numbers(dense)


def tokens_unread(config: ModelConfig, rows: Iterable[Row]) -> float:
    """Tokens before a window whose keys and values are not read, added up over the queries.

    Each query reads for itself, as a decode step does. The mean of all layers.
    """
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    passed = sum(seen(row, None) - seen(row, window) for row in rows for window in windows)
    return passed / config.num_layers
