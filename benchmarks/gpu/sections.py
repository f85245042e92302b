"""The sections of gpu_check in the order in which they run; a new one is appended here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu import (
    bandwidth,
    correctness,
    decode_step,
    engine,
    large,
    machine,
    peers,
    products,
    vllm_peer,
    writes,
)
from benchmarks.gpu.setting import Section, Setting


@dataclass(frozen=True, slots=True)
class Single:
    """A section in one piece.

    Attributes:
        run: finds it.
        part: of the three into which gpu_check may be divided.
        limit_s: seconds after which it is taken for hung.
    """

    run: Callable[[Setting], Section]
    part: int
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
    """

    cases: Callable[[Setting], list[str]]
    run: Callable[[Setting, str], Section]
    part: int
    limit_s: float = 60
    apart: bool = False
    group: Callable[[str], str] = lambda case: ""
    keep_s: float = 0


def attention(run: Callable[..., Section], cases: Any, *, chosen: bool) -> Several:
    """Correctness of the backend that is chosen for each case, or of the others."""
    return Several(cases, functools.partial(run, chosen=chosen), 1, 45)


def of_model(shape: str, section: Several) -> Several:
    """The cases of one model's shape."""
    return replace(section, cases=functools.partial(section.cases, shape=shape))


LLAMA_3, LLAMA_2 = "llama-3-8b", "llama-2-7b"
STEPS = Several(decode_step.cases, decode_step.decode_step, 3, 240, keep_s=100)
TRANSFORMERS = Several(peers.cases, peers.generate, 3, 200, apart=True)

# within a part the ones that matter most come first: what is not begun in time is left out
SECTIONS: dict[str, Single | Several] = {
    "machine": Single(machine.machine, 0),
    "bandwidth": Single(bandwidth.bandwidth, 0),
    "decode correctness": attention(correctness.decode, correctness.cases, chosen=True),
    "prefill correctness": attention(correctness.prefill, correctness.cases, chosen=True),
    "decode correctness, large": attention(large.decode, large.cases, chosen=True),
    "write_kv correctness": Single(writes.correctness, 1),
    "matmul correctness": Several(
        products.cases, products.products, 1, 45, group=products.backend_of
    ),
    "engine correctness": Single(engine.correctness, 1, 180),
    "decode correctness, other backends": attention(
        correctness.decode, correctness.cases, chosen=False
    ),
    "prefill correctness, other backends": attention(
        correctness.prefill, correctness.cases, chosen=False
    ),
    "decode correctness, large, other backends": attention(large.decode, large.cases, chosen=False),
    "write_kv speed": Single(writes.speed, 2),
    decode_step.STEP: of_model(LLAMA_3, STEPS),
    "transformers": of_model(LLAMA_3, TRANSFORMERS),
    "host time": Single(engine.host, 3, 120),
    "vllm": Several(vllm_peer.cases, vllm_peer.generate, 3, 420, apart=True),
    "decode step, Llama-2-7B": of_model(LLAMA_2, STEPS),
    "transformers, Llama-2-7B": of_model(LLAMA_2, TRANSFORMERS),
}
