"""The static shape of a compiled step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """The static shape of one program.

    Attributes:
        num_decode: B, decode rows.
        num_prefill: C, tokens of the prefill region; 0 for a decode program.
        num_lanes: N, requests that may share the region; 0 for a decode program.
        features: names of the features that it contains.
        num_special: M, rows that the costly features work on; 0 where it has none of them.
        num_queries: Q, tokens of a decode row: its newest one and drafts to be verified.
        on_demand: names of those features that no program of the start contains.
    """

    num_decode: int
    num_prefill: int
    num_lanes: int
    features: frozenset[str]
    num_special: int
    num_queries: int = 1
    on_demand: frozenset[str] = frozenset()

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, each of which samples."""
        return self.num_decode * self.num_queries

    @property
    def num_rows(self) -> int:
        """R, what is sampled: each token of the decode rows, then one a lane."""
        return self.num_decode_tokens + self.num_lanes

    @property
    def all_special(self) -> bool:
        """Whether every row is special, so that a row's place among the special ones is its own."""
        return self.num_special == self.num_rows

    @property
    def name(self) -> str:
        rows = f"{self.num_decode}"
        if self.num_queries > 1:
            rows += f" x {self.num_queries}"
        kind = f"mixed[{rows}, {self.num_prefill}]" if self.num_prefill else f"decode[{rows}]"
        kind += f" full[{self.num_special}]" if self.num_special else " fast"
        return f"{kind} with {', '.join(sorted(self.on_demand))}" if self.on_demand else kind
