"""What experts and windows save, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.models.config_reader import model_config_of
from jaxserve.models.cost import Row, flops_of, weight_numbers
from jaxserve.models.known_shapes import SHAPES
from jaxserve.models.moe import MoeConfig
from jaxserve.models.savings import tokens_unread, weights_unread, without_savings


def test_experts_without_a_token_are_not_read() -> None:
    model = model_config_of(SHAPES["mixtral-8x7b"])
    assert isinstance(model, MoeConfig)
    dense = without_savings(model)
    experts = model.num_layers * 8 * 3 * model.hidden_size * model.expert_size
    # a token leaves 6 of 8 alone, two tokens 6/8 of these
    for tokens, share in ((1, 6 / 8), (2, 36 / 64)):
        assert weights_unread(model, tokens) == pytest.approx(
            share * experts / weight_numbers(dense)
        )
    assert weights_unread(model, 1000) < 1e-9 and weights_unread(dense, 1) == 0.0
    row = [Row(0, 10)]
    more = flops_of(dense, row, 1) - flops_of(model, row, 1)
    assert more == 2 * 10 * experts * 6 // 8


def test_tokens_before_a_window_are_not_read() -> None:
    model = replace(model_config_of(SHAPES["gemma-3-12b"]), attention_window=5000)
    rows = [Row(6000, 2), Row(10, 3)]
    local, bounded = (2 * 6000 + 3) - 2 * 1024, (2 * 6000 + 3) - 2 * 5000
    assert tokens_unread(model, rows) == (40 * local + 8 * bounded) / 48
    dense = without_savings(model)
    assert tokens_unread(dense, rows) == 0.0 and weights_unread(model, 1) == 0.0
    saved = 4 * 2 * model.num_heads * model.head_dim * (40 * local + 8 * bounded) // 2
    assert flops_of(dense, rows, 1) - flops_of(model, rows, 1) == saved
