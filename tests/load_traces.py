"""Traces of engines that never were, for what reads recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.config.engine_config import EngineConfig
from jaxserve.observability.load_trace import VERSION, TracedStep
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.setting import Setting, find_model, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import Programs, StepSeconds
from jaxserve.simulation.workload import Workload

HOST_S, DELIVERY_S = 0.0002, 0.001

Formula = Callable[[Any, StepPlan], float]


def small_setting(**settings: Any) -> Setting:
    """An engine of a known shape on a CPU."""
    chosen = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "num_pages": 513,
    } | settings
    asked = EngineConfig(model="llama-125m", **chosen)
    return settle(asked, find_model(asked)[0], DEVICES["cpu"])


def plain(shape: Any, plan: StepPlan) -> float:
    """Seconds of a step that a fit can find exactly."""
    first = plan.num_decode
    keys = sum(plan.rows.starts[:first]) + first
    return 0.002 + 1e-4 * shape.num_decode + 2e-5 * shape.num_prefill + 1e-7 * keys


class Recording:
    """Tells a formula's times, and keeps the steps as a server would have recorded them."""

    intake, handover, source = 0.0, 0.0, "a formula"

    def __init__(self, setting: Setting, formula: Formula = plain):
        self._programs, self._formula = Programs(setting), formula
        self.steps: list[TracedStep] = []
        self.simulation: Simulation | None = None
        self._free = 0.0

    def first_delivery(self) -> float:
        return 0.0

    def of(self, plan: StepPlan, num_pages: int) -> StepSeconds:
        assert self.simulation is not None
        seconds = self._formula(self._programs.of_plan(plan), plan)
        begin, rows, first = self.simulation.now, plan.rows, plan.num_decode
        handed = begin + HOST_S
        self._free = max(handed, self._free) + seconds
        chunks = list(zip(rows.starts[first:], rows.lengths[first:]))
        self.steps.append(
            TracedStep(
                number=len(self.steps),
                begin=begin,
                dispatched=handed,
                fetched=self._free,
                plan=HOST_S,
                pack=0.0,
                dispatch=0.0,
                wait=0.0,
                commit=0.0,
                num_decode=first,
                num_prefill=len(chunks),
                num_decode_tokens=first,
                num_prefill_tokens=sum(n for _, n in chunks),
                num_running=first,
                num_waiting=0,
                num_pages=num_pages,
                num_decode_keys=sum(rows.starts[:first]) + first,
                num_prefill_keys=sum(n * start + n * (n + 1) // 2 for start, n in chunks),
            )
        )
        return StepSeconds(seconds, HOST_S, 0.0)


def write_trace(path: Path, setting: Setting | None = None, formula: Formula = plain) -> Path:
    """A trace of some hundred steps of an engine whose steps take what a formula says."""
    setting = setting or small_setting()
    recording = Recording(setting, formula)
    simulation = recording.simulation = Simulation(setting, recording)
    load = Workload(80, 8.0, input_len=100, output_len=12, range_ratio=0.9, seed=1)
    requests = [*load.requests()]
    served = simulation.run(requests)
    lines: list[dict[str, Any]] = [{"trace": VERSION, "model": "made up"}]
    for number, one in enumerate(requests):
        lines.append(
            {
                "arrival": one.arrival,
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
                "queue": served.started[number] - one.arrival,
                "overhead": HOST_S,
                "ttft": served.first[number] - one.arrival,
                "delivery": DELIVERY_S,
            }
        )
    lines += [{"step": [*step]} for step in recording.steps]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
