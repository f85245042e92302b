"""The cells of a comparison, and the file through which every engine reads the same ones.

A cell has prompts of its own in every round: one that was served before would be found in a cache.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

MIXED_SEED = 1234
MIXED_IN_FLIGHT = 16
PREFILL_LEN, PREFILL_IN_FLIGHT = 512, 4
LONG_LENS = 1800, 64  # of a prompt and of its output
FIRST_TOKEN = 16  # the special tokens live below


@dataclass(frozen=True)
class Cell:
    """One column of the table: requests that are all queued at once.

    Attributes:
        name: heading in the report.
        in_flight: most requests that run at a time.
        prompts: token ids, one list a request.
        output_lens: tokens that each request generates.
    """

    name: str
    in_flight: int
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(p) + o for p, o in zip(self.prompts, self.output_lens))


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    first = min(FIRST_TOKEN, vocab_size - 1)
    return [rng.randrange(first, vocab_size) for _ in range(count)]


def fixed_batch(
    batch: int, input_len: int, output_len: int, vocab_size: int, number: int = 0
) -> Cell:
    """`batch` requests of equal lengths, all in flight; other prompts in each round."""
    rng = random.Random(f"{batch} {number}")
    prompts = [_tokens(rng, input_len, vocab_size) for _ in range(batch)]
    return Cell(f"batch {batch}", batch, prompts, [output_len] * batch)


def prefill(count: int, vocab_size: int, number: int = 0) -> Cell:
    """`count` prompts of 512 with one output token: what is timed is the reading of prompts."""
    cell = fixed_batch(count, PREFILL_LEN, 1, vocab_size, number)
    return replace(cell, name=f"prefill {count}", in_flight=min(count, PREFILL_IN_FLIGHT))


def long(count: int, vocab_size: int, number: int = 0) -> Cell:
    """`count` prompts of 1,800 with 64 outputs each, all in flight."""
    return replace(fixed_batch(count, *LONG_LENS, vocab_size, number), name=f"long {count}")


def mixed(
    count: int,
    prompt_range: tuple[int, int],
    output_range: tuple[int, int],
    vocab_size: int,
    in_flight: int = MIXED_IN_FLIGHT,
    number: int = 0,
) -> Cell:
    """`count` requests with prompt and output lengths uniform in the ranges, ends included; the
    lengths are those of every round."""
    rng = random.Random(MIXED_SEED)
    lengths = [(rng.randint(*prompt_range), rng.randint(*output_range)) for _ in range(count)]
    rng = random.Random(f"{MIXED_SEED} {number}")
    prompts = [_tokens(rng, length, vocab_size) for length, _ in lengths]
    return Cell(f"mixed {count}", in_flight, prompts, [output for _, output in lengths])


def write_rounds(path: Path, rounds: list[list[Cell]]) -> None:
    """Write the cells of each round."""
    held = [[asdict(cell) for cell in cells] for cells in rounds]
    path.write_text(json.dumps({"rounds": held}))


def read_rounds(path: Path) -> list[list[Cell]]:
    """The cells of each round."""
    held = json.loads(path.read_text())["rounds"]
    return [[Cell(**cell) for cell in cells] for cells in held]
