"""Hypothesis strategies: random ragged problems of fixed shapes.

What a kernel is compiled for is a program, written down or drawn from small sets; lengths, page
tables and values vary within it, so most examples cost no compilation. Strategies draw plain
numbers, which Hypothesis can print; `Program.case` makes the arrays. The simplest example, which
Hypothesis tries first, holds every boundary length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from pallas_kernels import PrefillLanes
from tests.pallas_kernels.cases import Case, packed_lanes, paged_case

SEEDS = st.integers(0, 2**32 - 1)
FIRST_PAGE = 3
GAP = 3  # most rows of no lane before a lane, as `packed_lanes` makes them


def examples(count: int) -> Callable[[Any], Any]:
    """The same examples in every run, not shrunk: an interpreted kernel would take minutes."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


class Slots(NamedTuple):
    """A decode batch: tokens of each slot, 0 for padding, and how many are queries; None: all."""

    lengths: list[int]
    shared: dict[int, int]  # slot -> the slot before it whose full pages it shares
    stale: bool  # whether unused entries of the page table name any page
    seed: int
    queries: list[int] | None = None


class Lanes(NamedTuple):
    """Chunks of several requests, 0 for an idle lane, and the tokens before each."""

    chunks: list[int]
    contexts: list[int]
    shared: dict[int, int]
    stale: bool
    seed: int

    @property
    def lengths(self) -> list[int]:
        return [chunk and chunk + context for chunk, context in zip(self.chunks, self.contexts)]


@dataclass(frozen=True)
class Program:
    """The static facts of an attention problem.

    Attributes:
        heads, kv_heads, head_dim, page_size, pool, query, per_token: as in `paged_case`.
        window, soft_cap, splits: options of the call.
        sinks: whether heads have sinks.
        rows: slots of a decode batch, lanes of a prefill region.
        columns: most pages of a row.
        chunk: most rows of a lane.
        edge: a length beside which lengths are drawn too: a kernel's block.
        queries: query positions of a slot; with one, q has no axis of them.
        head_rows: rows of the pool that a head is.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pool: str
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    splits: int | None = None
    query: str | None = None
    per_token: bool = True
    rows: int = 6
    columns: int = 5
    chunk: int = 40
    edge: int = 64
    queries: int = 1
    head_rows: int = 1

    def in_rows(self, kv_pages: jnp.ndarray) -> jnp.ndarray:
        """A pool with a row a head as one with `head_rows` of them."""
        *of_token, heads, head_dim = kv_pages.shape
        return kv_pages.reshape(*of_token, heads * self.head_rows, head_dim // self.head_rows)

    def __str__(self) -> str:
        """What differs from the defaults, as a test's name."""
        named = {
            name: getattr(self, name)
            for name, field in self.__dataclass_fields__.items()
            if getattr(self, name) != field.default
        }
        shape = [str(named.pop(name)) for name in ("heads", "kv_heads", "head_dim", "page_size")]
        pool = named.pop("pool")
        return "-".join(["x".join(shape), pool, *(f"{name}={v}" for name, v in named.items())])

    @property
    def longest(self) -> int:
        return self.columns * self.page_size

    @property
    def precision(self) -> str:
        """The entry of `oracle.TOLERANCE` that its results keep to."""
        return "float32" if self.query == "float32" and self.is_8_bit else self.pool

    @property
    def is_8_bit(self) -> bool:
        return self.pool in ("int8", "uint8", "float8_e4m3fn")

    def options(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of the call that do not belong to the pool."""
        chosen: dict[str, Any] = {"window": self.window, "soft_cap": self.soft_cap}
        if self.sinks:
            sinks = np.random.default_rng(seed).uniform(-2.0, 3.0, self.heads)
            chosen["sinks"] = jnp.asarray(sinks, jnp.float32)
        return {"scale": self.head_dim**-0.5, **chosen}

    def case(self, drawn: Slots | Lanes, rng: np.random.Generator, **sizes: Any) -> Case:
        """The arrays of a drawn problem; `rows` gives the size of a prefill region."""
        window = self.window or 2**30
        if isinstance(drawn, Lanes):
            first_seen = [max(0, context + 1 - window) for context in drawn.contexts]
        else:
            counts = drawn.queries or [self.queries] * len(drawn.lengths)
            first_seen = [
                max(0, n - count + 1 - window) if count else n
                for n, count in zip(drawn.lengths, counts)
            ]
            if self.queries > 1:
                sizes["queries"] = self.queries
        return paged_case(
            rng,
            drawn.lengths,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            pool=self.pool,
            query=self.query,
            per_token=self.per_token,
            columns=self.columns,
            total=1 + self.rows * self.columns + 2,
            first_page=FIRST_PAGE,
            shared=drawn.shared,
            first_seen=first_seen,
            stale=drawn.stale,
            **sizes,
        )

    def region(self, lanes: Lanes, rng: np.random.Generator) -> tuple[PrefillLanes, int]:
        """The lanes packed in random order with gaps, and rows enough for any such lanes."""
        packed, _ = packed_lanes(rng, lanes.chunks, lanes.contexts, gaps=True)
        return packed, self.rows * self.chunk + GAP * (self.rows + 1)


def boundaries(program: Program) -> list[int]:
    """Lengths at which kernels go wrong, in an order in which neighbours can share pages."""
    page = program.page_size
    found = [program.longest, page + 1, 0, 1, page - 1, page]
    return [min(length, program.longest) for length in found]


def numbers(boundaries: Sequence[int], most: int, least: int = 1) -> st.SearchStrategy[int]:
    """A number at which a kernel may go wrong, the first of them before all others, or any."""
    return st.one_of(st.sampled_from(boundaries), st.integers(least, most))


def _number(simplest: int, special: list[int], most: int) -> st.SearchStrategy[int]:
    """0..most: `simplest`, one of the special ones, or any."""
    special = [number for number in special if 0 <= number <= most]
    return st.one_of(st.just(min(simplest, most)), st.sampled_from(special), st.integers(0, most))


@st.composite
def _sharing(draw: st.DrawFn, rows: int) -> dict[int, int]:
    others = {row: draw(st.sampled_from((0, None, row - 1))) for row in range(1, rows)}
    return {row: other for row, other in others.items() if other is not None}


@st.composite
def slots(draw: st.DrawFn, program: Program) -> Slots:
    """Decode batches of one program."""
    simple = boundaries(program)
    special = [*simple, program.edge - 1, program.edge, program.edge + 1, program.longest - 1]
    lengths = [
        draw(_number(simple[row % len(simple)], special, program.longest))
        for row in range(program.rows)
    ]
    drawn = Slots(lengths, draw(_sharing(program.rows)), draw(st.booleans()), draw(SEEDS))
    if program.queries == 1:
        return drawn
    # the simplest counts differ: all queries, none, one, and in between
    most = program.queries
    simple = [most, max(1, most // 2), most, 1, 0, most - 1]
    counts = [draw(_number(simple[row % 6], [0, 1, most], most)) for row in range(program.rows)]
    return drawn._replace(queries=draw(st.sampled_from((counts, None))))


@st.composite
def lanes(draw: st.DrawFn, program: Program) -> Lanes:
    """Prefill lanes of one program."""
    page = program.page_size
    whole = boundaries(program)
    chunks, contexts = [], []
    for row in range(program.rows):
        # the longest of the boundaries is the context of one row, the others are chunks
        chunk = draw(_number((1, *whole[1:])[row % 6], whole, min(program.chunk, program.longest)))
        room = program.longest - chunk
        simple = (room, page - 1, 7, 0, page, page + 1)[row % 6]
        contexts.append(draw(_number(simple, [0, 1, page - 1, page, page + 1, room], room)))
        chunks.append(chunk)
    return Lanes(chunks, contexts, draw(_sharing(program.rows)), draw(st.booleans()), draw(SEEDS))


def programs(
    *,
    pools: tuple[str, ...],
    head_dims: tuple[int, ...],
    page_sizes: tuple[int, ...],
    splits: tuple[int | None, ...] = (None,),
    groups: tuple[int, ...] = (1, 3, 4, 8),
    kv_heads: tuple[int, ...] = (1, 2),
    rows: int = 6,
    tokens: int = 160,
    queries: tuple[int, ...] = (1,),
    per_token: tuple[bool, ...] = (True, False),
) -> st.SearchStrategy[Program]:
    """Programs of any combination of these facts and of the options; each costs a compilation."""

    def program(pool: str, page_size: int, group: int, kv_heads: int, **facts: Any) -> Program:
        columns = max(2, tokens // page_size)
        return Program(
            group * kv_heads, kv_heads, pool=pool, page_size=page_size, columns=columns, **facts
        )

    return st.builds(
        program,
        pool=st.sampled_from(pools),
        page_size=st.sampled_from(page_sizes),
        group=st.sampled_from(groups),
        kv_heads=st.sampled_from(kv_heads),
        head_dim=st.sampled_from(head_dims),
        splits=st.sampled_from(splits),
        window=st.sampled_from((None, 1, 30, 100)),
        soft_cap=st.sampled_from((None, 3.0)),
        sinks=st.booleans(),
        per_token=st.sampled_from(per_token),
        rows=st.just(rows),
        queries=st.sampled_from(queries),
    )
