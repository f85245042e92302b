"""The cost of a watcher: the numbers of the command, and a short run of it."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import page_cost
from benchmarks.verify.edge_load import Server


def test_the_mean_of_ratios_and_its_interval() -> None:
    mean, low, high = page_cost.interval([0.5, 2.0] * 8)
    assert mean == pytest.approx(1.0)
    assert math.log(high) == pytest.approx(1.96 * math.log(2) * math.sqrt(16 / 15) / 4)
    assert low == pytest.approx(1 / high)


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of other processes are Linux'")
def test_the_time_of_a_process_and_its_children_is_counted() -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass\n"
    code = f"import subprocess, sys\n{spin}c = subprocess.Popen([sys.executable, '-c', {spin!r}"
    code += " + 'print(1, flush=True); input()'], stdin=-1)\ninput()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        server = Server(0, psutil.Process(process.pid), Path())
        seconds = page_cost.processor_seconds(server)
        assert 0.4 <= seconds < 1.0
        assert seconds == pytest.approx(sum(server.processor_seconds()), abs=0.05)
    finally:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()


def test_few_pairs_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        page_cost.main(["--pairs", "3"])
    assert "16 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = asyncio.run(page_cost._run(2, page_cost.Work(1, 2, 8), 0.5))
    told = capsys.readouterr().out
    assert code in (0, 1) and "pair 1:" in told and "with / without:" in told
    (line,) = [line for line in told.splitlines() if " frames, " in line]
    assert int(line.split()[0]) >= 2 and float(line.split()[2]) > 50
