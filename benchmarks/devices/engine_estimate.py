"""The engine on a device that is not here, by the simulator's cost model. Nothing is measured."""

from __future__ import annotations

from math import inf
from typing import Any

from benchmarks.devices import workloads
from jaxserve.bench.device_limits import Limits
from jaxserve.bench.workloads import bytes_moved, fixed, flops_of_items
from jaxserve.config.engine_config import EngineConfig
from jaxserve.loading.engine_build import Footprint
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.report import report_of
from jaxserve.simulation.setting import find_model, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import Rates, Roofline
from jaxserve.simulation.workload import Workload


def estimate(kind: str, shape: str, batch: int, length: int) -> dict[str, Any]:
    """An entry of one batch, as a measured engine has them.

    Args:
        kind: a key of `DEVICES`.
        shape: a key of `SHAPES`.
        batch: requests, all at once.
        length: tokens of a prompt and of an output.
    """
    asked = EngineConfig(model=shape, **workloads.engine_settings(batch))
    model, quantised = find_model(asked)
    device = DEVICES[kind]
    setting = settle(asked, model, device, quantised)
    load = Workload(batch, inf, input_len=length, output_len=length)
    served = Simulation(setting, Roofline(setting, Rates.of_data_sheet(device))).run(
        load.requests()
    )
    report = report_of(served, [50.0])
    footprint = Footprint(setting.weights.read, setting.token_bytes)
    items = fixed(batch, length, length, model.vocab_size, 0)
    moved = bytes_moved(items, 1, served.num_steps, model, footprint)
    seconds, flops = report["duration"], flops_of_items(items, 1, model, 0)
    limits = Limits(device.bf16_rate, device.bandwidth, "data sheet")
    return {
        "batch": batch,
        "dtype": setting.config.model.dtype,
        "tok_s": report["output_throughput"],
        "ttft_ms": report["median_ttft_ms"],
        "tpot_ms": report["median_tpot_ms"],
        "roofline": 100 * max(limits.shares(seconds, flops, moved)),
        "limits": limits.text(),
        "joules_per_token": None,
        "remark": "",
    }
