"""Section: transformers' `generate` on the same shapes, in a process with torch in it."""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks.gpu.decode_step import DRY_SHAPE, rate_key
from benchmarks.gpu.engine import TINY
from benchmarks.gpu.setting import Section, Setting
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench.worker import torch_worker
from jaxserve.bench.shapes import SHAPES

BATCHES = (16, 64, 1, 256)
LENGTH = 128
TARGET, TARGET_BATCH = 4.3, 16  # times transformers' tok/s


def cases(setting: Setting, shape: str) -> list[str]:
    """The shape of a model."""
    return [setting.pick(shape, DRY_SHAPE)]


def generate(setting: Setting, case: str) -> Section:
    """Static batches, greedy, prompt and output of 128 tokens; random weights of the same shape."""
    section = Section(columns=("shape", "batch", "transformers tok/s", "jaxserve", "remark"))
    if importlib.util.find_spec("torch") is None:
        section.notes.append("Not measured: torch is not installed.")
        return section
    settings: dict[str, Any] = SHAPES[case] | (TINY if setting.dry_run else {})
    length = setting.pick(LENGTH, 4)
    worker = torch_worker()
    try:
        answer = worker.call(
            {
                "do": "generate",
                "settings": settings | {"model_type": "llama"},
                "batches": setting.pick(BATCHES, (1, 2)),
                "input_len": length,
                "output_len": length,
                "seconds": 0.6 * setting.seconds_left,
            },
            setting.seconds_left,
        )
    except WorkerError as error:
        section.failures.append(f"transformers, {case}: {error}")
        return section
    finally:
        worker.close()
    for batch, rate in answer["tok_s"].items():
        if rate is None:
            section.rows.append((case, int(batch), "", "", "time was up"))
            continue
        ours = setting.shared.get(rate_key(case, int(batch)))
        ratio = "" if ours is None else f"{ours / rate:.2f}x"
        told = f"attention: {answer['attention']}"
        if ours is not None and int(batch) == TARGET_BATCH:
            told += f"; >= {TARGET}x: {'met' if ours / rate >= TARGET else 'missed'}"
        section.rows.append((case, int(batch), round(rate, 1), ratio, told))
    section.notes += [answer["versions"], "The jaxserve column is from the decode step section."]
    return section
