"""Times of steps by bytes and operations, against the compilers' figures and by their own rules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.capacity import weight_bytes
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.cost import Row, flops_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.setting import find_model, settle
from jaxserve.simulation.step_figures import launches, table
from jaxserve.simulation.step_time import Programs, Rates, Roofline

FAST = Rates(1e30, 1e30, 1e30, "no limit")


def setting_of(model="llama-3-8b", device="h200", **settings):
    asked = EngineConfig(model=model, **settings)
    return settle(asked, find_model(asked)[0], DEVICES[device])


def decode(rows: int, start: int) -> StepPlan:
    plan = StepPlan()
    plan.rows.requests, plan.rows.starts = [None] * rows, [start] * rows
    plan.rows.lengths = [1] * rows
    plan.samples.requests = [None] * rows
    return plan


def chunk(length: int, start: int = 0) -> StepPlan:
    plan = StepPlan()
    plan.rows.requests, plan.rows.starts, plan.rows.lengths = [None], [start], [length]
    plan.tokens[0] = None
    return plan


@pytest.mark.parametrize("figures", table(), ids=lambda f: f"{f.device}-{f.rows}-{f.prefill}")
def test_compilers_count_what_the_sums_say(figures):
    """Weights, operations and bytes of programs of two layers that were compiled for a device."""
    config = model_config_of(SHAPES[figures.shape] | {"num_hidden_layers": figures.layers})
    weights = weight_bytes(config, "bfloat16", "")
    assert figures.weights == pytest.approx(weights.total, rel=0.001)
    token = 2 * figures.layers * config.num_kv_heads * config.head_dim * 2
    moved = weights.read + token * (figures.pool_tokens + figures.prefill)
    assert figures.bytes == pytest.approx(moved, rel=0.01)
    # the pool's tokens are spread over the decode rows, prompts begin at 0 in 32 lanes
    context = figures.pool_tokens // figures.rows
    rows = [Row(context - 1, 1)] * figures.rows
    lanes = 32 if figures.prefill else 0
    rows += [Row(0, figures.prefill // lanes)] * lanes if lanes else []
    assert figures.flops == pytest.approx(flops_of(config, rows, figures.rows + lanes), rel=0.01)
    # XLA's copies around the kernels of a TPU are kernels too
    a_layer, once = (80, 200) if figures.device.startswith("v") else (40, 120)
    assert figures.kernels_a_layer < a_layer and figures.kernels_once < once


def test_every_device_has_figures():
    assert {one.device for one in table()} == {d.target for d in DEVICES.values() if d.target}
    assert launches("h200", 32, False) > 32 * 5 and launches(None, 32, False) == 0


def test_a_decode_step_reads_weights_and_keys():
    setting = setting_of()
    rates = replace(FAST, bandwidth=1e12)
    times = Roofline(setting, rates)
    launched = launches("h200", 32, False) * DEVICES["h200"].launch
    read = weight_bytes(setting.model, "bfloat16", "").read
    logits = 3 * 4 * 128256
    one = times.of(decode(1, 999), 0).device - launched
    assert one == pytest.approx((read + 1000 * 131072 + logits) / 1e12, rel=0.001)
    more = times.of(decode(1, 1999), 0).device - launched
    assert more - one == pytest.approx(1000 * 131072 / 1e12, rel=0.001)


def test_a_prompt_computes():
    rates = replace(FAST, flops=1e15)
    setting = setting_of()
    short = Roofline(setting, rates).of(chunk(2048), 0).device
    far = Roofline(setting, rates).of(chunk(2048, 4096), 0).device
    pairs = 2048 * 4096
    assert far - short == pytest.approx(4 * 32 * 128 * 32 * pairs / 1e15, rel=0.01)


def test_devices_that_share_a_model_are_faster_and_pay_for_their_sums():
    rates = Rates.of_data_sheet(DEVICES["h200"])
    times = [
        Roofline(setting_of(tensor_parallel_size=n), rates).of(decode(64, 1000), 0).device
        for n in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[3] > times[0] / 8


def test_eight_bits_are_read_sooner():
    rates = Rates.of_data_sheet(DEVICES["a100"])

    def took(quantization, plan):
        return Roofline(setting_of(device="a100", quantization=quantization), rates).of(plan, 0)

    assert took("int8", decode(1, 10)).device < 0.7 * took(None, decode(1, 10)).device
    assert took("awq", decode(1, 10)).device < took("int8", decode(1, 10)).device
    assert took("awq", chunk(2048)).device > took("int8", chunk(2048)).device


def test_a_sparse_model_reads_the_experts_that_are_asked_for():
    rates = Rates.of_data_sheet(DEVICES["h200"])
    times = Roofline(setting_of("qwen3-30b-a3b"), rates)
    one, many = times.of(decode(1, 10), 0).device, times.of(decode(64, 10), 0).device
    dense = weight_bytes(find_model(EngineConfig(model="qwen3-30b-a3b"))[0], "bfloat16", "").read
    assert one < 0.35 * dense / rates.bandwidth
    assert many > 0.9 * dense / rates.bandwidth


def test_a_window_bounds_what_attention_reads():
    rates = Rates.of_data_sheet(DEVICES["h200"])
    full = Roofline(setting_of(), rates).of(decode(64, 8000), 0).device
    short = Roofline(setting_of(attention_window=512), rates).of(decode(64, 8000), 0).device
    near = Roofline(setting_of(), rates).of(decode(64, 511), 0).device
    assert short == pytest.approx(near, rel=0.01) and short < full / 2


def test_programs_are_those_that_an_engine_would_choose():
    programs = Programs(setting_of())
    assert (programs.select(3, 0, 0).num_decode, programs.select(200, 0, 0).num_decode) == (4, 256)
    mixed = programs.select(10, 100, 2)
    assert mixed.num_prefill == 128 and mixed.num_decode >= 10
    assert programs.of_plan(chunk(1)).num_prefill == 0, "one token is a decode row"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, ""),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}}, None),
        ({"quant_method": "compressed-tensors", "num_bits": 4, "type": "int"}, "int4"),
        ({"quant_method": "compressed-tensors", "num_bits": 8, "type": "int"}, "int8"),
        ({"quant_method": "compressed-tensors", "num_bits": 8, "type": "float"}, "fp8"),
    ],
)
def test_a_quantised_checkpoint_is_known_by_its_config(told, found, tmp_path):
    weights = {name: told[name] for name in ("num_bits", "type") if name in told}
    if weights:
        told = told | {"config_groups": {"group_0": {"weights": weights}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["llama-125m"] | {"quantization_config": told}))
    asked = EngineConfig(model=str(path))
    model, stored = find_model(asked)
    if found is None:
        with pytest.raises(ValidationError, match="quantization='compressed-tensors'"):
            settle(asked, model, DEVICES["h200"], stored)
    else:
        assert stored == found and settle(asked, model, DEVICES["h200"], stored)
