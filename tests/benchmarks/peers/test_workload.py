"""The workload is the published one, and survives its file."""

from __future__ import annotations

import random

import pytest

from benchmarks.peers.workload import fixed_batch, long, mixed, prefill, read_rounds, write_rounds


def test_the_mixed_cell_is_the_published_workload():
    cell = mixed(64, (8, 256), (8, 256), 32000)
    r = random.Random(1234)
    lengths = [(r.randint(8, 256), r.randint(8, 256)) for _ in range(64)]
    assert [(len(p), o) for p, o in zip(cell.prompts, cell.output_lens)] == lengths
    assert (sum(map(len, cell.prompts)), cell.output_tokens) == (8207, 7266)
    assert cell.in_flight == 16


def test_the_mixed_cell_of_large_models():
    cell = mixed(32, (8, 128), (8, 64), 32000)
    assert (sum(map(len, cell.prompts)), cell.output_tokens) == (2012, 1054)


def test_cells_of_prompts():
    one, other = prefill(16, 100), long(8, 100)
    assert (one.name, one.in_flight, one.output_lens) == ("prefill 16", 4, [1] * 16)
    assert {len(p) for p in one.prompts} == {512} and prefill(2, 100).in_flight == 2
    assert (other.name, other.in_flight, other.output_lens) == ("long 8", 8, [64] * 8)
    assert {len(p) for p in other.prompts} == {1800} and other.longest == 1864


def test_no_prompt_of_a_round_begins_as_one_of_another():
    kinds = (
        lambda number: fixed_batch(4, 32, 8, 32000, number),
        lambda number: mixed(16, (32, 64), (8, 16), 32000, number=number),
        lambda number: prefill(4, 32000, number),
        lambda number: long(2, 32000, number),
    )
    for make in kinds:
        rounds = [make(number) for number in range(4)]
        pages = [tuple(p[:16]) for cell in rounds for p in cell.prompts]
        assert len(set(pages)) == len(pages)
        assert len({tuple(map(len, cell.prompts)) for cell in rounds}) == 1
        assert len({tuple(cell.output_lens) for cell in rounds}) == 1


@pytest.mark.parametrize("vocab_size", [2, 20, 32000])
def test_tokens_are_in_the_vocabulary_and_not_special(vocab_size):
    cell = fixed_batch(4, 32, 128, vocab_size)
    tokens = [token for prompt in cell.prompts for token in prompt]
    assert min(tokens) >= min(16, vocab_size - 1) and max(tokens) < vocab_size
    assert cell == fixed_batch(4, 32, 128, vocab_size)
    assert (cell.longest, cell.output_tokens, cell.in_flight) == (160, 512, 4)


def test_the_file_holds_the_cells(tmp_path):
    rounds = [[fixed_batch(1, 4, 2, 100, n), mixed(5, (1, 9), (2, 3), 100)] for n in (0, 1)]
    write_rounds(tmp_path / "cells.json", rounds)
    assert read_rounds(tmp_path / "cells.json") == rounds
