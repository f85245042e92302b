"""Sections: vLLM and transformers on the decode step's workloads, by the adapters of
`benchmarks.peers`, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device_run import ROOT
from benchmarks.gpu.decode_step import (
    DRY_ROWS,
    DRY_SHAPE,
    LENGTH,
    MIXED,
    MIXED_SLOTS,
    mixed_items,
    rate_key,
)  # fmt: skip
from benchmarks.gpu.setting import Section, Setting
from benchmarks.model_shapes import TINY, write_config
from benchmarks.peers.limits import least_work
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.workload import Cell, fixed_batch, write_rounds
from jaxserve.bench.device_limits import Limits, usable_cores
from jaxserve.config.device_defaults import device_defaults
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.known_shapes import SHAPES

NAMED = {"model_type": "llama"}  # by which the others' configs go
ROUNDS = 2  # the first one warms up
END_S = 5  # left of a case's time for the engine's end


@dataclass(frozen=True, slots=True)
class Engine:
    """Another engine.

    Attributes:
        name: of its adapter, and of its package.
        batches: batches that it runs, the most telling ones first.
        targets: times its tok/s that jaxserve is to have, by batch; or for every one.
        settings: extra settings of the engine on a GPU.
    """

    name: str
    batches: tuple[int | str, ...]
    targets: dict[str, float] | float
    settings: dict[str, Any] = field(default_factory=dict)

    def target(self, batch: str) -> float | None:
        """For one batch; None where there is none."""
        return self.targets.get(batch) if isinstance(self.targets, dict) else self.targets


# vLLM takes this share of the device's memory, where nothing else runs meanwhile
VLLM = Engine("vllm", (16, 64, MIXED, 1, 256), 1.0, {"gpu_memory_utilization": 0.85})
TRANSFORMERS = Engine("transformers", (64, 16, 1, 256), {"16": 4.3})


def cases(setting: Setting, shape: str) -> list[str]:
    """The shape of a model."""
    return [setting.pick(shape, DRY_SHAPE)]


def cells_of(setting: Setting, engine: Engine, vocab: int, number: int) -> dict[str, Cell]:
    """The workloads of the decode step's section in a round, by the name of the batch there."""
    length = setting.pick(LENGTH, 4)
    items = mixed_items(setting, vocab, number)
    prompts, lengths = [i.prompt_token_ids for i in items], [i.output_len for i in items]
    made = {}
    for batch in dict.fromkeys(
        setting.pick(b, b if b == MIXED else DRY_ROWS) for b in engine.batches
    ):
        if batch == MIXED:
            made[MIXED] = Cell(MIXED, setting.pick(MIXED_SLOTS, DRY_ROWS), prompts, lengths)
        else:
            made[str(batch)] = fixed_batch(batch, length, length, vocab, number)
    return made


def generate(setting: Setting, case: str, engine: Engine) -> Section:
    """Output tokens a second in the second round, random weights of the same shape, greedy."""
    section = Section(columns=("shape", "batch", f"{engine.name} tok/s", "jaxserve", "remark"))
    missing = [n for n in (engine.name, "torch") if importlib.util.find_spec(n) is None]
    if missing:
        absent = f"NOT MEASURED: {missing[0]} is not installed in {sys.executable}"
        section.rows.append((case, "", "", "", absent))
        section.notes.append(absent)
        return section
    overrides: dict[str, Any] = setting.pick({}, TINY)
    vocab = (SHAPES[case] | overrides)["vocab_size"]
    rounds = [cells_of(setting, engine, vocab, number) for number in range(ROUNDS)]
    ceilings = setting.ceilings
    limits = Limits(1e12 * ceilings.matmul_tflop_s, 1e9 * ceilings.copy_gb_s, "bf16")
    deadline = time.monotonic() + setting.seconds_left - END_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = write_config(case, folder / "model", **NAMED, **overrides)
            worker = worker_of(setting, engine, model, rounds)
            worker.start()
        except WorkerError as error:
            section.failures.append(f"{engine.name}, {case}: {error}")
            return section
        try:
            config = read_model_config(model)
            for index, (batch, cell) in enumerate(rounds[0].items()):
                if time.monotonic() > deadline:
                    section.rows.append((case, batch, "", "", "time was up"))
                    continue
                answers = [worker.run(index, number) for number in range(ROUNDS)]
                seconds = answers[-1]["seconds"]
                if not setting.dry_run:
                    work = least_work(cell, config, 16)
                    what = f"{engine.name}, {case} {batch}"
                    section.failures += limits.beyond(
                        what, seconds, work.flops, work.read_bytes, 16
                    )
                rate = cell.output_tokens / seconds
                ours, target = setting.shared.get(rate_key(case, batch)), engine.target(batch)
                ratio = "" if ours is None else f"{ours / rate:.2f}x"
                told = ""
                if ours is not None and target is not None:
                    told = f">= {target}x: {'met' if ours / rate >= target else 'missed'}"
                section.rows.append((case, batch, round(rate, 1), ratio, told))
        except WorkerError as error:
            section.failures.append(f"{engine.name}, {case}: {error}")
        finally:
            worker.close()
    versions = ", ".join(f"{name} {version}" for name, version in worker.versions.items())
    section.notes.append(f"{versions}; ready after {worker.startup_seconds:.0f} s")
    section.notes.append(
        "Prefix caches off, other prompts in each round, greedy, end-of-sequence ignored. The "
        "jaxserve column is from the decode step section, with the same lengths; it samples."
    )
    return section


def worker_of(
    setting: Setting, engine: Engine, model: Path, rounds: list[dict[str, Cell]]
) -> Worker:
    """The engine's process, not started yet."""
    workload = model.parent / "workload.json"
    write_rounds(workload, [list(cells.values()) for cells in rounds])
    settings: dict[str, Any] = {"load_format": "dummy"}
    job = {
        "model": str(model),
        "dtype": "bfloat16",
        "slots": max(cell.in_flight for cell in rounds[0].values()),
        "step_tokens": device_defaults("gpu").max_num_batched_tokens,  # as ours
        "threads": usable_cores(),
        "max_model_len": setting.pick(512, 64),
        "converted": str(model.parent / "converted"),
        "settings": settings | ({} if setting.dry_run else engine.settings),
    }
    command = [sys.executable, "-m", "benchmarks.peers.worker", engine.name]
    command += ["--job", json.dumps(job), "--workload", str(workload)]
    log = model.parent / f"{engine.name}.log"
    return Worker(command, ROOT, log, setting.seconds_left - END_S)
