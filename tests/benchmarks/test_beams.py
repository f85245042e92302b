"""The tables of beam searches, made of little."""

from __future__ import annotations

import pytest

from benchmarks import beam_speed, beam_width


@pytest.mark.slow
def test_a_wider_search_finds_no_less(capsys) -> None:
    assert beam_width.main(["--quick", "--widths", "1", "4"]) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    one, four = ([float(cell.strip(" %")) for cell in line] for line in lines[2:])
    assert one[0] == 1 and four[0] == 4
    assert one[1] > 80 and four[1] > 80, "the model knows its tasks"
    assert one[2] > 80 and four[4] >= one[4] - 1e-4


@pytest.mark.slow
def test_both_find_the_same_sequences(capsys) -> None:
    words = ["--quick", "--width", "2", "--batch", "2"]
    assert beam_speed.main(words) == 0
    printed = capsys.readouterr().out
    assert "the same 2 sequences of 2 of 2 prompts" in printed
    assert "| wall, s |" in printed and "| processor, s |" in printed
