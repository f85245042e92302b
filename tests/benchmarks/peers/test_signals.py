"""A comparison that is ended by a signal leaves no worker behind, running or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.workload import fixed_batch, write_rounds
from tests.waiting import until

FAKE = Path(__file__).with_name("fake_worker.py")
ROOT = Path(__file__).parents[3]
# two engines by turns: while "long" computes, the other one is stopped
PARENT = """
import sys
from pathlib import Path
from benchmarks.peers.process import Worker
from benchmarks.peers.rounds import Contestant, alternate
from benchmarks.peers.signals import ended_by_signals

fake, workload, folder = sys.argv[1:]

class Told(Worker):
    def start(self):
        super().start()
        print(self.pid, flush=True)

def maker(behaviour):
    command = [sys.executable, "-S", fake, behaviour, workload]
    return lambda: Told(command, Path(folder), Path(folder) / "log", 60.0)

with ended_by_signals():
    engines = [Contestant(name, maker(name), lambda line: None) for name in ("works", "long")]
    alternate(engines, 1, 1, lambda line: None)
"""


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_worker_is_left(number, tmp_path):
    workload = tmp_path / "workload.json"
    write_rounds(workload, [[fixed_batch(1, 3, 4, 50, n)] for n in (0, 1)])
    command = [sys.executable, "-c", PARENT, str(FAKE), str(workload), str(tmp_path)]
    parent = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    pids = []
    try:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        assert parent.wait(60) == 128 + number
        until(lambda: all(map(gone, pids)), told=lambda: "a worker is left")
    finally:
        parent.kill()
        for pid in pids:
            if not gone(pid):
                os.killpg(pid, signal.SIGKILL)
