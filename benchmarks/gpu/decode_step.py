"""Section: the engine on a full-size shape with random weights; its decode step in parts.

One case is one batch size: tok/s over whole requests, then the step in the steady state, next to
the least time that its bytes need at the copy bandwidth, then where the device spends it.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.device_busy import BUSY_TARGET, measure_busy
from benchmarks.device_trace import NoTraceError, traced
from benchmarks.gpu.engine import TINY, begin_decoding, make_llm
from benchmarks.gpu.setting import Section, Setting
from jaxserve import LLM
from jaxserve.bench.measure import run_workload
from jaxserve.bench.shapes import SHAPES, write_config
from jaxserve.bench.workloads import WorkItem, bytes_moved, fixed, uniform
from jaxserve.engine import Engine
from jaxserve.execution import runner
from jaxserve.execution.batch import StepShape
from jaxserve.execution.defaults import device_defaults
from jaxserve.execution.programs import wanted_shapes
from jaxserve.sampling.variant import Variant

MIXED, MIXED_SLOTS = "mixed", 64
# batches of each shape, or the mixed workload; the most telling ones first
CASES: dict[str, tuple[int | str, ...]] = {
    "llama-3-8b": (64, 16, 1, 256, MIXED),
    "llama-2-7b": (16, 64),
}
DRY_SHAPE, DRY_CASES = "llama-125m", (2, MIXED)
LENGTH = 128  # tokens of a prompt and of an output
MAX_MODEL_LEN = 512
PAGE_SIZE = device_defaults("gpu").page_size
ALL = 1000  # programs
TIMED_STEPS, TRACED_STEPS = 48, 8
WAIT_STEPS = 4  # after the prompts: the first decode steps may still be one program larger
SHOWN_KERNELS = 8
ROOFLINE_TARGET = 1.25  # times the least time
BACKLOG_S = 2.0  # traced, and as long untraced
LEAST, BUSY, STEP = "least time", "device busy", "decode step"  # parts that the plot shows


def cases(setting: Setting, shape: str) -> list[str]:
    """Shape and batch size, or the mixed workload."""
    batches = setting.pick(CASES[shape], DRY_CASES)
    return [f"{setting.pick(shape, DRY_SHAPE)} {batch}" for batch in batches]


def measured_shapes(
    wanted: list[StepShape], batch: int, prompt_tokens: int | None
) -> list[StepShape]:
    """Of the programs that an engine wants, those that greedy steps of so many rows run on.

    One for prompts, the smallest that takes so many tokens at once, or all for prompts of any
    length (None); and one for decode steps.
    """
    fitting = [s for s in wanted if s.variant == Variant.GREEDY and s.num_decode >= batch]
    mixed = sorted(
        (s for s in fitting if s.num_prefill), key=lambda s: (s.num_decode, s.num_prefill)
    )
    decode = min((s for s in fitting if not s.num_prefill), key=lambda s: s.num_decode)
    if prompt_tokens is not None:
        mixed = [next((s for s in mixed if s.num_prefill >= prompt_tokens), mixed[-1])]
    return [*mixed, decode]


@contextmanager
def compiling_only(batch: int, prompt_tokens: int | None) -> Iterator[None]:
    """Engines that are made in this block compile the programs that are measured and no others.

    Their own first programs serve requests of every kind: more work a step than greedy ones need,
    and minutes of compilation.
    """

    def few(*sizes: Any) -> list[StepShape]:
        return measured_shapes(wanted_shapes(*sizes), batch, prompt_tokens)

    with mock.patch.object(runner, "wanted_shapes", few):
        yield


def rate_key(shape: str, batch: int | str) -> str:
    """Where later sections find the tokens a second of whole requests."""
    return f"tok_s {shape} {batch}"


def copy_bandwidth(setting: Setting) -> float:
    """GB/s that this run measured; NaN where that section failed, which costs no step's time."""
    return setting.shared.get("copy_gb_s", math.nan)


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
    share = 100 * wide / copy_bandwidth(setting)
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
    told += f"; traced step {found.traced_ms:.3f} ms, {100 * found.traced:.1f} % busy in the trace"
    step_ms = round(found.step_ms, 3)
    section.rows.append((what, "device under a backlog, step", "", step_ms, told))
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
        slots = max(2, batch)
        with compiling_only(batch, None if kind == MIXED else batch * length):
            llm = make_llm(
                folder,
                max_num_seqs=slots,
                max_model_len=MAX_MODEL_LEN,
                # every slot at its longest, and the trash page; to plan it would cost a compilation
                num_pages=slots * MAX_MODEL_LEN // PAGE_SIZE + 1,
                compile_ahead=ALL,
            )
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
    copy = copy_bandwidth(setting)
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
    verdict = verdict if math.isfinite(ratio) else "unknown"
    section.rows.append((what, LEAST, "", round(1e3 * least, 3), f"at {copy:.0f} GB/s"))
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
    idle = after.times.device_idle - before.times.device_idle
    # in the last words of this process, should the profiler take it along
    print(section.rows, file=sys.stderr, flush=True)
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
            # the profiler turns CUDA graphs off: the served step less the host's pauses
            round(1e3 * (seconds - idle / timed), 3),
            f"at least {100 * (1 - idle / timed / seconds):.1f} % of the step by the host's "
            f"clock; kernels {1e3 * kernels.busy / seen:.3f} ms a step in the trace, no graphs",
        )
    )
    for name, calls, spent in kernels.largest(SHOWN_KERNELS):
        share = 100 * spent / kernels.busy
        row = (what, name, calls, round(1e3 * spent / seen, 4), f"{share:.1f} % of busy")
        section.rows.append(row)
    return section
