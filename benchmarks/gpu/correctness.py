"""Sections: every attention backend of the device against float64 NumPy, on small ragged problems.

The problems and the oracle are those of the tests: every page type and head size, groups, page
sizes, windows, soft caps, sinks and scales, NaN in all invisible places.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.bench import compiled
from pallas_kernels import (
    AttentionShape,
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case

POOLS = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
HEAD_DIMS = (128, 64, 80, 96, 256)
GROUPS = (4, 1, 8)
PAGE_SIZES = (16, 32, 64, 128)
# tokens: no kernel cuts rows of a table of so few, every GPU kernel a row of so many
WHOLE, CUT = 192, 6000
LONGEST = (1500, WHOLE, CUT)
QUERIES = (None, 4, None, 8, 1)  # of a decode row
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 37},
    {"soft_cap": 20.0},
    {"sinks": True},
    {"window": 50, "soft_cap": 30.0, "sinks": True},
    {"per_token": False},
)
FIRST_PAGE = 3
CHUNKS, CONTEXTS = (70, 0, 1, 129, 33), (0, 5, 300, 64, 17)


class Small(NamedTuple):
    """One problem of the matrix."""

    pool: str
    head_dim: int
    group: int
    page_size: int
    longest: int  # tokens of a decode row
    options: dict[str, Any]
    queries: int | None = None

    @property
    def label(self) -> str:
        """For a table."""
        told = ", ".join(f"{name} {value}" for name, value in self.options.items())
        sizes = f"{2 * self.group}/2x{self.head_dim} page {self.page_size} up to {self.longest}"
        sizes += f", {self.queries} queries" if self.queries else ""
        return f"{self.pool} {sizes}{', ' if told else ''}{told}"

    @property
    def per_token(self) -> bool:
        """Whether 8-bit pages have a scale a token, as the engine's int8 ones; else one."""
        return self.pool == "int8" and self.options.get("per_token", True)

    @property
    def shape(self) -> AttentionShape:
        """By which a backend takes or refuses it."""
        eight_bits = self.pool in ("int8", "float8_e4m3fn")
        return AttentionShape(
            head_dim=self.head_dim,
            page_size=self.page_size,
            group=self.group,
            pool_dtype=jnp.dtype(self.pool),
            query_dtype=jnp.dtype("bfloat16" if eight_bits else self.pool),
            token_scales=self.per_token,
        )


def matrix() -> list[Small]:
    """Every type with every head size; the other choices go round at different speeds."""
    found = []
    for index, (head_dim, pool) in enumerate(itertools.product(HEAD_DIMS, POOLS)):
        options = OPTIONS[index % len(OPTIONS)]
        if pool != "int8":
            options = {name: value for name, value in options.items() if name != "per_token"}
        group, page_size = GROUPS[index % 3], PAGE_SIZES[index % 4]
        longest, queries = LONGEST[index // 2 % 3], QUERIES[index // 3 % 5]
        found.append(Small(pool, head_dim, group, page_size, longest, options, queries))
    return found


def cases(setting: Setting) -> list[str]:
    """The matrix as JSON, one string a problem."""
    return [json.dumps(small) for small in matrix()[: setting.pick(None, 1)]]


def as_small(case: str) -> Small:
    """The inverse of `cases`."""
    return Small(*json.loads(case))


def call_options(small: Small, heads: int, rng: np.random.Generator) -> dict[str, Any]:
    """The options that the kernel and the oracle take."""
    found = {k: v for k, v in small.options.items() if k in ("window", "soft_cap")}
    if small.options.get("sinks"):
        found["sinks"] = rng.standard_normal(heads, np.float32)
    return found | {"scale": small.head_dim**-0.5}


Programs = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]  # by backend, with operands


class Posed(NamedTuple):
    """A problem with its programs; nothing is compiled yet."""

    problem: Any
    options: dict[str, Any]
    programs: Programs


def decode_problem(setting: Setting, small: Small, chosen: bool) -> Posed:
    """Decode attention by the backend that is chosen for the problem, or by the others."""
    rng = np.random.default_rng(0)
    page = small.page_size
    lengths = [3 * page - 1, 3 * page, 0, 1, page - 1, page, page + 1, 5 * page]
    if not setting.dry_run:
        lengths += [small.longest, *(int(n) for n in rng.integers(1, small.longest, 4))]
    problem = _paged(rng, small, lengths, queries=small.queries)
    options = call_options(small, problem.q.shape[-2], rng)
    backends = setting.covering("decode", small.shape, chosen)
    return _posed(problem, options, backends, paged_decode_attention, problem.lengths)


def decode(setting: Setting, case: str, *, chosen: bool) -> Section:
    """One problem of decode attention by the backend that is chosen for it, or by the others."""
    small = as_small(case)
    problem, options, programs = decode_problem(setting, small, chosen)
    want = oracle.decode(
        problem.q, problem.kv_pages, problem.page_table, problem.lengths,
        **options, **problem.options,
    )  # fmt: skip
    section = Section(columns=("backend", "problem", "error", "tolerance"))
    for backend, got in run_all(section, small.label, programs):
        _judge(section, backend, small, got, want)
        if got[2].any():
            section.failures.append(f"{backend} {small.label}: the idle slot is not zero")
    return section


def run_all(section: Section, label: str, programs: Programs) -> Iterator[tuple[str, np.ndarray]]:
    """Compiles the backends at the same time; each one's result, or its failure in the section."""
    executables, refused = compiled(programs)
    section.failures += [f"{backend} {label}: {reason}" for backend, reason in refused.items()]
    for backend, executable in executables.items():
        # the last output of this process, should the kernel hang
        print(f"{backend} {label} ...", file=sys.stderr, flush=True)
        yield backend, np.asarray(executable(*programs[backend][1]).astype(jnp.float32))


def prefill_problem(setting: Setting, small: Small, chosen: bool) -> tuple[Posed, PrefillLanes]:
    """Prefill attention by the backend that is chosen, or by the others; and its lanes."""
    small = small._replace(queries=None)
    rng = np.random.default_rng(1)
    chunks, contexts = setting.pick((CHUNKS, CONTEXTS), ((20, 0, 1, 9), (0, 5, 40, 17)))
    lanes, region = packed_lanes(rng, list(chunks), list(contexts), gaps=True)
    lengths = [chunk + context if chunk else 0 for chunk, context in zip(chunks, contexts)]
    problem = _paged(rng, small, lengths, rows=region)
    options = call_options(small, problem.q.shape[1], rng)
    backends = setting.covering("prefill", small.shape, chosen)
    return _posed(problem, options, backends, paged_prefill_attention, lanes), lanes


def prefill(setting: Setting, case: str, *, chosen: bool) -> Section:
    """One problem of prefill attention by the backend that is chosen, or by the others."""
    small = as_small(case)._replace(queries=None)
    (problem, options, programs), lanes = prefill_problem(setting, small, chosen)
    want = oracle.prefill(
        problem.q, problem.kv_pages, problem.page_table, lanes, **options, **problem.options
    )
    section = Section(columns=("backend", "problem", "error", "tolerance"))
    owned = np.zeros(problem.q.shape[0], bool)
    for start, length in zip(np.asarray(lanes.start), np.asarray(lanes.length)):
        owned[start : start + length] = True
    for backend, found in run_all(section, small.label, programs):
        _judge(section, backend, small, found, want)
        if found[~owned].any():
            section.failures.append(f"{backend} {small.label}: rows of no lane are not zero")
    return section


def _posed(
    problem: Any,
    options: dict[str, Any],
    backends: Iterable[tuple[str, Any]],
    call: Callable[..., Any],
    rows: Any,
) -> Posed:
    """The problem with a program for each backend; `rows`: the lengths of slots, or lanes."""
    sinks = {"sinks": jnp.asarray(options["sinks"])} if "sinks" in options else {}
    given = options | sinks | problem.options
    operands = (problem.q, problem.kv_pages, problem.page_table, rows)
    programs: Programs = {
        backend: (functools.partial(call, backend=backend, interpret=interpret, **given), operands)
        for backend, interpret in backends
    }
    return Posed(problem, options, programs)


def _paged(rng: np.random.Generator, small: Small, lengths: list[int], **sizes: Any) -> Any:
    return paged_case(
        rng,
        lengths,
        heads=2 * small.group,
        kv_heads=2,
        head_dim=small.head_dim,
        page_size=small.page_size,
        pool=small.pool,
        first_page=FIRST_PAGE,
        per_token=small.per_token,
        share=False,
        **sizes,
    )


def _judge(section: Section, backend: str, small: Small, got: np.ndarray, want: np.ndarray) -> None:
    error, limit = oracle.relative_error(got, want), oracle.TOLERANCE[small.pool]
    section.rows.append((backend, small.label, f"{error:.1e}", limit))
    if not error <= limit:
        section.failures.append(f"{backend} {small.label}: error {error:.2g} > {limit}")
