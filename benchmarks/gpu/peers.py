"""Sections: a torch step under one CUDA graph, and transformers, in a process with torch in it."""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks.gpu.decode_step import DRY_ROWS, DRY_SHAPE, FILTERED, GREEDY, rate_key, step_key
from benchmarks.gpu.decode_step import LENGTH as TOKENS
from benchmarks.gpu.engine import TINY
from benchmarks.gpu.setting import Section, Setting
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench.worker import torch_worker
from jaxserve.bench.shapes import SHAPES

BATCHES = (64, 16, 1, 256)
SEEN = TOKENS + 28  # tokens of a row in the steps that are timed of ours
TARGET, TARGET_BATCH = 4.3, 16  # times transformers' tok/s
OURS = "The jaxserve column is from the decode step section."


def cases(setting: Setting, shape: str) -> list[str]:
    """The shape of a model."""
    return [setting.pick(shape, DRY_SHAPE)]


def asked(setting: Setting, section: Section, case: str, do: str, **request: Any) -> dict[str, Any]:
    """What the process with torch answers; empty where it does not, and the section says why."""
    if importlib.util.find_spec("torch") is None:
        section.rows.append((case, "", "", "", "NOT MEASURED: torch is not installed"))
        return {}
    settings: dict[str, Any] = SHAPES[case] | (TINY if setting.dry_run else {})
    worker = torch_worker()
    request |= {"do": do, "settings": settings | {"model_type": "llama"}}
    request |= {"batches": setting.pick(BATCHES, (DRY_ROWS, 1)), "dry_run": setting.dry_run}
    request["seconds"] = 0.6 * setting.seconds_left
    try:
        return worker.call(request, setting.seconds_left)
    except WorkerError as error:
        section.failures.append(f"{case}: {error}")
        return {}
    finally:
        worker.close()


def torch_step(setting: Setting, case: str) -> Section:
    """Milliseconds of one decode step of the same layers: linear, SDPA, argmax, one CUDA graph."""
    section = Section(columns=("shape", "batch", "torch step, ms", "jaxserve", "remark"))
    answer = asked(setting, section, case, "step", tokens=setting.pick(SEEN, 12))
    for batch, found in answer.get("ms", {}).items():
        if found is None:
            section.rows.append((case, int(batch), "", "", "time was up"))
            continue
        setting.shared[f"torch_ms {case} {batch}"] = found
        told = []
        for kind in (FILTERED, GREEDY):
            ours = setting.shared.get(step_key(f"{case} {kind} {batch}"))
            told += [] if ours is None else [f"{kind} {ours:.3f} ms, {found / ours:.2f}x its speed"]
        remark = "" if answer["graph"] else "NO GRAPH: this is a dry run without a GPU"
        section.rows.append((case, int(batch), round(found, 3), "; ".join(told), remark))
    section.notes += [answer["versions"], OURS] if answer else []
    return section


def generate(setting: Setting, case: str) -> Section:
    """Static batches, greedy, prompt and output of 128 tokens; random weights of the same shape."""
    section = Section(columns=("shape", "batch", "transformers tok/s", "jaxserve", "remark"))
    length = setting.pick(TOKENS, 4)
    answer = asked(setting, section, case, "generate", input_len=length, output_len=length)
    for batch, rate in answer.get("tok_s", {}).items():
        if rate is None:
            section.rows.append((case, int(batch), "", "", "time was up"))
            continue
        ours = setting.shared.get(rate_key(case, int(batch)))
        ratio = "" if ours is None else f"{ours / rate:.2f}x"
        told = f"attention: {answer['attention']}"
        if ours is not None and int(batch) == TARGET_BATCH:
            told += f"; >= {TARGET}x: {'met' if ours / rate >= TARGET else 'missed'}"
        section.rows.append((case, int(batch), round(rate, 1), ratio, told))
    section.notes += [answer["versions"], f"{OURS} Its tokens are sampled."] if answer else []
    return section
