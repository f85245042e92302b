"""Ctrl-C where an exception would be swallowed or tear something apart."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from server.process_end import ended_by_ctrl_c
from tests.server.server_process import ROOT

SWALLOWING = """
import time
from server.process_end import ended_by_ctrl_c

with ended_by_ctrl_c():
    print("begun", flush=True)
    while True:
        try:
            time.sleep(10)
        except BaseException:
            pass
"""


def test_ctrl_c_ends_what_would_swallow_it_without_a_word():
    command = [sys.executable, "-c", SWALLOWING]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
        assert process.stdout.read() == ""


ENDING = """
import threading, time
from server import process_end as process

process.EXIT_S = 0.3
threading.Thread(target=time.sleep, args=({seconds},)).start()
print("done")
process.exit_soon(3)
"""


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["ends", "compiles for long"])
def test_the_end_waits_for_threads_and_not_for_long(seconds: float) -> None:
    command = [sys.executable, "-c", ENDING.format(seconds=seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")


def test_afterwards_ctrl_c_is_what_it_was():
    before = signal.getsignal(signal.SIGINT)
    with ended_by_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone():
    seen = []

    def run():
        with ended_by_ctrl_c():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
