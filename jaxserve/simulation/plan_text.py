"""A plan as text, with every sum, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.loading.capacity import (
    GROUP,
    RULE,
    WEIGHT_FORMS,
    gb,
    numbers_of,
    rule_of_thumb,
    weight_bytes,
)
from jaxserve.models.config import ModelConfig
from jaxserve.models.cost import Row, flops_of
from jaxserve.models.moe import MoeConfig
from jaxserve.models.savings import experts_unread, without_savings
from jaxserve.simulation.devices import Device
from jaxserve.simulation.planner import Candidate, Load
from jaxserve.simulation.prices import HOURS_A_MONTH, Prices
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.step_time import Rates

SHOWN = 12  # candidates that serve
STEPS = (1, 16, 256)  # tokens of steps whose weights are shown
NOT_COUNTED = (
    "adapters and drafts are not served yet: neither is counted",
    "latency is without HTTP and network; every output has its full length",
    "the sum of devices that share a model is estimated by an assumed latency and the maker's link",
)


def weight_lines(model: ModelConfig, dtype: str) -> list[str]:
    """What the weights take in each format, and of what that is the sum."""
    numbers = numbers_of(model)
    lines = [
        f"{numbers.total / 1e9:.2f} B parameters: {numbers.linear / 1e9:.2f} B in linear layers, "
        f"{numbers.head / 1e9:.2f} B in the head, {numbers.embedding / 1e9:.2f} B in the "
        f"embedding, {numbers.other / 1e6:.2f} M in norms and biases",
        "",
        "| weights as | in all | linear layers | head | embedding | rest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in WEIGHT_FORMS:
        if name == "gptq":  # as awq
            continue
        found = weight_bytes(model, dtype, name)
        parts = (found.total, found.linear, found.head, found.embedding, found.other)
        lines.append(f"| {name or dtype} | {' | '.join(map(gb, parts))} |")
    lines += [
        "",
        f"On devices 8 bits have a scale an output, 4 bits one for {GROUP} inputs (AWQ and GPTQ a "
        f"zero too); what is not in 8 or 4 bits is {dtype}. With every parameter in 8 bits the "
        f"weights would be {gb(numbers.total)}. A checkpoint in AWQ, whose scales are narrower, "
        f"has {gb(weight_bytes(model, dtype, 'awq', in_file=True).total)}.",
    ]
    return lines


def rule_lines(model: ModelConfig, dtype: str, quantizations: Sequence[str]) -> list[str]:
    """Where the rule "memory of 1.5 times the parameters" holds, and where not."""
    rule = rule_of_thumb(numbers_of(model).total)
    lines = [f'The rule "memory of {RULE} x parameters" asks for {gb(rule)}:']
    for name in quantizations:
        held = weight_bytes(model, dtype, name).total
        told = f"leaves {gb(rule - held)} for keys and values: it holds"
        if held >= rule:
            told = "the weights alone are more: it does not hold"
        lines.append(f"- {name or dtype}: {gb(held)}; {told}")
    return [*lines, f"It holds for weights of up to {RULE * 8:.0f} bits."]


def kv_lines(setting: Setting) -> list[str]:
    """What a token takes of the KV cache."""
    model, cache = setting.model, setting.config.asked.kv_cache_dtype
    kept = setting.config.model.dtype if cache == "auto" else cache
    return [
        f"A token's keys and values: 2 x {model.num_layers} layers x {model.num_kv_heads} heads x "
        f"{model.head_dim} numbers as {kept} = {setting.token_bytes:,} bytes over all devices"
        + (", with scales" if cache == "int8" else "")
    ]


def offload_lines(
    model: ModelConfig, dtype: str, quantizations: Sequence[str], devices: Sequence[Device]
) -> list[str]:
    """What a step takes at least that brings weights from the host's memory."""
    lines = ["With --cpu-offload-gb every step brings those weights over the link, one device:"]
    for device in devices:
        if not device.host_link:
            lines.append(f"- {device.name}: its maker says no rate of the link to the host")
            continue
        layers = (
            f"{name or dtype} {1e3 * held / device.host_link:,.0f} ms"
            for name in quantizations
            for held in [weight_bytes(model, dtype, name).linear]
        )
        rate, each = f"{device.host_link / 1e9:g} GB/s", 1e3 * 2**30 / device.host_link
        of_all = f"all linear layers {', '.join(layers)}"
        lines.append(f"- {device.name}: {rate}, so {each:.3g} ms for each GiB; {of_all}")
    return lines


def savings_of(setting: Setting, load: Load) -> dict[str, int]:
    """What a request computes and holds, and what it would with all experts and full attention."""
    # the last token passes through nothing
    rows = [Row(0, load.input_len), Row(load.input_len, load.output_len - 1)]
    length, page = load.input_len + load.output_len, setting.config.cache.page_size
    pages = setting.groups.most_held(length, page)
    dense = without_savings(setting.model)
    return {
        "flops": flops_of(setting.model, rows, load.output_len),
        "dense_flops": flops_of(dense, rows, load.output_len),
        "pages": pages,
        "kv_bytes": pages * setting.page_bytes * setting.devices,
        "dense_kv_bytes": -(-length // page) * page * setting.token_bytes,
    }


def saving_lines(setting: Setting, load: Load) -> list[str]:
    """What sparse experts and windows save; none where the model has neither."""
    model, found = setting.model, savings_of(setting, load)
    if found["flops"] == found["dense_flops"]:
        return []
    lines = [
        f"A request computes {found['flops'] / 1e9:,.0f} of the {found['dense_flops'] / 1e9:,.0f} "
        "GFLOP that it would with all experts and full attention"
    ]
    if isinstance(model, MoeConfig):
        weights, experts = setting.weights.read, setting.weights.experts
        read = ", ".join(
            f"{gb(weights - experts * experts_unread(model, tokens))} by {tokens}"
            for tokens in STEPS
        )
        lines.append(
            f"A token goes to {model.experts_per_token} of {model.num_experts} experts: of "
            f"{gb(weights)} of weights a step reads {read} tokens, if they are routed evenly"
        )
    if setting.groups.num_windowed:
        lines.append(
            f"Of its keys and values it holds {found['pages']:,} pages at most, "
            f"{gb(found['kv_bytes'])}; with all tokens kept {gb(found['dense_kv_bytes'])}"
        )
    return lines


def table(found: Sequence[Candidate], load: Load, currency: str) -> list[str]:
    """A Markdown table of those that serve the load, the cheapest first."""
    heads = ["offer", "weights", "devices a model", "engines", "machines", "slots"]
    heads += ["ttft p50/p99, ms", "tpot p50/p99, ms", "queue p50, ms"]
    heads += [f"{currency}/h", f"{currency}/M tokens", f"{currency}/month"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * (len(heads) - 2)}"]
    for one in found:
        latency, setting = one.latency, one.setting
        assert latency is not None and setting is not None
        cells = [
            one.offer.name,
            one.quantization or setting.config.model.dtype,
            one.devices,
            one.replicas,
            one.machines,
            one.slots,
            f"{1e3 * latency.ttft_p50:.0f}/{1e3 * latency.ttft_p99:.0f}",
            f"{1e3 * latency.tpot_p50:.1f}/{1e3 * latency.tpot_p99:.1f}",
            f"{1e3 * latency.queue_p50:.1f}",
            *map(_price, (one.per_hour, one.per_million(load), one.per_month)),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def sum_lines(one: Candidate, load: Load, currency: str) -> list[str]:
    """The sums of one candidate, line by line."""
    setting, room = one.setting, one.room
    assert setting is not None and room is not None
    length, page = load.input_len + load.output_len, setting.config.cache.page_size
    tokens = (setting.num_pages - 1) * page
    lines = [
        f"{one.offer.name}, {one.quantization or setting.config.model.dtype}, "
        f"{one.devices} devices a model; one device:",
        *room.lines(),
        f"{setting.num_pages} pages of {page} tokens are of use: {tokens:,} tokens / "
        f"({load.input_len} + {load.output_len}) a request = {tokens // length} requests; slots: "
        f"{setting.limits.max_num_seqs}, so {one.slots} run at once",
        f"{one.replicas} engines x {one.devices} devices = {one.replicas * one.devices} devices: "
        f"{one.machines} machines of {one.offer.devices}",
    ]
    if one.per_hour is not None:
        millions = load.tokens_an_hour / 1e6
        lines += [
            f"{one.machines} x {one.offer.per_hour:g} {currency}/h = {one.per_hour:g} {currency}/h",
            f"{one.per_hour:g} x {HOURS_A_MONTH} h = {one.per_month:,.0f} {currency}/month",
            f"{load.qps:g} requests/s x {length} tokens x 3600 s = {millions:.2f} M tokens/h",
            f"{one.per_hour:g} / {millions:.2f} = {one.per_million(load):.3f} {currency}/M tokens",
        ]
    return lines


def text_of(
    name: str, found: Sequence[Candidate], load: Load, prices: Prices, quantizations: Sequence[str]
) -> str:
    """The whole plan."""
    settings = [one.setting for one in found if one.setting is not None]
    good = [one for one in found if one.reason is None]
    lines = [
        f"# {name}: {load.qps:g} requests/s of {load.input_len} + {load.output_len} tokens, p99 of "
        f"ttft {1e3 * load.ttft:g} ms, of tpot {1e3 * load.tpot:g} ms",
        "",
    ]
    if settings:
        model, dtype = settings[0].model, settings[0].config.model.dtype
        lines += [*weight_lines(model, dtype), "", *rule_lines(model, dtype, quantizations), ""]
        lines += [*kv_lines(settings[0]), *saving_lines(settings[0], load), ""]
        devices = list(dict.fromkeys(one.offer.device for one in found))
        lines += [*offload_lines(model, dtype, quantizations, devices), ""]
    if good:
        lines += [*table(good[:SHOWN], load, prices.currency), ""]
        if len(good) > SHOWN:
            lines += [f"and {len(good) - SHOWN} more, which --json shows", ""]
        lines += ["The sums of the first:", "", *sum_lines(good[0], load, prices.currency), ""]
    else:
        lines += ["Nothing serves this load within the limits.", ""]
    refused = [one for one in found if one.reason is not None]
    if refused:
        lines += ["Not:", *_refusals(refused), ""]
    lines += ["Estimated, not measured:", *(f"- {text}" for text in sources(found))]
    if prices.offers[0].per_hour is not None:
        lines += [f"- prices: date {prices.date or 'unknown'}"]
        lines += [f"- prices: {warning}" for warning in prices.warnings]
    else:
        lines += ["- prices: none are known; --prices FILE, or --prices example"]
    return "\n".join(lines)


def sources(found: Sequence[Candidate]) -> list[str]:
    """What of a plan is estimated, and by what."""
    devices = {one.offer.device.name: one.offer.device for one in found}
    return [*(f"rates: {Rates.of_data_sheet(d).source}" for d in devices.values()), *NOT_COUNTED]


def json_of(
    name: str, found: Sequence[Candidate], load: Load, prices: Prices, quantizations: Sequence[str]
) -> dict[str, Any]:
    """All that is known."""
    settings = [one.setting for one in found if one.setting is not None]
    written: dict[str, Any] = {
        "model_id": name,
        "qps": load.qps,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "ttft_p99_ms": 1e3 * load.ttft,
        "tpot_p99_ms": 1e3 * load.tpot,
        "currency": prices.currency,
        "price_date": prices.date,
        "warnings": [*prices.warnings],
        "estimated": sources(found),
        "candidates": [_as_json(one, load) for one in found],
    }
    if settings:
        model, dtype = settings[0].model, settings[0].config.model.dtype
        numbers = numbers_of(model)
        written |= {
            "parameters": numbers.total,
            "rule_of_thumb_bytes": rule_of_thumb(numbers.total),
            "weight_bytes": {
                form or dtype: weight_bytes(model, dtype, form).total for form in quantizations
            },
            "all_in_8_bits_bytes": numbers.total,
            "a_request": savings_of(settings[0], load),
        }
    return written


def _as_json(one: Candidate, load: Load) -> dict[str, Any]:
    latency = one.latency
    found: dict[str, Any] = {
        "offer": one.offer.name,
        "device": one.offer.kind,
        "quantization": one.quantization or None,
        "tensor_parallel_size": one.devices,
        "reason": one.reason,
    }
    if one.room is not None and one.setting is not None:
        found |= {
            "memory": one.room.memory,
            "weights": one.room.weights,
            "beside": one.room.beside,
            "kv_bytes_per_token": one.setting.token_bytes,
            "num_pages": one.setting.num_pages,
            "slots": one.slots,
        }
    if latency is not None:
        found |= {
            "engines": one.replicas,
            "machines": one.machines,
            "median_ttft_ms": 1e3 * latency.ttft_p50,
            "p99_ttft_ms": 1e3 * latency.ttft_p99,
            "median_tpot_ms": 1e3 * latency.tpot_p50,
            "p99_tpot_ms": 1e3 * latency.tpot_p99,
            "median_queue_ms": 1e3 * latency.queue_p50,
            "per_hour": one.per_hour,
            "per_million_tokens": one.per_million(load),
            "per_month": one.per_month,
        }
    return found


def _refusals(refused: Sequence[Candidate]) -> list[str]:
    """A line for each."""
    lines = []
    for one in refused:
        told = f"- {one.offer.name}, {one.quantization or 'as stored'}, {one.devices} devices a "
        told += f"model: {one.reason}"
        if one.latency is not None:
            ttft, tpot = 1e3 * one.latency.ttft_p99, 1e3 * one.latency.tpot_p99
            told += f" (p99 of ttft {ttft:.0f} ms, of tpot {tpot:.1f} ms)"
        lines.append(told)
    return lines


def _price(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
