"""The sections of gpu_check in the order in which they run; a new one is appended here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """

    cases: Callable[[Setting], list[str]]
    run: Callable[[Setting, str], Section]
    part: int
    limit_s: float = 60
    apart: bool = False


SECTIONS: dict[str, Single | Several] = {
    "machine": Single(machine.machine, 0),
    "bandwidth": Single(bandwidth.bandwidth, 0),
    "decode correctness": Several(correctness.cases, correctness.decode, 1),
    "prefill correctness": Several(correctness.cases, correctness.prefill, 1),
    "decode correctness, large": Several(large.cases, large.decode, 1),
    "write_kv correctness": Single(writes.correctness, 1),
    "matmul correctness": Several(products.cases, products.products, 1),
    "engine correctness": Single(engine.correctness, 1, 240),
    "write_kv speed": Single(writes.speed, 2),
    decode_step.STEP: Several(decode_step.cases, decode_step.decode_step, 3, 240),
    "transformers": Several(peers.cases, peers.generate, 3, 300, apart=True),
    "vllm": Several(vllm_peer.cases, vllm_peer.generate, 3, 420, apart=True),
    "host time": Single(engine.host, 3, 240),
}
