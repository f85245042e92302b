"""FLOPs and bytes by shape, against the real arrays and brute force."""

from __future__ import annotations

import math

import pytest
from flax import nnx

from benchmarks.model_shapes import write_config
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.cost import ModelCost, Row, flops_of, seen
from jaxserve.models.registry import family_of
from jaxserve.models.store import named_leaves


def config_of(shape, folder, **overrides):
    return read_model_config(write_config(shape, folder, **overrides))


@pytest.mark.parametrize("shape", ["llama-125m", "qwen3-moe-3b"])
def test_numbers_of_a_token_are_those_of_the_arrays(shape, tmp_path):
    config = config_of(shape, tmp_path)
    model = nnx.eval_shape(lambda: family_of(config).model(config, config.dtype))
    counted = 0
    for name, leaf in named_leaves(model).items():
        if leaf.ndim < 2 or "embed" in name or "head" in name:
            continue
        share = 1.0
        if "moe" in shape and leaf.ndim == 3:  # of its experts a token takes a few
            share = config.experts_per_token / config.num_experts
        counted += share * math.prod(leaf.shape)
    assert config.numbers_per_token == counted


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("row", [Row(0, 9), Row(3, 1), Row(2, 7), Row(50, 3)])
def test_keys_that_are_seen_by_brute_force(row, window):
    positions = range(row.start, row.start + row.length)
    assert seen(row, window) == sum(min(p + 1, window or p + 1) for p in positions)


def test_a_step_by_hand(tmp_path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 10, "vocab_size": 7}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = config_of("llama-125m", tmp_path, **sizes)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10  # q, k and v, o, gated MLP
    rows = [Row(5, 1), Row(0, 3)]
    attention = 2 * 2 * 4 * (6 + 1 + 2 + 3)
    assert flops_of(config, rows, 2) == 2 * (4 * layer + 2 * 7 * 8 + attention)
    work = ModelCost(config, 1000, 16).of_step(rows, 2)
    assert (work.read_bytes, work.write_bytes) == (1000 + 16 * 9, 16 * 4)
    assert work.plus(work).flops == 2 * work.flops == 2 * flops_of(config, rows, 2)
