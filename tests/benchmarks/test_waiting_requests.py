"""The benchmark of waiting requests measures memory and plans."""

from __future__ import annotations

import pytest

from benchmarks.waiting_requests import bytes_each, main, plan_times
from jaxserve.config.engine_config import SCHEDULING_POLICIES

pytestmark = pytest.mark.slow  # each starts an engine or a server, or takes seconds


def test_a_line_a_policy_is_printed(capsys) -> None:
    assert main(["--requests", "200", "--steps", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:5]
    assert [line.split("|")[3].strip() for line in lines] == [*SCHEDULING_POLICIES]
    assert all(500 < float(line.split("|")[2].replace(",", "")) < 2200 for line in lines)


def test_every_step_is_timed() -> None:
    assert len(plan_times(50, "length", 7)) == 7 and bytes_each(50) > 0
