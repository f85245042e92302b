"""Engines of other kinds than bfloat16 on one device: quantised, sparse, divided.

The section feeds the tokens of each, decoded by the chosen kernels, to its own prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax

from benchmarks.gpu.engine import CHOSEN, UNTUNED, compiling_with, teacher_forced
from benchmarks.gpu.setting import Section, Setting

SPARSE_SHAPE = "qwen3-moe-3b"
# int4 and fp8 products take outputs and inputs in blocks; an expert is such a weight too
TINY_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes an engine.

    Attributes:
        settings: of the engine.
        shape: a key of SHAPES in place of the usual one; None: that one.
        tiny: overrides of a tiny model of this shape.
        divided: whether one device runs the code of several.
        weight_bytes: of an element of a layer's weights, with its share of a scale.
        page_bytes: of an element of the pages.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    shape: str | None = None
    tiny: dict[str, Any] = field(default_factory=dict)
    divided: bool = False
    weight_bytes: float = 2.0
    page_bytes: float = 2.0

    @contextmanager
    def made(self) -> Iterator[None]:
        """Engines that are made in this block are of the kind."""
        jax.clear_caches()  # what was traced for another kind on the same devices
        with mock.patch("jaxserve.parallel.mesh.DIVIDED_FROM", 1 if self.divided else 2):
            yield


PLAIN = Kind()
KINDS = {
    "int4": Kind({"quantization": "int4"}, weight_bytes=0.5 + 4 / 128),
    "fp8-weights": Kind({"quantization": "fp8"}, weight_bytes=1.0),  # on Hopper activations too
    "fp8-cache": Kind({"kv_cache_dtype": "fp8"}, page_bytes=1.0),
    "sparse": Kind(shape=SPARSE_SHAPE, tiny=TINY_SPARSE),
    "divided": Kind(divided=True),
}
LIMIT_S = 60  # of a case; most of it is compilation


def cases(setting: Setting) -> list[str]:
    """Their names."""
    return list(KINDS)


def run(setting: Setting, case: str) -> Section:
    """An engine of a kind: its decode steps against its prefill, on the same tokens."""
    kind = KINDS[case]
    shape = {} if kind.shape is None else {"shape": kind.shape}
    with compiling_with(UNTUNED), kind.made():
        section = teacher_forced(
            setting, [CHOSEN], CHOSEN, settings=kind.settings, overrides=kind.tiny, **shape
        )
    section.rows = [(case, *row[1:]) for row in section.rows]
    section.failures = [f"{case}: {failure}" for failure in section.failures]
    return section
