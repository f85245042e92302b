"""The table of estimates over several devices."""

from __future__ import annotations

import pytest

from benchmarks.scaling import table


@pytest.mark.slow
def test_the_table_has_a_line_for_each_size_that_fits():
    lines = table().splitlines()
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert any("llama-3-405b | h200 | 32 on 4 hosts" in line for line in lines)
