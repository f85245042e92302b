"""Plans: what fits, how many, what it costs, and what is refused of a price file."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.capacity import weight_bytes
from jaxserve.models.cost import Row, flops_of
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.plan_text import json_of, rule_lines, saving_lines, savings_of, text_of
from jaxserve.simulation.planner import Load, candidate, candidates, latency_of
from jaxserve.simulation.prices import EXAMPLE, Offer, Prices, read_prices, unpriced
from jaxserve.simulation.setting import find_model, settle

GOOD = {"offer": "one", "device": "a100", "devices": 8, "memory_gb": 640, "per_hour": 4.0}


@pytest.fixture
def eight_b():
    asked = EngineConfig(model="llama-3-8b")
    return asked, find_model(asked)[0]


def offer(kind="h100", devices=8, price=8.0, memory=80e9) -> Offer:
    return Offer(f"{devices} x {kind}", kind, devices, int(memory), price)


def test_a_small_load_needs_one_engine(eight_b):
    load = Load(1.0, 200, 50, ttft=1.0, tpot=0.05)
    found = candidate(*eight_b, load, offer(), "", 1)
    assert found.reason is None and (found.replicas, found.machines) == (1, 1)
    assert found.latency.meets(load) and found.slots == 256
    assert found.per_hour == 8.0 and found.per_month == 8.0 * 730
    assert found.per_million(load) == pytest.approx(8.0 / (250 * 3600 / 1e6))


def test_more_load_needs_more_and_no_more_than_that(eight_b):
    load = Load(60.0, 1000, 100, ttft=0.5, tpot=0.03)
    found = candidate(*eight_b, load, offer(), "", 1)
    assert found.replicas > 1 and found.latency.meets(load)
    assert found.machines == math.ceil(found.replicas / 8)
    fewer = latency_of(found.setting, load.workload(found.replicas - 1))
    assert not fewer.meets(load)


def test_what_does_not_fit_says_what_is_missing(eight_b):
    load = Load(1.0, 200, 50, 1.0, 0.05)
    small = candidate(*eight_b, load, offer("tpu-v5e", 8, 8.0, 16 << 30), "", 1)
    assert "16.06 GB of weights" in small.reason
    assert candidate(*eight_b, load, offer("tpu-v5e", 8, 8.0, 16 << 30), "", 4).reason is None
    long = candidate(*eight_b, Load(1.0, 9000, 50, 1.0, 0.05), offer(), "", 1)
    assert "9050 tokens" in long.reason


def test_a_limit_that_a_single_request_misses_is_named(eight_b):
    found = candidate(*eight_b, Load(1.0, 200, 50, 1.0, 0.001), offer("a100"), "", 1)
    assert found.reason == "too slow for a single request" and found.latency.tpot_p99 > 0.001


@pytest.mark.slow
def test_the_cheapest_is_first(eight_b):
    load = Load(5.0, 300, 60, ttft=1.0, tpot=0.05)
    offers = [offer("h200", 1, 9.0, 141e9), offer("a100", 1, 2.0), offer("h100", 1, 4.0)]
    found = sorted(candidates(*eight_b, load, offers, ["", "int8"], print), key=lambda o: o.order)
    assert [one.offer.kind for one in found[:2]] == ["a100", "a100"]
    costs = [one.per_hour for one in found if one.reason is None]
    assert costs == sorted(costs)


@pytest.mark.slow
def test_a_plan_shows_its_sums(eight_b):
    asked, model = eight_b
    load, offers = Load(2.0, 300, 60, 1.0, 0.05), (offer("a100", 2, 3.0),)
    found = sorted(
        candidates(asked, model, load, offers, ["", "awq"], print), key=lambda o: o.order
    )
    prices = Prices(offers, "EUR", "2026-01-01", ("ask first",))
    text = text_of("llama-3-8b", found, load, prices, ["", "awq"])
    for part in (
        "8.03 B parameters",
        "| bfloat16 | 16.06 GB |",
        "would be 8.03 GB",
        "has 5.73 GB",
        "2 x 32 layers x 8 heads x 128 numbers as bfloat16 = 131,072 bytes",
        "0.9 of 80.00 GB",
        "weights",
        "EUR/month",
        "2 requests/s x 360 tokens x 3600 s = 2.59 M tokens/h",
        "date 2026-01-01",
        "ask first",
        "adapters and drafts are not served yet",
        "data sheet",
        "A100-SXM4-80GB: 32 GB/s, so 33.6 ms for each GiB; all linear layers bfloat16 436 ms",
    ):
        assert part in text, part
    written = json.loads(json.dumps(json_of("llama-3-8b", found, load, prices, ["", "awq"])))
    assert written["candidates"][0]["per_hour"] == 3.0 and written["estimated"]
    assert written["parameters"] == 8_030_261_248


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told", "flops", "kv_bytes"),
    [
        ("qwen3-30b-a3b", ["8 of 128 experts", "60.44 GB", "by 256 tokens"], 0.5, 1.05),
        ("gemma-3-12b", ["767 pages at most, 3.22 GB", "all tokens kept 12.88 GB"], 0.8, 0.3),
        ("llama-3-8b", [], 1.0, 1.05),
    ],
)
def test_a_plan_tells_what_sparse_computing_saves(name, told, flops, kv_bytes):
    asked = EngineConfig(model=name, max_model_len=40960 if "qwen" in name else None)
    setting = settle(asked, find_model(asked)[0], DEVICES["h200"])
    load = Load(1.0, 32000, 768, 1.0, 0.05)
    text, found = " ".join(saving_lines(setting, load)), savings_of(setting, load)
    assert all(part in text for part in told) and bool(text) == bool(told), text
    assert found["flops"] <= flops * found["dense_flops"]
    assert found["kv_bytes"] <= kv_bytes * found["dense_kv_bytes"]
    rows = [Row(0, 32000), Row(32000, 767)]
    assert found["flops"] == flops_of(setting.model, rows, 768)


@pytest.mark.slow
def test_a_plan_tells_bytes_of_experts_in_their_own_form():
    asked = EngineConfig(model="qwen3-30b-a3b", max_model_len=4096, quantization="int4")
    setting = settle(asked, find_model(asked)[0], DEVICES["h200"])
    (read,) = re.findall(r"reads ([0-9.]+) GB by 1,", saving_lines(setting, Load(1, 9, 9, 1, 1))[1])
    few = replace(setting.model, num_experts=8)
    wanted = weight_bytes(few, "bfloat16", "int4").read / 1e9
    assert float(read) == pytest.approx(wanted, rel=0.02)


def test_the_rule_of_thumb_is_told_where_it_fails():
    model = find_model(EngineConfig(model="meta-llama/Meta-Llama-3-70B"))[0]
    first, stored, int8, last = rule_lines(model, "bfloat16", ["", "int8"])
    assert "105.83 GB" in first and "does not hold" in stored and "12 bits" in last
    assert "leaves 34.20 GB" in int8


def test_the_example_is_three_offers_with_their_doubts():
    prices = read_prices(EXAMPLE)
    assert [(one.devices, one.per_hour) for one in prices.offers] == [(8, 8.5), (4, 6.3), (8, 4.9)]
    assert sum(one.memory * one.devices for one in prices.offers) == pytest.approx(1280e9)
    told = " ".join(prices.warnings)
    assert "ask them" in told and "48 GB a device" in told and "64 GB a device" in told
    assert "GA100-8" not in told and prices.date


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"per_hour": None}, ":2 per_hour=None"),
        ({"per_hour": -1}, ":2 per_hour=-1"),
        ({"devices": 1.5}, ":2 devices=1.5"),
        ({"memory_gb": "80"}, ":2 memory_gb='80'"),
        ({"device": "h900"}, ":2 device='h900'"),
        ({"offer": ""}, ":2 offer=''"),
    ],
)
def test_an_error_of_a_price_file_names_file_line_and_field(change, said, tmp_path):
    path = tmp_path / "prices.jsonl"
    item = {name: value for name, value in (GOOD | change).items() if value is not None}
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(item)}\n")
    with pytest.raises(ValidationError, match=said) as told:
        read_prices(path)
    assert str(path) in str(told.value)


def test_a_price_file_that_is_none(tmp_path):
    (tmp_path / "p").write_text("{\n")
    with pytest.raises(ValidationError, match="p:1"):
        read_prices(tmp_path / "p")
    with pytest.raises(ValidationError, match="--prices"):
        read_prices(tmp_path / "none")
    assert unpriced(["h200"]).offers[0].per_hour is None
