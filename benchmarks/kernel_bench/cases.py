"""The measured cases: each is one shape of one operation, the most telling ones first."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

HEADS = ((32, 8), (32, 32), (8, 1))
SLOTS = (1, 8, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 4096, 16384, 65536)
CHUNKS = (4096, 1024, 256)
PRIOR = (0, 4096, 16384, 65536)
ROWS = (1, 16, 64, 256, 2048, 2, 4, 8)
# (name, inputs, outputs) of the matrices of a Llama-3-8B layer, as the engine fuses them
MATRICES = (
    ("gate_up", 4096, 28672),
    ("down", 14336, 4096),
    ("qkv", 4096, 6144),
    ("o", 4096, 4096),
)
# slots and contexts that the targets and most servers are about
FIRST = ((64, 4096), (1, 16384), (8, 1024), (256, 1024), (1, 1024), (64, 16384), (32, 4096))
# slots, contexts and raggedness of the decode cases by which a kernel is told at a glance
ANCHORS = ((64, 4096), (1, 16384), (8, 1024), (256, 128))
RAGGED = (64, 2048)  # one of 66,560 tokens among 63 of 1,024: as many as in 64 of 2,048
ANCHOR_PAGES = (16, 64)
ANCHOR_ROWS = (1, 16, 64)
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One query token for each of `slots` requests, every one at its full context.

    In a ragged case the slots have `context` tokens on the average: the first has more than half of
    all, the others half of `context` each.
    """

    slots: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    ragged: bool = False
    operation: ClassVar[str] = "decode"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request."""
        if not self.ragged:
            return [self.context] * self.slots
        others = [self.context // 2] * (self.slots - 1)
        return [self.slots * self.context - sum(others), *others]

    @property
    def pages(self) -> int:
        """Pages of one request at `context`."""
        return -(-self.context // self.page_size)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that must be read."""
        return self.slots * self.context * self.token_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions of the query-key pairs."""
        return 4 * self.heads * self.head_dim * self.slots * self.context

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's pages."""
        return self.slots * self.pages * self.page_size * self.token_bytes

    @property
    def label(self) -> str:
        """For a table."""
        page = "" if self.page_size == 16 else f", page {self.page_size}"
        ragged = " ragged" if self.ragged else ""
        return f"{self.heads}/{self.kv_heads} heads, {self.slots} x {self.context}{ragged}{page}"


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Chunks of `lanes` requests, each behind `prior` tokens that are in the pages already."""

    chunk: int
    prior: int
    heads: int
    kv_heads: int
    lanes: int = 1
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    operation: ClassVar[str] = "prefill"

    @property
    def flops(self) -> int:
        """Multiplications and additions of the visible query-key pairs."""
        pairs = self.lanes * (self.chunk * self.prior + self.chunk * (self.chunk + 1) // 2)
        return 4 * self.heads * self.head_dim * pairs

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that must be read, and of queries and results."""
        rows = 2 * self.lanes * self.chunk * self.heads * self.head_dim
        return self.as_decode.read_bytes + rows * ITEM_BYTES[self.dtype]

    @property
    def as_decode(self) -> DecodeCase:
        """The same pages as a decode problem has them."""
        total = self.chunk + self.prior
        sizes = (self.heads, self.kv_heads, self.head_dim, self.page_size)
        return DecodeCase(self.lanes, total, *sizes, self.dtype)

    @property
    def label(self) -> str:
        """For a table."""
        page = "" if self.page_size == 16 else f", page {self.page_size}"
        sizes = f"{self.lanes} x {self.chunk} after {self.prior}"
        return f"{self.heads}/{self.kv_heads} heads, {sizes}{page}"


@dataclass(frozen=True, slots=True)
class MatmulCase:
    """Rows times one weight matrix of a Llama-3-8B layer, in every format of the weight."""

    matrix: str
    rows: int
    inputs: int
    outputs: int
    operation: ClassVar[str] = "matmul"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inputs * self.outputs

    def weight_bytes(self, bits: float) -> float:
        """Bytes of the weight at so many bits an element, scales not counted."""
        return self.inputs * self.outputs * bits / 8

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.matrix} {self.rows} x {self.inputs} x {self.outputs}"


@dataclass(frozen=True, slots=True)
class PartsCase(MatmulCase):
    """The same in bfloat16, its contraction divided into parts that the next kernel adds."""

    operation: ClassVar[str] = "parts"


Case = DecodeCase | PrefillCase | MatmulCase
KINDS: dict[str, type[DecodeCase] | type[PrefillCase] | type[MatmulCase]] = {
    kind.operation: kind for kind in (DecodeCase, PrefillCase, MatmulCase, PartsCase)
}


def as_request(case: Case) -> dict[str, Any]:
    """The case as JSON can hold it."""
    return {"operation": case.operation, **asdict(case)}


def from_request(request: dict[str, Any]) -> Case:
    """The inverse of as_request."""
    fields = dict(request)
    return KINDS[fields.pop("operation")](**fields)


def _decode_cases(page_size: int) -> list[tuple[int, Case]]:
    cases: list[tuple[int, Case]] = []
    for heads, kv_heads in HEADS:
        grid = sorted(itertools.product(SLOTS, CONTEXTS), key=lambda cell: cell[0] * cell[1])
        for cell in (*FIRST, *(cell for cell in grid if cell not in FIRST)):
            rank = (0 if cell in FIRST else 1) + (0 if (heads, kv_heads) == HEADS[0] else 2)
            cases.append((rank, DecodeCase(*cell, heads, kv_heads, page_size=page_size)))
    return cases


def _prefill_cases(page_size: int) -> list[tuple[int, Case]]:
    cases: list[tuple[int, Case]] = []
    for heads, kv_heads in HEADS:
        first = (heads, kv_heads) == HEADS[0]
        for chunk, prior in itertools.product(CHUNKS, PRIOR):
            rank = (0 if chunk == CHUNKS[0] and prior <= 4096 else 1) + (0 if first else 2)
            cases.append((rank, PrefillCase(chunk, prior, heads, kv_heads, page_size=page_size)))
        packed = PrefillCase(256, 1024, heads, kv_heads, lanes=16, page_size=page_size)
        cases.append((1 if first else 3, packed))
    return cases


def _matmul_cases() -> list[tuple[int, Case]]:
    cases: list[tuple[int, Case]] = []
    for rows, (name, inputs, outputs) in itertools.product(ROWS, MATRICES):
        rank = 3 if rows in (2, 4, 8) else 0 if rows <= 16 and name == "gate_up" else 1
        cases.append((rank, MatmulCase(name, rows, inputs, outputs)))
    return cases


def all_cases(page_size: int = 16) -> list[Case]:
    """The whole grid in the order of importance, so that a run that is cut short has the best."""
    ranked = [*_decode_cases(page_size), *_prefill_cases(page_size), *_matmul_cases()]
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def anchor_cases() -> list[Case]:
    """The few cases that say most, at both page sizes."""
    heads = HEADS[0]
    attention: list[Case] = []
    for size in ANCHOR_PAGES:
        attention += [DecodeCase(*cell, *heads, page_size=size) for cell in ANCHORS]
        attention.append(DecodeCase(*RAGGED, *heads, page_size=size, ragged=True))
        attention.append(PrefillCase(4096, 0, *heads, page_size=size))
    return [*attention, *(MatmulCase("gate_up", rows, 4096, 28672) for rows in ANCHOR_ROWS)]


def dry_cases() -> list[Case]:
    """Tiny shapes that a CPU runs in a moment; they find wrong code, not speed."""
    return [
        DecodeCase(2, 24, 4, 2, head_dim=64),
        DecodeCase(2, 32, 4, 2, head_dim=64, ragged=True),
        PrefillCase(20, 10, 4, 2, lanes=2, head_dim=64),
        MatmulCase("tiny", 2, 256, 256),
    ]
