#!/usr/bin/env python3
"""What more devices bring to one model: estimates by data sheets, or measured where they are.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --measure llama-3-8b --devices 1 2 4 8

Without --measure it prints the tables of docs/scaling.md. A decode step of ROWS rows with CONTEXT
tokens each is estimated as the simulator does. Sums over the devices of several hosts go at the
speed of the link between hosts, but on TPUs, whose chips are linked over hosts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.model_shapes import write_config
from jaxserve import LLM, SamplingParams
from jaxserve.bench.measure import describe, environment
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import DEVICES, Device
from jaxserve.simulation.setting import Setting, settle
from jaxserve.simulation.step_time import Rates, Roofline

ROWS, CONTEXT = 64, 1024
# the most devices of each: of hosts with ON_HOST
MODELS = {"llama-3-8b": 8, "mixtral-8x7b": 8, "llama-3-70b": 32, "llama-3-405b": 32}
KINDS = ("h200", "a100", "tpu-v5e", "tpu-v6e")
ON_HOST = 8  # devices
SIZES = (1, 2, 4, 8, 16, 32)
HOST_LINK, HOST_HOP = 50e9, 5e-6  # bytes a second of a GPU's own adapter of 400 Gbit/s, seconds
COLUMNS = (
    "model", "device", "devices", "weights, GB each", "sums a step", "MB sent", "step, ms",
    "of it links", "tok/s", "step against the fewest", "tok/s against them",
)  # fmt: skip


class Estimate(NamedTuple):
    """A decode step of a model over some devices, by data sheets.

    Attributes:
        devices: that share the model.
        weights: bytes on each.
        sums: that the devices make of their parts, one after the other.
        sent: bytes that each sends.
        seconds: of the step.
        links: of them, by links.
    """

    devices: int
    weights: int
    sums: int
    sent: float
    seconds: float
    links: float


def over_hosts(device: Device, devices: int) -> Device:
    """The device with the link that its sums go over."""
    if devices <= ON_HOST or device.platform != "gpu":
        return device
    return replace(device, link=min(device.link, HOST_LINK), hop=device.hop + HOST_HOP)


def sent_bytes(model: ModelConfig, devices: int) -> float:
    """Bytes that a device sends in a step: sums, two a layer and one more, and parts of logits."""
    share = (devices - 1) / devices
    one = 2 * share * ROWS * model.hidden_size * 2
    logits = share * ROWS * model.vocab_size * 4 / devices
    return (2 * model.num_layers + 1) * one + logits


def estimate(name: str, kind: str, devices: int) -> Estimate | None:
    """The estimate; None where the model does not fit, or cannot be divided so."""
    model = model_config_of(SHAPES[name])
    asked = EngineConfig(
        model=name, tensor_parallel_size=devices, max_model_len=CONTEXT, max_num_seqs=ROWS
    )
    try:
        setting = settle(asked, model, over_hosts(DEVICES[kind], devices))
    except ValidationError:
        return None
    pages = ROWS * CONTEXT // setting.config.cache.page_size
    if setting.num_pages <= pages:
        return None
    seconds = _seconds(setting)
    free = replace(setting, device=replace(setting.device, hop=0.0, link=float("inf")))
    return Estimate(
        devices,
        setting.demand.weights,
        2 * model.num_layers + 1 if devices > 1 else 0,
        sent_bytes(setting.model, devices) if devices > 1 else 0.0,
        seconds,
        seconds - _seconds(free),
    )


def _seconds(setting: Setting) -> float:
    plan = StepPlan()
    plan.rows.requests, plan.rows.lengths = [None] * ROWS, [1] * ROWS
    plan.rows.starts = [CONTEXT - 1] * ROWS
    plan.samples.requests = [None] * ROWS
    return Roofline(setting, Rates.of_data_sheet(setting.device)).of(plan, 0).device


def table() -> str:
    """All estimates in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, most in MODELS.items():
        sizes = [size for size in SIZES if size <= most]
        for kind in KINDS:
            found = [one for one in (estimate(name, kind, size) for size in sizes) if one]
            lines += ["| " + " | ".join(_cells(name, kind, one, found[0])) + " |" for one in found]
    return "\n".join(lines)


def _cells(name: str, kind: str, one: Estimate, fewest: Estimate) -> Iterator[str]:
    hosts = -(-one.devices // ON_HOST)
    yield name
    yield kind
    yield f"{one.devices}" if hosts == 1 else f"{one.devices} on {hosts} hosts"
    yield f"{one.weights / 1e9:.1f}"
    yield f"{one.sums}"
    yield f"{one.sent / 1e6:.0f}"
    yield f"{1e3 * one.seconds:.2f}"
    yield f"{one.links / one.seconds:.0%}"
    yield f"{ROWS / one.seconds:,.0f}"
    yield "" if one is fewest else f"{one.seconds / fewest.seconds - 1:+.0%}"
    yield "" if one is fewest else f"x {fewest.seconds / one.seconds:.1f}"


def measure(name: str, devices: int, tokens: int, **settings: Any) -> float:
    """Output tokens a second of ROWS requests at once: the second of two runs, random weights."""
    with TemporaryDirectory() as folder:
        path = write_config(name, Path(folder) / name)
        llm = LLM(
            str(path),
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=devices,
            max_num_seqs=ROWS,
            max_model_len=CONTEXT,
            enable_prefix_caching=False,
            **settings,
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [[1 + row] * 8 for row in range(ROWS)]
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
        llm.close()
    return ROWS * tokens / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", choices=SHAPES, help="a model, on the devices that are here")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    for name in ("linear_backend", "quantization"):
        parser.add_argument("--" + name.replace("_", "-"), help="of the engine that is measured")
    options = parser.parse_args(arguments)
    if options.measure is None:
        print(table())
        return 0
    print(describe(environment()))
    settings = {"linear_backend": options.linear_backend, "quantization": options.quantization}
    first = 0.0
    for devices in options.devices:
        rate = measure(options.measure, devices, options.tokens, **settings)
        first = first or rate
        print(
            f"{options.measure} over {devices}: {rate:,.1f} tok/s, x {rate / first:.2f}", flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
