"""Sections: the decode step of full-size shapes with random weights, its kernels and its programs.

The cases of a section share one engine; its programs are compiled at the same time. A case is
whole requests in tok/s, then the step in the steady state by the host's clock, with CUDA graphs as
an engine has them, beside the least time of its operations; then the shares of its kernels. Under
the profiler there are no graphs: what it says of times is told as shares.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.device_busy import BUSY_TARGET, measure_busy
from benchmarks.device_trace import NoTraceError, traced
from benchmarks.gpu.engine import begin_decoding, make_llm
from benchmarks.gpu.engine_kinds import KINDS, PLAIN, Kind
from benchmarks.gpu.kernel_classes import by_class
from benchmarks.gpu.roofline import least_by_kind, operations
from benchmarks.gpu.setting import Section, Setting
from benchmarks.model_shapes import TINY, write_config
from jaxserve import LLM, SamplingParams
from jaxserve.bench.device_limits import MARGIN
from jaxserve.bench.measure import run_workload
from jaxserve.bench.workloads import WorkItem, fixed, random_tokens, uniform
from jaxserve.client.engine_client import EngineClient
from jaxserve.config.device_defaults import device_defaults
from jaxserve.execution import runner
from jaxserve.execution.features import FAST
from jaxserve.execution.programs import wanted_shapes
from jaxserve.execution.step_shape import StepShape

FILTERED, GREEDY, UNGRAPHED, MIXED = "filtered", "greedy", "graphs-off", "mixed"
MIXED_SLOTS = 64
LLAMA_3, LLAMA_2 = "llama-3-8b", "llama-2-7b"
# the cases of each section, the most telling ones first
STEPS = tuple(
    f"{LLAMA_3} {case}"
    for case in (
        f"{FILTERED} 64", f"{FILTERED} 16", f"{FILTERED} 1", f"{FILTERED} 256",
    )
)  # fmt: skip
# one step of each kind of engine, of fewer layers: most of its time would be compilation
OF_KINDS = tuple(f"{kind.shape or LLAMA_3} {name} 64" for name, kind in KINDS.items())
KIND_LAYERS = 8
OTHER_STEPS = tuple(f"{LLAMA_3} {case} 64" for case in (GREEDY, UNGRAPHED))
MIXES = (f"{LLAMA_3} {MIXED} {MIXED_SLOTS}",)
OLDER = (f"{LLAMA_2} {FILTERED} 16", f"{LLAMA_2} {FILTERED} 64")
DRY_SHAPE, DRY_ROWS = "llama-125m", 2
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}  # of filtered requests
# a program of XLA on a GPU that is launched kernel by kernel
NO_GRAPHS = {"xla_gpu_enable_command_buffer": "", "xla_gpu_graph_min_graph_size": str(2**31 - 1)}
LENGTH = 128  # tokens of a prompt and of an output
MAX_MODEL_LEN = 512
PAGE_SIZE = device_defaults("gpu", "9.0").page_size  # Hopper's on every GPU: one set of proofs
ALL = 1000  # programs
TIMED_STEPS, TRACED_STEPS = 48, 8
WAIT_STEPS = 4  # after the prompts: the first decode steps may still be one program larger
SHOWN_KERNELS = 8
ROOFLINE_TARGET = 1.25  # times the least time
BACKLOG_S = 2.0  # traced, and as long untraced
LEAST, BUSY, STEP = "least time", "kernels", "decode step"


class Case(NamedTuple):
    """One workload: the shape of the model, how tokens are chosen, and rows of the step."""

    shape: str
    kind: str
    rows: int

    @staticmethod
    def parsed(text: str) -> Case:
        """From "shape kind rows"."""
        shape, kind, rows = text.split()
        return Case(shape, kind, int(rows))

    @property
    def program(self) -> StepShape:
        """Of its decode steps."""
        return StepShape(self.rows, 0, 0, FAST, 0)

    @property
    def of(self) -> Kind:
        """The kind of its engine."""
        return KINDS.get(self.kind, PLAIN)

    @property
    def engine(self) -> str:
        """The name of its engine: cases with the same one share it."""
        return f"{self.shape} {self.kind}" if self.kind in KINDS else self.shape


@dataclass(frozen=True, slots=True)
class SampledItem(WorkItem):
    """A request with tokens drawn from a filtered distribution."""

    def params(self, **how: Any) -> SamplingParams:
        return replace(WorkItem.params(self, **how), seed=0, **SAMPLING)


@dataclass(slots=True)
class Bed:
    """An engine, and the seconds in which each of its programs was compiled."""

    llm: LLM
    compile_s: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """Gives the device's memory back."""
        self.llm.close()


def cases(setting: Setting, every: tuple[str, ...]) -> list[str]:
    """Shape, kind and rows of every case; in a dry run one of each kind."""
    kinds = dict.fromkeys(Case.parsed(case).kind for case in every)
    tiny = {kind: KINDS[kind].shape if kind in KINDS else None for kind in kinds}
    dry = [f"{shape or DRY_SHAPE} {kind} {DRY_ROWS}" for kind, shape in tiny.items()]
    return setting.pick(list(every), dry)


def measured_shapes(wanted: list[StepShape], found: list[Case]) -> list[StepShape]:
    """Of the programs that an engine wants, those on which the steps of some cases run.

    The first two serve every step of the cases: the largest for prompts and for decode steps. The
    smallest for prompts follows, which one short request takes.
    """
    rows = max(case.rows for case in found)
    fitting = [s for s in wanted if s.features == FAST]
    mixed = sorted(
        (s for s in fitting if s.num_prefill), key=lambda s: (s.num_decode, s.num_prefill)
    )
    decode = min(
        (s for s in fitting if not s.num_prefill and s.num_decode >= rows),
        key=lambda s: s.num_decode,
    )
    prompts = mixed if any(case.kind == MIXED for case in found) else mixed[:1]
    exact = [case.program for case in found if case.program in wanted]
    return list(dict.fromkeys([mixed[-1], decode, *prompts, *exact]))


@contextmanager
def compiling_only(found: list[Case], seconds: dict[str, float]) -> Iterator[None]:
    """Engines made in this block compile the programs that are measured and no others.

    Their own first programs serve requests of every kind: minutes of compilation. What each takes,
    several at the same time, is put into `seconds`.
    """
    compile_program: Callable[..., Any] = runner.Runner.compile_program

    def few(*sizes: Any, **named: Any) -> list[StepShape]:
        return measured_shapes(wanted_shapes(*sizes, **named), found)

    def timed(self: Any, shape: StepShape, *others: Any) -> Any:
        begin = time.perf_counter()
        program = compile_program(self, shape, *others)
        seconds[shape.name] = time.perf_counter() - begin
        return program

    with (
        mock.patch.object(runner, "wanted_shapes", few),
        mock.patch.object(runner.Runner, "compile_program", timed),
    ):
        yield


@contextmanager
def without_graphs(bed: Bed, shape: StepShape) -> Iterator[None]:
    """In this block steps of a shape run on a program that is launched kernel by kernel."""
    runner = bed.llm.client.engine.runner
    (stage,) = runner.stages
    options = {**stage.compiler.options, **NO_GRAPHS}
    begin = time.perf_counter()
    with mock.patch.object(stage.compiler, "options", options):
        program = runner.compile_program(shape)
    bed.compile_s[f"{shape.name}, no graphs"] = time.perf_counter() - begin
    kept = runner.programs.substitute(shape, program)
    try:
        yield
    finally:
        runner.programs.substitute(shape, kept)


def rate_key(shape: str, batch: int | str) -> str:
    """The key by which later sections find the tokens a second of whole requests."""
    return f"tok_s {shape} {batch}"


def step_key(case: str) -> str:
    """The key of the milliseconds of a case's step, for later sections."""
    return f"ms {case}: {STEP}"


def step_seconds(client: EngineClient, steps: int) -> float:
    """Seconds of one of several steps in the steady state."""
    begin = time.perf_counter()
    for _ in range(steps):
        client.outputs()
    return (time.perf_counter() - begin) / steps


def mixed_items(setting: Setting, vocab: int, number: int = 0) -> list[WorkItem]:
    """Requests with lengths uniform in 8 .. 256, more of them than slots; other prompts of the same
    lengths in each round."""
    longest, count = setting.pick((256, 256), (16, 4))
    rng = random.Random(f"{MIXED} {number}")
    return [
        WorkItem(random_tokens(rng, len(item.prompt_token_ids), vocab), item.output_len)
        for item in uniform(count, 8, longest, vocab, seed=1234)
    ]


def too_fast(what: str, least: float, seconds: float) -> list[str]:
    """The failure of a step that took less than its operations can; the ceilings are measured."""
    if not seconds * MARGIN < least:
        return []
    return [
        f"{what}: {1e3 * seconds:.3f} ms is less than the {1e3 * least:.3f} ms that its bytes and "
        f"FLOPs take at the ceilings of this run ({MARGIN}x allowed)"
    ]


def bed_of(setting: Setting, case: Case, every: list[Case]) -> Bed:
    """The engine of a case and of those of its section that share it; the first one makes it."""
    if case.engine not in setting.held:
        while setting.held:  # another one's memory is needed
            setting.held.popitem()[1].close()
        every = [other for other in every if other.engine == case.engine]
        slots = max(2, *(case.rows for case in every))
        seconds: dict[str, float] = {}
        layers = {"num_hidden_layers": KIND_LAYERS} if case.kind in KINDS else {}
        overrides = setting.pick(layers, TINY | case.of.tiny)
        with (
            tempfile.TemporaryDirectory() as name,
            compiling_only(every, seconds),
            case.of.made(),
        ):
            llm = make_llm(
                write_config(case.shape, Path(name), **overrides),
                **case.of.settings,
                max_num_seqs=slots,
                max_model_len=MAX_MODEL_LEN,
                block_size=PAGE_SIZE,
                # every slot at its longest, and the trash page; to plan it would cost a compilation
                num_pages=slots * MAX_MODEL_LEN // PAGE_SIZE + 1,
                compile_ahead=ALL,
            )
        setting.held[case.engine] = Bed(llm, seconds)
    return setting.held[case.engine]


def decode_step(setting: Setting, text: str, every: tuple[str, ...]) -> Section:
    """One case; the engine is dropped where it fails, since it may hold half of a workload."""
    case = Case.parsed(text)
    new = case.engine not in setting.held
    bed = bed_of(setting, case, [Case.parsed(other) for other in cases(setting, every)])
    try:
        if case.kind == MIXED:
            section = mixed(setting, bed.llm, text, case)
        elif case.kind == UNGRAPHED:
            with without_graphs(bed, case.program):
                section = steady(setting, bed.llm, text, case)
        else:
            section = steady(setting, bed.llm, text, case)
    except BaseException:
        setting.held.pop(case.engine).close()
        raise
    section.columns = ("workload", "part", "calls or tok/s", "ms", "remark")
    if new:
        section.notes.append(f"{case.engine}: start-up {bed.llm.startup_seconds:.1f} s")
    if case.kind in KINDS:
        section.notes.append(f"Engines of other kinds have {KIND_LAYERS} layers.")
    told = bed.compile_s if new else {k: v for k, v in bed.compile_s.items() if "no graphs" in k}
    for program, seconds in told.items():
        milliseconds = round(1e3 * seconds)
        section.rows.append((case.engine, f"compilation of {program}", "", milliseconds, ""))
    return section


def mixed(setting: Setting, llm: LLM, what: str, case: Case) -> Section:
    """The mixed workload; then in how much of the time the device is busy under a backlog."""
    vocab = llm.model_config.vocab_size
    run_workload(llm, mixed_items(setting, vocab))
    items = mixed_items(setting, vocab, 1)
    run = run_workload(llm, items)
    rate, wide = run.output_tokens_per_second, run.gigabytes_per_second
    values = (round(rate, 1), round(1e3 * run.elapsed_time / run.num_steps, 3))
    setting.shared[rate_key(case.shape, MIXED)] = rate
    told = f"{len(items)} requests, {wide:.0f} GB/s"
    section = Section(rows=[(what, "whole requests", *values, told)])
    try:
        found = measure_busy(llm, items, case.rows, setting.pick(BACKLOG_S, 0.05))
    except NoTraceError as error:
        section.failures.append(f"{what}: {error}")
        return section
    verdict = "met" if found.busy >= BUSY_TARGET else "missed"
    told = f"{100 * found.busy:.1f} % busy; >= {BUSY_TARGET:.0%}: {verdict}"
    told += f"; traced step {found.traced_ms:.3f} ms, {100 * found.traced:.1f} % busy in the trace"
    section.rows.append((what, "step under a backlog", "", round(found.step_ms, 3), told))
    return section


def steady(setting: Setting, llm: LLM, what: str, case: Case) -> Section:
    """Whole requests, then the decode step alone, then its kernels."""
    section = Section()
    config, batch, length = llm.model_config, case.rows, setting.pick(LENGTH, 8)

    def requests(output: int, seed: int) -> list[WorkItem]:
        made = fixed(batch, length, output, config.vocab_size, seed)
        if case.kind in (GREEDY, MIXED):
            return made
        return [SampledItem(item.prompt_token_ids, item.output_len) for item in made]

    run_workload(llm, requests(length, 0))
    run = run_workload(llm, requests(length, 2))
    rate = run.output_tokens_per_second
    if case.kind == FILTERED:
        setting.shared[rate_key(case.shape, batch)] = rate
    per_step = round(1e3 * run.elapsed_time / run.num_steps, 3)
    told = f"{length}/{length} tokens, {run.gigabytes_per_second:.0f} GB/s"
    section.rows.append((what, "whole requests", round(rate, 1), per_step, told))
    timed, seen = setting.pick((TIMED_STEPS, TRACED_STEPS), (2, 2))
    client = begin_decoding(llm, requests(WAIT_STEPS + timed + seen + 8, 1))
    for _ in range(WAIT_STEPS):
        client.outputs()
    before = llm.stats()
    seconds = step_seconds(client, timed)
    after = llm.stats()
    # every row reads its prompt and half of what it has generated by then
    tokens = batch * (length + WAIT_STEPS + timed // 2)
    bytes_of = case.of.weight_bytes, case.of.page_bytes
    by_kind = least_by_kind(operations(config, batch, tokens, *bytes_of), setting.ceilings)
    least = sum(by_kind.values())
    ratio = seconds / least
    section.failures += [] if setting.dry_run else too_fast(what, least, seconds)
    verdict = "met" if ratio <= ROOFLINE_TARGET else "missed"
    verdict = verdict if math.isfinite(ratio) else "unknown"
    parts = ", ".join(f"{kind} {1e3 * value:.3f}" for kind, value in by_kind.items())
    section.rows.append((what, LEAST, "", round(1e3 * least, 3), f"by bytes or FLOPs: {parts}"))
    idle = (after.times.device_idle - before.times.device_idle) / timed
    told = f"{ratio:.2f}x the least time; <= {ROOFLINE_TARGET}x: {verdict}; the device is busy in "
    told += f"at least {100 * (1 - idle / seconds):.1f} % of it by the host's clock"
    section.rows.append((what, STEP, round(batch / seconds, 1), round(1e3 * seconds, 3), told))
    setting.shared[step_key(what)] = 1e3 * seconds
    for phase in ("plan", "pack", "dispatch", "wait", "commit", "device_idle"):
        spent = getattr(after.times, phase) - getattr(before.times, phase)
        section.rows.append((what, f"host: {phase}", "", round(1e3 * spent / timed, 4), ""))
    # in the last words of this process, should the profiler take it along
    print(section.rows, file=sys.stderr, flush=True)
    try:
        trace = traced(lambda: step_seconds(client, seen))
    except NoTraceError as error:
        section.failures.append(f"{what}: {error}")
        return section
    finally:
        while client.has_work:  # the next case finds it idle
            client.outputs()
    busy = trace.busy / seen
    told = f"in the trace: {100 * trace.busy / trace.span:.1f} % of its time, with no graphs; "
    told += f"{100 * busy / seconds:.0f} % of the step that is served"
    section.rows.append((what, BUSY, "", round(1e3 * busy, 3), told))
    for name, found in by_class(trace, seen).items():
        spent, pauses = 1e3 * found.seconds, 1e3 * found.pauses
        told = f"{100 * found.seconds / busy:.1f} % of busy; pauses before them {pauses:.3f} ms"
        if name in by_kind:
            told += f"; at least {1e3 * by_kind[name]:.3f} ms"
        section.rows.append((what, f"class: {name}", round(found.calls, 1), round(spent, 4), told))
    for name, calls, spent in trace.largest(SHOWN_KERNELS):
        share = f"{100 * spent / trace.busy:.1f} % of busy"
        section.rows.append((what, name, calls, round(1e3 * spent / seen, 4), share))
    return section
