"""The protocol against a worker without an engine: answers, and every way to fail."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.workload import fixed_batch, write_rounds

FAKE = Path(__file__).with_name("fake_worker.py")


@pytest.fixture
def start(tmp_path):
    """Starts a fake worker with a behaviour; all are ended after the test."""
    workload = tmp_path / "workload.json"
    write_rounds(
        workload, [[fixed_batch(2, 3, 4, 50, n), fixed_batch(1, 3, 4, 50, n)] for n in (0, 1)]
    )
    started = []

    def make(behaviour: str, timeout: float = 20.0) -> Worker:
        # -S: site-packages would be most of the test's time
        command = [sys.executable, "-S", str(FAKE), behaviour, str(workload)]
        started.append(Worker(command, tmp_path, tmp_path / "log", timeout))
        started[-1].start()
        return started[-1]

    yield make
    for worker in started:
        worker.close()


def test_commands_are_answered(start):
    worker = start("works")
    assert worker.versions == {"quick": "1.0"}
    assert worker.startup_seconds > 0 and worker.conversion_seconds == 0
    assert worker.run(0, 1)["tokens"] == 8
    assert worker.run(1, 1)["tokens"] == 4
    assert worker.peak_rss_mib == 7.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state is read from /proc")
def test_a_worker_is_stopped_while_it_waits(start):
    worker = start("works")
    state = Path(f"/proc/{worker._process.pid}/stat")

    def stopped() -> bool:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if state.read_text().rsplit(")", 1)[1].split()[0] == "T":
                return True
        return False

    assert stopped()
    worker.run(0, 1)
    assert stopped()
    worker.close()
    assert worker._process.returncode == 0  # it was asked, and ended by itself


def test_variables_reach_the_worker(tmp_path):
    script = "import json, os; print(json.dumps({'event': 'no', 'reason': os.environ['ANSWER']}))"
    command = [sys.executable, "-S", "-c", script]
    with pytest.raises(WorkerError, match="forty-two"):
        Worker(command, tmp_path, tmp_path / "log", 20.0, {"ANSWER": "forty-two"}).start()


def test_a_conversion_is_not_start_up(start):
    worker = start("converts")
    assert worker.conversion_seconds == 0.2
    assert worker.run(0, 1)["tokens"] == 8


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("missing", "not installed: No module named 'quick'"),
        ("dies at once", "exit status 3, saying: the engine's last words"),
        ("babbles", "'hello', which is not JSON"),
    ],
)
def test_a_worker_that_does_not_start_says_why(start, behaviour, reason):
    with pytest.raises(WorkerError, match=reason):
        start(behaviour)


def test_silence_ends(start):
    with pytest.raises(WorkerError, match="no answer in 0 s"):
        start("silent", timeout=0.2)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("fails in cell 1", "RuntimeError: out of memory"), ("dies in cell 1", "signal 6")],
)
def test_a_failure_in_a_cell_says_why(start, behaviour, reason):
    worker = start(behaviour)
    worker.run(0, 1)
    with pytest.raises(WorkerError, match=reason):
        worker.run(1, 1)


def test_an_interpreter_that_is_not_there(tmp_path):
    with pytest.raises(WorkerError, match="No such file"):
        Worker([str(tmp_path / "python")], tmp_path, tmp_path / "log", 1.0).start()
