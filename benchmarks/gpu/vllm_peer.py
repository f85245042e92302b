"""Section: vLLM on the same shapes and workloads, through the adapter of `benchmarks.peers`."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.decode_step import LENGTH, MIXED, MIXED_SLOTS, mixed_items, rate_key
from benchmarks.gpu.engine import TINY
from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.worker import ROOT
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.workload import Cell, fixed_batch, write_cells
from jaxserve.bench.shapes import SHAPES, write_config

MODELS = ("llama-3-8b",)
BATCHES = (16, 64, MIXED, 1, 256)
MEMORY_SHARE = 0.85  # of the device, where nothing else runs meanwhile
NAMED = {"model_type": "llama"}  # by which vLLM's configs go
TARGET = 1.0  # times vLLM's tok/s
ROUNDS = 2  # the first one warms up
END_S = 5  # left of a case's time for the engine's end


def cases(setting: Setting) -> list[str]:
    """Shapes of models."""
    return list(setting.pick(MODELS, ("llama-125m",)))


def cells_of(setting: Setting, vocab: int) -> dict[str, Cell]:
    """The workloads of the decode step's section, by the name of the batch there."""
    length = setting.pick(LENGTH, 4)
    items = mixed_items(setting, vocab)
    prompts, lengths = [i.prompt_token_ids for i in items], [i.output_len for i in items]
    made = {}
    for batch in setting.pick(BATCHES, (2, MIXED)):
        if batch == MIXED:
            made[MIXED] = Cell(MIXED, setting.pick(MIXED_SLOTS, 2), prompts, lengths)
        else:
            made[str(batch)] = fixed_batch(batch, length, length, vocab)
    return made


def generate(setting: Setting, case: str) -> Section:
    """Output tokens a second in the second round, random weights of the same shape, greedy."""
    section = Section(columns=("shape", "batch", "vLLM tok/s", "jaxserve", "remark"))
    if importlib.util.find_spec("vllm") is None:
        absent = f"NOT MEASURED: vllm is not installed in {sys.executable}"
        section.rows.append((case, "", "", "", absent))
        section.notes.append(absent)
        return section
    overrides: dict[str, Any] = setting.pick({}, TINY)
    cells = cells_of(setting, (SHAPES[case] | overrides)["vocab_size"])
    deadline = time.monotonic() + setting.seconds_left - END_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = write_config(case, folder / "model", **NAMED, **overrides)
            worker = start(setting, model, cells)
        except WorkerError as error:
            section.failures.append(f"vLLM, {case}: {error}")
            return section
        try:
            for index, (batch, cell) in enumerate(cells.items()):
                if time.monotonic() > deadline:
                    section.rows.append((case, batch, "", "", "time was up"))
                    continue
                answers = [worker.run(index) for _ in range(ROUNDS)]
                rate = cell.output_tokens / answers[-1]["seconds"]
                ours = setting.shared.get(rate_key(case, batch))
                ratio = "" if ours is None else f"{ours / rate:.2f}x"
                met = "" if ours is None else "met" if ours / rate >= TARGET else "missed"
                told = f">= {TARGET}x: {met}" if met else ""
                section.rows.append((case, batch, round(rate, 1), ratio, told))
        except WorkerError as error:
            section.failures.append(f"vLLM, {case}: {error}")
        finally:
            worker.close()
    versions = ", ".join(f"{name} {version}" for name, version in worker.versions.items())
    section.notes.append(f"{versions}; ready after {worker.startup_seconds:.0f} s")
    section.notes.append("The jaxserve column is from the decode step section.")
    return section


def start(setting: Setting, model: Path, cells: dict[str, Cell]) -> Worker:
    """vLLM's process, which has everything compiled and captured when this returns.

    Raises:
        WorkerError: it does not start; the message says why.
    """
    workload = model.parent / "workload.json"
    write_cells(workload, list(cells.values()))
    settings: dict[str, Any] = {"load_format": "dummy"}
    if not setting.dry_run:
        settings["gpu_memory_utilization"] = MEMORY_SHARE
    job = {
        "model": str(model),
        "dtype": "bfloat16",
        "slots": max(cell.in_flight for cell in cells.values()),
        "max_model_len": setting.pick(512, 64),
        "converted": str(model.parent / "converted"),
        "settings": settings,
    }
    command = [sys.executable, "-m", "benchmarks.peers.worker", "vllm"]
    command += ["--job", json.dumps(job), "--workload", str(workload)]
    return Worker(command, ROOT, model.parent / "vllm.log", setting.seconds_left - END_S)
