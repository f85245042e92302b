"""A device in pure Python that runs step plans and checks every page it reads.

It keeps a page table and token history by slot and a pool of cells, as the real one does, and fails
if a row would read a cell that holds anything but the row's own token at that position.
"""

from __future__ import annotations

import hashlib

from jaxserve.scheduling.plan import StepPlan


def next_token(tokens: list[int], vocab: int) -> int:
    """The 'model': a deterministic function of the whole context."""
    digest = hashlib.blake2b(bytes(str(tokens), "ascii"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % vocab


class FakeDevice:
    """Executes plans in dispatch order."""

    def __init__(self, *, num_pages: int, page_size: int, num_slots: int, vocab: int):
        self.page_size = page_size
        self.vocab = vocab
        self.num_pages = num_pages
        self.table: dict[tuple[int, int], int] = {}
        self.history: dict[tuple[int, int], int] = {}
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.num_slots = num_slots

    def run(self, plan: StepPlan) -> list[int]:
        for upload in plan.uploads:
            for position, token in enumerate(upload.tokens.tolist()):
                self.history[upload.slot, position] = token
            for index, page in enumerate(upload.pages):
                assert 0 < page < self.num_pages
                self.table[upload.slot, index] = page
        for update in plan.page_updates:
            assert 0 < update.page < self.num_pages, "the trash page is never handed out"
            self.table[update.slot, update.page_index] = update.page
        rows = [
            (slot, position, 1) for slot, position in zip(plan.decode.slots, plan.decode.positions)
        ]
        rows += [(lane.slot, lane.start, lane.length) for lane in plan.lanes]
        slots = [slot for slot, _, _ in rows]
        assert len(set(slots)) == len(slots), "a slot appears once a step"
        assert all(0 <= slot < self.num_slots for slot in slots)
        for lane in plan.lanes:
            chunk = lane.request.prefill_tokens[lane.start : lane.start + lane.length].tolist()
            for offset, token in enumerate(chunk):
                self.history[lane.slot, lane.start + offset] = token
        for slot, start, length in rows:
            for position in range(start, start + length):
                self.cells[self._cell(slot, position)] = (position, self.history[slot, position])
        sampled = [self._sample(slot, start + length - 1) for slot, start, length in rows]
        for (slot, start, length), token in zip(rows, sampled):
            self.history[slot, start + length] = token
        return sampled

    def _cell(self, slot: int, position: int) -> tuple[int, int]:
        return self.table[slot, position // self.page_size], position % self.page_size

    def _sample(self, slot: int, position: int) -> int:
        context = []
        for p in range(position + 1):
            held_position, token = self.cells[self._cell(slot, p)]
            assert held_position == p, "a page was overwritten while it was in use"
            assert token == self.history[slot, p], "a page holds another request's token"
            context.append(token)
        return next_token(context, self.vocab)
