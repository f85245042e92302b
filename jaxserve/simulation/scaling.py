"""What more devices bring to a step of one model, as the simulator estimates it by data sheets.

A decode step of ROWS rows with CONTEXT tokens each. Sums over the devices of several hosts go at
the speed of the link between hosts, but on TPUs, whose chips are linked over hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.request.request import Request
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import Device, device_of
from jaxserve.simulation.setting import Setting, settle
from jaxserve.simulation.step_time import Rates, Roofline

ROWS, CONTEXT = 64, 1024
ON_HOST = 8  # devices
SIZES = (1, 2, 4, 8, 16, 32)
HOST_LINK, HOST_HOP = 50e9, 5e-6  # bytes a second of a GPU's own adapter of 400 Gbit/s, seconds
COLUMNS = (
    "model", "device", "devices", "weights, GB each", "sums a step", "MB sent", "step, ms",
    "of it links", "tok/s", "step against the fewest", "tok/s against them",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A decode step of a model over some devices, by data sheets.

    Attributes:
        device: their kind.
        devices: that share the model.
        weights: bytes on each.
        sums: that the devices make of their parts, one after the other.
        sent: bytes that each sends.
        seconds: of the step.
        links: of them, by links.
    """

    device: str
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


def estimate(
    asked: EngineConfig, model: ModelConfig, kind: str, devices: int, quantization: str = ""
) -> Estimate | None:
    """The estimate; None where the model does not fit, or cannot be divided so.

    Args:
        asked: settings of the engine, but for rows, context and devices.
        model: its config.
        kind: of the devices.
        devices: that share the model.
        quantization: of the weights; "": as the model's type.
    """
    sizes = replace(asked, tensor_parallel_size=devices, max_model_len=CONTEXT, max_num_seqs=ROWS)
    device = over_hosts(device_of(kind), devices)
    try:
        setting = settle(sizes, model, device, quantization)
    except ValidationError:
        return None
    pages = ROWS * CONTEXT // setting.config.cache.page_size
    if setting.num_pages <= pages:
        return None
    seconds = _seconds(setting)
    free = replace(setting, device=replace(setting.device, hop=0.0, link=float("inf")))
    return Estimate(
        kind,
        devices,
        setting.demand.weights,
        2 * model.num_layers + 1 if devices > 1 else 0,
        sent_bytes(setting.model, devices) if devices > 1 else 0.0,
        seconds,
        seconds - _seconds(free),
    )


def _seconds(setting: Setting) -> float:
    plan, nobody = StepPlan(), cast(list[Request], [None] * ROWS)
    plan.rows.requests, plan.rows.lengths = nobody, [1] * ROWS
    plan.rows.starts = [CONTEXT - 1] * ROWS
    plan.samples.requests = nobody
    return Roofline(setting, Rates.of_data_sheet(setting.device)).of(plan, 0).device


def estimates(
    asked: EngineConfig,
    model: ModelConfig,
    kinds: Sequence[str],
    sizes: Sequence[int] = SIZES,
    quantization: str = "",
) -> list[Estimate]:
    """Of all numbers of devices that hold the model, kind by kind; see `estimate`."""
    every = (estimate(asked, model, kind, n, quantization) for kind in kinds for n in sizes)
    return [one for one in every if one is not None]


def heading() -> list[str]:
    """Of the table in Markdown that `rows` are of."""
    return ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]


def rows(name: str, found: Sequence[Estimate]) -> list[str]:
    """A row for each estimate of one model, beside the fewest devices of its kind."""
    fewest: dict[str, Estimate] = {}
    return [
        "| " + " | ".join(_cells(name, one, fewest.setdefault(one.device, one))) + " |"
        for one in found
    ]


def as_json(found: Sequence[Estimate]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [asdict(one) | {"rows": ROWS, "context": CONTEXT} for one in found]


def _cells(name: str, one: Estimate, fewest: Estimate) -> Iterator[str]:
    hosts = -(-one.devices // ON_HOST)
    yield name
    yield one.device
    yield f"{one.devices}" if hosts == 1 else f"{one.devices} on {hosts} hosts"
    yield f"{one.weights / 1e9:.1f}"
    yield f"{one.sums}"
    yield f"{one.sent / 1e6:.0f}"
    yield f"{1e3 * one.seconds:.2f}"
    yield f"{one.links / one.seconds:.0%}"
    yield f"{ROWS / one.seconds:,.0f}"
    yield "" if one is fewest else f"{one.seconds / fewest.seconds - 1:+.0%}"
    yield "" if one is fewest else f"x {fewest.seconds / one.seconds:.1f}"
