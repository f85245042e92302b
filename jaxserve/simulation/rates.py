"""The rates of a device: by its data sheet, by a file of measurements, or measured here."""

from __future__ import annotations

import json
from pathlib import Path

from jaxserve.bench.device_limits import NARROW_PRODUCTS, measure_limits
from jaxserve.errors import ValidationError
from jaxserve.simulation.devices import Device
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.step_time import Rates


def read_rates(path: Path, device: Device) -> Rates:
    """The rates that `jaxserve bench latency --output-json` measured on a device.

    Raises:
        ValidationError: names file and field.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValidationError(str(path), "not read", f"a JSON file ({error})") from error
    limits = found.get("limits") if isinstance(found, dict) else None
    if not isinstance(limits, dict):
        allowed = "an object with `limits`, as jaxserve bench latency --output-json writes it"
        raise ValidationError(f"{path} limits", limits, allowed)
    rates = []
    for name in ("bytes_per_second", "flops_per_second"):
        value = limits.get(name)
        if not isinstance(value, int | float) or not value > 0:
            raise ValidationError(f"{path} limits.{name}", value, "a number above 0")
        rates.append(float(value))
    bandwidth, flops = rates
    told = found.get("environment", {}).get("device", "a device that it does not name")
    return Rates(bandwidth, flops, flops * _narrow(device), f"measured on {told} ({path.name})")


def rates_of(setting: Setting, path: Path | None) -> Rates:
    """The rates of a device.

    Args:
        setting: of the engine; a CPU without a file is measured here.
        path: of measurements.

    Raises:
        ValidationError: the file is none.
    """
    device = setting.device
    if path is not None:
        return read_rates(path, device)
    if device.platform != "cpu":
        return Rates.of_data_sheet(device)
    limits = measure_limits(setting.demand.weights)
    told = f"measured on this machine now ({limits.text()})"
    narrow = limits.flops_per_second * _narrow(device)
    return Rates(limits.bytes_per_second, limits.flops_per_second, narrow, told)


def _narrow(device: Device) -> float:
    """How many 8-bit operations a device does while it does one of 16 bits."""
    if device.bf16_rate:
        return device.int8_rate / device.bf16_rate
    return NARROW_PRODUCTS
