"""Section: the same layers in torch under one CUDA graph, in a process with torch in it."""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks.gpu.decode_step import DRY_ROWS, FILTERED, GREEDY, LENGTH, step_key
from benchmarks.gpu.setting import Section, Setting
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench.worker import torch_worker
from benchmarks.model_shapes import TINY
from jaxserve.models.known_shapes import SHAPES

BATCHES = (64, 16, 1, 256)
SEEN = LENGTH + 28  # tokens of a row in the steps that are timed of ours


def torch_step(setting: Setting, case: str) -> Section:
    """Milliseconds of one decode step: linear, SDPA and argmax, nothing else on the host."""
    section = Section(columns=("shape", "batch", "torch step, ms", "jaxserve", "remark"))
    if importlib.util.find_spec("torch") is None:
        section.rows.append((case, "", "", "", "NOT MEASURED: torch is not installed"))
        return section
    settings: dict[str, Any] = SHAPES[case] | (TINY if setting.dry_run else {})
    worker = torch_worker()
    try:
        answer = worker.call(
            {
                "do": "step",
                "settings": settings,
                "batches": setting.pick(BATCHES, (DRY_ROWS,)),
                "tokens": setting.pick(SEEN, 12),
                "seconds": 0.6 * setting.seconds_left,
                "dry_run": setting.dry_run,
            },
            setting.seconds_left,
        )
    except WorkerError as error:
        section.failures.append(f"{case}: {error}")
        return section
    finally:
        worker.close()
    for batch, found in answer["ms"].items():
        if found is None:
            section.rows.append((case, int(batch), "", "", "time was up"))
            continue
        told = []
        for kind in (FILTERED, GREEDY):
            ours = setting.shared.get(step_key(f"{case} {kind} {batch}"))
            told += [] if ours is None else [f"{kind} {ours:.3f} ms, {found / ours:.2f}x its speed"]
        remark = "" if answer["graph"] else "NO GRAPH: this is a dry run without a GPU"
        section.rows.append((case, int(batch), round(found, 3), "; ".join(told), remark))
    section.notes += [answer["versions"], "The jaxserve column is from the decode step section."]
    return section
