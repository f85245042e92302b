"""A device in pure Python that runs step plans and checks every page it reads.

It keeps page table, token history and length by slot and a pool of cells, as the real one does, and
fails if a row would read a cell that holds anything but the row's own token at that position, for
each group of layers. Layers with a window read no cell before it. Its drafts are right or wrong at
random.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from functools import lru_cache
from random import Random
from typing import Any

from jaxserve.memory.page_groups import PageGroups
from jaxserve.memory.tier import Landing, Move
from jaxserve.scheduling.plan import Fork, StepPlan


def next_token(tokens: list[int], vocab: int) -> int:
    """The 'model': a deterministic function of the whole context."""
    digest = hashlib.blake2b(bytes(str(tokens), "ascii"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % vocab


def likely_tokens(tokens: list[int], vocab: int, count: int) -> list[tuple[int, float]]:
    """The most likely tokens after a context and their log-probabilities, by another 'model'."""
    return _ranked(tuple(tokens), vocab)[:count]


@lru_cache(maxsize=50_000)
def _ranked(tokens: tuple[int, ...], vocab: int) -> list[tuple[int, float]]:
    rng = Random(str([*tokens]))
    weights = [rng.random() + 0.01 for _ in range(vocab)]
    scored = [(token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)]
    return sorted(scored, key=lambda one: -one[1])


ONE_GROUP = PageGroups()


class FakeDevice:
    """Executes plans in dispatch order."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        vocab: int,
        groups: PageGroups = ONE_GROUP,
        landing: Landing | None = None,
    ):
        self._landing = landing
        self._on_their_way: deque[tuple[int, Any]] = deque()
        self.groups = groups
        self.page_size = page_size
        self.vocab = vocab
        self.num_pages = num_pages
        self.table: dict[tuple[int, int], int] = {}
        self.history: dict[tuple[int, int], int] = {}
        self.lengths: dict[int, int] = {}
        self.cells: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.host: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.num_moves_back = 0
        self.num_slots = num_slots
        self._luck = Random(0)

    def run(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """The sampled tokens, and how many of them each sample has."""
        first = plan.num_moves_first
        self._move(plan.moves[:first])
        for fork in plan.forks:
            self._fork(fork)
        self._move(plan.moves[first:])
        for upload in plan.uploads:
            for position, token in enumerate(upload.tokens.tolist()):
                self.history[upload.slot, position] = token
            for place, page in enumerate(upload.pages):
                windowed = place % self.groups.num_groups in self.groups.windowed
                assert 0 < page < self.num_pages or (windowed and page == 0)
                self.table[upload.slot, place] = page
        for update in plan.page_updates:
            assert 0 < update.page < self.num_pages, "the trash page is never handed out"
            self.table[update.slot, update.place] = update.page
        rows = plan.rows
        assert len(set(rows.slots)) == len(rows), "a slot appears once a step"
        assert all(0 <= slot < self.num_slots for slot in rows.slots)
        assert list(plan.tokens) == [*range(plan.num_decode, len(rows))]
        assert plan.samples.rows[: plan.num_decode] == [*range(plan.num_decode)]

        starts: list[int] = []
        for row, (slot, start, length) in enumerate(zip(rows.slots, rows.starts, rows.lengths)):
            if row in plan.tokens:
                assert len(plan.tokens[row]) == length
                known = plan.tokens[row].tolist()
            else:
                assert self.lengths[slot] <= start, "the host's start is an upper bound"
                start = self.lengths[slot]
                known = self._drafted(slot, start, length)
            starts.append(start)
            for position, token in enumerate(known, start):
                self.history[slot, position] = token
                for group in range(self.groups.num_groups):
                    self.cells[self._cell(slot, position, group)] = (group, position, token)

        tokens, counts = [], []
        for sample, (slot, row) in enumerate(zip(plan.samples.slots, plan.samples.rows)):
            first, length = starts[row], rows.lengths[row]
            if sample < plan.num_decode:
                accepted = self._verified(slot, first, length)
            else:
                first += length - 1
                accepted = [self._sampled(rows.slots[row], first)]
            for position, token in enumerate(accepted, first + 1):
                self.history[slot, position] = token
            self.lengths[slot] = first + len(accepted)
            tokens += accepted
            counts.append(len(accepted))
        return tokens, counts

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            assert 0 < move.page < self.num_pages
            for offset in range(self.page_size):
                cell, held = (move.page, offset), (move.host_page, offset)
                if move.leaves:
                    self.host[held] = self.cells[cell]
                else:
                    self.cells[cell] = self.host[held]
            self.num_moves_back += not move.leaves
            if move.leaves and self._landing is not None:
                note = self._landing.leaving(move.host_page)
                self._on_their_way.append((move.host_page, note))

    def land(self, count: int, *, lost: int = 0) -> None:
        """Copies to the host end, the oldest first; the first `lost` of them without a page."""
        assert self._landing is not None
        for number in range(min(count, len(self._on_their_way))):
            host_page, note = self._on_their_way.popleft()
            if number < lost:
                for offset in range(self.page_size):
                    self.host.pop((host_page, offset), None)
                self._landing.lost(host_page, note)
            else:
                self._landing.landed(host_page, note, [])

    def _fork(self, fork: Fork) -> None:
        for position in range(fork.num_tokens):
            self.history[fork.slot, position] = self.history[fork.source, position]
        full, rest = divmod(fork.num_tokens, self.page_size)
        count = self.groups.num_groups
        assert len(fork.pages) == len(fork.source_pages) == (count if rest else 0)
        for place in range(full * count):
            self.table[fork.slot, place] = self.table[fork.source, place]
        for place, (source, page) in enumerate(zip(fork.source_pages, fork.pages), full * count):
            assert self.table[fork.source, place] == source != page > 0
            self.table[fork.slot, place] = page
            for offset in range(self.page_size):
                held = self.cells.get((source, offset))
                if held is not None:
                    self.cells[page, offset] = held
        self.lengths[fork.slot] = fork.num_tokens

    def _drafted(self, slot: int, start: int, length: int) -> list[int]:
        """The slot's newest token and drafts behind it."""
        context = [self.history[slot, position] for position in range(start + 1)]
        for _ in range(length - 1):
            right = next_token(context, self.vocab)
            context.append(right if self._luck.random() < 0.7 else (right + 1) % self.vocab)
        return context[start:]

    def _verified(self, slot: int, start: int, length: int) -> list[int]:
        """What is sampled at each token of a row, up to the first draft that is wrong."""
        accepted = [self._sampled(slot, start)]
        for position in range(start + 1, start + length):
            if self.history[slot, position] != accepted[-1]:
                break
            accepted.append(self._sampled(slot, position))
        return accepted

    def _cell(self, slot: int, position: int, group: int) -> tuple[int, int]:
        place = position // self.page_size * self.groups.num_groups + group
        return self.table[slot, place], position % self.page_size

    def _sampled(self, slot: int, position: int) -> int:
        context = []
        for p in range(position + 1):
            token = self.history[slot, p]
            for group in range(self.groups.num_groups):
                if group in self.groups.windowed and p <= position - self.groups.window:
                    continue
                held = self.cells[self._cell(slot, p, group)]
                assert held[:2] == (group, p), "a page was overwritten while it was in use"
                assert held[2] == token, "a page holds another request's token"
            context.append(token)
        return next_token(context, self.vocab)
