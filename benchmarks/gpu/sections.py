"""The sections of gpu_check in the order in which they run; a new one is appended to its part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import (
    correctness,
    decode_step,
    engine,
    engine_kinds,
    fused,
    large,
    machine,
    memcheck,
    other_engines,
    products,
    served,
    smoke,
    torch_peer,
    writes,
)
from benchmarks.gpu.decode_step import LLAMA_2, LLAMA_3
from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.cases import Case, all_cases, anchor_cases, dry_cases

PARTS = ("A", "B", "C", "rest")
ALL = "all"  # the name of a run without a part
EVERY = ""  # in place of a part: the section belongs to each of them


@dataclass(frozen=True, slots=True)
class Single:
    """A section in one piece.

    Attributes:
        run: makes the section.
        part: one of PARTS, or EVERY.
        limit_s: seconds after which it is taken for hung.
    """

    run: Callable[[Setting], Section]
    part: str
    limit_s: float = 120


@dataclass(frozen=True, slots=True)
class Several:
    """A section of cases that are run one by one: one that hangs does not cost the others.

    Attributes:
        cases: names of the cases.
        run: finds one of them.
        part, limit_s: as for Single, the limit for each case.
        apart: it uses the device in a process of its own, and wants all of its memory there.
        group: of a case: after some failures the other cases of its group are left out.
        keep_s: seconds left to the sections after it; it begins no case later.
        prepare: what is done for all cases before, such as compiling their programs.
    """

    cases: Callable[[Setting], list[str]]
    run: Callable[[Setting, str], Section]
    part: str
    limit_s: float = 60
    apart: bool = False
    group: Callable[[str], str] = lambda case: ""
    keep_s: float = 0
    prepare: Callable[[Setting], None] | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Cases of the kernel benchmark, which has a process of its own.

    Attributes:
        part: as for Single.
        file: its rows are written to FILE.json and FILE.md.
        cases: the measured cases.
        dry: the cases of a dry run.
        peers: whether others are measured as well, torch's among them.
        limit_s: seconds after which a case is taken for hung.
    """

    part: str
    file: str
    cases: Callable[[], list[Case]]
    dry: Callable[[], list[Case]]
    peers: bool
    limit_s: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """The search of tune_kernels in the time that is left."""

    part: str


AnySection = Single | Several | Table | Tuning
CHOSEN = {"part": "C", "limit_s": 45, "keep_s": 200}  # tuning begins in time
OTHERS = {"part": "rest", "limit_s": 45}
ANCHORS_S = 100  # kept for the anchors, the figures that everything else is judged by


def attention(run: Callable[..., Section], cases: Any, *, chosen: bool) -> Several:
    """Correctness of the backend that is chosen for each case, or of the others."""
    options: dict[str, Any] = CHOSEN if chosen else OTHERS
    return Several(cases, functools.partial(run, chosen=chosen), **options)


def quantised(*, chosen: bool) -> Several:
    """Correctness of quantised products, likewise."""
    options: dict[str, Any] = CHOSEN if chosen else OTHERS
    cases = functools.partial(products.cases, chosen=chosen)
    return Several(cases, products.products, group=products.backend_of, **options)


def steps(every: tuple[str, ...], part: str, keep_s: float = 0) -> Several:
    """Decode steps; the first case makes the engine and compiles all programs of the section."""
    cases = functools.partial(decode_step.cases, every=every)
    run = functools.partial(decode_step.decode_step, every=every)
    return Several(cases, run, part, 300, keep_s=keep_s)


def beside(
    run: Callable[[Setting, str], Section], shape: str, part: str, limit_s: float = 120
) -> Several:
    """Other engines on a model's shape."""
    cases = functools.partial(other_engines.cases, shape=shape)
    return Several(cases, run, part, limit_s, apart=True)


transformers = functools.partial(other_engines.generate, engine=other_engines.TRANSFORMERS)
vllm = functools.partial(other_engines.generate, engine=other_engines.VLLM)


# within a part the ones that matter most come first: what is not begun in time is left out
SECTIONS: dict[str, AnySection] = {
    "machine": Single(machine.machine, EVERY),
    "bandwidth": Single(machine.bandwidth, EVERY),
    "smoke": Several(
        smoke.cases,
        smoke.run,
        "A",
        smoke.LIMIT_S,
        group=str,
        keep_s=ANCHORS_S,
        prepare=smoke.prepare,
    ),
    "anchors": Table("A", "anchors", anchor_cases, dry_cases, peers=False, limit_s=40),
    "fused kernels": Several(
        fused.cases, fused.run, "A", fused.LIMIT_S, group=str, prepare=fused.prepare
    ),
    "engine tokens": Single(engine.tokens, "A", 120),
    "engine kinds": Several(
        engine_kinds.cases, engine_kinds.run, "A", engine_kinds.LIMIT_S, group=str
    ),
    "memcheck": Several(memcheck.cases, memcheck.memcheck, "A", memcheck.LIMIT_S + 10, apart=True),
    "decode step": steps(decode_step.STEPS, "B", keep_s=250),
    "decode step, other kinds": steps(decode_step.OF_KINDS, "B", keep_s=100),
    "torch step": beside(torch_peer.torch_step, LLAMA_3, "B"),
    "transformers": beside(transformers, LLAMA_3, "B"),
    "decode step, greedy and without graphs": steps(decode_step.OTHER_STEPS, "B"),
    "decode correctness": attention(correctness.decode, correctness.cases, chosen=True),
    "prefill correctness": attention(correctness.prefill, correctness.cases, chosen=True),
    "matmul correctness": quantised(chosen=True),
    "write_kv correctness": Single(writes.correctness, "C"),
    "engine correctness": Single(engine.correctness, "C", 180),
    "decode correctness, large": attention(large.decode, large.cases, chosen=True),
    "tuning": Tuning("C"),
    "served": Several(served.cases, served.served, "rest", served.LIMIT_S, apart=True, group=str),
    "kernels": Table("rest", "kernels", all_cases, dry_cases, peers=True, limit_s=90),
    "write_kv speed": Single(writes.speed, "rest"),
    "host time": Single(engine.host, "rest"),
    "mixed workload": steps(decode_step.MIXES, "rest"),
    "vllm": beside(vllm, LLAMA_3, "rest", 420),
    "decode step, Llama-2-7B": steps(decode_step.OLDER, "rest"),
    "transformers, Llama-2-7B": beside(transformers, LLAMA_2, "rest"),
    "decode correctness, other backends": attention(
        correctness.decode, correctness.cases, chosen=False
    ),
    "prefill correctness, other backends": attention(
        correctness.prefill, correctness.cases, chosen=False
    ),
    "matmul correctness, other backends": quantised(chosen=False),
    "decode correctness, large, other backends": attention(large.decode, large.cases, chosen=False),
}
