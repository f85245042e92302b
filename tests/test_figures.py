"""The figures of the docs are drawn by their script, from what the scheduler does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `bench`")

from docs.figures import draw
from docs.figures.kernels import KERNELS
from docs.figures.runs import SLOTS, TOKENS_A_STEP, paging_run, scheduling_run

ROOT = Path(__file__).parent.parent


def test_two_sequences_share_the_pages_of_their_prefix() -> None:
    first, other, third = paging_run().scheduler.running
    assert first.pages[:2] == third.pages[:2] and third.num_cached == 32
    assert not {*other.pages} & {*first.pages, *third.pages}
    pages = [text.get_text() for text in draw.paging(paging_run()).axes[0].texts]
    assert pages.count("page 1") == 2 and f"{first.num_computed} tokens" in pages


def test_a_step_has_one_row_a_slot_and_no_more_tokens_than_it_may() -> None:
    steps = scheduling_run().steps
    for step in steps:
        assert len({row.slot for row in step}) == len(step) <= SLOTS
        assert sum(row.length for row in step) <= TOKENS_A_STEP
    assert any(len({row.is_prefill for row in step}) == 2 for step in steps)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_arrows_of_a_kernel_join_parts_that_it_has(kernel) -> None:
    parts = {box.name for row in kernel.rows for box in row if box is not None}
    joined = {name for source, target, _ in kernel.arrows for name in (source, target)}
    assert joined <= parts and len(draw.flow(kernel).axes[0].patches) >= len(parts)


def test_the_docs_show_every_figure() -> None:
    files = {file.name for file in (ROOT / "docs/figures").glob("*.svg")}
    assert files == {"paging.svg", "scheduler.svg", *(f"kernel-{k.name}.svg" for k in KERNELS)}
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert files <= set(re.findall(r"figures/([\w-]+\.svg)", text))
