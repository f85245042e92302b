"""Section: the engine on a full-size shape with random weights; its decode step in parts.

One case is one batch size: tok/s over whole requests, then the step in the steady state, next to
the least time that its bytes need at the copy bandwidth, then where the device spends it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.device_busy import BUSY_TARGET, measure_busy
from benchmarks.device_trace import NoTraceError, traced
from benchmarks.gpu.engine import TINY, begin_decoding, make_llm
from benchmarks.gpu.setting import Section, Setting
from jaxserve import LLM
from jaxserve.bench.measure import run_workload
from jaxserve.bench.shapes import SHAPES, write_config
from jaxserve.bench.workloads import WorkItem, bytes_moved, fixed, uniform
from jaxserve.engine import Engine

MIXED, MIXED_SLOTS = "mixed", 64
# shape and batch, or the mixed workload; the most telling ones first
CASES = (
    ("llama-3-8b", 64), ("llama-3-8b", 16), ("llama-3-8b", 1), ("llama-3-8b", 256),
    ("llama-3-8b", MIXED), ("llama-2-7b", 16), ("llama-2-7b", 64),
)  # fmt: skip
DRY_CASES = (("llama-125m", 2), ("llama-125m", MIXED))
LENGTH = 128  # tokens of a prompt and of an output
TIMED_STEPS, TRACED_STEPS = 48, 8
WAIT_STEPS = 4  # after the prompts: the first decode steps may still be one program larger
SHOWN_KERNELS = 8
ROOFLINE_TARGET = 1.25  # times the least time
BACKLOG_S = 2.0  # traced, and as long untraced
LEAST, BUSY, STEP = "least time", "device busy", "decode step"  # parts that the plot shows


def cases(setting: Setting) -> list[str]:
    """Shape and batch size, or the mixed workload."""
    return [f"{shape} {batch}" for shape, batch in setting.pick(CASES, DRY_CASES)]


def rate_key(shape: str, batch: int | str) -> str:
    """Where later sections find the tokens a second of whole requests."""
    return f"tok_s {shape} {batch}"


def step_seconds(engine: Engine, steps: int) -> float:
    """Seconds of one of several steps in the steady state."""
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - begin) / steps


def mixed_items(setting: Setting, vocab: int) -> list[WorkItem]:
    """Requests whose lengths are uniform in 8 .. 256, more of them than slots."""
    longest, count = setting.pick((256, 256), (16, 4))
    return uniform(count, 8, longest, vocab, seed=1234)


def mixed(setting: Setting, llm: LLM, vocab: int, shape: str, slots: int) -> Section:
    """The mixed workload; then in how much of the time the device is busy under a backlog."""
    items = mixed_items(setting, vocab)
    run_workload(llm, items)
    run = run_workload(llm, items)
    rate, wide = run.output_tokens_per_second, run.gigabytes_per_second
    share = 100 * wide / setting.shared["copy_gb_s"]
    what = f"{shape}, mixed, {len(items)} requests at {slots} slots"
    values = (round(rate, 1), round(1e3 * run.elapsed_time / run.num_steps, 3))
    setting.shared[rate_key(shape, MIXED)] = rate
    section = Section(rows=[(what, "whole requests", *values, f"{wide:.0f} GB/s, {share:.0f} %")])
    try:
        found = measure_busy(llm, items, slots, setting.pick(BACKLOG_S, 0.05))
    except NoTraceError as error:
        section.failures.append(f"{what}: {error}")
        return section
    verdict = "met" if found.busy >= BUSY_TARGET else "missed"
    told = f"{100 * found.busy:.1f} % busy; >= {BUSY_TARGET:.0%}: {verdict}"
    told += f"; untraced step {found.step_ms:.3f} ms, at least {100 * found.bound:.1f} % busy"
    traced_ms = round(found.traced_ms, 3)
    section.rows.append((what, "device under a backlog, traced step", "", traced_ms, told))
    return section


def decode_step(setting: Setting, case: str) -> Section:
    """One batch size, or the mixed workload at 64 slots."""
    columns = ("workload", "part", "tok/s or calls", "ms", "remark")
    shape, kind = case.split()
    overrides: dict[str, Any] = setting.pick({}, TINY)
    vocab = (SHAPES[shape] | overrides)["vocab_size"]
    batch = setting.pick(MIXED_SLOTS, 2) if kind == MIXED else int(kind)
    length = setting.pick(LENGTH, 8)
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(shape, Path(name), **overrides)
        llm = make_llm(folder, max_num_seqs=max(2, batch), compile_ahead=setting.pick(8, 2))
        try:
            startup = f"start-up {llm.startup_seconds:.1f} s"
            if kind == MIXED:
                section = mixed(setting, llm, vocab, shape, batch)
            else:
                section = steady(setting, llm, f"{shape}, batch {batch}", batch, length, vocab)
                setting.shared[rate_key(shape, batch)] = section.rows[0][2]
        finally:
            llm.close()
    section.columns = columns
    section.notes.append(f"{case}: {startup}")
    return section


def steady(setting: Setting, llm: LLM, what: str, batch: int, length: int, vocab: int) -> Section:
    """Whole requests, then the decode step alone, then its kernels."""
    section = Section()
    copy = setting.shared["copy_gb_s"]
    items = fixed(batch, length, length, vocab, seed=0)
    run_workload(llm, items)
    run = run_workload(llm, items)
    wide = run.gigabytes_per_second
    section.rows.append(
        (
            what,
            f"whole requests, {length}/{length}",
            round(run.output_tokens_per_second, 1),
            round(1e3 * run.elapsed_time / run.num_steps, 3),
            f"{wide:.0f} GB/s, {100 * wide / copy:.0f} % of copying",
        )
    )
    timed, seen = setting.pick((TIMED_STEPS, TRACED_STEPS), (2, 2))
    prompts = fixed(batch, length, WAIT_STEPS + timed + seen + 8, vocab, seed=1)
    engine = begin_decoding(llm, prompts)
    for _ in range(WAIT_STEPS):
        engine.step()
    before = llm.stats()
    seconds = step_seconds(engine, timed)
    after = llm.stats()
    # every row reads its prompt and half of what it has generated by then
    read = bytes_moved(fixed(batch, length, 1, vocab, seed=1), 1, llm.footprint)
    read += batch * (WAIT_STEPS + timed // 2) * llm.footprint.kv_bytes_per_token
    least = read / (copy * 1e9)
    ratio = seconds / least
    verdict = "met" if ratio <= ROOFLINE_TARGET else "missed"
    section.rows.append((what, LEAST, "", round(1e3 * least, 3), "at the copy bandwidth"))
    section.rows.append(
        (
            what,
            STEP,
            round(batch / seconds, 1),
            round(1e3 * seconds, 3),
            f"{ratio:.2f}x the least time; <= {ROOFLINE_TARGET}x: {verdict}",
        )
    )
    for phase in ("plan", "pack", "dispatch", "wait", "commit", "device_idle"):
        spent = getattr(after.times, phase) - getattr(before.times, phase)
        section.rows.append((what, f"host: {phase}", "", round(1e3 * spent / timed, 4), ""))
    try:
        kernels = traced(lambda: step_seconds(engine, seen))
    except NoTraceError as error:
        section.failures.append(f"{what}: {error}")
        return section
    section.rows.append(
        (
            what,
            BUSY,
            "",
            round(1e3 * kernels.busy / seen, 3),
            f"{100 * kernels.busy / kernels.span:.1f} % of the traced time",
        )
    )
    for name, calls, spent in kernels.largest(SHOWN_KERNELS):
        share = 100 * spent / kernels.busy
        row = (what, name, calls, round(1e3 * spent / seen, 4), f"{share:.1f} % of busy")
        section.rows.append(row)
    return section
