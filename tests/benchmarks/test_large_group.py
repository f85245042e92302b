"""A stream beside a large group, through a real server."""

from __future__ import annotations

import pytest

from benchmarks.large_group import main


@pytest.mark.slow
def test_a_stream_goes_on_beside_a_large_group(capsys) -> None:
    assert main(["--quick", "--n", "500"]) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:5]]
    names = [cells[0].strip() for cells in lines]
    assert names == ["nobody", "single requests", "one of n = 500"]
    for cells in lines:
        assert int(cells[1]) > 100 and 0 < float(cells[2]) <= float(cells[4])
