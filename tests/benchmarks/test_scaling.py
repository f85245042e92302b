"""The table of estimates over several devices."""

from __future__ import annotations

import pytest

from benchmarks.scaling import idle_share, table


def test_as_many_steps_as_stages_leave_none_idle():
    assert [idle_share(steps, 4) for steps in (1, 3, 4, 9)] == [0.75, 0.25, 0.0, 0.0]


@pytest.mark.slow
def test_the_table_has_a_line_for_each_size_that_fits():
    lines = table().splitlines()
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert any("llama-3-405b | h200 | 32 on 4 hosts" in line for line in lines)
