"""Least and expected times of steps, from counts that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.memory_table import StepProof
from benchmarks.time_table import CONTEXT, blocks_per_expert, estimate, time_table
from benchmarks.verify.prove import Counts, Proof
from jaxserve.loading.capacity import weight_bytes
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.step_time import BANDWIDTH_SHARE, LOGITS_PASSES

SHAPE, LAYERS, ROWS = "llama-125m", 12, 16
COUNTS = Counts(
    kernels={"product": 9, "attend": 2, "fusion": 8},
    a_layer={"product": 4, "attend": 1},
    moved=5_000_000,
    moved_a_layer=2_000_000,
)


def proved(**changes) -> StepProof:
    proof = Proof("a step", "h200", 1.0, None, (), (), (), counts=COUNTS)
    made = StepProof(
        shape=SHAPE,
        layers=2,
        devices=1,
        step=f"decode[{ROWS}]",
        backends=("mosaic_gpu", None),
        pool_tokens=0,
        weights=0,
        pool=0,
        proof=proof,
        cpu_seconds=0.0,
        blob=0,
        rows=ROWS,
    )
    return replace(made, **changes)


def test_the_whole_model_is_told_from_two_layers() -> None:
    found = estimate(proved())
    assert found is not None
    device, model = DEVICES["h200"], model_config_of(SHAPES[SHAPE])
    assert found.kernels == 9 + 2 + 8 + (LAYERS - 2) * 5
    assert found.launches == pytest.approx(found.kernels * device.launch)
    read = weight_bytes(model, "bfloat16", "").read
    keys = ROWS * CONTEXT * 2 * LAYERS * model.num_kv_heads * model.head_dim * 2
    logits = LOGITS_PASSES * 4 * ROWS * model.vocab_size
    assert found.least_bytes == pytest.approx(read + keys + logits, rel=0.001)
    between = 5_000_000 + (LAYERS - 2) * 2_000_000
    assert found.moved == pytest.approx(found.least_bytes - logits + between)
    # few rows: bytes are the bound
    assert found.least == pytest.approx(found.least_bytes / device.bandwidth)
    assert found.expected == pytest.approx(found.least / BANDWIDTH_SHARE + found.launches)


def test_quantised_weights_and_several_devices_are_told_apart() -> None:
    one, int4 = estimate(proved()), estimate(proved(quantization="int4"))
    spread = estimate(proved(devices=4))
    assert one is not None and int4 is not None and spread is not None
    assert int4.least_bytes < one.least_bytes
    assert spread.least_bytes == pytest.approx(one.least_bytes / 4, rel=0.01)
    # two sums a layer, which take time beside their bytes
    hops = 2 * LAYERS * DEVICES["h200"].hop
    least = spread.least_bytes / DEVICES["h200"].bandwidth / BANDWIDTH_SHARE
    assert spread.expected == pytest.approx(least + spread.launches + hops)


def test_blocks_of_experts_that_tokens_choose_evenly() -> None:
    model = model_config_of(SHAPES["mixtral-8x7b"])
    assert blocks_per_expert(model, 1) == 1.0
    # 64 tokens choose 2 of 8: blocks of 32 places, 16 rows an expert on average, binomial
    rng = np.random.default_rng(5)
    rows = rng.binomial(64, 0.25, 100_000)
    assert blocks_per_expert(model, 64) == pytest.approx((-(-rows // 32)).mean(), rel=0.01)


def test_what_fills_up_rows_counts_as_moved() -> None:
    tpu = replace(proved().proof, device="v5e")
    steps = [
        estimate(proved(shape="qwen3-30b-a3b", rows=1, quantization=kind, proof=tpu))
        for kind in (None, "int4")
    ]
    bf16, int4 = (one for one in steps if one is not None)
    # each third matrix of the 8 of 128 experts of a token has a third more
    experts = weight_bytes(model_config_of(SHAPES["qwen3-30b-a3b"]), "bfloat16", "int4").experts
    more = experts / 9 * 8 / 128
    between = bf16.moved - bf16.least_bytes
    assert int4.moved - int4.least_bytes == pytest.approx(between + more, rel=0.001)


def test_a_line_a_decode_step() -> None:
    steps = [
        proved(),
        proved(quantization="fp8"),
        proved(rows=None),
        proved(proof=replace(proved().proof, device="l4")),
        proved(proof=replace(proved().proof, counts=None)),
    ]
    text = time_table(steps)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and "| bfloat16 | 5 | 69 |" in lines[2] and "| fp8 |" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert "not measured" in text
    assert time_table(steps[2:]) == ""
